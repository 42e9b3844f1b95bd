"""The best evaluation: which it is, and that its weights are what an adapter ends with, whatever happens."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import fill_disk
from limited_runs import Watching, ask, interrupt, limit_for, replace_memory, submission
from mlora.cli.run_status import read_status
from mlora.cli.tables import result_table
from mlora.config.adapter_config import AdapterConfig
from mlora.config.config_file import resolve_config
from mlora.errors import RunError
from mlora.run.reporter import PlainLines, Reporter
from mlora.run.run import resume, train
from mlora.run.task_states import compare
from mlora.store.checkpoint import list_checkpoints
from mlora.tasks.task import Progress
from peft import PeftModel
from safetensors.torch import load_file
from test_resume import Crashing, Interrupting
from tiny_run import lines, run_data, save_base, weights, write_jsonl, write_run
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.mlora.stage_runs import ENVIRONMENT, assert_alike, run_stages
from tests.tolerances import STEADY_EPSILON

KILLED = """
import os, signal, sys
from mlora.run.reporter import Reporter
from mlora.run.run import train
class Killed(Reporter):
    left = int(sys.argv[2])
    def evaluation(self, task, record):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
train(sys.argv[1], reporter=Killed())
"""


def worsening(base: Path, folder: Path, **fields: Any) -> dict[str, Any]:
    """A run whose adapter `first` improves at first, and then becomes worse; `fields` are its own."""
    data = run_data(base, folder)
    data["seed"] = 10  # bests are steps 1, 3 and 4, by more than rounding
    data["defaults"] |= {"max_steps": 10, "save_steps": 3}
    data["adapters"][0] |= {
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "gradient_accumulation_steps": 1,
        "eval_steps": 1,
        "load_best_model_at_end": True,
        **fields,
    }
    return data


def evaluations(run: Path, name: str = "first") -> dict[int, dict[str, Any]]:
    """What was measured after each step but step 0."""
    return {r["step"]: r for r in lines(run) if r["adapter"] == name and "eval_loss" in r and r["step"]}


def lowest(run: Path) -> int:
    """The step of the lowest loss, which is neither the first nor the last one."""
    found = evaluations(run)
    step = min(found, key=lambda step: found[step]["eval_loss"])
    assert 1 < step < max(found)
    return step


def weights_after(data: dict[str, Any], folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The weights of the adapter `first` after a step, from the checkpoint of a run that ends there.

    The other adapter trains as well: alone, `first` would get micro-batches that may round differently.
    """
    longer = {"max_steps": 99, "early_stopping_patience": None, "load_best_model_at_end": False}
    first, *others = data["adapters"]
    data = data | {"output_dir": f"until-{step}", "adapters": [first | longer, *others]}
    train(resolve_config(data, folder=folder), reporter=Watching({("first", step): interrupt}))
    newest = list_checkpoints(folder / f"until-{step}" / "checkpoints")[-1]
    state = torch.load(newest, weights_only=True)["adapters"]["first"]
    assert state["steps"] == step
    found = state["weights"]
    return {f"base_model.model.{key.replace('.first.', '.')}": tensor for key, tensor in found.items()}


def saved(run: Path, name: str = "first") -> dict[str, torch.Tensor]:
    return load_file(run / "adapters" / name / "adapter_model.safetensors")


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[key], other[key]) for key in one)


def peft_eval_loss(base: Path, adapter: Path, records: list[dict[str, Any]]) -> float:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    total, tokens = 0.0, 0
    for record in records:
        labels = torch.tensor(record["labels"][1:])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([record["input_ids"]])).logits[0, :-1]
        total += cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
        tokens += int((labels != -100).sum())
    return total / tokens


