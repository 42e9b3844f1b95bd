"""Plans of other out-of-core systems: what each may do, and that none is predicted to be faster than ours."""

from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
from mlora.offload.planner.activation_plan import ActivationChoice, ActivationPlan
from mlora.offload.planner.iteration_time import iteration_time
from mlora.offload.planner.machine import Budget, Machine
from mlora.offload.planner.memory_need import memory_need
from mlora.offload.planner.workload import Block, OffloadWorkload, StatePlacement

MACHINE = Machine(1.0, read=1.0, write=1.0, to_device=4.0, to_host=4.0)
BLOCKS = [Block(flops=10.0 + index % 3, inner_bytes=12.0 + index % 4, hidden_bytes=1.0) for index in range(8)]
WORK, PLACE = OffloadWorkload(BLOCKS, 1), StatePlacement(base="device")
BUDGET = Budget(device=80.0, host=60.0)
RIVALS = ("zero", "capuchin", "g10", "checkmate")


@pytest.fixture
def rivals(bench_folder: Path) -> ModuleType:
    return import_module("offload.rivals")


@pytest.fixture
def plans(bench_folder: Path) -> ModuleType:
    return import_module("offload.plans")


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("name", RIVALS)
def test_no_rival_is_faster(rivals: ModuleType, name: str, one: bool) -> None:
    for device, link in ((60.0, 2.0), (90.0, 0.5), (90.0, 50.0)):
        machine = replace(
            MACHINE, one_memory=one, read=link / 2, write=link / 2, to_device=link, to_host=link
        )
        budget = Budget(device, 60.0)
        parts = machine, WORK, PLACE, budget
        plan = getattr(rivals, name)(*parts)
        ours = iteration_time(machine, WORK, PLACE, rivals.algorithm_1(*parts)).seconds
        if memory_need(machine, WORK, PLACE, plan).fits(budget):
            assert ours <= 1.001 * iteration_time(machine, WORK, PLACE, plan).seconds


def test_zero_recomputes_everything(rivals: ModuleType) -> None:
    plan = rivals.zero(MACHINE, WORK, PLACE, BUDGET)
    assert plan == ActivationPlan((ActivationChoice.RECOMPUTE,) * 8, ActivationChoice.HOST)


def test_capuchin_swaps_what_computation_hides_and_recomputes_the_rest(rivals: ModuleType) -> None:
    wide = rivals.capuchin(MACHINE, WORK, PLACE, Budget(80.0, 1e3))
    assert set(wide.inner) == {ActivationChoice.KEEP, ActivationChoice.HOST}
    assert wide.inner[0] is ActivationChoice.HOST, "the first block is free for longest"
    narrow = rivals.capuchin(replace(MACHINE, to_device=0.4, to_host=0.4), WORK, PLACE, Budget(80.0, 1e3))
    assert set(narrow.inner) == {ActivationChoice.KEEP, ActivationChoice.HOST, ActivationChoice.RECOMPUTE}
    slow = rivals.capuchin(replace(MACHINE, to_device=0.01, to_host=0.01), WORK, PLACE, BUDGET)
    assert set(slow.inner) == {ActivationChoice.KEEP, ActivationChoice.RECOMPUTE}


def test_g10_recomputes_nothing(rivals: ModuleType) -> None:
    plan = rivals.g10(MACHINE, WORK, PLACE, BUDGET)
    assert ActivationChoice.RECOMPUTE not in plan.inner
    assert plan.inner[0] is ActivationChoice.DISK
    slow = rivals.g10(replace(MACHINE, read=0.3, write=0.3), WORK, PLACE, BUDGET)
    assert slow.inner.count(ActivationChoice.HOST) >= 2, "the disk's bandwidth is used up"


def test_checkmate_recomputes_as_little_as_any_plan_that_fits(rivals: ModuleType) -> None:
    plan = rivals.checkmate(MACHINE, WORK, PLACE, BUDGET)
    found = iteration_time(MACHINE, WORK, PLACE, plan).compute_seconds
    best = min(
        iteration_time(MACHINE, WORK, PLACE, other).compute_seconds
        for inner in product((ActivationChoice.KEEP, ActivationChoice.RECOMPUTE), repeat=8)
        if memory_need(MACHINE, WORK, PLACE, other := ActivationPlan(inner)).fits(BUDGET)
    )
    assert found == pytest.approx(best)
    assert rivals.checkmate(MACHINE, WORK, PLACE, Budget()).inner == (ActivationChoice.KEEP,) * 8
    assert (
        rivals.checkmate(MACHINE, WORK, PLACE, Budget(device=1.0)).inner == (ActivationChoice.RECOMPUTE,) * 8
    )


def test_the_command_prints_a_row_for_each_step(
    plans: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plans.main(["--machines", "GPU, one NVMe"]) == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("predicted, not measured")
    assert head.split()[-6:] == ["Algorithm", "1", "ZeRO", "Capuchin", "G10", "Checkmate"]
    assert len(rows) == len(plans.STEPS)
    for row in rows:
        seconds = [
            float(cell) for cell in row.replace("no room", "inf s").split() if cell.replace(".", "").isdigit()
        ]
        ours, *others = seconds[-5:]
        assert all(ours <= 1.001 * other for other in others)
