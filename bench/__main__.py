"""Runs a benchmark: `python -m bench NAME [options]`; without a name it lists them.

`python -m bench NAME --help` says what is measured, against whom, and with which options.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

BENCHMARKS = {
    "suite": ("microbench.command", "operators, layers and steps beside their peers: `mlora bench`"),
    "linear": ("linear.command", "one linear layer with several adapters against the frozen layer"),
    "host": ("linear.host", "what a layer with 1, 8 and 64 adapters costs on the host"),
    "train": ("training.train", "four adapters together against PEFT one after the other"),
    "quantized": ("training.quantized", "training over a 4-bit base against PEFT's QLoRA loop"),
    "experts": ("training.experts", "16 adapters over 128 small experts against PEFT one by one"),
    "growth": ("training.growth", "a step with 1 to 256 adapters and with 1 to 4 blocks"),
    "preferences": ("training.preferences", "four DPO adapters in one run against TRL; needs `make peers`"),
    "sweep": ("training.sweep", "a sweep of 16 trials against PEFT one after the other"),
    "data": ("training.data", "what tokenised data takes; how soon a run over a million samples trains"),
    "startup": ("training.startup", "the start of `mlora --help` and of `import mlora_ext`"),
    "pipeline": ("pipeline.command", "pipelines of several processes against torch's, FSDP2 and TP"),
    "scheduler": ("scheduler.command", "what the scheduler costs, and its memory predictions"),
    "offload": ("offload.command", "out-of-core tuning on a CPU, part by part"),
    "memory-limit": ("offload.memory_group", "the most memory that any command holds under a limit"),
    "scale": ("forecast.command", "nothing: simulates 8 to 512 devices"),
    "gpu-budget": ("gpu.budget_report", "nothing: computes what the CUDA launches must cost"),
    "gpu-launches": ("gpu.launches", "each CUDA launch of layers, on a GPU"),
    "gpu-products": ("gpu.products", "the product with the low-rank part inside, beside the vendor's"),
    "gpu-graph": ("gpu.graph", "a captured step against an eager one"),
    "gpu-kit": ("gpu.kit", "nothing: builds what a machine with a GPU and no network needs"),
    "gpu-sanitize": ("gpu.sanitize", "nothing: checks GPU backends on odd shapes, also under sanitizers"),
    "gpu-overlap": ("gpu.pipeline_overlap", "copies beside kernels of two stages on one device"),
    "gpu-code": ("gpu.code_cuda", "nothing: registers and instructions of the CUDA kernels"),
    "gpu-code-report": ("gpu.code_triton", "nothing: the same of the Triton kernels, too"),
}
"""Module, and what it measures, by name."""
WORKERS = {"offload-worker": "offload.worker", "pipeline-worker": "pipeline.worker"}
"""Started by benchmarks, as processes of their own."""


def main() -> int:
    """Runs the benchmark that the command line names; returns its exit code."""
    here = str(Path(__file__).resolve().parent)
    if here not in sys.path:
        sys.path.insert(0, here)
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    module = WORKERS.get(name) or BENCHMARKS.get(name, ("",))[0]
    if not module:
        lines = [f"  {each:16} {about}" for each, (_, about) in BENCHMARKS.items()]
        known = name in ("-h", "--help")
        print(
            "\n".join([__doc__, *lines]) if known else f"no benchmark {name!r}; `python -m bench` lists them"
        )
        return 0 if known else 2
    sys.argv = [f"python -m bench {name}", *sys.argv[2:]]
    return int(import_module(module).main() or 0)


if __name__ == "__main__":
    raise SystemExit(main())
