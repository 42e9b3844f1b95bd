"""What is run: places, each some processes with contenders that take turns in them.

What a turn is asked for, and what each process tells of it, are plain values as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from mlora.pipeline.trace import Span

from pipeline.model import Shape


@dataclass(frozen=True)
class Case:
    """A contender, and what it runs in a turn.

    Attributes:
        name: in results.
        way: `ours`, `torch`, `fsdp`, `tensor` or `by hand`.
        schedule: of a pipeline.
        adapters: L; each makes as many steps.
        micro_batches: N of an optimizer step.
        steps: of each adapter in a turn.
        tasks: whether an adapter makes all its steps before the next one begins; else they take turns.
        at_once: for `lorapp`, adapters that are in the pipeline at once; None = all.
        joint: for `torch`, whether the adapters' micro-batches are one flush.
        keep: for `fsdp`, whether weights that were gathered for forward stay for backward.
        delay: each message is held back by this share of the shortest forward of a stage.
    """

    name: str
    way: str
    schedule: str = ""
    adapters: int = 4
    micro_batches: int = 1
    steps: int = 1
    tasks: bool = False
    at_once: int | None = None
    joint: bool = False
    keep: bool = False
    delay: float = 0.0


class Item(NamedTuple):
    """A micro-batch; its number counts from 1 in the order of entering."""

    adapter: int
    step: int
    micro_batch: int


@dataclass
class Turn:
    """What one process tells of a turn.

    Attributes:
        items: what entered, as the first stage knows.
        spans: what it did, optimizer steps as `optimizer`; none where the contender is no pipeline.
        losses: by item, where the loss is computed.
        ended: monotonic seconds at which each adapter ended, as the first process knows.
        sent: bytes to neighbours that the contender counted.
        delay: seconds by which messages were held back.
    """

    items: list[Item] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    losses: list[tuple[Item, float]] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    sent: int = 0
    delay: float = 0.0


def rounds(case: Case, steps: int) -> Iterator[tuple[int, int]]:
    """Adapter and step of each optimizer step, one after the other."""
    if case.tasks:
        yield from ((adapter, step) for adapter in range(case.adapters) for step in range(steps))
    else:
        yield from ((adapter, step) for step in range(steps) for adapter in range(case.adapters))


REAL = Shape(512, 1408, 8, 8, 8, 512, 8, 2, 64)
NETWORK = Shape(384, 32, 2, 12, 2, 32, 4, 8, 32, ("q_proj", "v_proj"))
"""Little work for each byte that is sent, as one core of a CPU is to 1 Gbit/s what a GPU is to more."""
TINY = Shape(64, 176, 2, 2, 2, 64, 2, 2, 8)
ADAPTERS = 4
RATE = "1gbit"
SLEEP = {"forward": 0.040, "backward": 0.046}
"""Seconds; of the order of a stage's micro-batch of `REAL`."""
TURNS = {"real": 7, "overlap": 15, "network": 7, "tasks": 5, "sleep": 3}
"""Of each contender. What is asked of `overlap`, 3%, is less than turns differ by."""
QUICK_SLEEP = {"forward": 0.004, "backward": 0.005}
WARM_UP_STEPS = 2
"""Of each adapter; what the second one's losses are, shows what the first one's update was."""
DELAYS = (0.5, 0.9)
"""Shares of the shortest forward."""


