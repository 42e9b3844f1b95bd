"""Throughput of many devices, simulated: `python -m bench scale` writes results/scale.{json,txt,png}.

What a stage of a Llama needs is counted: seconds, bytes to the next stage, bytes of memory. Speeds and the
ratios of backward to forward are assumptions (docs/dev/scale.md). R pipelines of D stages share nothing, so R
of them give R times the throughput for R times the adapters.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlora.cli.tables import aligned
from mlora.simulate.measures import Measures
from mlora.simulate.measures import measure as measures_of
from mlora.simulate.simulator import simulate
from mlora.simulate.workload import SimulatedLink, StageTime, Stream, Workload
from shared.harness import Found, Panel, measured
from shared.shapes import MODELS, ModelShape

SEQUENCE = 1024
"""Tokens of a sequence."""
ACHIEVED = 400e12
"""FLOP/s of a device in bf16: 40% of what an H100 SXM's data sheet says."""
RANK = 16
ITEM = 2


@dataclass(frozen=True)
class Network:
    """Between neighbouring stages.

    Attributes:
        bandwidth: bytes per second of each direction.
        latency: seconds of a message, software included.
    """

    bandwidth: float
    latency: float


NETWORKS = {
    "NVLink": Network(450e9, 10e-6),
    "InfiniBand": Network(400e9 / 8, 20e-6),
    "10 Gbit/s": Network(10e9 / 8, 100e-6),
    "1 Gbit/s": Network(1e9 / 8, 200e-6),
}
"""NVLink of an H100, InfiniBand NDR at 400 Gbit/s, Ethernet; bandwidths by name, latencies assumed."""