@pytest.mark.parametrize("early", [False, True])
def test_an_adapter_ends_with_its_best_weights(tiny_base: Path, tmp_path: Path, early: bool) -> None:
    asked: dict[str, Any] = {"load_best_model_at_end": True}
    if early:  # the best is the default then
        asked = {"load_best_model_at_end": None, "early_stopping_patience": 2}
    data = worsening(tiny_base, tmp_path, **asked)
    result = train(resolve_config(data, folder=tmp_path))
    run, best = tmp_path / "run", lowest(tmp_path / "run")
    assert equal(saved(run), weights_after(data, tmp_path, best))
    value = evaluations(run)[best]["eval_loss"]
    rows = [json.loads(line) for line in (tmp_path / "two.jsonl").read_text().splitlines()]
    assert peft_eval_loss(tiny_base, run / "adapters" / "first", rows) == pytest.approx(value, rel=1e-5)
    first = result.adapters["first"]
    assert first.step == (best + 2 if early else 10)
    assert first.best == {"step": best, "metric": "eval_loss", "value": value}
    assert (first.saved_step, first.eval_loss["after"]) == (best, value)
    assert result.adapters["second"].best is None
    assert result.adapters["second"].saved_step == 10 - 1
    last = {step: r["best"] for step, r in evaluations(run).items() if "best" in r}
    assert list(last.values()) == ["eval_loss"] * len(last)
    assert max(last) == best
    kept = {path.name for path in (run / "states").glob("*")}
    assert kept <= {f"first.best-{best:08d}.pt"}  # where the checkpoint before the last one names it


@pytest.mark.parametrize("asked", [{}, {"early_stopping_patience": 2}, {"metric_for_best_model": "loss"}])
def test_the_last_weights_are_saved_where_the_best_are_not_asked_for(
    tiny_base: Path, tmp_path: Path, asked: dict[str, Any]
) -> None:
    data = worsening(tiny_base, tmp_path, load_best_model_at_end=False, **asked)
    result = train(resolve_config(data, folder=tmp_path))
    first, found = result.adapters["first"], evaluations(tmp_path / "run")
    assert first.saved_step == first.step == (6 if "early_stopping_patience" in asked else 10)
    assert first.eval_loss["after"] == found[first.step]["eval_loss"]
    assert (first.best or {}).get("step") == (lowest(tmp_path / "run") if asked else None)
    assert equal(saved(tmp_path / "run"), weights_after(data, tmp_path, first.step))
    assert not (tmp_path / "run" / "states").exists()


EXPLODING = {
    "learning_rate": 1e25,
    "max_grad_norm": 0,
    "optim": "sgd",
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 4,
}


def test_a_task_that_is_stopped_later_leaves_its_best_weights(tiny_base: Path, tmp_path: Path) -> None:
    data = worsening(tiny_base, tmp_path, **EXPLODING)
    del data["adapters"][1]
    watching = Watching()
    result = train(resolve_config(data, folder=tmp_path), reporter=watching)
    first, run = result.adapters["first"], tmp_path / "run"
    assert (result.status, result.exit_code, first.state) == ("failed", 1, "stopped")
    assert first.best is not None
    best = first.best["step"]
    assert first.message.endswith(
        f"is not a number; try a lower learning_rate; saved as it was at step {best}, the best"
    )
    assert (first.saved_step, first.eval_loss["after"]) == (best, first.best["value"])
    kept = saved(run)
    assert all(tensor.isfinite().all() for tensor in kept.values())
    rows = [json.loads(line) for line in (tmp_path / "two.jsonl").read_text().splitlines()]
    loss = peft_eval_loss(tiny_base, run / "adapters" / "first", rows)
    assert loss == pytest.approx(first.best["value"], rel=1e-5)
    again = resume(run)
    assert again.adapters["first"] == first
    assert equal(saved(run), kept)


