"""Runs with `method: full`: all weights of a model, in memory and out of core, bit for bit the same."""

import errno
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from limited_runs import Watching, ask, die, interrupt
from mlora.config.adapter_config import AdapterConfig
from mlora.config.config_file import resolve_config
from mlora.data.packing import pack
from mlora.engine.full_engine import FullEngine
from mlora.errors import RunError
from mlora.model import export
from mlora.offload import optimizer_states, saved_tensors, updates
from mlora.offload.options import OffloadOptions
from mlora.optim.optim_config import OptimConfig
from mlora.run.run import resume, train
from tiny_models import samples
from tiny_run import lines, run_data, save_base, weights
from transformers import AutoModelForCausalLM, Trainer

from tests.mlora.offload.families import FAMILIES
from tests.mlora.offload.full_runs import BLOCKS, ON_DISK, assert_same, full_data, model_of, run_of


@pytest.fixture(autouse=True, scope="module")
def _small_things_leave_memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_tensors, "SMALLEST", 256)
        patch.setattr(optimizer_states, "SMALL", 64)
        patch.setattr(optimizer_states, "UNIT", 2048)
        patch.setattr("mlora.config.sections.OffloadOptions", partial(OffloadOptions, poison=True))
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), layers=BLOCKS)


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return run_of(full_data(base, folder), folder)


def test_it_learns_and_the_model_loads(base: Path, whole: Path) -> None:
    evaluations = [line["eval_loss"] for line in lines(whole) if "eval_loss" in line]
    assert evaluations[-1] < evaluations[0]
    loaded = AutoModelForCausalLM.from_pretrained(whole / "adapters" / "all", dtype=torch.bfloat16)
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, model_of(whole)[name])
    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    assert not torch.equal(before.lm_head.weight, loaded.lm_head.weight)


@pytest.mark.parametrize("activations", ["keep", "recompute", "swap"])
def test_out_of_core_it_is_the_same(base: Path, whole: Path, tmp_path: Path, activations: str) -> None:
    (tmp_path / "scratch").mkdir()
    offload = ON_DISK | {"activations": activations, "folders": ["scratch"]}
    assert_same(run_of(full_data(base, tmp_path, offload=offload), tmp_path), whole)
    assert not list((tmp_path / "scratch").iterdir())


def test_a_trace_shows_reads_updates_and_writes(base: Path, tmp_path: Path) -> None:
    train(resolve_config(full_data(base, tmp_path, offload=ON_DISK), folder=tmp_path), trace=True)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    for track in ("read", "update", "write"):
        names = {event["name"] for event in spans if tracks[event["tid"]] == track}
        assert any("mlp.up_proj" in name for name in names), track
        assert track != "read" or any("block" in name for name in names)
    assert all(event["dur"] >= 0 for event in spans)


@pytest.mark.parametrize("end", [die, interrupt])
def test_a_run_that_ended_early_goes_on_to_the_bit(base: Path, whole: Path, tmp_path: Path, end: Any) -> None:
    config = resolve_config(full_data(base, tmp_path, offload=ON_DISK), folder=tmp_path)
    reporter = Watching({("all", 5): end})
    if end is die:
        with pytest.raises(ConnectionAbortedError):
            train(config, reporter=reporter)
    else:
        assert train(config, reporter=reporter).status == "interrupted"
    assert resume(tmp_path / "run").exit_code == 0
    assert_same(tmp_path / "run", whole)
    left = [path.name for path in (tmp_path / "run" / "states").iterdir()]
    assert left == [f"all.full-{4 if end is die else 5:08}.bin"]  # of the checkpoint before the last one


def test_it_is_paused_and_goes_on(base: Path, whole: Path, tmp_path: Path) -> None:
    config = resolve_config(full_data(base, tmp_path, offload=ON_DISK), folder=tmp_path)
    run = tmp_path / "run"
    reporter = Watching({("all", 3): lambda: ask(run, "pause", "all")})
    assert train(config, reporter=reporter).status == "paused"
    ask(run, "unpause", "all")
    assert resume(run).exit_code == 0
    assert_same(run, whole)


