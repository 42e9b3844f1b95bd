"""What the compilers made of the GPU kernels: registers, shared memory, spills, matrix instructions.

    python -m bench gpu-code-report                    # Triton for sm_80 and sm_90; CUDA as it was built
    python -m bench gpu-code-report --out FOLDER       # the same, written to FOLDER/machine-code.txt

No GPU is needed. Read with `cuobjdump`, of the CUDA toolkit or of the package triton.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path

from shared import machine

from gpu import code_cuda, code_triton
from mlora_ext.library import LIBRARY

HEADER = (
    f"{'':6} {'kernel':24} {'version':34} {'target':>7} {'registers':>9} {'shared':>7} {'local':>5}  "
    "matrix instructions"
)


def line(backend: str, version: str, kernel: code_cuda.Kernel) -> str:
    """A row of the report; `local` is what was spilled, in bytes a thread."""
    matrix = ", ".join(f"{count} {kind}" for kind, count in kernel.matrix.items())
    return (
        f"{backend:6} {kernel.name:24} {version:34} {kernel.architecture:>7} {kernel.registers:>9} "
        f"{kernel.shared_bytes:>7} {kernel.local_bytes:>5}  {matrix}"
    )


def rows() -> Iterator[str]:
    """All of it, line by line."""
    info = machine.describe()
    yield f"commit {info['commit']}, triton {code_triton.triton.__version__}"
    yield HEADER
    for architecture in code_triton.ARCHITECTURES:
        for version, kernel in code_triton.report(architecture):
            yield line("triton", version, kernel)
    for kernel in code_cuda.kernels(LIBRARY):
        yield line("cuda", "", kernel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder to write machine-code.txt into")
    arguments = parser.parse_args()
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    lines = []
    try:
        for text in rows():
            lines.append(text)
            print(text, flush=True)
    except (OSError, RuntimeError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    if arguments.out:
        (arguments.out / "machine-code.txt").write_text("\n".join(lines) + "\n")
