"""Runs of random tasks under a memory limit, simulated: their memory follows another law than the fit."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlora.memory.adapter_memory import seed_shapes
from mlora.memory.estimate import MemoryEstimate
from mlora.memory.room import Room
from mlora.scheduler import ORDERS, PLACEMENTS, MemoryNeed, admit, next_batch

MIB = 2**20
BLOCK = 2 * MIB  # what the allocator hands out multiples of
RESERVE = BLOCK  # what rounding takes at most


@dataclass
class SimulatedTask:
    """A task, with the lengths of all of its micro-batches."""

    name: str
    priority: int
    arrives: int
    states: int
    kind: float
    batches: list[list[int]]
    taken: int = 0

    def need(self, arrival: int) -> MemoryNeed:
        left = self.batches[self.taken :]
        middle = sorted(left, key=sum)[len(left) // 2]
        largest = max(left, key=sum)
        rows = float(sum(map(sum, left)))
        return MemoryNeed(
            self.name, self.priority, arrival, rows, (self.states,), tuple(middle), tuple(largest)
        )


@dataclass
class Truth:
    """What micro-batches really need: the larger of two phases; a power of the rows, noise, blocks, steps."""

    dice: random.Random
    per_row: float = field(init=False)

    def __post_init__(self) -> None:
        draw = self.dice.uniform
        self.per_row, self.base = draw(20e3, 400e3), draw(0, 60e6)
        self.power, self.square, self.mask = draw(0.995, 1.005), draw(0, 20.0), draw(0, 40.0)
        self.uneven = draw(0, 0.1) * self.per_row
        self.loss_rows, self.loss = draw(32, 128), draw(0, 60e3)  # a CPU's are 64
        self.step_at, self.step = draw(1000, 20000), draw(0, 0.004)
        self.noise, self.blind = draw(0.0, 0.004), draw(-0.018, 0.018)

    def clean(self, kind: float, lengths: Sequence[int]) -> tuple[float, float]:
        """Both phases without noise, blocks and steps."""
        rows = sum(lengths)
        kept = kind * self.per_row * rows**self.power + self.square * sum(n * n for n in lengths)
        kept += self.mask * max(lengths) ** 2 + (self.uneven * rows if min(lengths) < max(lengths) else 0.0)
        head = self.loss * min(rows, self.loss_rows)
        return self.base + kept, 0.9 * kept + head

    def of(self, kind: float, lengths: Sequence[int]) -> list[int]:
        rows = sum(lengths)
        step = 1 + (self.step if rows > self.step_at else 0.0)
        noisy = step * (1 + self.dice.uniform(-self.noise, self.noise))
        return [math.ceil(phase * noisy / BLOCK) * BLOCK for phase in self.clean(kind, lengths)]

    def dry(self, kind: float, lengths: Sequence[int]) -> list[int]:
        """Within 2%, as dry runs have to be: what they do not see is about the same share everywhere."""
        blind = 1 + self.blind + self.dice.uniform(-0.002, 0.002)
        return [int(phase * blind) for phase in self.clean(kind, lengths)]


@dataclass
class Outcome:
    """What came of a simulated run: the limit, the most that was used, how many tasks ended of how many, and
    at each iteration in which tasks waited what share of the limit was used; and the most that a micro-batch
    that took half of its budget or more needed beyond its bound, rounding apart, as a share of that: limits
    are seldom so near that an error of a bound shows."""

    limit: int
    most: int
    ended: int
    tasks: int
    used: list[float]
    past: float = -1.0


def simulate(seed: int, *, many: bool = False) -> Outcome:
    """Run a random set of tasks to its end; `many` of them are all small beside the limit, and wait."""
    dice = random.Random(seed)
    truth = Truth(dice)
    tasks = [
        _task(dice, number, many=many)
        for number in range(80 if many else dice.choice([dice.randint(1, 6), dice.randint(10, 40)]))
    ]
    kinds = {task.name: task.kind for task in tasks}
    largest = max(max(truth.of(1.2, max(task.batches, key=sum))) * 1.05 + task.states for task in tasks)
    base = dice.randint(100, 3000) * MIB
    free = int(largest * (8 if many else dice.choice([1.12, 2, 4, 10]))) + RESERVE
    room = Room((free - RESERVE,))

    def mixture(names: Sequence[str]) -> str:
        return str(max(kinds[name] for name in names))

    def dry_run(names: Sequence[str]) -> list[Any]:
        kind = max(kinds[name] for name in names)
        own = [task for task in tasks if task.name in names]
        shapes = seed_shapes(max(length for task in own for lengths in task.batches for length in lengths))
        return [(s, [truth.dry(kind, s)]) for s in shapes]

    estimate = MemoryEstimate(mixture, dry_run, [[None, int(truth.loss_rows)]])
    waiting: list[SimulatedTask] = []
    outcome = Outcome(base + free, 0, 0, len(tasks), [])
    coming = sorted(tasks, key=lambda task: task.arrives)
    order = ORDERS[dice.choice(sorted(ORDERS))]
    placement = PLACEMENTS[dice.choice(sorted(PLACEMENTS))]
    admission, iteration = None, 0
    while coming or waiting:
        came = [task for task in coming if task.arrives <= iteration]
        coming = coming[len(came) :]
        waiting += came
        if came or admission is None or estimate.stale:
            estimate.adopt()
            needs = [task.need(tasks.index(task)) for task in waiting]
            admission = admit(needs, room, 1, order, placement, estimate.activations)
        iteration += 1
        if not waiting:
            continue
        here = {task.name: task for task in waiting}
        among = list(admission.slots)
        assert among, "nobody was admitted though each fits alone"
        lengths = {name: here[name].batches[here[name].taken] for name in among}
        chosen = next_batch(lengths, admission.budget, estimate.as_adopted.activations, among)
        together = [length for name in chosen for length in lengths[name]]
        kind = max(kinds[name] for name in among)
        phases = truth.of(kind, together)
        needed = max(phases)
        (bound,) = estimate.as_adopted.activations({name: lengths[name] for name in chosen}, among)
        if needed > admission.budget[0] / 2:
            outcome.past = max(outcome.past, (needed - BLOCK) / bound - 1)
        states = sum(here[name].states for name in among)
        total = base + states + needed
        outcome.most = max(outcome.most, total)
        if len(among) < len(waiting):
            outcome.used.append(total / outcome.limit)
        if estimate.worth_measuring({name: lengths[name] for name in chosen}, among):
            estimate.observe(together, among, [phases])
        for name in chosen:
            here[name].taken += 1
        ended = [task for task in waiting if task.taken == len(task.batches)]
        waiting = [task for task in waiting if task.taken < len(task.batches)]
        outcome.ended += len(ended)
        if ended:
            admission = None
    return outcome


def _task(dice: random.Random, number: int, *, many: bool) -> SimulatedTask:
    batch, mean = dice.randint(1, 16), dice.choice([60, 200, 700])
    spread = dice.choice([0.0, dice.uniform(0, 0.8)])
    count = dice.randint(3, 60)
    lengths = [
        [max(1, int(mean * dice.uniform(1 - spread, 1 + spread))) for _ in range(batch)] for _ in range(count)
    ]
    return SimulatedTask(
        f"t{number}",
        dice.randint(0, 2),
        0 if many else dice.choice([0, 0, dice.randint(0, 200)]),
        math.ceil(dice.randint(1, 300) / 8) * BLOCK,
        dice.choice([1.0, 1.0, 1.1, 1.2]),
        lengths,
    )
