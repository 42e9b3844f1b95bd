"""Run the tests as other x86 machines would: instruction sets, threads and random orders.

Usage: python .ci/matrix.py [--only NAME]... [PYTEST ARGUMENT ...]

Each profile tells oneDNN, PyTorch, MKL and our own kernels which instruction set to use and with how many
threads, and shuffles the tests with a seed. Together the profiles have every value of every switch at least
once, not every combination. Prints one line per profile; its log is in build/matrix. Exits with 1 if one
failed, if PyTorch did not use what a profile says, or if this processor could run none of them.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "matrix"
SWITCHES = {"onednn": "ONEDNN_MAX_CPU_ISA", "aten": "ATEN_CPU_CAPABILITY"}
SWITCHES |= {"mkl": "MKL_ENABLE_INSTRUCTIONS", "mkl_bits": "MKL_CBWR"}


@dataclass(frozen=True)
class Profile:
    """What one run of the tests is told; empty: the library's own choice.

    Attributes:
        name: of the profile.
        threads: of each process.
        seed: of the order of the tests.
        onednn: the highest instruction set that oneDNN may use.
        aten: the instruction set of PyTorch's own kernels.
        mkl: the highest instruction set that MKL may use.
        mkl_bits: the instruction set whose bits MKL keeps to, also on processors of AMD.
        kernels: the instruction set of our own kernels.
    """

    name: str
    threads: int
    seed: int
    onednn: str = ""
    aten: str = ""
    mkl: str = ""
    mkl_bits: str = ""
    kernels: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """The switches that are set."""
        switches = {variable: getattr(self, field) for field, variable in SWITCHES.items()}
        return {variable: value for variable, value in switches.items() if value}

    @property
    def told(self) -> str:
        """In words."""
        switches = [f"{key}={value}" for key, value in self.environment.items()]
        kernels = [f"kernels={self.kernels}"] if self.kernels else []
        return ", ".join([*switches, *kernels, f"threads={self.threads}, seed {self.seed}"])


PROFILES = [
    Profile("plain", 1, 1),
    Profile("oldest", 1, 2, "SSE41", "default", mkl_bits="COMPATIBLE", kernels="portable"),
    Profile("avx", 2, 3, "AVX", "default", mkl="SSE4_2", kernels="portable"),
    Profile("avx2", 1, 4, "AVX2", "avx2", mkl="AVX2", kernels="avx2"),
    Profile("avx2 with bf16", 4, 5, "AVX2_VNNI_2", "avx2", mkl_bits="AVX2", kernels="avx2"),
    Profile("avx512", 4, 1, "AVX512_CORE", "avx512", mkl="AVX512", kernels="avx512"),
    Profile("avx512 with bf16", 2, 2, "AVX512_CORE_BF16", "avx512", kernels="avx512bf16"),
    Profile("amx", 2, 3, "AVX512_CORE_AMX", "avx512", kernels="amx"),
    Profile("mixed", 4, 4, "AVX2", "avx512", mkl_bits="AVX512"),
]
"""A higher instruction set than the processor's is left unused by oneDNN and MKL; PyTorch and we need it."""

PROBE = """
import torch
x = torch.zeros(64, 64)
print("torch", torch.backends.cpu.get_cpu_capability())
with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
    torch.ops.mkldnn._linear_pointwise(x, x, None, "none", [], "")
"""


def missing(profile: Profile, flags: set[str]) -> str:
    """What the processor lacks for a profile; empty if nothing."""
    needed = {"avx2": ["avx2", "fma"], "avx512": ["avx512f", "avx512bw", "avx512vl", "avx512dq"]}
    needed["avx512bf16"] = [*needed["avx512"], "avx512_bf16"]
    needed["amx"] = [*needed["avx512bf16"], "amx_tile", "amx_bf16"]
    wanted = [*needed.get(profile.aten, []), *needed.get(profile.kernels, [])]
    return ", ".join(sorted(set(wanted) - flags))


def processor_flags() -> set[str]:
    """What Linux says that this processor has."""
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return set(found[1].split()) if found else set()


def obeyed(environment: dict[str, str]) -> tuple[str, str]:
    """What PyTorch and oneDNN say that they use under a profile; a question mark where one says nothing."""
    done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True)
    torch = re.search(r"^torch (.*)$", done.stdout, re.MULTILINE)
    onednn = re.search(r"info,cpu,isa:(.*)$", done.stdout, re.MULTILINE)
    return torch[1] if torch else "?", onednn[1] if onednn else "?"


def ignored(profile: Profile, torch: str) -> str:
    """What PyTorch was told and did not do; empty where it obeyed, or was told nothing."""
    if not profile.aten or torch == profile.aten.upper():
        return ""
    return f"{SWITCHES['aten']}={profile.aten} was ignored: PyTorch uses {torch}"


def run(profile: Profile, arguments: Sequence[str]) -> bool | None:
    """Run the tests under a profile and print its line; whether all passed, or none if it was not run."""
    lacks = missing(profile, processor_flags())
    if lacks:
        print(f"{profile.name}: not run, this processor has no {lacks}", flush=True)
        return None
    environment = {key: value for key, value in os.environ.items() if key not in SWITCHES.values()}
    environment |= profile.environment | {"OMP_WAIT_POLICY": "PASSIVE"}  # processes share cores: no one spins
    log = LOGS / f"{profile.name.replace(' ', '-')}.log"
    command = [sys.executable, "-m", "pytest", "-v", "--color=no"]
    command += ["-m", "not soak and not gpu and not nightly"]
    command += ["--random-order", "--random-order-seed", str(profile.seed), "--threads", str(profile.threads)]
    command += ["--cpu-isa", profile.kernels] if profile.kernels else []
    began = time.monotonic()
    with log.open("w") as file:
        done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, stdout=file, stderr=file)
    lines = log.read_text().splitlines()
    counts = re.sub(r" in [\d.]+s.*", "", lines[-1].strip("= ")) if lines else "no output"
    seconds = time.monotonic() - began
    torch, onednn = obeyed(environment)
    used = f"PyTorch {torch}, oneDNN {onednn}"
    print(f"{profile.name}: {profile.told} ({used}): {counts}, {seconds:.0f} s", flush=True)
    unheard = ignored(profile, torch)
    if unheard:
        print(f"  {unheard}", flush=True)
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(f"  {line}", flush=True)
    return done.returncode == 0 and not unheard


def exit_code(passed: Sequence[bool | None]) -> int:
    """Of what `run` said of each profile: 0 if at least one was run, and none failed."""
    if all(one is None for one in passed):
        print("no profile was run", flush=True)
        return 1
    return 1 if False in passed else 0


def main() -> int:
    """Run the chosen profiles; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [one.name for one in PROFILES]
    parser.add_argument("--only", action="append", choices=names, help="default: all")
    options, arguments = parser.parse_known_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    passed = [run(one, arguments) for one in PROFILES if one.name in (options.only or names)]
    return exit_code(passed)


if __name__ == "__main__":
    sys.exit(main())
