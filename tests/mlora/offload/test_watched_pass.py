"""What a watched micro-batch tells the planner, and what it must leave as it was."""

from __future__ import annotations

import threading
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
from tiny_run import save_base

import mlora_ext
from tests.mlora.equal_states import assert_equal
from tests.mlora.tiny_models import samples

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


@pytest.mark.parametrize("activations", ["auto", "swap", "keep"])
def test_blocks_without_adapters_have_no_backward_pass(base: Path, activations: Any) -> None:
    found = []
    for offload in (OffloadOptions(), OffloadOptions(base="disk", activations=activations)):
        with Engine(base, offload=offload) as engine:
            lora = LoraConfig(r=3, target_modules=["q_proj", "up_proj"], layers_to_transform=[4, 5])
            engine.create_adapter("a", lora, OptimConfig(total_steps=3))
            engine.forecast({"a": samples(2, 9, seed=0)})
            for step in range(3):
                engine.forward_backward({"a": samples(2, 9, seed=step)})
                engine.optim_step("a")
            found.append(engine.state_dict("a"))
    assert_equal(*found)


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
    found = []
    for offload in (OffloadOptions(), OffloadOptions(base="disk", slots=2, poison=True)):
        with Engine(base, offload=offload) as engine, mlora_ext.use_backend("reference"):
            engine.create_adapter(
                "a", LoraConfig(r=3, target_modules="all-linear"), OptimConfig(total_steps=3)
            )
            for step in range(3):
                engine.forward_backward({"a": samples(2, 9, seed=step)})
                engine.optim_step("a")
            found.append(engine.state_dict("a"))
    assert_equal(*found)
