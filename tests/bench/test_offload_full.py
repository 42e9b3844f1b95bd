"""The parts of the offloading benchmark that train all weights: their arithmetic, and tiny steps."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.offload.planner.machine import Machine
from mlora.offload.planner.search import Case
from mlora.offload.planner.workload import Block, OffloadWorkload


def part(name: str) -> Any:
    """A module of the benchmark; its folder is on the path inside a test only."""
    return import_module(f"offload.{name}")


def tiny() -> Any:
    return import_module("shared.shapes").ModelShape(64, 128, heads=2, kv_heads=2, layers=3, vocabulary=64)


def test_efficiency_and_the_bound_on_the_ratio_to_naive() -> None:
    gradients = part("gradients")
    seconds = {"serial": 8.0, "naive": 7.0, "optimised": 6.0, "no optimizer": 5.0, "optimizer alone": 2.5}
    turn = {name: {"seconds": value} for name, value in seconds.items()}
    turn["no optimizer"] |= {"forward": 1.0, "backward": 4.0}
    assert gradients.efficiency(turn) == pytest.approx(2 / 2.5)
    assert gradients.over_naive(turn) == {"ratio": pytest.approx(7 / 6), "bound": pytest.approx(7 / 5)}


def test_losses_are_equal_whenever_weights_are_updated(tmp_path: Path) -> None:
    gradients, models = part("gradients"), part("full_model")
    ids = models.random_tokens(16, tiny().vocabulary)
    losses = {}
    for name, how in gradients.CONTENDERS.items():
        tuned = models.Tuned(tiny(), folders=[tmp_path], **how)
        for _ in range(2):
            tuned.update() if name == gradients.ALONE else tuned.step(ids)
        tuned.close()
        losses[name] = tuned.losses
    assert losses.pop(gradients.ALONE) == []
    first = losses[gradients.SERIAL]
    assert first[1] < first[0]
    assert losses.pop(gradients.NONE) == [first[0], first[0]]
    assert all(found == first for found in losses.values())


def test_swapped_and_recomputed_blocks_give_the_same_bits(tmp_path: Path) -> None:
    models = part("full_model")
    swapping = part("swapping").Swapping(models.random_llama(tiny()), tmp_path)
    ids = models.random_tokens(512, tiny().vocabulary)
    sizes = swapping.bytes_of_blocks(ids)
    plans = (["keep"] * 3, ["recompute"] * 3, ["recompute", "swap", "swap"])
    found = [swapping.step(plan, ids) for plan in plans]
    written = swapping._space.written
    swapping.close()
    assert len({(one.loss, one.gradient) for one in found}) == 1
    assert found[0].gradient != 0
    assert written == sum(sizes[1:]) > 0


def watched() -> OffloadWorkload:
    """Three blocks of 100 bytes; forward 3 s, backward 6 s, recomputation 3 s, head and loss 2 s."""
    block = Block(inner_bytes=100, forward_seconds=1, backward_seconds=2, recompute_seconds=1)
    return OffloadWorkload([block] * 3 + [Block(forward_seconds=2, backward_seconds=1e-9)], 16)


def test_the_prediction_of_a_step_with_all_blocks_recomputed_is_the_sum_of_its_parts() -> None:
    swapping = part("swapping")
    work = watched()
    machine = Machine(1.0, read=1e6, write=1e6, one_memory=True, cores=2, compute_cores=1)
    assert swapping.predicted(machine, work, swapping.plan_of(0, 3)) == pytest.approx(14)
    assert swapping.predicted(machine, work, swapping.plan_of(3, 3)) == pytest.approx(11)


@pytest.mark.parametrize(("rate", "case"), [(1e6, Case.COMPUTE), (30, Case.INFLECTION), (1, Case.TRANSFER)])
def test_the_case_depends_on_the_disk(rate: float, case: Case) -> None:
    swapping = part("swapping")
    work = watched()
    assert swapping.case_of(Machine(1.0, read=rate, write=rate, one_memory=True), work) is case


@pytest.mark.parametrize(("fits", "known"), [(5, 0), (5, 3), (0, 0), (9, 2)])
def test_the_largest_model_is_found(
    fits: int, known: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest, base = part("largest"), part("base")
    killed = part("full_process").FullError("was killed", killed=True)

    def train(job: dict[str, Any], *_: object) -> dict[str, Any]:
        if json.loads((Path(job["base"]) / "config.json").read_text())["num_hidden_layers"] > fits:
            raise killed
        return {"seconds": [1.0], "usage": {"peak": 1}}

    monkeypatch.setattr(largest, "train_full", train)
    shape = import_module("shared.shapes").ModelShape(8, 8, heads=1, kv_heads=1, layers=9, vocabulary=8)
    base.write_base(tmp_path, shape)
    tried = largest.Tried(tmp_path, shape, largest.CONTENDERS["recomputed"])
    assert tried.largest(known) == fits
    assert len(tried.found) <= 7


def test_a_model_of_the_first_blocks_loads(tmp_path: Path) -> None:
    largest, base = part("largest"), part("base")
    from transformers import LlamaForCausalLM

    base.write_base(tmp_path, tiny())
    whole = LlamaForCausalLM.from_pretrained(tmp_path)
    few = LlamaForCausalLM.from_pretrained(largest.first_blocks(tmp_path, tiny(), 2))
    assert len(few.model.layers) == 2
    for block, other in zip(few.model.layers, whole.model.layers, strict=False):
        assert torch.equal(block.mlp.up_proj.weight, other.mlp.up_proj.weight)
    assert torch.equal(few.lm_head.weight, whole.lm_head.weight)
