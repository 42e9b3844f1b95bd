"""Runs with preference objectives: resume, stages, metrics, a memory limit, and faults in one line."""

from __future__ import annotations

import io
import math
import random
import re
from pathlib import Path
from typing import Any

import mlora
import pytest
from mlora.cli.live_table import LiveTable
from mlora.cli.run_status import read_status
from mlora.config.config_file import resolve_config
from mlora.errors import RunError
from mlora.run.reporter import PlainLines
from mlora.run.validation import validate
from mlora.store.run_folder import read_metrics
from peft import LoraConfig
from rich.console import Console
from transformers import AutoModelForCausalLM

import mlora_ext as mx
from tests.mlora.limited_runs import Watching
from tests.mlora.seam_runs import train_and_resume
from tests.mlora.tiny_run import run_data, write_jsonl


def lines(count: int, seed: int = 1) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Pairs, and judged completions."""
    draw = random.Random(seed)
    pairs, judged = [], []
    for _ in range(count):
        prompt, chosen, rejected = ("".join(draw.choices("abcd", k=draw.randint(1, 6))) for _ in range(3))
        pairs.append({"prompt": f"{prompt}=", "chosen": chosen, "rejected": rejected})
        judged.append({"prompt": f"{prompt}=", "completion": chosen, "label": draw.random() < 0.5})
    return pairs, judged


def preference_data(base: Path, folder: Path, stages: int = 1, **changes: Any) -> dict[str, Any]:
    """Dpo, kto, orpo and cross-entropy in one run."""
    data = run_data(base, folder, pipeline={"stages": stages})
    pairs, judged = lines(9)
    write_jsonl(folder / "pairs.jsonl", pairs)
    write_jsonl(folder / "judged.jsonl", judged)
    data["datasets"] += [
        {"name": "pairs", "path": "pairs.jsonl", "format": "preference"},
        {"name": "judged", "path": "judged.jsonl", "format": "unpaired"},
    ]
    lora = {"r": 4, "lora_dropout": 0.2, "target_modules": "all-linear"}
    common = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "lora": lora}
    first, second = data["adapters"]
    first |= {"dataset": "pairs", "eval_dataset": "pairs", "objective": {"name": "dpo", "beta": 0.5}}
    data["adapters"] = [
        first,
        {"name": "kto", "dataset": "judged", "eval_dataset": "judged", "objective": "kto", **common},
        {"name": "orpo", "dataset": "pairs", "objective": "orpo", **common},
        second,
    ]
    return data | changes


def test_dropout_beside_a_reference_is_warned_of(tiny_base: Path, tmp_path: Path) -> None:
    """The reference has none; orpo and cross-entropy compare with nobody."""
    data = preference_data(tiny_base, tmp_path)
    own = {"objective": {"name": "dpo", "reference": "init_from"}, "lora": None, "name": "goes-on"}
    first = data["adapters"][0]
    first["lora"] = {"r": 4, "target_modules": ["q_proj"]}
    validate(resolve_config(data, folder=tmp_path), told := Watching())
    said = "lora_dropout is 0.2, and the reference has no dropout, so rewards are noisy; TRL sets it to 0"
    assert [line for line in told.lines if "dropout" in line] == [f"kto: {said}"]
    config = LoraConfig(r=2, lora_dropout=0.2, target_modules=["q_proj"])
    model = mx.convert_model(AutoModelForCausalLM.from_pretrained(tiny_base), {"a": config})
    mx.save_adapter(model, "a", tmp_path / "a")
    data["adapters"] = [first | own | {"init_from": str(tmp_path / "a")}]
    validate(resolve_config(data, folder=tmp_path), told := Watching())
    assert [line for line in told.lines if "dropout" in line] == [f"goes-on: {said}"]


def test_trials_are_warned_of_dropout_once(tiny_base: Path, tmp_path: Path) -> None:
    data = preference_data(tiny_base, tmp_path)
    own = {key: value for key, value in data.pop("adapters")[0].items() if key not in ("name", "objective")}
    own |= {"max_steps": 1, "lora": {"r": 2, "lora_dropout": 0.2, "target_modules": ["q_proj"]}}
    space = {"objective": {"beta": {"choice": [0.1, 0.2, 0.3]}}}
    data["sweep"] = {"sampler": "grid", "adapter": own | {"objective": {"name": "dpo"}}, "search": space}
    mlora.train(resolve_config(data, folder=tmp_path), reporter=(told := Watching()))
    lines = [line for line in told.lines if "dropout" in line]
    assert len(lines) == 1
    assert lines[0].startswith("sweep: lora_dropout is 0.2, and the reference has no dropout")


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_run_trains_and_resumes_bit_for_bit(tiny_base: Path, tmp_path: Path, stages: int) -> None:
    run = train_and_resume(preference_data(tiny_base, tmp_path, stages), tmp_path)
    own = [line for line in read_metrics(run / "metrics.jsonl") if line["adapter"] == "first"]
    steps, evaluations = ([line for line in own if key in line] for key in ("loss", "eval_loss"))
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=0.05)  # log 2, but for dropout
    for line in steps:
        assert line["rewards/margins"] == pytest.approx(
            line["rewards/chosen"] - line["rewards/rejected"], abs=1e-5
        )
        assert 0 <= line["rewards/accuracies"] <= 1
    assert evaluations[0]["eval_rewards/margins"] == 0.0
    assert evaluations[-1]["eval_rewards/margins"] > 0.05
    kto = [line for line in read_metrics(run / "metrics.jsonl") if line["adapter"] == "kto"]
    assert all(line["kl"] >= 0 for line in kto if "loss" in line)
    assert any("eval_logps/chosen" in line for line in kto)


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_the_start_as_reference_resumes_bit_for_bit(tiny_base: Path, tmp_path: Path, stages: int) -> None:
    """DPO goes on from an adapter that a run has trained, and compares with it."""
    data = preference_data(tiny_base, tmp_path, stages)
    data["adapters"] = [data["adapters"][3] | {"name": "tuned"}]
    assert mlora.train(resolve_config(data, folder=tmp_path)).status == "finished"
    tuned = tmp_path / "run" / "adapters" / "tuned"
    data = preference_data(tiny_base, tmp_path, stages, output_dir=str(tmp_path / "dpo"))
    first = data["adapters"][0] | {"init_from": str(tuned), "lora": None}
    start = {"objective": {"name": "dpo", "reference": "init_from"}}
    data["adapters"] = [first | start, first | {"name": "second"}, first | start | {"name": "third"}]
    run = train_and_resume(data, tmp_path)
    losses = {}
    for line in read_metrics(run / "metrics.jsonl"):
        if "eval_loss" in line:
            losses.setdefault(line["adapter"], []).append(line["eval_loss"])
    assert losses["first"][0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses["second"][0] != pytest.approx(math.log(2), abs=1e-4)
    assert losses["third"][-1] < math.log(2)


@pytest.mark.nightly
def test_stages_and_memory_do_not_matter(tiny_base: Path, tmp_path: Path) -> None:
    """Two stages, and a limit that cuts the batches, train as one stage does without a limit."""

    def trained(name: str, **changes: Any) -> list[tuple[Any, ...]]:
        data = preference_data(tiny_base, tmp_path, output_dir=str(tmp_path / name)) | changes
        assert mlora.train(resolve_config(data, folder=tmp_path)).status == "finished"
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        return sorted((r["adapter"], r["step"], r["loss"]) for r in records if "loss" in r)

    whole = trained("whole")
    for name, changes in (
        ("stages", {"pipeline": {"stages": 2, "micro_batches": 2}}),
        ("limit", {"scheduler": {"memory_limit": "8GiB"}}),
    ):
        for one, other in zip(whole, trained(name, **changes), strict=True):
            assert one[:2] == other[:2]
            assert one[2] == pytest.approx(other[2], rel=2e-5), (name, one)


def test_a_metric_of_the_objective_decides_and_is_shown(tiny_base: Path, tmp_path: Path) -> None:
    data = preference_data(tiny_base, tmp_path)
    first = data["adapters"][0] | {"metric_for_best_model": "rewards/margins", "load_best_model_at_end": True}
    data["adapters"] = [first | {"eval_steps": 2}, data["adapters"][2]]
    data["defaults"]["max_steps"] = 4
    out, drawn = io.StringIO(), io.StringIO()
    result = mlora.train(resolve_config(data, folder=tmp_path), reporter=PlainLines(out))
    run, best = tmp_path / "run", result.adapters["first"].best
    margins = {
        line["step"]: line["eval_rewards/margins"]
        for line in read_metrics(run / "metrics.jsonl")
        if "eval_loss" in line and line["step"]
    }
    step = max(margins, key=lambda each: margins[each])
    assert best == {"step": step, "metric": "eval_rewards/margins", "value": margins[step]}
    assert result.adapters["first"].eval_metrics["rewards/margins"] == {"before": 0.0, "after": margins[step]}
    assert read_status(run).adapters["first"]["eval_metrics"] == result.adapters["first"].eval_metrics
    assert read_status(run).adapters["orpo"]["metrics"] == result.adapters["orpo"].metrics
    said = out.getvalue()
    assert re.search(r"orpo: step 2/4 loss \d.* reward accuracy \d+\.\d% reward margin -?\d", said)
    assert re.search(r"first: step 4/4 eval_loss \d\.\d+ reward accuracy \d+\.\d% reward margin \d", said)
    titles = read_status(run).table()[0]
    assert {"reward accuracy", "eval reward margin before"} < set(titles)
    data["adapters"] = data["adapters"][1:]
    console = Console(file=drawn, force_terminal=True, width=100, highlight=False)
    mlora.train(resolve_config(data, folder=tmp_path), reporter=LiveTable(console), overwrite=True)
    last = drawn.getvalue().rpartition("accuracy")[2]
    assert re.search(r"orpo +finished +4/4 +\d\.\d{4} +\d+\.\d% *\n", last)


SPREAD = """
def loss(rows):
    return -rows.sums(), {"spread": rows.sums() ** 2}
