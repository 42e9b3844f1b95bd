"""How well the memory of unseen micro-batches is predicted, after so many that were measured.

As in the mLoRA paper, Fig. 8a: mean absolute error in percent against the number of data points. Three tasks
of different adapters share each micro-batch; one to three sequences each, of random lengths, every fourth
micro-batch of equally long ones. What is predicted is what a micro-batch takes beyond weights, gradients and
moments, which is a smaller number than the whole memory, so that errors are larger.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mlora.config.run_config import RunConfig
from mlora.data.dataset import Sample
from mlora.engine.dry_run import dry_stages
from mlora.engine.engine import Engine
from mlora.engine.stage_group import StageOptions
from mlora.memory.adapter_memory import AdapterMemory
from mlora.memory.estimate import MemoryEstimate
from mlora.memory.model import PeakModel
from mlora.model.base_info import BaseInfo
from mlora.planning.task_memory import know_task
from mlora.scheduler import MemoryModel
from mlora.tasks.task import Task, TaskBuilder

from scheduler.run import Shape, Work, make_config, random_lengths

SHAPES = (Shape(128), Shape(256), Shape(512))
WINDOWED = Shape(256, window=48)
"""Beside the others, and judged by nobody."""
WORK = Work(tasks=3, batch=3, shortest=16, longest=256, steps=40)
POINTS, UNSEEN, ORDERS = 20, 24, 8
JUDGED_AT = 10
MUST_MAPE, MUST_SEED = 0.25, 2.0
"""Percent: after `JUDGED_AT` points, in the worst of the orders; of seeds alone, for the worst shape."""

Sample_ = tuple[dict[str, list[int]], tuple[int, ...]]
"""A micro-batch's lengths by task, and the phases that were measured."""
Predictor = tuple[Callable[[Sample_], None], Callable[[Mapping[str, Sequence[int]]], float]]
"""What takes in a measurement, and what predicts."""


