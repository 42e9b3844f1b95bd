"""The predicted time of a step: cases worked out by hand, bytes that are moved, and steps that are played."""

import math
from dataclasses import replace

import pytest
from mlora.offload.planner.activation_plan import ActivationChoice, ActivationPlan
from mlora.offload.planner.iteration_time import IterationTime, iteration_time
from mlora.offload.planner.machine import Budget, Machine
from mlora.offload.planner.tokens_to_hide import (
    Hidden,
    adapters_to_hide,
    tokens_of_passes,
    tokens_to_hide,
)
from mlora.offload.planner.workload import Block, OffloadWorkload, StatePlacement
from played_steps import played_stream, played_update

BLOCK = Block(flops=10.0, weight_bytes=4.0, inner_bytes=6.0, hidden_bytes=2.0)
FULL = replace(BLOCK, trainable=2.0, state_bytes=24.0, gradient_bytes=4.0)
THREE = Machine(flops=1.0, read=1.0, write=2.0, to_device=4.0, to_host=4.0)
ONE = Machine(flops=1.0, read=1.0, write=2.0, one_memory=True)
RESIDENT, STREAMED = StatePlacement(base="device"), StatePlacement(slots=2)


def timed(
    machine: Machine, placement: StatePlacement, *inner: str, hidden: str = "keep", **how
) -> IterationTime:
    """A step of one block for each choice."""
    block = FULL if how.get("method") == "full" else BLOCK
    plan = ActivationPlan(tuple(ActivationChoice(choice) for choice in inner), ActivationChoice(hidden))
    return iteration_time(machine, OffloadWorkload([block] * len(inner), 1, **how), placement, plan)


def test_computation_alone() -> None:
    found = timed(THREE, RESIDENT, *["keep"] * 4)
    assert (found.forward.seconds, found.backward.seconds, found.optimizer.seconds) == (40, 40, 0)
    assert found.bound == "compute"
    assert found.tokens_per_second == 1 / 80
    assert set(found.moved_bytes.values()) == {0}
    assert timed(THREE, RESIDENT, *["keep"] * 4, method="full").backward.seconds == 80
    assert timed(THREE, RESIDENT, *["keep"] * 4, backward_ratio=1.5).backward.seconds == 60


def test_recomputation_costs_a_forward_pass_and_moves_nothing() -> None:
    found = timed(THREE, RESIDENT, "keep", "recompute", "recompute", "keep")
    assert (found.forward.seconds, found.backward.seconds) == (40, 60)
    assert found.compute_seconds == 100
    assert set(found.moved_bytes.values()) == {0}


def test_swaps_take_each_way_that_they_go() -> None:
    """Two of four blocks to the disk, one to the host, and 8 bytes between blocks to the host."""
    found = timed(THREE, RESIDENT, "disk", "disk", "host", "keep", hidden="host")
    assert found.moved_bytes == {"read": 12, "written": 12, "to_device": 26, "to_host": 26}
    slow = replace(THREE, flops=100.0, to_host=0.5)
    out = timed(slow, RESIDENT, "disk", "disk", "host", "keep", hidden="host")
    assert (out.forward.seconds, out.forward.bound) == (52, "to host")
    assert (out.backward.seconds, out.backward.bound) == (12, "read")
    back = timed(replace(slow, to_device=0.1), RESIDENT, "keep", "keep", "host", "keep")
    assert (back.backward.seconds, back.backward.bound) == (pytest.approx(60), "to device")


def test_with_one_memory_nothing_goes_between_device_and_host() -> None:
    found = timed(ONE, STREAMED, "disk", "keep", "keep", "keep")
    assert found.moved_bytes == {"read": 22, "written": 6, "to_device": 0, "to_host": 0}
    with pytest.raises(ValueError, match="cannot swap to the host; use keep, recompute, disk"):
        timed(ONE, STREAMED, "host", "keep")
    with pytest.raises(ValueError, match="cannot swap to the disk; use keep, recompute"):
        timed(Machine(1.0, one_memory=True), RESIDENT, "disk", "keep")


def test_a_frozen_base_is_read_twice_but_for_the_slots() -> None:
    """Of 5 blocks of 4 bytes, 2 stay. Reads begin after the first block and end before the last."""
    found = timed(THREE, STREAMED, *["keep"] * 5)
    assert found.moved_bytes == {"read": 24, "written": 0, "to_device": 24, "to_host": 0}
    assert (found.forward.seconds, found.forward.bound) == (50, "compute")
    slow = timed(replace(THREE, read=0.1), STREAMED, *["recompute"] * 5)
    assert (slow.forward.seconds, slow.forward.bound) == (12 / 0.1 + 2 * 10, "read")
    assert slow.backward.seconds == 12 / 0.1 + 2 * 20
    assert slow.moved_bytes["read"] == 24, "a block is recomputed while its weights are there"
    host = timed(THREE, replace(STREAMED, base="host"), *["keep"] * 5)
    assert host.moved_bytes == {"read": 0, "written": 0, "to_device": 24, "to_host": 0}
    assert timed(ONE, replace(STREAMED, base="host"), *["keep"] * 5).moved_bytes["read"] == 0
    assert timed(THREE, replace(STREAMED, slots=9), *["keep"] * 5).moved_bytes["read"] == 0