@dataclass(frozen=True)
class Trained:
    """A model as it is trained.

    Attributes:
        name: in `shapes.MODELS`.
        checkpointing: only the inputs of blocks are kept, and blocks are computed again in backward.
        rows: tokens of a micro-batch.
    """

    name: str
    checkpointing: bool
    rows: int = 4096

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""
        return MODELS[self.name]

    @property
    def ratio(self) -> float:
        """Backward over forward, as measured with a frozen base."""
        return 2.0 if self.checkpointing else 1.15

    @property
    def block_parameters(self) -> int:
        """Of the linear layers of one block."""
        return sum(linear.count * linear.d_in * linear.d_out for linear in self.shape.linears)

    @property
    def block_seconds(self) -> float:
        """Forward of one block: its linear layers, and causal attention."""
        flops = 2 * self.block_parameters + 2 * self.shape.hidden * SEQUENCE
        return self.rows * flops / ACHIEVED

    @property
    def head_seconds(self) -> float:
        """Forward of the head."""
        return self.rows * 2 * self.shape.hidden * self.shape.vocabulary / ACHIEVED

    @property
    def kept_bytes(self) -> int:
        """Of one block and micro-batch, between forward and backward.

        Without checkpointing: inputs and outputs of both norms, q, k, v, the output of attention; gate, up,
        the activation and the product.
        """
        shape = self.shape
        whole = 6 * shape.hidden + 2 * shape.kv_width + 4 * shape.intermediate
        return self.rows * ITEM * (shape.hidden if self.checkpointing else whole)

    @property
    def adapter_bytes(self) -> int:
        """An adapter of all linear layers of a block: weights, gradients and two moments in fp32."""
        return 16 * sum(RANK * linear.count * (linear.d_in + linear.d_out) for linear in self.shape.linears)

    def cut(self, stages: int) -> list[int]:
        """Blocks of each stage such that the slowest is as fast as can be; the head is on the last one."""
        blocks, head = self.shape.layers, self.head_seconds / self.block_seconds

        def slowest(last: int) -> float:
            return max(-(-(blocks - last) // (stages - 1)), last + head)

        last = min(range(blocks, -1, -1), key=slowest)
        each, more = divmod(blocks - last, stages - 1)
        return [each + (index < more) for index in range(stages - 1)] + [last]

    def stages(self, stages: int) -> list[StageTime]:
        """Times of the stages."""
        forwards = [blocks * self.block_seconds for blocks in self.cut(stages)]
        forwards[-1] += self.head_seconds
        return [StageTime(forward, self.ratio * forward) for forward in forwards]

    def link(self, network: Network) -> SimulatedLink:
        """A link that carries hidden states, or their gradients."""
        return SimulatedLink(network.latency, network.bandwidth, ITEM * self.shape.hidden)

    def memory(self, stages: int, in_flight: list[int], adapters: int) -> float:
        """Bytes of the fullest stage: base, adapters, and what micro-batches in flight keep."""
        shape = self.shape
        base = [blocks * self.block_parameters * ITEM for blocks in self.cut(stages)]
        base[0] += shape.vocabulary * shape.hidden * ITEM
        base[-1] += shape.vocabulary * shape.hidden * ITEM
        return max(
            weights + blocks * (adapters * self.adapter_bytes + most * self.kept_bytes)
            for weights, blocks, most in zip(base, self.cut(stages), in_flight, strict=True)
        )


TRAINED = (Trained("llama-2-7b", checkpointing=False), Trained("llama-3-70b", checkpointing=True))


DEPTHS = {"llama-2-7b": (2, 4, 8, 16, 32), "llama-3-70b": (4, 8, 16, 32, 64)}
LAYOUTS = {
    "llama-2-7b": ((1, 8), (8, 8), (2, 32), (64, 8), (16, 32)),
    "llama-3-70b": ((1, 8), (8, 8), (1, 64), (64, 8), (8, 64)),
}
"""R pipelines of D stages, by model."""
STEPS = 40
ENOUGH = 0.99
"""Adapters suffice where they give this part of the throughput that the slowest stage or link allows."""


def run(stages: Sequence[StageTime], link: SimulatedLink, adapters: int, rows: int = 1) -> Measures:
    """Simulate a pipeline with one micro-batch of each adapter, all of which may be in flight."""
    streams = [Stream(STEPS, rows=(rows,))] * adapters
    return measures_of(simulate(Workload(stages, streams, "lorapp", link, link, in_flight=adapters)))


def fewest_adapters(stages: Sequence[StageTime], link: SimulatedLink, rows: int) -> tuple[int, Measures]:
    """The fewest adapters that suffice, by bisection, and what they give."""
    goal = ENOUGH * rows / max(link.seconds(rows), max(stage.seconds() for stage in stages))
    low, high = 0, len(stages)
    while (found := run(stages, link, high, rows)).throughput < goal:
        low, high = high, 2 * high
    best = high, found
    while high - low > 1:
        middle = (low + high) // 2
        found = run(stages, link, middle, rows)
        if found.throughput < goal:
            low = middle
        else:
            high, best = middle, (middle, found)
    return best


def pipeline_row(model: Trained, depth: int, name: str, network: Network) -> dict[str, Any]:
    """One pipeline with as many streams as it needs, with as many as stages, and twice as many.

    A stream is an adapter; `mlora train` makes at most 2D of them.
    """
    stages, link = model.stages(depth), model.link(network)
    works = [stage.seconds() for stage in stages]
    adapters, found = fewest_adapters(stages, link, model.rows)
    per_device = model.rows / sum(works)
    few, most = (run(stages, link, factor * depth, model.rows) for factor in (1, 2))
    return {
        "model": model.name,
        "stages": depth,
        "rows": model.rows,
        "network": name,
        "slowest_stage_ms": 1e3 * max(works),
        "message_ms": 1e3 * link.seconds(model.rows),
        "stage_bound": sum(works) / depth / max(works),
        "link_bound": min(1.0, sum(works) / depth / link.seconds(model.rows)),
        "adapters": adapters,
        "efficiency": found.throughput / depth / per_device,
        "efficiency_with_D_adapters": few.throughput / depth / per_device,
        "efficiency_with_2D_adapters": most.throughput / depth / per_device,
        "tokens_per_second": found.throughput,
        "most_in_flight": max(found.in_flight),
        "memory_gb": model.memory(depth, found.in_flight, adapters) / 1e9,
    }


def length_rows(depth: int = 8, spread: float = 0.5, repeats: int = 3) -> list[dict[str, Any]]:
    """Bubble ratio against adapters per stage: equal micro-batches, and lengths that differ by half."""
    stages = [StageTime(0, 0, 1e-6, 1.15e-6)] * depth
    rows, mean = [], 4096
    for latency in (0.0, 0.05):
        link = SimulatedLink(latency * 2.15e-6 * mean)
        for adapters in (4, 6, 8, 10, 12, 15, 16, 20, 24):
            ratios = {"equal": [run(stages, link, adapters, mean).bubble_ratio], "mixed": []}
            for seed in range(repeats):
                drawn = random.Random(seed)
                streams = [
                    Stream(
                        40, rows=tuple(int(mean * drawn.uniform(1 - spread, 1 + spread)) for _ in range(40))
                    )
                    for _ in range(adapters)
                ]
                workload = Workload(stages, streams, "lorapp", link, link, in_flight=adapters)
                ratios["mixed"].append(measures_of(simulate(workload)).bubble_ratio)
            rows.append(
                {"stages": depth, "latency": latency, "adapters": adapters}
                | {name: sum(values) / len(values) for name, values in ratios.items()}
            )
    return rows


def layout_rows(pipelines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """R pipelines beside each other."""
    rows = []
    for row in pipelines:
        for replicas, depth in LAYOUTS[row["model"]]:
            if depth == row["stages"]:
                rows.append(
                    {
                        "model": row["model"],
                        "devices": replicas * depth,
                        "replicas": replicas,
                        "stages": depth,
                        "network": row["network"],
                        "tokens_per_second": replicas * row["tokens_per_second"],
                        "efficiency": row["efficiency"],
                        "adapters": replicas * row["adapters"],
                    }
                )
    return rows


def measure(options: argparse.Namespace) -> Found:
    """Simulates everything."""
    pipelines = [
        pipeline_row(model, depth, name, network)
        for model in TRAINED
        for depth in DEPTHS[model.name][: 2 if options.quick else None]
        for name, network in NETWORKS.items()
    ]
    data = {
        "simulated": True,
        "assumed": {
            "rows": TRAINED[0].rows,
            "sequence": SEQUENCE,
            "flops_per_second": ACHIEVED,
            "rank": RANK,
            "backward_over_forward": {model.name: model.ratio for model in TRAINED},
            "networks": {name: vars(network) for name, network in NETWORKS.items()},
        },
        "pipelines": pipelines,
        "fewer_rows": [
            pipeline_row(replace(TRAINED[0], rows=rows), 8, "10 Gbit/s", NETWORKS["10 Gbit/s"])
            for rows in (4096, 1024, 256)
        ],
        "layouts": layout_rows(pipelines),
        "lengths": length_rows(repeats=1 if options.quick else 3),
    }
    lines = ["simulated, not measured"]
    for name in ("pipelines", "fewer_rows", "layouts", "lengths"):
        cells = [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in data[name]]
        lines += ["", aligned([list(data[name][0]), *cells])]
    return Found(data, lines, panels=panels(data))


def panels(data: dict[str, Any]) -> list[Panel]:
    """Returns the figure: efficiency by depth, throughput by devices, bubbles by adapters."""
    efficiency: dict[str, dict[Any, float]] = {}
    for row in data["pipelines"]:
        efficiency.setdefault(f"{row['model']}, {row['network']}", {})[row["stages"]] = row["efficiency"]
    throughput: dict[str, dict[Any, float]] = {}
    for row in sorted(data["layouts"], key=lambda row: float(row["devices"])):
        points = throughput.setdefault(f"{row['model']}, {row['network']}", {})
        points[row["devices"]] = max(points.get(row["devices"], 0.0), row["tokens_per_second"])
    bubbles: dict[str, dict[Any, float]] = {}
    for row in data["lengths"]:
        for name in ("equal", "mixed"):
            points = bubbles.setdefault(f"{name} lengths, latency {row['latency']:.0%} of T", {})
            points[row["adapters"] / row["stages"]] = row[name]
    return [
        Panel("work / (devices x time)", efficiency, "simulated", "stages of one pipeline", bars=False),
        Panel("tokens/s", throughput, "simulated, the better layout", "devices", bars=False, log=True),
        Panel("steady bubble ratio", bubbles, "simulated", "adapters per stage, D = 8", bars=False),
    ]


def main() -> int:
    """Simulates, prints, and writes the results."""
    return measured(__doc__, measure, out="scale", turns=1)
