"""What the compilers made of the GPU kernels: registers, shared memory, spills, matrix instructions.

    python bench/code_report.py                    # Triton for sm_80 and sm_90; CUDA where it was built
    python bench/code_report.py --out FOLDER       # the same, written to FOLDER/machine-code.txt

No GPU is needed. Read with `cuobjdump`, of the CUDA toolkit or of the package triton.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

MATRIX_INSTRUCTIONS = ("HMMA", "HGMMA", "UTCHMMA", "QGMMA")
_SPILLS = ("LDL", "STL")


@dataclass(frozen=True)
class KernelCode:
    """One compiled kernel.

    Attributes:
        kernel: name; of a binary, the mangled one.
        variant: which of its versions; empty for one of a binary.
        architecture: such as `sm_90`.
        registers: per thread.
        stack_bytes: of the stack frame per thread, which holds what was spilled.
        shared_bytes: static, and dynamic where the launcher is known.
        matrix_instructions: in its machine code.
        local_instructions: loads and stores of spilled registers.
    """

    kernel: str
    variant: str
    architecture: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    matrix_instructions: int
    local_instructions: int

    def named(self, kernel: str, variant: str, architecture: str, shared_bytes: int) -> KernelCode:
        """The same code under another name, with the shared memory that its launch asks for."""
        return replace(
            self, kernel=kernel, variant=variant, architecture=architecture, shared_bytes=shared_bytes
        )

    def line(self) -> str:
        """A row of the report."""
        return (
            f"{self.architecture:8} {self.kernel:24} {self.variant:36} {self.registers:9} "
            f"{self.stack_bytes:5} {self.local_instructions:6} {self.shared_bytes:7} "
            f"{self.matrix_instructions:6}"
        )


HEADER = (
    f"{'arch':8} {'kernel':24} {'variant':36} {'registers':>9} {'stack':>5} {'spills':>6} {'shared':>7} "
    f"{'matrix':>6}"
)


def read_binary(path: Path) -> list[KernelCode]:
    """Every kernel in a cubin, an object file or a library.

    Args:
        path: of the file.

    Returns:
        One entry per kernel and architecture.

    Raises:
        RuntimeError: if there is no `cuobjdump`, or it cannot read the file.
    """
    counts = _instructions(_cuobjdump("--dump-sass", path))
    found, architecture = [], ""
    for line in _cuobjdump("--dump-resource-usage", path).splitlines():
        if match := re.search(r"arch = (sm_\w+)", line):
            architecture = match[1]
        elif match := re.search(r"Function (\S+?):$", line.strip()):
            name = match[1]
        elif match := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", line):
            registers, stack, shared = map(int, match.groups())
            matrix, local = counts.get((architecture, name)) or counts["", name]
            found.append(KernelCode(name, "", architecture, registers, stack, shared, matrix, local))
    if not found:
        raise RuntimeError(f"{path}: cuobjdump found no kernel in it")
    return found


def _instructions(sass: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Matrix and local-memory instructions by architecture (also without it) and function."""
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    architecture, name = "", ""
    for line in sass.splitlines():
        if match := re.search(r"arch = (sm_\w+)", line):
            architecture = match[1]
        elif match := re.search(r"Function : (\S+)", line):
            name = match[1]
            counts[architecture, name] = counts["", name] = (0, 0)
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9]+)", line):
            matrix, local = counts[architecture, name]
            matrix += match[1] in MATRIX_INSTRUCTIONS
            local += match[1] in _SPILLS
            counts[architecture, name] = counts["", name] = (matrix, local)
    return counts


def _cuobjdump(option: str, path: Path) -> str:
    tool = shutil.which("cuobjdump") or _of_triton()
    if tool is None:
        raise RuntimeError("cuobjdump is neither on PATH nor in the package triton: install either")
    done = subprocess.run([tool, option, str(path)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"cuobjdump {option} {path}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _of_triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(tool) if tool.exists() else None


def main() -> None:
    import code_triton
    import machine

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder to write machine-code.txt into")
    arguments = parser.parse_args()
    info = machine.describe()
    lines = [f"commit {info['commit']}, triton {code_triton.triton.__version__}", HEADER]
    print("\n".join(lines))
    for architecture in code_triton.ARCHITECTURES:
        for code in code_triton.report(architecture):
            lines.append(code.line())
            print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "machine-code.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