def test_a_run_that_was_cut_short_is_replaced(base: Path, whole: Path, tmp_path: Path) -> None:
    config = resolve_config(full_data(base, tmp_path, offload=ON_DISK), folder=tmp_path)
    for end in ({("all", 5): interrupt}, {}):
        train(config, reporter=Watching(end), overwrite=True)
        (tmp_path / "run" / "states" / "all.full-00000009.bin.new").write_bytes(b"1")  # as after a kill
    assert_same(tmp_path / "run", whole)
    train(config, overwrite=True)
    assert_same(tmp_path / "run", whole)


def test_a_disk_that_fills_while_the_model_is_written_leaves_nothing_of_it(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SHARD", 4096)
    save, calls = export.save_file, []

    def fill(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[1]))
        save(*args)

    with FullEngine(base) as engine:
        engine.create_adapter("all", None, OptimConfig(total_steps=1))
        with monkeypatch.context() as patch:
            patch.setattr(export, "save_file", fill)
            with pytest.raises(OSError, match="No space left"):
                engine.save("all", tmp_path / "trained")
        assert not list(tmp_path.iterdir())
        engine.save("all", tmp_path / "trained")
    assert [path.name for path in tmp_path.iterdir()] == ["trained"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "trained")


@pytest.mark.parametrize("norm", [0.0, 1.0], ids=["active", "clipped"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_a_plain_loop_with_torchs_adamw(tmp_path: Path, family: str, norm: float) -> None:
    """Over five steps in fp32, with the same batches; biases and norms are not decayed, as in Trainer."""
    torch.manual_seed(3)
    FAMILIES[family]().save_pretrained(tmp_path / "base")
    batches = [samples(2, 9, seed=step) for step in range(5)]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    spared = [p for name, p in model.named_parameters() if name not in decayed]
    assert spared
    groups = [
        {"params": [p for name, p in model.named_parameters() if name in decayed], "weight_decay": 0.3},
        {"params": spared, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    expected = []
    for batch in batches:
        packed = pack({"all": batch})
        sums = []
        for sample in batch:
            logits = model(input_ids=torch.tensor([sample.input_ids])).logits[0, :-1]
            labels = torch.tensor(sample.labels[1:])
            sums.append(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        loss = sum(sums) / sum(packed.counts)
        loss.backward()
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), norm or 1e9)
        optimizer.step()
        optimizer.zero_grad()
        expected.append((loss.item(), total.item()))
    offload = OffloadOptions(base="disk", optimizer="disk", poison=True)
    found = []
    with FullEngine(tmp_path / "base", offload=offload) as engine:
        optim = OptimConfig(
            learning_rate=1e-3,
            weight_decay=0.3,
            max_grad_norm=norm,
            lr_scheduler_type="constant",
            total_steps=5,
        )
        engine.create_adapter("all", None, optim)
        for batch in batches:
            result = engine.forward_backward({"all": batch}, ends=["all"])["all"]
            found.append((result.loss_sum / result.tokens, engine.optim_step("all").grad_norm))
        engine.save("all", tmp_path / "trained")
    assert found == [pytest.approx(pair, rel=1e-5) for pair in expected]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    for (name, weight), other in zip(trained.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-5, msg=name)


def test_a_gradient_that_is_not_finite_ends_the_run_at_its_last_checkpoint(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, calls = updates.Updates.submit, []

    def spoil(self: Any, name: str, gradient: torch.Tensor, step: Any) -> None:
        calls.append(name)
        if step.step == 4 and "layers.1.mlp.up_proj" in name:
            gradient = gradient * float("inf")
        submit(self, name, gradient, step)

    monkeypatch.setattr(updates.Updates, "submit", spoil)
    data = full_data(base, tmp_path, offload=ON_DISK)
    with pytest.raises(RunError, match=r"layers\.1\.mlp\.up_proj\.weight: the gradient is not finite"):
        run_of(data, tmp_path)
    monkeypatch.setattr(updates.Updates, "submit", submit)
    assert resume(tmp_path / "run").exit_code == 0
    assert [line["step"] for line in lines(tmp_path / "run") if "loss" in line] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp16": True, "bf16": False}, "fp16: overflows are known after the backward pass only; use bf16"),
        ({"pack_base": True}, "pack_base: packs frozen weights"),
        ({"pipeline": {"stages": 2}}, "pipeline.stages: method: full has one stage"),
        ({"scheduler": {"memory_limit": "1GiB"}}, "scheduler.memory_limit: decides which adapters run"),
        ({"lora": {"r": 4}}, r"adapters\.all\.lora: method: full trains all weights; remove it"),
        ({"optim": "sgd"}, r"adapters\.all\.optim: method: full trains with AdamW, got 'sgd'; remove it"),
        ({"num_labels": 2}, r"adapters\.all\.num_labels: is of heads; method: full has none"),
        ({"label_names": ["a", "b"]}, r"adapters\.all\.label_names: is of heads; method: full has none"),
        ({"problem_type": "regression"}, r"adapters\.all\.problem_type: is of heads"),
        ({"loraplus_lr_ratio": 2}, r"adapters\.all\.loraplus_lr_ratio: is a rate of lora_B"),
        (
            {"early_stopping_patience": 2},
            r"adapters\.all\.load_best_model_at_end: method: full keeps the",
        ),
    ],
)
def test_what_it_does_not_do_is_refused(
    base: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    data = full_data(base, tmp_path)
    if changes.keys() <= AdapterConfig.model_fields.keys():
        data["adapters"][0] |= changes
    else:
        data |= changes
    with pytest.raises(RunError, match=message):
        resolve_config(data, folder=tmp_path)


@pytest.mark.parametrize("method", [pytest.param("full", marks=pytest.mark.nightly), "lora"])
def test_a_plan_for_activations_changes_no_result(base: Path, tmp_path: Path, method: str) -> None:
    """Also where the run stops in the middle of an accumulation, and plans again."""
    found = []
    for name, activations in (("kept", "keep"), ("planned", "auto")):
        folder = tmp_path / name
        folder.mkdir()
        offload: dict[str, Any] = {"base": "disk", "activations": activations}
        if method == "full":
            data = full_data(base, folder, offload=offload | {"optimizer": "disk"})
        else:
            data = run_data(base, folder, offload=offload)
        reporter = Watching({3: interrupt})
        train(resolve_config(data, folder=folder), reporter=reporter)
        assert resume(folder / "run", reporter=reporter).exit_code == 0
        found.append([folder / "run", reporter.lines])
    told = [line for line in found[1][1] if "tokens" in line or "activations" in line]
    assert [line.partition(":")[0] for line in told if line.startswith("activations")] != []
    assert any("s predicted, bound by" in line for line in told)
    assert not any("predicted" in line for line in found[0][1])
    assert lines(found[0][0]) == lines(found[1][0])
    if method == "full":
        assert_same(found[1][0], found[0][0])
    else:
        assert weights(found[0][0]) == weights(found[1][0])


def test_swapping_and_a_memory_limit_exclude_each_other(base: Path, tmp_path: Path) -> None:
    data = run_data(base, tmp_path, offload={"activations": "swap"}, scheduler={"memory_limit": "4GiB"})
    with pytest.raises(RunError, match=r"offload\.activations: swap cannot be used with scheduler\.memory_"):
        resolve_config(data, folder=tmp_path)
    data = run_data(base, tmp_path, offload={"activations": "auto"}, gradient_checkpointing=True)
    with pytest.raises(RunError, match="auto says what is recomputed; remove gradient_checkpointing"):
        resolve_config(data, folder=tmp_path)