def run(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Measure and predict, of each model with and without gradient checkpointing."""
    shapes = (Shape(64, 2, 300), Shape(64, 2, 300, window=24)) if quick else (*SHAPES, WINDOWED)
    work = Work(3, 2, 8, 60, steps=20, samples=16) if quick else WORK
    points, unseen, orders = (4, 4, 2) if quick else (POINTS, UNSEEN, ORDERS)
    curves = []
    for shape in shapes:
        base = folder / shape.name.replace(" ", "-")
        shape.make().save_pretrained(base)
        for checkpointing in (False, True):
            out = folder / f"{base.name}-{checkpointing}" / "run"
            config = make_config(base, out, work, limit=None, checkpointing=checkpointing)
            found = one_model(config, work, points, unseen, orders)
            curves.append({**asdict(shape), "name": shape.name, "checkpointing": checkpointing, **found})
    return {
        "work": vars(work),
        "points": points,
        "unseen": unseen,
        "orders": orders,
        "judged_at": min(JUDGED_AT, points),
        "must_mape": MUST_MAPE,
        "must_seed": MUST_SEED,
        "curves": curves,
    }


def one_model(config: RunConfig, work: Work, points: int, unseen: int, orders: int) -> dict[str, Any]:
    """The curves of one model in one mode.

    Args:
        config: of a run of some tasks.
        work: what they train.
        points: micro-batches to learn from.
        unseen: others, on which predictions are judged.
        orders: in which the points come; errors are means over them.

    Returns:
        `mape` and `worst_mape` by the number of points, for each way to predict; of seeds alone the
        `seed_worst` shape's error in percent; errors of the `equal` unseen shapes apart.
    """
    tasks = tasks_of(config)
    names = [task.name for task in tasks]
    shapes = random_lengths(points + unseen, work, seed=1, names=names)
    samples = measured(config, tasks, shapes)
    learned, tests = samples[:points], samples[points:]
    options = StageOptions(torch.device("cpu"), torch.float32, config.gradient_checkpointing)
    memory = AdapterMemory(dry_stages(config.base_model, options))
    for task in tasks:
        know_task(memory, task)
    estimate = memory.estimate
    estimate.predict(shapes[0], names)  # dry runs
    seeded, knees = estimate.state(), knees_of(estimate.state())
    ways: dict[str, Callable[[], Predictor]] = {
        "seeded": partial(by_estimate, estimate, seeded, names),
        "unseeded": partial(by_phases, knees),
        "paper": by_peak,
    }
    first = by_estimate(estimate, seeded, names)[1]
    return {
        "megabytes": [round(max(phases) / 1e6, 3) for _, phases in samples],
        "seed_worst": max(errors(first, tests)),
        "ways": {name: curves(make, learned, tests, orders) for name, make in ways.items()},
        "seeded_equal": curves(ways["seeded"], learned, [one for one in tests if is_equal(one)], orders),
    }


def tasks_of(config: RunConfig) -> list[Task]:
    """A config's tasks, with their data."""
    builder = TaskBuilder(config, BaseInfo(config.base_model, config.base_folder))
    return [builder.build(adapter) for adapter in config.adapters]


def measured(
    config: RunConfig, tasks: Sequence[Task], shapes: Sequence[dict[str, list[int]]]
) -> list[Sample_]:
    """Train micro-batches of given lengths, and measure each as a run does."""
    found = []
    with Engine(config.base_model, gradient_checkpointing=config.gradient_checkpointing) as engine:
        for task in tasks:
            engine.create_adapter(task.name, task.lora, task.optim)
        for shape in [shapes[0], *shapes]:  # the first one makes what is made once
            batch = {name: [Sample((5,) * n, (5,) * n) for n in lengths] for name, lengths in shape.items()}
            future = engine.start(batch, ends=list(batch), measure=True)
            engine.finish(future)
            for name in batch:
                engine.optim_step(name)
            found.append((shape, future.measured[0].phases[0]))
    return found[1:]


def curves(
    make: Callable[[], Predictor], learned: Sequence[Sample_], tests: Sequence[Sample_], orders: int
) -> dict[str, list[float | None]]:
    """Errors on unseen micro-batches after 0, 1, 2 and more points.

    Args:
        make: a new predictor, which may be unable to predict from no point.
        learned: the points.
        tests: the unseen ones.
        orders: random ones of the points, the same for each predictor.

    Returns:
        `mape`, the mean over the orders, and `worst_mape`, of the worst one, in percent; None where nothing
        can be predicted.
    """
    draw, found = random.Random(0), []
    for _ in range(orders):
        observe, predict = make()
        row = [mape(predict, tests)]
        for one in draw.sample(list(learned), len(learned)):
            observe(one)
            row.append(mape(predict, tests))
        found.append(row)
    columns = [[value for value in column if value is not None] for column in zip(*found, strict=True)]
    return {
        "mape": [sum(column) / len(column) if column else None for column in columns],
        "worst_mape": [max(column, default=None) for column in columns],
    }


def errors(predict: Callable[[Mapping[str, Sequence[int]]], float], tests: Sequence[Sample_]) -> list[float]:
    """Absolute errors of predictions, in percent of what was measured."""
    return [100 * abs(predict(lengths) / max(phases) - 1) for lengths, phases in tests]


def mape(predict: Callable[[Mapping[str, Sequence[int]]], float], tests: Sequence[Sample_]) -> float | None:
    """Their mean; None where there is nothing to predict from, or nothing to predict."""
    try:
        found = errors(predict, tests)
    except RuntimeError:
        return None
    return sum(found) / len(found) if found else None


def is_equal(sample: Sample_) -> bool:
    """Whether all sequences of a micro-batch are equally long."""
    return len({length for lengths in sample[0].values() for length in lengths}) == 1


def together(lengths: Mapping[str, Sequence[int]]) -> list[int]:
    """All sequences of a micro-batch."""
    return [length for own in lengths.values() for length in own]


def by_estimate(estimate: MemoryEstimate, seeded: Mapping[str, Any], names: Sequence[str]) -> Predictor:
    """As a run predicts: the library's estimate, seeded by dry runs; each point is adopted at once."""
    estimate.load_state(seeded)

    def observe(sample: Sample_) -> None:
        estimate.observe(together(sample[0]), names, [sample[1]])
        estimate.adopt()

    return observe, lambda lengths: estimate.predict(lengths, names)[0]


def by_phases(knees: Sequence[int | None]) -> Predictor:
    """The same fits of the phases, from measurements alone."""
    model = PeakModel(knees)

    def predict(lengths: Mapping[str, Sequence[int]]) -> float:
        if not model.known:
            raise RuntimeError("nothing has been measured")
        return model.predict(together(lengths))

    return lambda sample: model.observe(together(sample[0]), sample[1]), predict


def by_peak() -> Predictor:
    """As the paper does: one fit of the whole peak, from measurements alone."""
    model = MemoryModel()
    return (
        lambda sample: model.observe(together(sample[0]), max(sample[1])),
        lambda lengths: model.predict(together(lengths)),
    )


def knees_of(state: Mapping[str, Any]) -> list[int | None]:
    """The knees of the phases in an estimate's state with one mixture on one stage."""
    (mixture,) = state["adopted"].values()
    return [model["knee"] for model in mixture["places"][0]["models"]]
