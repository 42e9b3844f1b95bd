"""What the scheduler takes of a step, with 64 tasks under a limit on memory: timed inside of real runs.

Hidden 256, four blocks, 64 adapters of three kinds, each with one sequence of 16 to 64 tokens in a step:
about 2,500 tokens. What the scheduler does depends on the number of tasks and hardly on the model; with a
larger one, or longer sequences, a step takes longer and the share is smaller.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mlora.cluster.allocators import give_back_freed_memory, keep_freed_memory
from shared import machine

from scheduler.run import Iteration, Shape, TurnRun, Work, make_config, overhead, ratios, room_for

SHAPE = Shape(256, blocks=4, vocabulary=4096)
WORK = Work(tasks=64, batch=1, shortest=16, longest=64, steps=400)
PLENTY = 1 << 40
"""A limit under which all fit."""
TIGHT = 0.6
"""Share of the tasks that fit under the other limit at first."""
LEARNING = 12
"""Iterations before turns are counted: the first ten are measured."""
TURNS, ITERATIONS = 8, 5
MUST = 0.01


def sizes(quick: bool) -> tuple[Shape, Work, int, int]:
    """Model, tasks, turns, and iterations of a turn."""
    if quick:
        return Shape(64, 2, 128), Work(2, 1, 16, 64, steps=60, samples=8), 2, 3
    return SHAPE, WORK, TURNS, ITERATIONS


def run(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Time the scheduler where all tasks fit, and where some wait."""
    shape, work, turns, iterations = sizes(quick)
    base = folder / "base"
    shape.make().save_pretrained(base)
    together = _together(folder, base, work, turns, iterations)
    return {
        "shape": vars(shape),
        "work": vars(work),
        "learning": LEARNING,
        "turns": turns,
        "iterations_of_a_turn": iterations,
        "all_fit": together,
        "some_wait": _waiting(folder, base, work, turns, iterations, together),
        "must": MUST,
    }


def _together(folder: Path, base: Path, work: Work, turns: int, iterations: int) -> dict[str, Any]:
    """Runs of the same tasks that take turns: without a limit, with one, and with every step measured."""
    kinds = {
        "no limit": (None, False, keep_freed_memory),
        "limit": (PLENTY, False, keep_freed_memory),
        "limit, its malloc": (PLENTY, False, give_back_freed_memory),
        "limit, all measured": (PLENTY, True, keep_freed_memory),
    }
    found: dict[str, list[list[Iteration]]] = {name: [] for name in kinds}
    with ExitStack() as stack, machine.OtherProcesses() as others:
        runs = {}
        for number, (name, (limit, measure_all, _)) in enumerate(kinds.items()):
            config = make_config(base, folder / "together" / str(number), work, limit=limit)
            runs[name] = stack.enter_context(TurnRun(config, measure_all=measure_all))
        for turn in range(-1, turns):
            names = list(kinds) if turn % 2 else list(kinds)[::-1]
            for name in names:
                kinds[name][2]()
                before = len(runs[name].stopwatch.iterations)
                runs[name].turn(LEARNING if turn < 0 else iterations, decide=turn >= 0)
                found[name].append(runs[name].stopwatch.iterations[before:])
        losses = [run.losses() for run in runs.values()]
        start_seconds = runs["limit"].start_seconds
    assert all(each == losses[0] for each in losses), "a limit under which all fit changed what was trained"
    counted = {name: each[1:] for name, each in found.items()}
    plain = ratios(counted, "limit, all measured", "limit")
    flat = [one for turn in counted["limit"] for one in turn]
    return {
        **overhead(flat, plain["median"] - 1),
        "start_seconds": start_seconds,
        "learning_steps_measured": [one.measured for one in found["limit"][0] if one.tasks],
        "learning_ratio": ratios({n: e[:1] for n, e in found.items()}, "limit", "no limit"),
        "over_no_limit": {name: ratios(counted, name, "no limit") for name in kinds if name != "no limit"},
        "measured_over_not": plain,
        "other_processes_share": others.share,
    }


def _waiting(
    folder: Path, base: Path, work: Work, turns: int, iterations: int, together: dict[str, Any]
) -> dict[str, Any]:
    """A run under a limit that some tasks wait for, alone."""
    give_back_freed_memory()
    config = make_config(base, folder / "waiting" / "run", work, limit=PLENTY)
    found: list[Iteration] = []
    admitted = []
    with TurnRun(config, room_for(TIGHT)) as run, machine.OtherProcesses() as others:
        run.turn(LEARNING, decide=False)
        for _ in range(turns):
            before = len(run.stopwatch.iterations)
            run.turn(iterations)
            found += run.stopwatch.iterations[before:]
            admitted.append(run.admitted)
    return {
        **overhead(found, together["measuring_of_a_measured_step"]),
        "start_seconds": run.start_seconds,
        "admitted": admitted,
        "other_processes_share": others.share,
    }
