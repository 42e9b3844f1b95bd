"""What the compilers made of the GPU kernels: registers, shared memory, spills, matrix instructions.

    python -m bench gpu-code-report                    # Triton for sm_80 and sm_90; CUDA as it was built
    python -m bench gpu-code-report --out FOLDER       # the same, written to FOLDER/machine-code.txt

No GPU is needed: every Triton kernel is compiled ahead of time, with the very arguments that the launcher
gives it; launches of real calls are written down in place of being made. Read with `cuobjdump`, of the CUDA
toolkit or of the package triton.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from shared import machine
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import mlora_ext as mx
from gpu import code_cuda
from mlora_ext.backends import run
from mlora_ext.backends.interface import Layer
from mlora_ext.backends.triton import operator
from mlora_ext.frozen.plain import PlainWeight
from mlora_ext.library import LIBRARY

KERNELS = ("shrink", "expand", "read_dy", "read_x", "reduce_rows", "reduce_gradients")
ARCHITECTURES = (80, 90)
_WARP = 32
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Variant:
    """One way to call the operator that needs kernels of its own.

    Attributes:
        name: in the report.
        dtype: of x.
        adapter_dtype: of A and B.
        rank: largest rank.
        dropout: whether there is any.
    """

    name: str
    dtype: torch.dtype
    adapter_dtype: torch.dtype
    rank: int
    dropout: bool


VARIANTS = (
    Variant("bf16, fp32 adapters, r 64, dropout", torch.bfloat16, torch.float32, 64, True),
    Variant("fp16, r 16", torch.float16, torch.float16, 16, False),
    Variant("fp32, r 64, dropout", torch.float32, torch.float32, 64, True),
)


@dataclass(frozen=True)
class Launch:
    """A launch that was written down: the kernel, its arguments by name, and compiler options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int | bool]


def launches_of(variant: Variant, rows: int = 1100, other_rank: int = 8) -> list[Launch]:
    """The launches of one forward and backward call, none of which is made.

    Args:
        variant: what is called.
        rows: of x, more than 1088: then the second adapter has several splits.
        other_rank: rank of the first adapter.

    Returns:
        A launch of every kernel.
    """
    made: list[Launch] = []
    d_in, d_out, ranks = 4096, 4096, (other_rank, variant.rank)
    x, dy = torch.zeros(rows, d_in, dtype=variant.dtype), torch.zeros(rows, d_out, dtype=variant.dtype)
    pages = [torch.zeros(sum(ranks), d, dtype=variant.adapter_dtype) for d in (d_in, d_out)]
    a, b = list(pages[0].split(ranks)), [rows.t() for rows in pages[1].split(ranks)]
    layout = mx.SegmentLayout.from_lengths([64, rows - 64])
    drop = mx.LoRADropout([0.1, 0.1], [1, 2]).tensors("cpu") if variant.dropout else (None, None, None)
    weight = torch.zeros(d_out, d_in, dtype=variant.dtype)
    layers, plan = [Layer(PlainWeight.of(weight), weight)], (layout.table(), torch.ones(2), *drop)
    with _recorded(made), _NoBaseProducts():
        _, saved = run.forward("triton", x, layers, a, b, plan)
        run.backward("triton", [dy], x, layers, a, b, saved, plan, (True, True, True))
    return made


@contextmanager
def _recorded(made: list[Launch]) -> Iterator[None]:
    module: Any = operator
    before = {name: getattr(module, name) for name in KERNELS}
    for name in KERNELS:
        setattr(module, name, _Recorder(before[name], made))
    try:
        yield
    finally:
        for name, kernel in before.items():
            setattr(module, name, kernel)


class _NoBaseProducts(TorchFunctionMode):
    """Leaves out the products with the frozen weight, which are cuBLAS's and take seconds on a CPU."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        return arguments[0] if function is Tensor.addmm_ else function(*arguments, **(named or {}))


class _Recorder:
    """Stands in for a kernel: `kernel[grid](...)` is written down."""

    def __init__(self, kernel: Any, made: list[Launch]) -> None:
        self.kernel, self.made = kernel, made

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def write_down(*positional: Any, **named: Any) -> None:
            arguments = dict(zip(self.kernel.arg_names, positional, strict=False)) | named
            options = {key: named.pop(key) for key in _OPTIONS if key in named}
            self.made.append(Launch(self.kernel, arguments, options))

        return write_down


def specialisation(launched: Launch) -> tuple[dict[str, str], dict[str, Any], list[str]]:
    """What Triton compiles a version of its own for.

    Args:
        launched: the launch.

    Returns:
        The type of every argument, the value of every constant (integers that are 1 are constants too), and
        the arguments that 16 divides.
    """
    kernel = launched.kernel
    types, constants, divisible = {}, {}, []
    constexprs = {kernel.arg_names[i] for i in kernel.constexprs}
    for name in kernel.arg_names:
        value = launched.arguments[name]
        tensor = isinstance(value, Tensor)
        free = name in kernel.do_not_specialize
        if name in constexprs or not (tensor or free or value != 1):
            types[name], constants[name] = "constexpr", value
            continue
        types[name] = _POINTERS[value.dtype] if tensor else "i32" if abs(value) < 2**31 else "i64"
        if not free and (value.data_ptr() if tensor else value) % 16 == 0:
            divisible.append(name)
    return types, constants, divisible


def compiled(launched: Launch, architecture: int) -> Any:
    """Triton's compiled kernel, specialised as a launch would."""
    types, constants, divisible = specialisation(launched)
    place = {name: (index,) for index, name in enumerate(launched.kernel.arg_names)}
    source = ASTSource(
        launched.kernel,
        types,
        constexprs={place[name]: value for name, value in constants.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in divisible},
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, _WARP), options=launched.options)


def report(
    architecture: int, variants: tuple[Variant, ...] = VARIANTS
) -> Iterator[tuple[str, code_cuda.Kernel]]:
    """Registers, memory and matrix instructions of every kernel.

    Args:
        architecture: 80 or 90.
        variants: of the call.

    Yields:
        The variant's name and the kernel, whose shared memory is what its launch asks for.

    Raises:
        RuntimeError: if the kernels were defined for Triton's interpreter.
    """
    if operator.INTERPRETED:
        raise RuntimeError("the kernels were defined for Triton's interpreter: unset TRITON_INTERPRET")
    with tempfile.TemporaryDirectory() as folder:
        for variant in variants:
            for launched in launches_of(variant):
                kernel = compiled(launched, architecture)
                file = Path(folder) / "kernel.cubin"
                file.write_bytes(kernel.asm["cubin"])
                (code,) = code_cuda.kernels(file)
                shared = max(code.shared_bytes, kernel.metadata.shared)
                yield variant.name, replace(code, shared_bytes=shared, architecture=f"sm_{architecture}")


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
    yield f"commit {info['commit']}, triton {triton.__version__}"
    yield HEADER
    for architecture in ARCHITECTURES:
        for version, kernel in report(architecture):
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