def test_reads_and_writes_of_one_disk_add_up() -> None:
    machine, inner = replace(THREE, flops=100.0), ["disk"] * 4
    shared = timed(machine, STREAMED, *inner)
    assert (shared.forward.seconds, shared.forward.bound) == (8 + 24 / 2 + 2 * 0.1, "write")
    apart = timed(replace(machine, shared_disk=False), STREAMED, *inner)
    assert (apart.forward.seconds, apart.forward.bound) == (12, "write")


def test_the_processor_pays_for_bytes_beside_what_it_computes() -> None:
    costs = {"read_seconds": 0.5, "write_seconds": 1.0, "copy_seconds": 2.0}
    busy = replace(ONE, **costs, cores=2.0, compute_cores=2.0, read=10.0, write=10.0)
    found = timed(busy, RESIDENT, "disk", "keep")
    assert (found.forward.seconds, found.forward.bound) == ((20 + 12) + 6 / 2, "processor")
    assert found.backward.seconds == 20 + 3 / 2
    free = timed(replace(busy, compute_cores=1.0), RESIDENT, "disk", "keep")
    assert (free.forward.seconds, free.forward.bound) == (20 + 12, "compute"), "what computes also copies"


def test_full_tuning_moves_14_bytes_a_parameter_each_way() -> None:
    """4 blocks of P = 2 parameters: 12 P of states in and out, 2 P of weights in twice and out once, of
    2 blocks in a slot only out."""
    place = StatePlacement(optimizer="disk", slots=2)
    found = timed(THREE, place, *["keep"] * 4, method="full")
    weights, states = 4 * 4, 4 * 24
    assert found.moved_bytes == {
        "read": weights // 2 + weights // 2 + states,
        "written": weights + states,
        "to_device": weights // 2 + weights // 2,
        "to_host": weights,
    }
    more = timed(THREE, place, *["keep"] * 4, method="full", micro_batches=3)
    assert more.moved_bytes["written"] == weights + states, "the update is made once"
    assert more.moved_bytes["to_host"] == 3 * weights
    assert more.tokens == 3


def test_when_the_optimizer_works() -> None:
    """Read 24 s, update 2 s, write 28 / 2 = 14 s for a block; backward 20 s for each of 4 blocks."""
    machine = replace(THREE, update_seconds=1.0, to_host=math.inf)
    place = StatePlacement(base="device", optimizer="disk")
    parts = {}
    for update in ("serial", "after", "naive", "active"):
        found = timed(machine, replace(place, update=update), *["keep"] * 4, method="full")
        parts[update] = (found.backward.seconds, found.optimizer.seconds)
    write = 24 / 2
    assert parts["serial"] == (80, 4 * (24 + 2 + write))
    assert parts["after"] == (80, 4 * (24 + write))
    handlers = 20 + 4 * (24 + 2 + write)
    assert sum(parts["naive"]) == handlers
    assert sum(parts["active"]) == 4 * (24 + write), "the first update finds its states there"
    fast = replace(machine, read=100.0, write=100.0)
    short = timed(fast, place, *["keep"] * 4, method="full")
    assert short.backward.seconds == 80
    assert short.optimizer.seconds == pytest.approx(2 + 0.24), "the last block's update and write"
    assert short.bound == "compute"


def test_an_adapter_moves_only_its_own_states() -> None:
    block = replace(BLOCK, trainable=1.0, state_bytes=12.0, gradient_bytes=2.0)
    workload = OffloadWorkload([block] * 4, 1, micro_batches=2)
    plan = ActivationPlan((ActivationChoice.KEEP,) * 4)
    found = iteration_time(THREE, workload, StatePlacement(base="host", optimizer="disk", slots=2), plan)
    assert found.moved_bytes == {"read": 48, "written": 48, "to_device": 2 * 16 + 8, "to_host": 8}
    on_host = iteration_time(THREE, workload, StatePlacement(base="host", optimizer="host", slots=2), plan)
    assert on_host.moved_bytes["written"] == 0


def test_micro_batches_follow_one_another() -> None:
    one, three = (timed(THREE, STREAMED, *["disk"] * 4, micro_batches=count) for count in (1, 3))
    assert three.seconds == pytest.approx(3 * one.seconds)
    assert three.tokens_per_second == pytest.approx(one.tokens_per_second)


@pytest.mark.parametrize("slots", [2, 4])
@pytest.mark.parametrize("read", [0.5, 1.0, 2.0, 5.0])
def test_a_played_stream_takes_as_long(slots: int, read: float) -> None:
    """The real stream, with a played disk: 12 blocks, forward 1 s, backward 2 s each."""
    workload = OffloadWorkload([Block(flops=1, weight_bytes=read)] * 12, 1, backward_ratio=2)
    machine = Machine(1.0, read=1.0, write=1.0, one_memory=True)
    plan = ActivationPlan((ActivationChoice.KEEP,) * 12)
    found = iteration_time(machine, workload, StatePlacement(slots=slots), plan)
    assert found.seconds == pytest.approx(played_stream(12, slots, read, 1.0, 2.0))


