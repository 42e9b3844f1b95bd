"""An engine over a base that stays on disk trains as over one in memory, also when it is watched."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.engine.engine import Engine
from mlora.engine.full_engine import FullEngine
from mlora.offload import saved_tensors
from mlora.offload.activations import BlockTimes
from mlora.offload.forecast import passes_of
from mlora.offload.options import OffloadOptions
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tiny_run import save_base
from transformers import PreTrainedModel

import mlora_ext
from tests.mlora.equal_states import assert_equal
from tests.mlora.offload.families import FAMILIES
from tests.mlora.tiny_models import samples

QUICK_STEPS, STEPS = 6, 20
"""From the third step on, all slots and files are used again."""
SOME = {
    "llama": ["q_proj", "down_proj"],
    "qwen3, tied head": ["k_proj"],
    "gpt2": ["c_attn"],
    "phi3": ["qkv_proj", "gate_up_proj"],
}
ON_DISK = OffloadOptions(base="disk", slots=3, poison=True)


def saved(family: str, folder: Path, dtype: torch.dtype) -> Path:
    torch.manual_seed(3)
    model: PreTrainedModel = FAMILIES[family]()
    model.to(dtype).save_pretrained(folder)
    return folder


def train(family: str, base: Path, offload: OffloadOptions, steps: int, **how) -> list:
    """Losses of all steps of two adapters, the last gradients, and the states at the end."""
    with Engine(base, seed=1, offload=offload, **how) as engine:
        loras = {
            "a": LoraConfig(r=3, target_modules="all-linear", lora_dropout=0.1),
            "b": LoraConfig(r=5, target_modules=SOME[family]),
        }
        for name, lora in loras.items():
            engine.create_adapter(name, lora, OptimConfig(learning_rate=1e-2, total_steps=steps))
        found = []
        for step in range(steps):
            batch = {"a": samples(2, 9, seed=step), "b": samples(1, 14, seed=100 + step)}
            results = engine.forward_backward(batch)
            found.append([results[name].loss_sum for name in loras])
            if step == steps - 1:
                parameters = [mlora_ext.adapter_parameters(engine.model, name) for name in loras]
                found.append(
                    [None if p.grad is None else p.grad.clone() for own in parameters for p in own.values()]
                )
            for name in loras:
                engine.optim_step(name)
        return [*found, [engine.state_dict(name) for name in loras]]


@pytest.mark.pairwise
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("where", ["disk-keep", "disk-swap", "device-swap", "disk-recompute"])
@pytest.mark.parametrize("saved_as", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_gradients_and_states_are_equal_to_the_bit(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    family: str,
    dtype: torch.dtype,
    saved_as: torch.dtype,
    where: str,
    stages: int,
) -> None:
    """Weights of another dtype in the files are converted into a scratch file."""
    base = saved(family, tmp_path / "base", saved_as)
    how = {"dtype": dtype, "stages": stages}
    place, activations = where.split("-")
    out = replace(ON_DISK, base=place, activations=activations)
    steps = STEPS if request.node.get_closest_marker("nightly") else QUICK_STEPS
    in_memory, on_disk = (train(family, base, offload, steps, **how) for offload in (OffloadOptions(), out))
    assert_equal(on_disk, in_memory)


@pytest.mark.parametrize("saved_as", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_that_the_checkpoint_lacks_is_named(tmp_path: Path, saved_as: torch.dtype) -> None:
    base = saved("llama", tmp_path / "base", saved_as)
    tensors = load_file(base / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing 1 weights, for example model\.layers\.2\.mlp\.up_proj"):
        Engine(base, offload=ON_DISK)


def test_what_cannot_stay_on_disk_is_refused(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base", torch.float32)
    with pytest.raises(
        ValueError, match=r"offload\.base: disk reads a model from its files; give its folder"
    ):
        Engine(FAMILIES["llama"](), offload=ON_DISK)
    with pytest.raises(ValueError, match=r"pack_base: .*packing needs a plain weight, got .* StreamedWeight"):
        Engine(base, offload=ON_DISK, frozen_weight="packed")
    with pytest.raises(ValueError, match="slots: expected at least 2 slots"):
        Engine(base, offload=replace(ON_DISK, slots=1))
    with pytest.raises(ValueError, match=r"offload\.base: disk serves models on the CPU so far"):
        Engine(base, offload=ON_DISK, device="meta")


def test_a_folder_for_scratch_files_that_is_missing_is_named(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base", torch.bfloat16)
    with pytest.raises(FileNotFoundError, match="cannot be opened") as error:
        Engine(base, offload=replace(ON_DISK, folders=[str(tmp_path / "gone")]))
    assert error.value.filename == str(tmp_path / "gone")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_it_keeps_to_a_memory_limit(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base", torch.float32)
    with Engine(base, offload=ON_DISK, memory_limit="8GiB") as engine:
        engine.create_adapter("a", LoraConfig(r=3, target_modules=["q_proj"]), OptimConfig(total_steps=1))
        result = engine.forward_backward({"a": samples(2, 9, seed=1)})["a"]
        assert engine.memory is not None
        assert 0 < result.loss_sum < 1000


BLOCKS = 6


@pytest.fixture(autouse=True)
def _small_things_leave_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tensors, "SMALLEST", 256)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), layers=BLOCKS)


def test_recomputation_costs_what_recomputed_blocks_take_more() -> None:
    times = BlockTimes(forward=[3.0, 2.0, 3.0, 2.0], backward=[4.0, 7.0, 6.0, 9.0], around=1.0)
    found = passes_of(times, ["swap", "recompute", "swap", "recompute"])
    assert [sum(parts[:2]) for parts in found] == pytest.approx([7, 9 * 0.8, 9, 11 * 0.8])
    assert [parts[2] for parts in found] == pytest.approx([7 / 0.8 - 7, 9 * 0.2, 9 / 0.8 - 9, 11 * 0.2])
    assert [parts[0] for parts in found] == pytest.approx([3, 3, 3, 3])


def test_recomputation_is_a_forward_pass_where_nothing_was_kept() -> None:
    times = BlockTimes(forward=[1.0], backward=[3.0])
    assert passes_of(times, ["keep"]) == [pytest.approx((1, 3, 0), abs=1e-8)]


def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The workload that a forecast hands to the planner."""
    from mlora.offload import forecast

    seen: list[Any] = []
    of = forecast.watched_workload

    def keep(*args: Any, **kwargs: Any) -> Any:
        seen.append(of(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(forecast, "watched_workload", keep)
    engine.forecast({"a": samples(2, 9, seed=0)})
    return seen[0]


@pytest.mark.parametrize("activations", ["auto", "keep"])
def test_bytes_of_a_block_are_those_that_it_saves(
    base: Path, activations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of all the inputs that recomputed blocks save."""
    options = OffloadOptions(base="disk", activations=activations)
    with Engine(base, offload=options) as engine:
        engine.create_adapter("a", LoraConfig(r=3, target_modules="all-linear"), OptimConfig(total_steps=1))
        work = watched(engine, monkeypatch)
        counted = engine._base.activations.saved.counted
        assert set(counted) > {-1}
        assert {block.inner_bytes for block in work.blocks[:-1]} == {
            max(size for number, size in counted.items() if number >= 0)
        }


def states_of(base: Path, offload: OffloadOptions, lora: LoraConfig, forecast: bool) -> Any:
    """The states of an adapter after three steps."""
    with Engine(base, offload=offload) as engine:
        engine.create_adapter("a", lora, OptimConfig(total_steps=3))
        if forecast:
            engine.forecast({"a": samples(2, 9, seed=0)})
        for step in range(3):
            engine.forward_backward({"a": samples(2, 9, seed=step)})
            engine.optim_step("a")
        return engine.state_dict("a")


@pytest.mark.parametrize("activations", ["auto", "swap", "keep"])
def test_blocks_without_adapters_have_no_backward_pass(base: Path, activations: Any) -> None:
    lora = LoraConfig(r=3, target_modules=["q_proj", "up_proj"], layers_to_transform=[4, 5])
    on_disk = OffloadOptions(base="disk", activations=activations)
    assert_equal(*(states_of(base, offload, lora, forecast=True) for offload in (OffloadOptions(), on_disk)))


@pytest.mark.parametrize("norm", [0.0, 1.0])
def test_a_watched_pass_of_full_tuning_gathers_no_gradients(
    base: Path, monkeypatch: pytest.MonkeyPatch, norm: float
) -> None:
    with FullEngine(
        base, offload=OffloadOptions(base="disk", optimizer="disk", activations="auto")
    ) as engine:
        engine.create_adapter("a", None, OptimConfig(max_grad_norm=norm, total_steps=2))
        found: list[bool] = []
        drop = engine.discard_gradients

        def look(name: str) -> None:
            found.extend(p.grad is not None for p in engine.model.parameters())
            drop(name)

        monkeypatch.setattr(engine, "discard_gradients", look)
        work = watched(engine, monkeypatch)
        assert found
        assert not any(found)
        assert sum(block.trainable for block in work.blocks) == sum(
            tensor.numel() for tensor in engine.model.parameters()
        )
        engine.forward_backward({"a": samples(2, 9, seed=0)}, ends=["a"])
        assert engine.optim_step("a").grad_norm > 0


@pytest.mark.parametrize("ends", [True, False], ids=["closed", "after an error"])
def test_an_engine_that_ends_leaves_no_thread(base: Path, ends: bool) -> None:
    before = set(threading.enumerate())

    def work() -> None:
        with FullEngine(base, offload=OffloadOptions(base="disk", optimizer="disk")) as engine:
            engine.create_adapter("a", None, OptimConfig(max_grad_norm=0, total_steps=2))
            engine.forward_backward({"a": samples(2, 9, seed=0)}, ends=["a"])
            assert set(threading.enumerate()) != before
            if not ends:
                raise KeyError("a")
            engine.optim_step("a")

    if ends:
        work()
    else:
        with pytest.raises(KeyError):
            work()
    assert set(threading.enumerate()) <= before


def test_a_failed_micro_batch_leaves_no_update_behind(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one accumulates; it does not update weights as the one that failed would have."""
    with FullEngine(base, offload=OffloadOptions(optimizer="disk")) as engine:
        engine.create_adapter("a", None, OptimConfig(max_grad_norm=0, total_steps=4))
        part: Any = engine._part
        hidden = part.base.hidden
        with monkeypatch.context() as patch:
            patch.setattr(part.base, "hidden", lambda *args: (_ for _ in ()).throw(MemoryError("full")))
            with pytest.raises(MemoryError):
                engine.forward_backward({"a": samples(2, 9, seed=0)}, ends=["a"])
        assert part.base.hidden == hidden
        before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
        engine.forward_backward({"a": samples(2, 9, seed=0)})
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.model.state_dict().items())


def test_the_oracle_serves_a_streamed_base(base: Path) -> None:
    """It lets autograd save weights, which are in a slot for a while only."""
    lora = LoraConfig(r=3, target_modules="all-linear")
    on_disk = OffloadOptions(base="disk", slots=2, poison=True)
    with mlora_ext.use_backend("reference"):
        assert_equal(
            *(states_of(base, offload, lora, forecast=False) for offload in (OffloadOptions(), on_disk))
        )