@pytest.mark.parametrize(
    "changes",
    [{"load_best_model_at_end": False}, {"learning_rate": 1e30, "warmup_steps": 0}],
    ids=["last", "nothing evaluated"],
)
def test_a_task_that_is_stopped_without_a_best_leaves_nothing(
    tiny_base: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    data = worsening(tiny_base, tmp_path, **EXPLODING | changes)
    del data["adapters"][1]
    first = train(resolve_config(data, folder=tmp_path)).adapters["first"]
    assert first.state == "stopped"
    assert first.message.endswith("is not a number; try a lower learning_rate")
    assert first.saved_step is None
    assert not (tmp_path / "run" / "adapters" / "first").exists()


def test_the_evaluation_at_the_end_counts(tiny_base: Path, tmp_path: Path) -> None:
    """`max_steps` is no multiple of `eval_steps`; step 0 does not count, though it is better than all."""
    data = worsening(tiny_base, tmp_path, eval_steps=3, max_steps=4, learning_rate=1e-3)
    result = train(resolve_config(data, folder=tmp_path))
    found = evaluations(tmp_path / "run")
    assert list(found) == [3, 4]
    assert result.adapters["first"].saved_step == min(found, key=lambda step: found[step]["eval_loss"])
    (tmp_path / "worse").mkdir()
    data = worsening(tiny_base, tmp_path / "worse", max_steps=2)
    data["adapters"][0]["greater_is_better"] = True
    result = train(resolve_config(data, folder=tmp_path / "worse"))
    first, found = result.adapters["first"], evaluations(tmp_path / "worse" / "run")
    assert first.best == {"step": 2, "metric": "eval_loss", "value": found[2]["eval_loss"]}
    assert found[2]["eval_loss"] > found[1]["eval_loss"]


@pytest.mark.parametrize(
    "after", [3, 8, 17, *(pytest.param(one, marks=pytest.mark.nightly) for one in (5, 12))]
)
def test_a_run_that_ends_in_the_middle_goes_on_to_the_same_best(
    tiny_base: Path, tmp_path: Path, after: int
) -> None:
    data = worsening(tiny_base, tmp_path)
    train(resolve_config(data | {"output_dir": "whole"}, folder=tmp_path))
    with pytest.raises(ConnectionAbortedError):
        train(resolve_config(data, folder=tmp_path), reporter=Crashing(after))
    assert resume(tmp_path / "run", reporter=Interrupting(2)).exit_code == 130
    result = resume(tmp_path / "run")
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert result.adapters["first"].saved_step == lowest(tmp_path / "whole")


@pytest.mark.parametrize("after", [6, pytest.param(9, marks=pytest.mark.nightly)])
def test_a_run_killed_right_after_an_evaluation(tiny_base: Path, tmp_path: Path, after: int) -> None:
    """Its best is step 4: in no checkpoint when it is killed after step 5, in two after step 8."""
    data = worsening(tiny_base, tmp_path) | {"output_dir": "whole"}
    data["adapters"] = data["adapters"][:1]
    train(resolve_config(data, folder=tmp_path))
    assert lowest(tmp_path / "whole") == 4
    path = write_run(tmp_path, data | {"output_dir": "run"})
    command = [sys.executable, "-c", KILLED, str(path), str(after)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert resume(tmp_path / "run").exit_code == 0
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_files_of_best_weights_go_when_nobody_needs_them(tiny_base: Path, tmp_path: Path) -> None:
    """Bests are steps 1, 3 and 4; checkpoints come at steps 2, 4, 6 and so on."""
    seen: dict[int, list[str]] = {}

    class Looking(Watching):
        def step(self, task: Any, record: dict[str, Any]) -> None:
            found = sorted(path.name for path in (tmp_path / "run" / "states").glob("*"))
            seen[record["step"]] = [str(int(name[len("first.best-") : -len(".pt")])) for name in found]

    data = worsening(tiny_base, tmp_path, save_steps=2)
    data["adapters"] = data["adapters"][:1]
    train(resolve_config(data, folder=tmp_path), reporter=Looking())
    assert [*seen[1], *seen[2]] == ["1"]
    assert (seen[4], seen[5]) == (["1", "3"], ["1", "4"])  # a checkpoint names step 1
    assert seen[9] == ["4"]
    assert [path.name for path in (tmp_path / "run" / "states").iterdir()] == ["first.best-00000004.pt"]
    assert len(list_checkpoints(tmp_path / "run" / "checkpoints")) == 2  # that of step 8 names it
    data["adapters"][0]["save_steps"] = None
    train(resolve_config(data, folder=tmp_path), reporter=Looking(), overwrite=True)
    assert (seen[2], seen[4], seen[5], seen[10]) == (["1"], ["3"], ["4"], ["4"])


def test_best_weights_that_are_gone_are_told_of_before_training(tiny_base: Path, tmp_path: Path) -> None:
    data = worsening(tiny_base, tmp_path)
    train(resolve_config(data, folder=tmp_path), reporter=Interrupting(12))
    for earlier in sorted((tmp_path / "run" / "checkpoints").iterdir())[:-1]:
        earlier.unlink()  # it would be gone on from
    path = max((tmp_path / "run" / "states").iterdir())
    content = path.read_bytes()
    path.unlink()
    expected = (
        r"first\.best-00000004\.pt: cannot be read: No such file .*; no checkpoint is whole; put the file"
    )
    with pytest.raises(RunError, match=expected):
        resume(tmp_path / "run")
    path.write_bytes(content[:900])
    with pytest.raises(
        RunError, match=r"first\.best-00000004\.pt: cannot be read: it is damaged or incomplete"
    ):
        resume(tmp_path / "run")
    path.write_bytes(content)
    assert resume(tmp_path / "run").adapters["first"].saved_step == 4


def test_a_full_disk_while_the_best_is_kept(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = worsening(tiny_base, tmp_path)
    train(resolve_config(data | {"output_dir": "whole"}, folder=tmp_path))
    with monkeypatch.context() as patch:
        fill_disk(patch, lambda path: "first.best-00000004" in path.name)
        with pytest.raises(RunError, match=r"first\.best-00000004\.pt: cannot be saved: No space left"):
            train(resolve_config(data, folder=tmp_path))
    assert resume(tmp_path / "run").exit_code == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_a_task_that_is_paused_and_preempted_keeps_its_best(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two tasks fits, and each gives way to a third."""
    replace_memory(monkeypatch)
    data = worsening(tiny_base, tmp_path) | {"scheduler": {"memory_limit": limit_for(1)}}
    train(resolve_config(data | {"output_dir": "whole"}, folder=tmp_path))
    run = tmp_path / "run"
    content = submission(data, tmp_path, "urgent", priority=9)
    watching = Watching(
        {
            ("first", 5): lambda: ask(run, "submit", "urgent", content),
            ("urgent", 1): lambda: ask(run, "pause", "first"),
            ("second", 2): lambda: ask(run, "unpause", "first"),
        }
    )
    result = train(resolve_config(data, folder=tmp_path), reporter=watching)
    assert watching.steps.index(("first", 6)) > watching.steps.index(("second", 2))
    assert result.adapters["first"].saved_step == lowest(tmp_path / "whole") == 4
    assert weights(run)["first"] == weights(tmp_path / "whole")["first"]


def test_a_task_that_is_cancelled_leaves_nothing(tiny_base: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    watching = Watching({("first", 5): lambda: ask(run, "cancel", "first")})
    result = train(resolve_config(worsening(tiny_base, tmp_path), folder=tmp_path), reporter=watching)
    first = result.adapters["first"]
    assert (first.state, first.saved_step) == ("cancelled", None)
    assert first.best is not None
    assert not (run / "adapters" / "first").exists()


def slowly_learning(folder: Path) -> dict[str, Any]:
    """A rate that does not amplify rounding, on a deeper model; the highest loss, of step 2, is the best."""
    base = save_base(folder / "base", layers=4, initializer_range=0.2)
    data = worsening(base, folder, learning_rate=2e-3, max_steps=6, greater_is_better=True)
    data["seed"] = 3
    data["defaults"]["adam_epsilon"] = 100 * STEADY_EPSILON  # the gradients of this base are as much larger
    return data


@pytest.mark.parametrize(
    "pipeline",
    [{"stages": 2}, pytest.param({"stages": 4, "micro_batches": 2}, marks=pytest.mark.nightly)],
    ids=str,
)
def test_stages_gather_the_best_weights(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    data = slowly_learning(tmp_path)
    one = train(resolve_config(data | {"output_dir": "whole"}, folder=tmp_path))
    with pytest.raises(ConnectionAbortedError):
        train(resolve_config(data | {"pipeline": pipeline}, folder=tmp_path), reporter=Crashing(9))
    many = resume(tmp_path / "run")
    assert_alike(tmp_path / "run", tmp_path / "whole")
    first = many.adapters["first"]
    assert first.saved_step == one.adapters["first"].saved_step == 2


def test_stages_that_are_processes_gather_the_best_weights(tmp_path: Path) -> None:
    data = slowly_learning(tmp_path)
    train(resolve_config(data | {"output_dir": "whole"}, folder=tmp_path))
    path = write_run(tmp_path, data | {"pipeline": {"stages": 2}})
    codes, _, errors = run_stages(["train", path], 2)
    assert codes == [0, 0], errors
    assert_alike(tmp_path / "run", tmp_path / "whole")


def test_exact_match_is_a_metric(tmp_path: Path) -> None:
    """Greater is better, the first of equals counts, and each evaluation measures it."""
    base = save_base(tmp_path / "base", seed=5, hidden=64)
    answers = {"a": "x", "b": "yy", "c": "z", "dd": "w"}
    rows = [{"prompt": f"{key}=", "completion": value} for key, value in answers.items()]
    write_jsonl(tmp_path / "d.jsonl", rows)
    adapter: dict[str, Any] = {"name": "a", "dataset": "d", "eval_dataset": "d", "eval_exact_match": True}
    data = {
        "base_model": str(base),
        "output_dir": "run",
        "device": "cpu",
        "defaults": {"max_steps": 60, "learning_rate": 2e-2, "per_device_train_batch_size": 4},
        "datasets": [{"name": "d", "path": "d.jsonl", "format": "prompt_completion"}],
        "adapters": [
            {
                **adapter,
                "eval_steps": 5,
                "early_stopping_patience": 3,
                "metric_for_best_model": "exact_match",
                "lora": {"r": 8, "target_modules": "all-linear"},
            }
        ],
    }
    result = train(resolve_config(data, folder=tmp_path)).adapters["a"]
    found = {step: r["eval_exact_match"] for step, r in evaluations(tmp_path / "run", "a").items()}
    step = next(step for step, share in found.items() if share == max(found.values()))
    assert result.best == {"step": step, "metric": "eval_exact_match", "value": 1.0}
    assert result.saved_step == step
    assert result.eval_exact_match == {"before": 0.0, "after": 1.0}
    assert result.step == step + 15
    assert result.message == "stopped early: eval_exact_match did not improve in 3 evaluations"
    losses = {s: r["eval_loss"] for s, r in evaluations(tmp_path / "run", "a").items()}
    assert result.eval_loss["after"] == losses[step] > losses[result.step]


class Compared:
    """A task as far as `compare` looks at it."""

    def __init__(self, **fields: Any) -> None:
        lora = {"r": 2, "target_modules": "all-linear"}
        known = {"name": "a", "dataset": "d", "eval_dataset": "d", "eval_steps": 1, "lora": lora}
        self.config, self.progress = AdapterConfig(**{**known, **fields}), Progress()

    def bests(self, values: list[float], metric: str = "eval_loss") -> list[bool]:
        return [compare(self, {"step": step, metric: value}) for step, value in enumerate(values)]  # type: ignore[arg-type]


def test_evaluations_compare_as_in_transformers() -> None:
    nan = float("nan")
    task = Compared(load_best_model_at_end=True)
    assert task.bests([0.1, nan, 3.0, 3.0, nan, 2.0, 2.5]) == [False, False, True, False, False, True, False]
    assert (task.progress.best, task.progress.best_step, task.progress.worse) == (2.0, 5, 1)
    task = Compared(metric_for_best_model="eval_exact_match", eval_exact_match=True)
    assert task.bests([0.9, 0.1, 0.3, 0.3], "eval_exact_match") == [False, True, True, False]
    task = Compared(early_stopping_patience=9, early_stopping_threshold=0.5)
    assert task.bests([9.0, 3.0, 2.75, 2.0, 1.75]) == [False, True, True, True, True]
    assert task.progress.worse == 1  # a best that improves by less than the threshold counts as none
    assert Compared().bests([3.0, 2.0, 1.0]) == [False] * 3


def test_what_is_shown_of_the_best(tiny_base: Path, tmp_path: Path, capsys: Any) -> None:
    data = worsening(tiny_base, tmp_path)

    class AfterAnEvaluation(Reporter):
        def evaluation(self, task: Any, record: dict[str, Any]) -> None:
            if record["step"] == 6:
                signal.raise_signal(signal.SIGINT)

    train(resolve_config(data, folder=tmp_path), reporter=AfterAnEvaluation())
    run = tmp_path / "run"
    titles, first, _ = read_status(run).table()
    shown = dict(zip(titles, first, strict=True))
    step = int(shown["step"].split("/")[0])
    found = evaluations(run)
    assert shown["latest eval loss"] == f"{found[step]['eval_loss']:.4f}, step {step}"
    assert shown["best step"] == "4"
    assert "after" not in shown
    task = read_status(run).as_json()["tasks"][0]
    assert task["latest_eval"] == {"step": step, "eval_loss": found[step]["eval_loss"]}
    assert task["best"] == {"step": 4, "metric": "eval_loss", "value": found[4]["eval_loss"]}
    result = resume(run, reporter=PlainLines())
    out = capsys.readouterr().out.splitlines()
    assert "first: finished at step 10, saved as it was at step 4, the best" in out
    for titles, first, *_ in (read_status(run).table(), result_table(result.summary())):
        shown = dict(zip(titles, first, strict=True))
        assert (shown["after"], shown["best step"]) == (f"{found[4]['eval_loss']:.4f}", "4")
        assert "latest eval loss" not in shown