@pytest.mark.parametrize("backward", [0.3, 1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("update", [0.1, 1.0, 2.0])
def test_a_played_update_takes_as_long(backward: float, update: float) -> None:
    """An active update over 16 blocks, states read and written in 1 s each: within 3%."""
    block = Block(flops=backward, trainable=1, state_bytes=1)
    workload = OffloadWorkload([block] * 16, 1, method="full", backward_ratio=1)
    machine = Machine(1.0, read=1.0, write=1.0, one_memory=True, update_seconds=update)
    plan = ActivationPlan((ActivationChoice.KEEP,) * 16)
    found = iteration_time(machine, workload, StatePlacement(base="device", optimizer="disk"), plan)
    played = played_update(16, backward, 1.0, update, 1.0)
    assert found.backward.seconds + found.optimizer.seconds == pytest.approx(played, rel=0.03)


def test_tokens_that_hide_the_streaming() -> None:
    assert tokens_to_hide(2, 165e12, 25e9) == pytest.approx(6600)
    assert tokens_to_hide(2, 165e12, 7e9) == pytest.approx(24_000, rel=0.02)
    assert tokens_to_hide(0.5, 165e12, 25e9) == pytest.approx(6600 / 4)
    assert tokens_to_hide(2, 165e12, 25e9, active=0.1) == pytest.approx(66_000)
    assert [adapters_to_hide(6600, each) for each in (64, 6600, 10_000)] == [104, 1, 1]
    with pytest.raises(ValueError, match="bandwidth: expected a number above 0, got 0"):
        tokens_to_hide(2, 165e12, 0)


def test_tokens_of_a_model_are_those_at_which_a_pass_is_bound_by_computation() -> None:
    parameters, slots, count = 1e8, 3, 32
    machine = Machine(165e12, read=7e9, write=7e9, to_device=25e9, to_host=25e9)

    def step(tokens: int) -> OffloadWorkload:
        return OffloadWorkload(
            [Block(flops=2 * parameters * tokens, weight_bytes=2 * parameters)] * count, tokens
        )

    hidden = tokens_of_passes(machine, step(100), StatePlacement(slots=slots))
    rule = tokens_to_hide(2, 165e12, 7e9)
    assert hidden.forward == pytest.approx(rule * (count - slots) / count)
    full = tokens_of_passes(machine, replace(step(100), method="full"), StatePlacement(slots=slots))
    assert (full.forward, full.backward) == (hidden.forward, pytest.approx(hidden.backward / 2))
    plan = ActivationPlan((ActivationChoice.KEEP,) * count)
    bounds = []
    for factor in (0.9, 1.2):
        found = iteration_time(machine, step(int(factor * rule)), StatePlacement(slots=slots), plan)
        bounds.append((found.forward.bound, found.backward.bound))
    assert bounds == [("read", "read"), ("compute", "compute")]
    assert tokens_of_passes(machine, step(1), RESIDENT) == Hidden(0, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Machine(0.0), "flops: expected a number above 0, got 0.0"),
        (lambda: Machine(1.0, read=-1.0), "read: expected a number of at least 0, got -1.0"),
        (lambda: Machine(math.nan), "flops: expected a number of at least 0, got nan"),
        (lambda: Machine(1.0, cores=2, compute_cores=3), "compute_cores: expected at most cores=2, got 3"),
        (lambda: Budget(device=-1), "device: expected a number of at least 0, got -1"),
        (lambda: OffloadWorkload([], 1), "blocks: expected at least 1, got none"),
        (lambda: OffloadWorkload([BLOCK], 0), "tokens: expected at least 1, got 0"),
        (lambda: OffloadWorkload([BLOCK], 1, method="qlora"), "method: expected lora or full, got 'qlora'"),
        (lambda: StatePlacement(base="tape"), "base: expected one of device, host, disk, got 'tape'"),
        (
            lambda: StatePlacement(update="late"),
            "update: expected one of active, naive, after, serial, got 'late'",
        ),
        (lambda: StatePlacement(slots=1), "slots: expected at least 2, got 1"),
        (lambda: ActivationPlan((), ActivationChoice.RECOMPUTE), "hidden: expected keep, host or disk"),
        (lambda: timed(THREE, RESIDENT, hidden="keep"), "blocks: expected at least 1"),
    ],
)
def test_what_is_no_plan_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_plan_of_another_model_is_refused() -> None:
    plan = ActivationPlan((ActivationChoice.KEEP,) * 3)
    with pytest.raises(ValueError, match="inner: expected 2 choices, got 3"):
        iteration_time(THREE, OffloadWorkload([BLOCK] * 2, 1), RESIDENT, plan)
