"""What the compiler made of the CUDA kernels: registers, memory and matrix instructions.

Usage: python -m bench gpu-code [LIBRARY]
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

_FUNCTION = re.compile(r"Function\s*:?\s*(\w+)")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_MATRIX = re.compile(r"\w*MMA$")


@dataclass
class Kernel:
    """One kernel in one architecture's code.

    Attributes:
        name: with its template arguments, e.g. `read_x<BFloat16, 64>`.
        architecture: e.g. `sm_90a`.
        registers: of a thread.
        shared_bytes: of a block, beside what a launch asks for.
        local_bytes: of a thread: its stack, where registers are spilled too.
        local_accesses: instructions that read or write local memory.
        matrix: matrix instructions by kind, e.g. `{"HMMA": 16}`.
    """

    name: str
    architecture: str
    registers: int
    shared_bytes: int
    local_bytes: int
    local_accesses: int = 0
    matrix: Counter[str] = field(default_factory=Counter)


def cuobjdump() -> str | None:
    """The disassembler: on PATH, or the one that triton carries; None if there is neither."""
    found = shutil.which("cuobjdump")
    triton = importlib.util.find_spec("triton")
    if found or triton is None or triton.origin is None:
        return found
    return shutil.which("cuobjdump", path=str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))


def kernels(library: Path, architecture: str | None = None) -> list[Kernel]:
    """Every kernel in the library, for each architecture that it was built for; none if it has no CUDA code.

    Args:
        library: a shared library, object file or cubin, which does not name its architecture.
        architecture: the only one to look at, such as `sm_90a`; default: all.

    Raises:
        FileNotFoundError: if there is no `cuobjdump`, or no library.
        RuntimeError: if it cannot read the library.
    """
    tool = cuobjdump()
    if not library.is_file():
        raise FileNotFoundError(f"{library}: expected a library with CUDA code, there is no such file")
    if tool is None:
        raise FileNotFoundError("cuobjdump: neither on PATH nor in the package triton")
    found: dict[tuple[str, str], Kernel] = {}
    for target, function, line in _functions([tool, "--dump-resource-usage", library]):
        resources = _RESOURCES.search(line)
        if resources and architecture in (None, target):
            registers, stack, shared, local = map(int, resources.groups())
            kernel = Kernel(_readable(function), target, registers, shared, stack + local)
            found[target, function] = kernel
    for target in sorted({target for target, _ in found}):
        for function, lines in machine_code(library, target).items():
            kernel = found[target, function]
            for line in lines:
                # a search in each of a million lines would take long
                counted = "MMA" in line or "LDL" in line or "STL" in line
                if counted and (instruction := _INSTRUCTION.match(line)):
                    kind = instruction[1].split(".")[0]
                    kernel.local_accesses += kind in ("LDL", "STL")
                    if _MATRIX.match(kind):
                        kernel.matrix[kind] += 1
    return sorted(found.values(), key=lambda kernel: (kernel.architecture, kernel.name))


def machine_code(library: Path, architecture: str) -> dict[str, list[str]]:
    """Returns the lines with an instruction of each function, by its mangled name.

    The disassembler takes 15 s, so what was asked for last is kept. `architecture`: "" for a cubin.
    """
    return _disassembled(library, architecture, library.stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _disassembled(library: Path, architecture: str, written: int) -> dict[str, list[str]]:
    tool = cuobjdump()
    assert tool is not None
    # a cubin has one target, and does not name it
    chosen = ["--gpu-architecture", architecture] if architecture else []
    found: dict[str, list[str]] = {}
    for _, function, line in _functions([tool, "--dump-sass", *chosen, library]):
        instruction, ends, _ = line.partition(";")  # the rest, and every other line, is the encoding
        if ends:
            found.setdefault(function, []).append(instruction + ends)
    return found


def _functions(command: list[str | Path]) -> Iterator[tuple[str, str, str]]:
    """Architecture, function and line, for each line that belongs to a function."""
    architecture = function = ""
    # nvdisasm warns of formats on stderr, for each file
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("arch = "):
                architecture, function = line.removeprefix("arch = ").strip(), ""
            elif "Function" in line and (header := _FUNCTION.search(line)):
                function = header[1]
            elif function:
                yield architecture, function, line
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: exit code {process.returncode}")


def _readable(symbol: str) -> str:
    """`name<dtype, ranks>` of a mangled `_ZN<length><part>...I<arguments>E...`."""
    rest, parts = symbol.removeprefix("_ZN"), []
    while length := re.match(r"\d+", rest):
        end = length.end() + int(length[0])
        parts.append(rest[length.end() : end])
        rest = rest[end:]
    if not parts:
        return symbol
    name = parts[-1].removesuffix("_kernel")
    if not rest.startswith("I"):
        return name
    dtype = re.search(r"BFloat16|Half", rest.split("EE")[0])
    ranks = re.search(r"Li(\d+)E", rest)
    arguments = [dtype[0] if dtype else "float", *([ranks[1]] if ranks else [])]
    return f"{name}<{', '.join(arguments)}>"


def main() -> None:
    """Print one line per kernel and architecture."""
    given = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = Path(__file__).parents[2] / "mlora_ext" / "libmlora_ops.so"
    given.add_argument("library", type=Path, nargs="?", default=default, help="default: the package's own")
    try:
        found = kernels(given.parse_args().library)
    except (OSError, RuntimeError) as error:
        given.exit(1, f"{given.prog}: {error}\n")
    print(f"{'kernel':32}{'target':>8}{'registers':>11}{'shared':>8}{'local':>7}  matrix instructions")
    for kernel in found:
        matrix = ", ".join(f"{count} {kind}" for kind, count in kernel.matrix.items())
        print(
            f"{kernel.name:32}{kernel.architecture:>8}{kernel.registers:>11}{kernel.shared_bytes:>8}"
            f"{kernel.local_bytes:>7}  {matrix}"
        )
