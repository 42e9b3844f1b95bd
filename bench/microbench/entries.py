"""The contenders that the suite lists, and how a layer of one shape is measured with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from linear import contenders, limits, peers
from linear.contenders import Contender, Layer, Run
from linear.layouts import LAYOUTS
from linear.limits import Ceilings, Work
from linear.oracle import Entry, Oracle, WrongResult
from shared.counting import count
from shared.results import dtype_name
from shared.timing import back_to_back, take_turns

from microbench.settings import Findings, Settings, failures, first_line

T = TypeVar("T")
FROZEN = "frozen"
_PEERS = [
    Entry(FROZEN, lambda layer: contenders.frozen(layer), adapters=False, drops=False),
    Entry("PEFT loop", lambda layer: peers.peft_loop(layer, autocast_adapter_dtype=False)),
    Entry("addmm_ loop", lambda layer: peers.addmm_loop(layer)),
    Entry("parts, cat, add", lambda layer: peers.addmm_loop(layer, in_place=False)),
    Entry(
        "grouped_mm, padded ranks, p=0",
        lambda layer: peers.grouped_mm(replace(layer, p=0.0)),
        drops=False,
    ),
]


def entries(settings: Settings) -> dict[str, Entry]:
    """Every contender that can run on the device, by name: the peers, then ours by backend."""
    found = {entry.name: entry for entry in _PEERS}
    for backend in settings.backends:

        def ours(layer: Layer, backend: Any = backend) -> Contender:
            return contenders.ours(layer, backend=backend)

        def without(layer: Layer, backend: Any = backend) -> Contender:
            return contenders.ours(replace(layer, p=0.0), backend=backend)

        name = f"ours, {backend}"
        if backend == "triton" and settings.device.type == "cpu":
            name += ", interpreted"
        found[name] = Entry(name, ours, mine=True, own_masks=False)
        if settings.device.type == "cuda":

            def floats(layer: Layer, backend: Any = backend) -> Contender:
                return contenders.ours(layer.with_fp32_adapters(), backend=backend)

            of_floats = f"{name}, fp32 adapters"
            found[of_floats] = Entry(of_floats, floats, mine=True, own_masks=False)
        found[f"{name}, p=0"] = Entry(f"{name}, p=0", without, mine=True, drops=False, own_masks=False)
    return found


@dataclass(frozen=True)
class Shape:
    """One layer with its adapters.

    Attributes:
        name: of the layer.
        d_in, d_out: D and O.
        rows: T.
        ranks: of each adapter.
        layout: how the rows are spread.
        dtype: of everything.
    """

    name: str
    d_in: int
    d_out: int
    rows: int
    ranks: tuple[int, ...]
    layout: str
    dtype: torch.dtype

    @property
    def lengths(self) -> list[int]:
        """Rows of each adapter."""
        return LAYOUTS[self.layout](self.rows, len(self.ranks))

    def layer(self, settings: Settings) -> Layer:
        """A random layer of this shape."""
        sizes = (self.d_in, self.d_out, self.dtype, settings.dropout, settings.device)
        return Layer.random(self.lengths, self.ranks, *sizes)

    def describe(self) -> dict[str, Any]:
        """For a row of results."""
        return asdict(self) | {"dtype": dtype_name(self.dtype), "adapters": len(self.ranks)}

    def low_rank(self, part: str = "both") -> Work:
        """Of the low-rank part in `forward`, `backward` or `both`."""
        sizes = (self.lengths, self.ranks, self.d_in, self.d_out, self.dtype.itemsize)
        named = {"forward": limits.low_rank_forward, "backward": limits.low_rank_backward}
        return named.get(part, limits.low_rank)(*sizes)

    def frozen(self, part: str = "both") -> Work:
        """Of the frozen product in `forward`, `backward` or `both`."""
        sizes = (self.rows, self.d_in, self.d_out, self.dtype.itemsize)
        named = {"forward": limits.frozen_forward, "backward": limits.frozen_backward}
        return named.get(part, limits.frozen)(*sizes)


def small_checks(settings: Settings, findings: Findings, named: Sequence[Entry]) -> None:
    """Compare every contender with the oracle on one small, odd layer of each dtype.

    Those that are right stand in `findings.checks` and may be timed; what the others did is in the findings.
    """
    for dtype in settings.dtypes:
        oracle = Oracle(Layer.random([5, 1, 70, 21], [8, 16, 32, 64], 96, 160, dtype, 0.1, settings.device))
        right = findings.checks.setdefault(dtype_name(dtype), {})
        for entry in named:
            checked = guarded(findings, entry, f"check {dtype_name(dtype)}", oracle.check)
            if checked is not None:
                right[entry.name] = checked


def guarded(findings: Findings, entry: Entry, where: str, run: Callable[[Entry], T]) -> T | None:
    """Run something of a contender; what it raises becomes a finding, and the result None."""
    try:
        return run(entry)
    except WrongResult as wrong:
        findings.failed[f"{where}: {entry.name}"] = f"wrong result: {wrong}"
    except failures() as error:
        kept = findings.failed if entry.mine else findings.skipped
        kept[f"{where}: {entry.name}"] = first_line(error)
    return None


def able(
    findings: Findings, named: Sequence[Entry], where: str, prepared: Callable[[Entry], Run]
) -> dict[str, Run]:
    """What is to be timed, by name: those that could be prepared and were right; the others are findings."""
    found = {entry.name: guarded(findings, entry, where, prepared) for entry in named}
    return {name: run for name, run in found.items() if run is not None}


def measure(
    shape: Shape,
    named: Sequence[Entry],
    settings: Settings,
    findings: Findings,
    part: str = "both",
    steady: bool = False,
) -> dict[str, Any]:
    """One row of results: every contender on one layer, in turns.

    Args:
        shape: of the layer.
        named: who takes part; the first must be the frozen layer, unless none is.
        settings: of the run.
        findings: what fails is added to them.
        part: `forward`, `backward` or `both`.
        steady: on a GPU, also take wall time back to back, which shows the share of launches.
    """
    layer = shape.layer(settings)
    oracle = Oracle(layer)
    kind = dtype_name(shape.dtype)
    where = f"{shape.name}, {shape.rows} rows, N={len(shape.ranks)}, {shape.layout}, {kind}"

    def prepared(entry: Entry) -> Run:
        if settings.check:
            oracle.check(entry)
        contender = entry.build(layer)
        assert isinstance(contender, Contender)
        run: Run = contender if part == "both" else getattr(contender, part)()
        run()
        return run

    cases = able(findings, named, where, prepared)
    products, extra = shape.frozen(part), shape.low_rank(part)
    work = {entry.name: products + (extra if entry.adapters else Work()) for entry in named}
    refresh = layer.refresh if part == "both" else _nothing
    results = timed(cases, refresh, work, settings, steady)
    ceiling = findings.ceiling(settings, shape.dtype)
    return shape.describe() | {
        "dropout": settings.dropout,
        "part": part,
        "contenders": results,
        "limit": limit(products, extra, ceiling, results),
    }


def whole_row(
    about: dict[str, Any],
    builders: Mapping[str, Callable[[], Run]],
    check: Callable[[str], object],
    refresh: Callable[[], object],
    work: tuple[Work, Work] | None,
    dtype: torch.dtype,
    settings: Settings,
    findings: Findings,
    rounds: int | None = None,
) -> dict[str, Any]:
    """Returns one row of several layers: contenders that their check found right, in turns.

    Args:
        about: what the row says beside: name, rows, adapters, ranks, layout.
        builders: make what is timed, by name.
        check: raises WrongResult.
        refresh: draws new data.
        work: of the frozen part and of the low-rank part; None: no limit is computed.
        dtype: of all.
        settings, findings: of the run.
        rounds: where these are not the settings' own.
    """

    def prepared(entry: Entry) -> Run:
        check(entry.name)
        run = builders[entry.name]()
        run()
        return run

    named = [Entry(name, lambda layer: layer, mine=name.startswith("ours")) for name in builders]  # type: ignore[arg-type, return-value]
    size = f"{about['rows']} rows, N={about['adapters']}, {about['layout']}"
    where = f"{about['name']}, {size}, {dtype_name(dtype)}"
    cases = able(findings, named, where, prepared)
    parts = {} if work is None else {n: work[0] + (Work() if n == FROZEN else work[1]) for n in cases}
    results = timed(cases, refresh, parts, settings, steady=True, rounds=rounds)
    row = about | {"dtype": dtype_name(dtype), "dropout": settings.dropout, "contenders": results}
    return row if work is None else row | {"limit": limit(*work, findings.ceiling(settings, dtype), results)}


def timed(
    cases: dict[str, Run],
    refresh: Callable[[], object],
    work: dict[str, Work],
    settings: Settings,
    steady: bool = False,
    rounds: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Medians, speeds, ratios, launches and memory of functions, by name."""
    timings = take_turns(cases, refresh, rounds or settings.rounds, device=settings.device)
    results: dict[str, dict[str, Any]] = {}
    for name, timing in timings.items():
        row = {key: value for key, value in asdict(timing).items() if value is not None}
        if FROZEN in timings:
            row["ratio_to_frozen"] = timing.seconds / timings[FROZEN].seconds
        if name in work:
            row["flops_per_second"] = work[name].flops / timing.seconds
            row["bytes_per_second"] = work[name].bytes / timing.seconds
        counts = count(cases[name], settings.device)
        row |= {key: value for key, value in asdict(counts).items() if value is not None}
        if steady and counts.device_seconds is not None:
            row["steady_seconds"] = back_to_back(cases[name], settings.device, min(10, settings.rounds))
            row["launch_share"] = max(0.0, 1 - counts.device_seconds / row["steady_seconds"])
        results[name] = row
    return results


def limit(
    frozen: Work, low_rank: Work, ceiling: Ceilings, results: dict[str, dict[str, Any]]
) -> dict[str, float]:
    """The computed limit: of the frozen part, of the low-rank part, and of the ratio to the frozen layer."""
    found = {
        "frozen_seconds": ceiling.seconds(frozen),
        "low_rank_seconds": ceiling.seconds(low_rank),
        "low_rank_flops": low_rank.flops,
        "low_rank_bytes": low_rank.bytes,
    }
    if FROZEN in results:
        found["ratio_to_frozen"] = 1 + found["low_rank_seconds"] / results[FROZEN]["seconds"]
    return found


def _nothing() -> None:
    """A backward pass alone belongs to one forward pass, whose input stays."""