"""


@pytest.mark.parametrize("metric", ["spread", "sprea"])
def test_a_metric_of_a_loss_of_ones_own_decides(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str
) -> None:
    """Whether it is measured shows before training; the other adapter trains."""
    (tmp_path / f"{metric}_losses.py").write_text(SPREAD)
    monkeypatch.syspath_prepend(tmp_path)
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {"objective": f"{metric}_losses:loss", "metric_for_best_model": metric}
    result = mlora.train(resolve_config(data, folder=tmp_path))
    first, second = result.adapters["first"], result.adapters["second"]
    assert second.state == "finished"
    if metric == "spread":
        assert (first.state, first.best and first.best["metric"]) == ("finished", "eval_spread")
        return
    assert first.state == "refused"
    assert first.message == (
        "metric_for_best_model: eval_sprea is not measured; metrics: eval_loss, eval_spread"
    )


def faults(data: dict[str, Any], folder: Path) -> list[str]:
    with pytest.raises(RunError) as error:
        resolve_config(data, folder=folder)
    return str(error.value).splitlines()


def test_what_does_not_fit_is_refused_in_one_line(tiny_base: Path, tmp_path: Path) -> None:
    data = preference_data(tiny_base, tmp_path)
    first, kto, orpo, plain = data["adapters"]

    def told(adapter: dict[str, Any], **changes: Any) -> str:
        (line,) = faults(
            data | {"adapters": [adapter | {"eval_dataset": None, "eval_steps": None} | changes]}, tmp_path
        )
        return re.sub(r"^config: adapters\.\w+\.", "", line)

    assert told(first, dataset="one") == (
        "dataset: objective dpo needs a dataset of format preference, got 'tokens'"
    )
    assert told(kto, dataset="pairs") == (
        "dataset: objective kto needs a dataset of format unpaired, got 'preference'"
    )
    assert told(plain, dataset="judged").startswith(
        "dataset: objective cross_entropy needs a dataset of format tokens or text or prompt_completion or"
    )
    assert told(plain, dataset="judged").endswith("got 'unpaired'; `objective:` kto takes unpaired")
    assert told(plain, dataset="pairs").endswith(
        "got 'preference'; `objective:` dpo or cpo or simpo or orpo takes preference"
    )
    assert told(orpo, objective={"name": "orpo", "lambda": 1}) == (
        "objective.lambda: unknown option of orpo; its options: beta"
    )
    assert (
        told(first, objective={"name": "dpo", "beta": 0}) == "objective.beta: must be greater than 0, got 0"
    )
    assert told(first, objective={"name": "dpo", "reference": "kto"}).startswith(
        "objective.reference: expected __base__ or init_from, got 'kto'"
    )
    assert told(first, objective={"name": "dpo", "reference": "init_from"}) == (
        "objective.reference: init_from: add init_from, whose weights it compares with"
    )
    assert told(kto, per_device_train_batch_size=1) == (
        "per_device_train_batch_size: must be at least 2 for objective kto, whose KL term pairs prompts with "
        "completions of other samples of the batch"
    )
    full = data | {
        "method": "full",
        "adapters": [first | {"lora": None, "eval_dataset": None, "eval_steps": None}],
    }
    assert faults(full, tmp_path) == [
        "config: adapters.first.objective: compares with __base__, but method: full trains the base model "
        "itself; use an objective without a reference, such as cpo, simpo or orpo"
    ]


def test_a_pair_without_rejected_is_one_line(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = preference_data(tiny_base, tmp_path)
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a", "chosen": "b"}\n')
    data["adapters"] = data["adapters"][:1]
    with pytest.raises(RunError, match="every adapter was refused"):
        mlora.train(resolve_config(data, folder=tmp_path), reporter=PlainLines())
    found = capsys.readouterr().err.splitlines()
    assert found == [
        f"error: first: refused: {path}:2: 'rejected' is missing; the line has 'prompt', 'chosen'"
    ]


def test_full_tuning_with_pairs(tiny_base: Path, tmp_path: Path) -> None:
    data = preference_data(tiny_base, tmp_path)
    orpo = {k: v for k, v in data["adapters"][2].items() if k != "lora"}
    data |= {"method": "full", "adapters": [orpo | {"max_grad_norm": 0}]}
    assert mlora.train(resolve_config(data, folder=tmp_path)).status == "finished"
    losses = [r["loss"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    assert losses[-1] < losses[0]


def test_a_sweep_searches_an_option_of_the_objective(tiny_base: Path, tmp_path: Path) -> None:
    data = preference_data(tiny_base, tmp_path)
    shared = {key: value for key, value in data.pop("adapters")[0].items() if key != "name"}
    sweep = {
        "sampler": "grid",
        "adapter": shared | {"objective": "dpo"},
        "search": {
            "objective": {"beta": {"choice": [0.1, 0.5]}, "loss_type": {"choice": ["sigmoid", "ipo"]}}
        },
    }
    config = resolve_config(data | {"sweep": sweep}, folder=tmp_path)
    assert config.sweep is not None
    assert [sample["objective"] for sample in config.sweep.samples()] == [
        {"name": "dpo", "beta": 0.1, "loss_type": "sigmoid"},
        {"name": "dpo", "beta": 0.5, "loss_type": "ipo"},
    ]
    sweep["search"] = {"objective": {"bata": {"choice": [0.1]}}}
    (line,) = faults(data | {"sweep": sweep}, tmp_path)
    assert line == "config: sweep.search.objective.bata: unknown option of dpo; did you mean 'beta'?"