@dataclass(frozen=True)
class Place:
    """One job.

    Attributes:
        name: in results.
        stages: D, and processes.
        cases: contenders.
        repeats: turns of each.
        shape: of the model; None where stages sleep.
        sleep: seconds that they sleep.
        network: whether it is between two network namespaces.
    """

    name: str
    stages: int
    cases: Sequence[Case]
    repeats: int
    shape: Shape | None = None
    sleep: dict[str, float] | None = None
    network: bool = False

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch; sleeping stages have no tokens, and micro-batches are counted."""
        return self.shape.rows if self.shape else 1

    def job(self) -> dict[str, Any]:
        """As `worker.py` reads it."""
        what = {"shape": asdict(self.shape)} if self.shape else {"sleep": self.sleep}
        cases = [asdict(case) for case in self.cases]
        return what | {"cases": cases, "repeats": self.repeats, "warm_up_steps": WARM_UP_STEPS}


def place_of(result: Mapping[str, Any]) -> Place:
    """The place that a result is of."""
    return Place(
        result["name"],
        result["stages"],
        [Case(**case) for case in result["cases"]],
        max(row["turns"] for row in result["rows"].values()),
        Shape(**result["shape"]) if result["shape"] else None,
        result["sleep"],
        result["network"],
    )


def places(sections: Sequence[str], *, quick: bool, repeats: int | None = None) -> list[Place]:
    """The jobs that some sections need."""
    scale, shape = (1, TINY) if quick else (2, REAL)
    turns = dict.fromkeys(TURNS, repeats or 1) if repeats or quick else TURNS
    found = []
    if {"throughput", "volume", "bubbles"} & set(sections):
        cases = throughput_cases(scale, everything="throughput" in sections, quick=quick)
        found.append(Place("real", 2, cases, turns["real"], shape))
    if "tasks" in sections:
        cases = task_cases(scale, (3,) if quick else (2, 4, 8))
        found.append(Place("tasks", 2, cases, turns["tasks"], shape))
    if "overlap" in sections:
        found.append(Place("overlap", 2, overlap_cases("lorapp", 4 * scale), turns["overlap"], shape))
    if "network" in sections:
        cases = throughput_cases(scale * 2, everything=True, quick=quick)
        found.append(Place("network", 2, cases, turns["network"], TINY if quick else NETWORK, network=True))
    if {"bubbles", "overlap"} & set(sections):
        for stages in (3,) if quick else (4, 8):
            found.append(_sleeping(sections, stages, turns["sleep"], quick=quick))
    return found


def _sleeping(sections: Sequence[str], stages: int, turns: int, *, quick: bool) -> Place:
    steps = 2 if quick else 8
    cases = []
    if "bubbles" in sections:
        for adapters in (stages, 3 * stages // 2, 2 * stages):
            cases.append(Case(f"lorapp L={adapters}", "ours", "lorapp", adapters, steps=steps))
        for schedule in ("gpipe", "1f1b"):
            case = Case(f"{schedule} N={stages}", "ours", schedule, 1, micro_batches=stages, steps=steps)
            cases.append(case)
    if "overlap" in sections:
        cases += overlap_cases(f"lorapp L={2 * stages}", steps, 2 * stages)
    sleep = QUICK_SLEEP if quick else SLEEP
    return Place(f"sleep D={stages}", stages, _unique(cases), turns, sleep=sleep)


def throughput_cases(scale: int, *, everything: bool, quick: bool) -> list[Case]:
    """Every contender with one and with four micro-batches per optimizer step, or only ours.

    Args:
        scale: steps of each adapter with four micro-batches in a turn; with one, four times as many.
        everything: peers too.
        quick: of these, only those with four micro-batches.
    """
    base = Case("", "ours", adapters=ADAPTERS, steps=scale)
    one = replace(base, steps=4 * scale)
    four = replace(base, micro_batches=4)
    cases = [
        replace(one, name="lorapp", schedule="lorapp"),
        replace(one, name="gpipe", schedule="gpipe"),
        replace(four, name="lorapp N=4", schedule="lorapp"),
        replace(four, name="gpipe N=4", schedule="gpipe"),
        replace(four, name="1f1b N=4", schedule="1f1b"),
    ]
    if not everything:
        return cases
    cases += [
        replace(one, name="torch GPipe", way="torch", schedule="gpipe"),
        replace(four, name="torch GPipe N=4", way="torch", schedule="gpipe"),
        replace(four, name="torch 1F1B N=4", way="torch", schedule="1f1b"),
        replace(four, name="torch 1F1B N=4, joint", way="torch", schedule="1f1b", joint=True),
    ]
    for suffix, case in ((" N=4", four),) if quick else (("", one), (" N=4", four)):
        cases += [
            replace(case, name=f"FSDP2{suffix}", way="fsdp"),
            replace(case, name=f"FSDP2 keep{suffix}", way="fsdp", keep=True),
            replace(case, name=f"TP{suffix}", way="tensor"),
            replace(case, name=f"TP by hand{suffix}", way="by hand"),
        ]
    return cases


def overlap_cases(without: str, steps: int, adapters: int = ADAPTERS) -> list[Case]:
    """LoRAPP at L = 2D, without and with delays on the links."""
    base = Case(without, "ours", "lorapp", adapters, steps=steps)
    return [base, *(replace(base, name=f"{without}, delay {each} T_f", delay=each) for each in DELAYS)]


def task_cases(steps: int, counts: Sequence[int]) -> list[Case]:
    """Tasks at once by LoRAPP, and one after the other by the flushed schedules."""
    cases = []
    for count in counts:
        base = Case("", "ours", adapters=count, micro_batches=4, steps=steps, tasks=True)
        cases.append(replace(base, name=f"tasks={count} lorapp", schedule="lorapp"))
        if count > 2:
            cases.append(replace(base, name=f"tasks={count} lorapp, 2 at once", schedule="lorapp", at_once=2))
        cases += [replace(base, name=f"tasks={count} {way}", schedule=way) for way in ("gpipe", "1f1b")]
    return cases


def _unique(cases: Sequence[Case]) -> list[Case]:
    return list({case.name: case for case in reversed(cases)}.values())[::-1]
