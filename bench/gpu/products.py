"""Is the product with the low-rank part inside right, and how fast is it beside the vendor's?

    python -m bench gpu-products --kit .gpu --limit 200
    python -m bench gpu-products --dry      # a CPU stands in for the GPU: tries the script, shows nothing

Prints a line of JSON for each job when it is done, and tables at the end. Jobs, the safest first: `check`
compares every element with fp32 sums; `stress` repeats launches beside other traffic and compares bits;
`speed` times what was right in turns with the vendor's product, with the L2 cache flushed and back to back;
`beside` has a few multiprocessors read memory while products run. A launch that hangs is tried once more from
the build that watches its waits, if the kit has one. Exits with 1 where a job was not right.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shared.harness import documented_parser
from shared.machine import BENCH

from gpu.jobs import Jobs, serve

TILE, RANKS, PITCH = 128, [8, 16, 32, 64] * 2, 64
MASKS = ("with low rank", "masks stored", "masks drawn")
# forward, one of MASKS, blocks of a cluster; the safest first
KEYS = [[1, 0, 1], [1, 0, 2], [0, 0, 1], [0, 0, 2], [0, 1, 2], [0, 2, 2]]
SHAPES = [(4096, 4096), (4096, 11008), (11008, 4096), (8192, 28672)]
ROWS, GROUP, GROUPS = 8192, 8, (4, 16)
READERS = (8, 16, 24)
# rows, D, O, with the low-rank part
CHECKED = [
    (128, 64, 256, 0),
    (500, 256, 384, 0),
    (500, 256, 384, 1),
    (1000, 520, 776, 1),
    (8192, 4096, 4096, 1),
]
STRESSED = [(128, 64, 256, 200), (640, 256, 1032, 400), (2184, 1096, 2056, 200), (8192, 4096, 4096, 60)]
SECONDS = {"hello": 30, "check": 25, "stress": 25, "speed": 45, "beside": 30, "watched": 25}


class Data(NamedTuple):
    """One direction of one layer; T rows, depth summed over, d columns of the result, R largest rank.

    Attributes:
        rows, weight: `[T, depth]`, W `[O, D]`.
        s: `[T, R]`, zeros from an adapter's rank on.
        page: the factors below each other, each at a multiple of `PITCH` rows.
        owners: adapter of each row.
        factors: a table with the rank of each adapter, as csrc/cuda/factor.h says.
        starts, parts: of each tile of rows its runs of one adapter, as csrc/cuda/plan.h says.
        p, keep: dropout of each adapter, and bits of the kept columns, where masks are stored.
        rng, layer: of drawn masks: seed and step of each adapter, and the layer's index.
        out: `[T, d]`.
    """

    rows: Any
    weight: Any
    s: Any
    page: Any
    owners: list[int]
    factors: Any
    starts: Any
    parts: Any
    p: Any
    keep: Any
    rng: Any
    layer: Any
    out: Any


def parts_of(owners: Sequence[int]) -> tuple[list[int], list[tuple[int, int, int, int]]]:
    """Where the parts of each row tile begin, and the parts: first row, rows, adapter, row of its mask."""
    starts, parts = [0], []
    for row in range(0, len(owners), TILE):
        begin, end = row, min(row + TILE, len(owners))
        for i in range(row + 1, end + 1):
            if i == end or owners[i] != owners[begin]:
                parts.append((begin, i - begin, owners[begin], begin))
                begin = i
        starts.append(len(parts))
    return starts, parts


class Worker:
    """The child's side: everything that touches the GPU, or the CPU that stands in for it."""

    def __init__(self, kit: Path, dry: bool, fault: str) -> None:
        import torch

        self.torch, self.kit, self.dry, self.fault = torch, kit, dry, fault
        self.device = "cpu" if dry else "cuda"
        torch.backends.cuda.matmul.allow_tf32 = False
        self.half = {"device": self.device, "dtype": torch.bfloat16}
        torch.zeros(1, device=self.device)
        self.blocks = 132 if dry else torch.cuda.get_device_properties(0).multi_processor_count

    def hello(self) -> dict[str, Any]:
        from linear.limits import copy_speed

        name = "none" if self.dry else self.torch.cuda.get_device_name()
        speed = copy_speed(self.device, 4 if self.dry else 512)
        product = self.dry or hasattr(self.library(""), "mlora_product")
        return {"device": name, "blocks": self.blocks, "copy_TBs": round(speed / 1e12, 2), "product": product}

    def library(self, form: str) -> ctypes.CDLL:
        return ctypes.CDLL(str(self.kit / f"products{form}.so"))

    def data(self, rows: int, d_in: int, d_out: int, forward: int) -> Data:
        torch, half = self.torch, self.half
        depth, columns = (d_in, d_out) if forward else (d_out, d_in)
        owners = [min(row * len(RANKS) // rows, len(RANKS) - 1) for row in range(rows)]
        page = torch.zeros(len(RANKS), PITCH, columns, **half)
        factors = torch.zeros(len(RANKS), 8, dtype=torch.int64, device=self.device)
        for adapter, rank in enumerate(RANKS):
            page[adapter, :rank] = torch.randn(rank, columns, **half) / rank**0.5
            factors[adapter, 3] = rank

        def table(values: Any) -> Any:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        ranks = table(RANKS)[table(owners)]
        s = torch.randn(rows, max(RANKS), **half) * (
            torch.arange(max(RANKS), device=self.device) < ranks[:, None]
        )
        keep = torch.randint(-(2**31), 2**31, (rows, -(-columns // 32)), device=self.device).to(torch.int32)
        starts, parts = map(table, parts_of(owners))
        weight = torch.randn(d_out, d_in, **half) / depth**0.5
        p, out = torch.full((len(RANKS),), 0.1, device=self.device), torch.empty(rows, columns, **half)
        x = torch.randn(rows, depth, **half)
        rng = torch.tensor([[3**30 + i, i] for i in range(len(RANKS))], device=self.device)
        layer = torch.tensor([5], device=self.device)
        return Data(x, weight, s, page, owners, factors, starts, parts, p, keep, rng, layer, out)

    def want(self, data: Data, key: Sequence[int], low_rank: int) -> Any:
        """The result with fp32 sums."""
        torch, (forward, masks, _) = self.torch, key
        weight = data.weight.float()
        want = data.rows.float() @ (weight.T if forward else weight)
        if not low_rank:
            return want
        low = torch.zeros_like(want)
        for row, count, adapter, _ in data.parts.tolist():
            rank = RANKS[adapter]
            low[row : row + count] = (
                data.s[row : row + count, :rank].float() @ data.page[adapter, :rank].float()
            )
        if masks == 2:
            from mlora_ext.ops.dropout import philox_mask

            for row, count, adapter, row0 in data.parts.tolist():
                seed, step = data.rng[adapter].tolist()
                drawn = {"p": 0.1, "seed": seed, "step": step, "layer": int(data.layer), "row0": row0}
                low[row : row + count] *= philox_mask(count, want.shape[1], device=self.device, **drawn)
        elif masks:
            column = torch.arange(want.shape[1], device=self.device)
            bit = (column % 32 // 2 + column % 2 * 16).to(torch.int32)
            low *= data.keep.repeat_interleave(32, 1)[:, : want.shape[1]] >> bit & 1
        return want + low

    def product(
        self,
        data: Data,
        key: Sequence[int],
        low_rank: int,
        form: str = "",
        group: int = GROUP,
        left: int = 0,
    ) -> Callable[[], None]:
        """A launch, its arguments packed once."""
        if self.dry:
            result = self.want(data, key, low_rank).bfloat16()
            if self.fault == f"wrong {key}":
                result[7, 9] += 1
            return lambda: data.out.copy_(result)
        forward, masks, cluster = key
        d_out, d_in = data.weight.shape

        def at(tensor: Any) -> ctypes.c_void_p:
            return ctypes.c_void_p(tensor.data_ptr())

        nothing = ctypes.c_void_p()
        values = (
            ctypes.c_bool(bool(forward)), at(data.rows), at(data.weight), at(data.out),
            ctypes.c_int64(len(data.rows)), d_in, d_out,
            at(data.starts) if low_rank else nothing, at(data.parts), at(data.s), data.s.shape[1],
            at(data.page), len(RANKS), PITCH, at(data.factors),
            at(data.p) if masks else nothing, at(data.rng), at(data.layer),
            at(data.keep) if masks == 1 else nothing,
            cluster, group, left,
        )  # fmt: skip
        call = self.library(form).mlora_product

        def run() -> None:
            code = call(*values, ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream))
            if code:
                raise RuntimeError(f"launch_product: CUDA error {code}")

        run.data = data  # type: ignore[attr-defined]  (its memory is in use)
        return run

    def wait(self) -> None:
        if not self.dry:
            self.torch.cuda.synchronize()

    def compared(self, data: Data, key: Sequence[int], low_rank: int) -> dict[str, Any]:
        """Elements that are off by more than rounding can be, NaN among them, and where they lie."""
        got, want = data.out.float(), self.want(data, key, low_rank)
        allowed = want.abs() * 2**-8 + 2e-3 * want.square().mean().sqrt()
        bad = ~((got - want).abs() <= allowed)
        error = ((got - want).norm() / want.norm()).item()
        found = {"error": error, "bad": int(bad.sum()), "right": not bad.any() and error < 2.5e-3}
        if found["bad"]:
            row, column = bad.nonzero().unbind(1)
            found["where"] = {
                "rows": sorted({int(v) for v in row[:: max(1, len(row) // 8)]}),
                "columns": sorted({int(v) for v in column[:: max(1, len(column) // 8)]}),
                "tiles": [int((row // TILE).unique().numel()), int((column // 256).unique().numel())],
            }
        return found

    def check(self, key: list[int], form: str = "") -> dict[str, Any]:
        if self.fault == f"hang {key}" and not form:
            time.sleep(1000)
        if self.fault == f"die {key}":
            raise RuntimeError("an illegal memory access")
        cases = []
        for rows, d_in, d_out, low_rank in CHECKED[: 4 if self.dry else None]:
            data = self.data(rows, d_in, d_out, key[0])
            data.out.fill_(float("nan"))
            self.product(data, key, low_rank, form)()
            self.wait()
            cases.append(
                {"shape": [rows, d_in, d_out], "low rank": low_rank, **self.compared(data, key, low_rank)}
            )
        return {"right": all(case["right"] for case in cases), "cases": cases}

    def stress(self, key: list[int]) -> dict[str, Any]:
        """The same bits from every launch, alone and beside copies."""
        torch, cases = self.torch, []
        side = None if self.dry else torch.cuda.Stream()
        noise = torch.zeros(1 if self.dry else 1 << 26, dtype=torch.int8, device=self.device)
        for rows, d_in, d_out, launches in STRESSED[: 2 if self.dry else None]:
            data = self.data(rows, d_in, d_out, key[0])
            run = self.product(data, key, 1)
            run()
            self.wait()
            first, other = (
                data.out.clone().view(torch.int16),
                torch.zeros((), dtype=torch.int64, device=self.device),
            )
            for i in range(2 if self.dry else launches):
                data.out.fill_(float("nan"))
                if side is not None and i % 2:
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        noise.add_(1)
                run()
                other += (data.out.view(torch.int16) != first).any()
                if side is not None:
                    torch.cuda.current_stream().wait_stream(side)
            cases.append({"shape": [rows, d_in, d_out], "other bits": int(other)})
        return {"right": not any(case["other bits"] for case in cases), "cases": cases}

    def watched(self, key: list[int]) -> dict[str, Any]:
        """Runs the build whose waits end with a trap; what it prints is part of the answer."""
        return self.check(key, ".watched")

    def speed(self, d_in: int, d_out: int, forward: int, keys: list[list[int]]) -> dict[str, Any]:
        from shared.timing import back_to_back, take_turns

        torch, rows = self.torch, ROWS
        if self.dry:
            rows, d_in, d_out = 200, d_in // 64, d_out // 64
        data = self.data(rows, d_in, d_out, forward)
        other = data.weight.T if forward else data.weight
        runs: dict[str, Callable[[], object]] = {
            "vendor": lambda: torch.mm(data.rows, other, out=data.out),
            "vendor, added to": lambda: data.out.addmm_(data.rows, other),
        }
        wrong = {}
        for key in keys:
            for low_rank, group in [(0, GROUP), (1, GROUP), *((1, group) for group in GROUPS if key[2] == 2)]:
                if key[1] and not low_rank:
                    continue
                what = MASKS[key[1]] if low_rank else "alone"
                run = self.product(data, key, low_rank, group=group)
                data.out.fill_(float("nan"))
                run()
                found = self.compared(data, key, low_rank)
                name = f"ours, {what}, cluster {key[2]}, group {group}"
                if found["right"]:
                    runs[name] = run
                else:
                    wrong[name] = found
        big = d_in * d_out > 1 << 27
        flushed = take_turns(runs, lambda: None, 2 if self.dry else 8 if big else 25, device=self.device)
        calls = 2 if self.dry else 20 if big else 100
        steady: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(1 if self.dry else 5):
            for name, run in runs.items():
                steady[name].append(1e6 * back_to_back(run, self.device, calls))
        us = {name: [1e6 * flushed[name].seconds, statistics.median(steady[name])] for name in runs}
        return {"right": not wrong, "us": us, "wrong": wrong, "flops": 2 * rows * d_in * d_out}

    def beside(self, keys: list[list[int]]) -> dict[str, Any]:
        """Bytes/s of a few multiprocessors alone, and eight products while they read 64 MiB for each."""
        from shared.timing import take_turns

        torch, turns = self.torch, 2 if self.dry else 10
        rows, d = (128, 64) if self.dry else (ROWS, 4096)
        data, each = self.data(rows, d, d, 1), 1 if self.dry else 1 << 26
        source = torch.zeros(8 * each, dtype=torch.int8, device=self.device)
        sink, side = torch.zeros(1, dtype=torch.int32, device=self.device), None

        def read(blocks: int) -> None:
            if self.dry:
                return
            at, to = ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(sink.data_ptr())
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            code = self.library("").mlora_read(at, ctypes.c_int64(source.numel() // 16), to, blocks, stream)
            if code:
                raise RuntimeError(f"mlora_read: CUDA error {code}")

        side = None if self.dry else torch.cuda.Stream(priority=-1)

        def both(blocks: int, product: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                if side is not None and blocks:
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        read(blocks)
                for _ in range(8):
                    product()
                if side is not None:
                    torch.cuda.current_stream().wait_stream(side)

            return run

        runs: dict[str, Callable[[], object]] = {
            f"{blocks} read alone": lambda blocks=blocks: read(blocks) for blocks in (*READERS, self.blocks)
        }
        for blocks in (0, *READERS):
            runs[f"vendor, {blocks} read"] = both(
                blocks, lambda: torch.mm(data.rows, data.weight.T, out=data.out)
            )
            for key in (key for key in keys if key == [1, 0, 2]):
                ours = self.product(data, key, 1, left=blocks)
                runs[f"ours on the others, {blocks} read"] = both(blocks, ours)
        us = {
            name: 1e6 * t.seconds
            for name, t in take_turns(runs, lambda: None, turns, device=self.device).items()
        }
        alone = {name: round(source.numel() / t / 1e6, 3) for name, t in us.items() if "alone" in name}
        return {"right": True, "TBs": alone, "us": {name: t for name, t in us.items() if name not in alone}}


class Session:
    """The parent's side: which job comes next, and what is said of it."""

    def __init__(self, jobs: Jobs, watched: bool) -> None:
        self.jobs, self.watched, self.failed = jobs, watched, False

    def run(self, name: str, *arguments: Any) -> dict[str, Any]:
        found = self.jobs.run(name, arguments, SECONDS[name])
        print(json.dumps({"job": name, "of": arguments, **found}), flush=True)
        self.failed |= not found.get("right", name == "hello" and "device" in found)
        return found

    def state(self, key: list[int]) -> str:
        """`right`, or what went wrong first."""
        for name, wrong in (("check", "WRONG"), ("stress", "OTHER BITS")):
            found = self.run(name, key)
            if not found.get("right"):
                if "hung" in found and self.watched:
                    self.run("watched", key)
                    self.watched = False
                return next((word for word in ("skipped", "failed", "hung") if word in found), wrong)
        return "right"

    def all(self) -> None:
        """Goes through all jobs, and prints the tables."""
        states = {}
        if self.run("hello").get("product"):
            states = {tuple(key): self.state(key) for key in KEYS}
        good = [list(key) for key, state in states.items() if state == "right"]
        tables = ["right?" if states else "the kit has no product of ours; the vendor's alone"]
        for (forward, masks, cluster), state in states.items():
            way = f"{'forward' if forward else 'dX'}{', ' + MASKS[masks] if masks else ''}, cluster {cluster}"
            tables.append(f"  {way:28} {state}")
        for d_in, d_out in SHAPES:
            for forward in (1, 0):
                found = self.run("speed", d_in, d_out, forward, [key for key in good if key[0] == forward])
                tables += speed_lines(f"{ROWS} x {d_in} -> {d_out}, {'forward' if forward else 'dX'}", found)
            if (d_in, d_out) == SHAPES[0]:
                found = self.run("beside", good)
                tables += [f"  {name}: {speed} TB/s" for name, speed in found.get("TBs", {}).items()]
                tables += [
                    f"  eight products, {name}: {us:.1f} us" for name, us in found.get("us", {}).items()
                ]
        self.jobs.stop()
        print("\n".join(tables), flush=True)


def speed_lines(title: str, found: dict[str, Any]) -> list[str]:
    """Microseconds, flushed and back to back, and the share of the vendor's speed."""
    if "us" not in found:
        return [f"{title}: not measured"]
    vendor = found["us"]["vendor"]
    lines = [f"{title}: vendor {found['flops'] / vendor[0] / 1e6:.1f} TFLOP/s"]
    for name, us in found["us"].items():
        shares = [f"{v / t:.3f}" for v, t in zip(vendor, us, strict=True)]
        lines.append(
            f"  {name:44} {us[0]:9.1f} | {us[1]:9.1f} us   {shares[0]} | {shares[1]} of the vendor's speed"
        )
    return lines


def main() -> int:
    """Runs the parent, or with `--child` a child; returns the exit code."""
    parser = documented_parser(__doc__)
    parser.add_argument("--kit", type=Path, default=Path(".gpu"), help="the folder with products.so")
    parser.add_argument("--limit", type=float, default=200, help="seconds of all jobs together")
    parser.add_argument("--dry", action="store_true", help="the CPU stands in for the GPU")
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(lambda: Worker(options.kit, options.dry, options.fault))
        return 0
    session = Session(
        Jobs([*BENCH, "gpu-products", *sys.argv[1:], "--child"], options.limit),
        (options.kit / "products.watched.so").exists() or options.dry,
    )
    session.all()
    return 1 if session.failed else 0
