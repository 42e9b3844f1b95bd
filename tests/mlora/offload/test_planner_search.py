"""The choice of what is kept, recomputed and swapped: its cases, its memory, and an exhaustive search."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from exhaustive_plans import shortest
from mlora.offload.planner.activation_plan import ActivationChoice, ActivationPlan
from mlora.offload.planner.candidates import Problem
from mlora.offload.planner.iteration_time import iteration_time
from mlora.offload.planner.machine import Budget, Machine
from mlora.offload.planner.memory_need import memory_need
from mlora.offload.planner.search import Case, plan_activations
from mlora.offload.planner.workload import Block, OffloadWorkload, StatePlacement

BLOCK = Block(flops=10.0, weight_bytes=4.0, inner_bytes=20.0, hidden_bytes=2.0)
WORK = OffloadWorkload([BLOCK] * 12, 1)
LITTLE = Budget(device=90.0, host=1000.0)
PLACE = StatePlacement(base="host", slots=2)
RANDOM = ("one memory, lora", "one memory, full", "two memories, lora", "two memories, full")
DIFFERENT = 0.03
"""How much longer a plan may take than the best one where blocks differ; in 2,400 cases 0.026 was met."""


def machine(disk: float, link: float) -> Machine:
    return Machine(flops=1.0, read=disk, write=disk, to_device=link, to_host=link)


@pytest.mark.parametrize(
    ("link", "case", "recomputed"),
    [(0.3, Case.TRANSFER, 11), (1.1, Case.INFLECTION, None), (100.0, Case.COMPUTE, 0)],
    ids=["transfer-bound", "inflection", "compute-bound"],
)
def test_the_three_cases_of_the_paper(link: float, case: Case, recomputed: int | None) -> None:
    found = plan_activations(machine(1e-3, link), WORK, PLACE, LITTLE)
    assert found.case is case
    count = found.plan.inner.count(ActivationChoice.RECOMPUTE)
    assert 0 < count < 11 if recomputed is None else count == recomputed
    assert found.plan.inner.count(ActivationChoice.DISK) == 0, "the disk is slower than anything"
    assert found.need.fits(LITTLE)


def test_the_inflection_moves_with_the_bandwidth() -> None:
    """A faster link swaps more and takes no longer."""
    links = [0.3, 0.6, 0.8, 1.0, 1.2, 1.6, 2.4]
    found = [plan_activations(machine(1e-3, link), WORK, PLACE, LITTLE) for link in links]
    for before, after in pairwise(found):
        assert before.plan.inner.count(ActivationChoice.HOST) <= after.plan.inner.count(ActivationChoice.HOST)
        assert before.time.seconds >= after.time.seconds
    assert len({each.plan for each in found}) >= 5


def test_what_fits_is_kept_and_the_last_blocks_stay() -> None:
    fast = machine(1.0, 2.0)
    everything = plan_activations(fast, WORK, PLACE)
    assert everything.plan == ActivationPlan((ActivationChoice.KEEP,) * 12)
    assert everything.case is Case.FITS
    half = plan_activations(fast, WORK, PLACE, Budget(device=200.0, host=1000.0))
    kept = [index for index, choice in enumerate(half.plan.inner) if choice is ActivationChoice.KEEP]
    assert kept == list(range(12 - len(kept), 12))
    assert 5 <= len(kept) < 12
    least = plan_activations(fast, WORK, PLACE, Budget(device=52.0, host=1000.0))
    assert ActivationChoice.KEEP not in least.plan.inner


def test_the_host_before_the_disk_and_no_more_than_there_is_room() -> None:
    place = StatePlacement(base="device")
    work = replace(WORK, blocks=[replace(BLOCK, weight_bytes=0.0)] * 12)
    found = plan_activations(machine(1e3, 1e3), work, place, Budget(device=60.0, host=150.0))
    assert found.need.fits(Budget(device=60.0, host=150.0))
    assert found.plan.inner.count(ActivationChoice.HOST) >= 5
    assert found.plan.inner.count(ActivationChoice.DISK) >= 5
    slow = Budget(device=90.0, host=100.0)
    found = plan_activations(Machine(flops=1.0, to_device=1e3, to_host=1e3), work, place, slow)
    assert found.case is Case.MEMORY
    assert found.plan.inner.count(ActivationChoice.HOST) == 5


def test_memory_of_a_plan_by_hand() -> None:
    """Device: 2 slots, 3 blocks kept, one at work, one on its way; host: the weights and two blocks."""
    inner = (ActivationChoice.KEEP,) * 3 + (ActivationChoice.HOST,) * 2 + (ActivationChoice.RECOMPUTE,) * 7
    need = memory_need(machine(1, 1), WORK, PLACE, ActivationPlan(inner, ActivationChoice.HOST))
    assert (need.device, need.host) == (2 * 4 + 3 * 20 + 2 * 22, 12 * 4 + 2 * 20 + 12 * 2)
    disk = memory_need(
        machine(1, 1), WORK, StatePlacement(slots=2), ActivationPlan(inner, ActivationChoice.DISK)
    )
    assert (disk.device, disk.host) == (need.device, 2 * 4 + 2 * 20 + 22)
    more = replace(WORK, in_flight=3, resident_bytes=7.0)
    third = memory_need(machine(1, 1), more, PLACE, ActivationPlan(inner, ActivationChoice.HOST))
    assert third.device - need.device == 7 + 2 * 3 * 20
    one = replace(machine(1, 1), one_memory=True)
    kept = memory_need(one, WORK, StatePlacement(slots=2), ActivationPlan((ActivationChoice.KEEP,) * 12))
    assert (kept.device, kept.host) == (2 * 4 + 12 * 22 + 22, 0)
    full = OffloadWorkload([replace(BLOCK, state_bytes=24.0, gradient_bytes=4.0)] * 12, 1, method="full")
    states = memory_need(
        one, full, StatePlacement(slots=2, optimizer="disk"), ActivationPlan((ActivationChoice.KEEP,) * 12)
    )
    assert states.device - kept.device == 3 * 24 + 12 * 4
    in_host = memory_need(
        machine(1, 1), full, StatePlacement(slots=2, optimizer="host"), ActivationPlan(inner)
    )
    assert in_host.host == 2 * 4 + 12 * 28 + 2 * 20


def test_too_little_memory_says_how_much_would_do() -> None:
    large = replace(BLOCK, weight_bytes=4e6, inner_bytes=20e6, hidden_bytes=0.0)
    message = (
        r"device memory needs at least 27 MiB, the budget is 19 MiB; use fewer tokens or slots, or raise"
    )
    with pytest.raises(ValueError, match=message):
        plan_activations(machine(1, 1), OffloadWorkload([large] * 6, 1), PLACE, Budget(device=2e7))
    with pytest.raises(ValueError, match="host memory needs at least"):
        plan_activations(machine(1, 1), WORK, PLACE, Budget(device=1e3, host=20.0))


def test_of_equal_blocks_the_first_ones_are_swapped_and_the_last_ones_kept() -> None:
    found = plan_activations(machine(1e-3, 1.1), WORK, PLACE, Budget(device=120.0, host=1000.0))
    assert set(found.plan.inner) == {ActivationChoice.HOST, ActivationChoice.RECOMPUTE, ActivationChoice.KEEP}
    order = [
        (ActivationChoice.HOST, ActivationChoice.RECOMPUTE, ActivationChoice.KEEP).index(choice)
        for choice in found.plan.inner
    ]
    assert order == sorted(order)


def test_equal_inputs_give_equal_plans() -> None:
    found = [plan_activations(machine(0.5, 1.1), WORK, PLACE, LITTLE) for _ in range(2)]
    assert found[0] == found[1]


def problem(rng: random.Random, kind: str, count: int, *, equal: bool) -> Problem:
    """A machine and a model whose computation and transfers take about as long as each other."""

    def between(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    full, one = kind.endswith("full"), kind.startswith("one")
    tokens, flops = int(between(64, 16384)), between(1e10, 1e12)
    parameters, inner = between(1e6, 1e8), between(1e3, 3e5) * tokens
    blocks = []
    for _ in range(count):
        size, saved = (1, 1) if equal else (between(0.5, 2), between(0.5, 2))
        block = Block(2 * parameters * size * tokens, 2 * parameters * size, inner * saved, tokens * 1e3)
        own = {"trainable": size * parameters, "state_bytes": 12 * size * parameters}
        own["gradient_bytes"] = block.weight_bytes
        blocks.append(replace(block, **own) if full else block)
    work = OffloadWorkload(blocks, tokens, method="full" if full else "lora")
    seconds = sum(block.flops for block in blocks) / flops
    disk = sum(block.inner_bytes + block.weight_bytes for block in blocks) / seconds * between(0.2, 5)
    cores = rng.choice([1, 2, 8])
    costs = [0.2 / disk * rng.random() for _ in range(3)]
    one_machine = Machine(
        flops,
        disk,
        disk * between(0.3, 1.5),
        *(disk * between(0.5, 20) for _ in range(2)),
        one_memory=one,
        cores=cores,
        compute_cores=rng.choice([0, 1, cores]),
        read_seconds=costs[0],
        write_seconds=costs[1],
        copy_seconds=costs[2],
        update_seconds=between(1e-10, 1e-8) if full else 0.0,
    )
    place = StatePlacement(optimizer="disk" if full else "device")
    least = ActivationPlan((ActivationChoice.RECOMPUTE,) * count, ActivationChoice.DISK)
    need = memory_need(one_machine, work, place, least)
    total = sum(block.inner_bytes for block in blocks)
    largest = max(block.inner_bytes for block in blocks)
    budget = Budget(need.device + 2 * largest + rng.random() * total, need.host + rng.random() * total)
    return Problem(one_machine, work, place, budget)


def gap(found: Problem) -> float:
    """How much longer the chosen plan takes than the best of all."""
    parts = (found.machine, found.workload, found.placement, found.budget)
    return plan_activations(*parts).time.seconds / shortest(*parts) - 1


@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize("seed", range(4))
def test_no_plan_is_faster_where_blocks_are_equal(kind: str, seed: int) -> None:
    count = 10 if kind.startswith("one") else 7
    assert gap(problem(random.Random(seed), kind, count, equal=True)) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_much_faster_where_all_blocks_differ(kind: str, seed: int) -> None:
    count = 10 if kind.startswith("one") else 7
    assert -1e-9 < gap(problem(random.Random(seed), kind, count, equal=False)) < DIFFERENT


def test_twelve_blocks_against_all_531441_plans() -> None:
    assert gap(problem(random.Random(0), RANDOM[0], 12, equal=True)) == pytest.approx(0, abs=1e-9)
    assert -1e-9 < gap(problem(random.Random(1), RANDOM[0], 12, equal=False)) < DIFFERENT


@pytest.mark.parametrize("kind", RANDOM[:2])
@pytest.mark.parametrize("seed", range(10))
def test_the_time_is_convex_in_what_is_swapped(kind: str, seed: int) -> None:
    found = problem(random.Random(seed), kind, 12, equal=False)
    walk = list(found.walk(ActivationChoice.KEEP, [ActivationChoice.DISK]))
    points = [(each.amounts.swapped, each.seconds) for each in walk if math.isfinite(each.seconds)]
    slopes = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(points)]
    scale = 1e-9 * points[0][1] / found.workload.blocks[0].inner_bytes
    assert all(before <= after + scale for before, after in pairwise(slopes))


def test_a_plan_takes_what_its_blocks_take() -> None:
    found = plan_activations(machine(0.5, 1.1), WORK, PLACE, LITTLE)
    again = iteration_time(machine(0.5, 1.1), WORK, PLACE, found.plan)
    assert again.seconds == pytest.approx(found.time.seconds)
    assert memory_need(machine(0.5, 1.1), WORK, PLACE, found.plan).device == pytest.approx(found.need.device)
