"""Builds what a machine with a GPU (sm_90) and no network needs, into one folder; `bench/gpu.sh` runs it.

    make gpu-kit                                     # .gpu, for the Python that builds it
    make gpu-kit KIT="--python python3.12"           # for another Python
    make gpu-kit KIT="--variant old=HEAD~3 --variant deep=-DSTAGES=4"

A variant is the package of a commit, or of this tree with more definitions for nvcc, in
`variants/NAME/mlora_ext`. `base` is this tree as it is. `products.so` holds the product of
csrc/cuda/hopper_product.cu, if there is one, and a kernel that reads memory; `products.watched.so` the same
with -DWATCHED, if the sources know that. `wheels` are packages that mlora imports. `call-1.sh` to `call-3.sh`
are the commands, in the order of what they decide.

On the machine with the GPU, `--install` copies base's libraries into the checkout and unpacks the wheels.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu-kit"
LARGEST = 60 * 10**6
VARIANTS = {"base": ""}
"""What is built: by name, definitions for nvcc (`-D...`), a commit, or nothing for this tree."""
WHEELS = (
    *("alembic", "annotated-types", "colorlog", "datasets", "dill", "mako", "multiprocess", "optuna"),
    *("pydantic", "pydantic-core", "sqlalchemy", "typing-inspection"),
)
"""What mlora imports beside what a machine with torch, Transformers and PEFT usually has."""
CALLS = {
    "call-1.sh": "libraries,odd shapes,products,launches",
    "call-2.sh": "libraries,suite,captured step,tests of the suite",
    "call-3.sh": "libraries,tests,kinds of adapters,runs,16-bit runs,memory limit,pipeline,"
    "memcheck,racecheck",
}
CALL = """#!/bin/sh
# {phases}: {name} OUT_FOLDER, in the checkout
exec bench/gpu.sh --kit "$(dirname "$0")" --phases "{phases}" "$@"
"""
NVCC = ("nvcc", "-std=c++20", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-DMLORA_SM90A", "-shared")


def run(command: Sequence[object], **options: object) -> None:
    """Runs a command; CalledProcessError if it fails."""
    print("+", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, **options)  # type: ignore[call-overload]


def output(command: Sequence[object]) -> str:
    """What a command prints."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def product_commands(kit: Path) -> list[list[object]]:
    """The commands that compile the products: as they are, and so that endless waits say where they are."""
    product = ROOT / "csrc/cuda/hopper_product.cu"
    sources = [ROOT / "bench/gpu/products.cu", *([product] if product.exists() else [])]
    common = [*NVCC, "-Xcompiler", "-fPIC", "-I", ROOT / "csrc", *sources, "-o"]
    watches = any("WATCHED" in path.read_text() for path in product.parent.glob("hopper*"))
    watched = [[*common, kit / "products.watched.so", "-DWATCHED"]] if watches else []
    return [[*common, kit / "products.so"], *watched]


def build_variant(name: str, source: str, kit: Path, python: str) -> None:
    """Compiles a variant into a package of its own, beside the Python files of its tree."""
    tree, flags = ROOT, source
    if source and not source.startswith("-D"):
        tree, flags, packed = BUILD / name, "", BUILD / f"{name}.tar"
        shutil.rmtree(tree, ignore_errors=True)
        BUILD.mkdir(parents=True, exist_ok=True)
        run(["git", "-C", ROOT, "archive", "-o", packed, source])
        shutil.unpack_archive(packed, tree)
    options = {
        "MLORA_WITH_CUDA": "ON",
        "MLORA_CUDA_ARCHITECTURES": "90a",
        "Python_EXECUTABLE": python,
        "CMAKE_SKIP_RPATH": "ON",
        "CMAKE_SHARED_LINKER_FLAGS": "-Wl,-s",
        "CMAKE_CUDA_FLAGS": flags,
    }
    arguments = " ".join(f"'-D{key}={value}'" for key, value in options.items())
    folders = ["--build-lib", kit / "variants" / name, "--build-temp", BUILD / "objects" / name]
    command = [sys.executable, tree / "setup.py", "-q", "build_ext", *folders]
    run(command, env={**os.environ, "CMAKE_ARGS": arguments}, cwd=tree)
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    package = kit / "variants" / name / "mlora_ext"
    shutil.copytree(tree / "mlora_ext", package, ignore=ignore, dirs_exist_ok=True)


def download_wheels(kit: Path, python: str) -> None:
    """Downloads packages for an interpreter, in the versions that are installed here."""
    of = output([python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"])
    places = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (34, 28, 27, 17)]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", *places]
    named = [f"{name}=={version(name)}" for name in WHEELS]
    run([*pip, "--platform=manylinux2014_x86_64", f"--python-version={of}", "-d", kit / "wheels", *named])


def build(kit: Path, variants: Mapping[str, str], python: str, wheels: bool) -> int:
    """Makes the folder anew; returns its bytes."""
    shutil.rmtree(kit, ignore_errors=True)
    kit.mkdir(parents=True)
    for command in product_commands(kit):
        run(command)
    for name, source in variants.items():
        build_variant(name, source, kit, python)
    if wheels:
        download_wheels(kit, python)
    for name, phases in CALLS.items():
        (kit / name).write_text(CALL.format(name=name, phases=phases))
        (kit / name).chmod(0o755)
    commit = output(["git", "-C", ROOT, "describe", "--always", "--dirty"])
    (kit / "kit.json").write_text(json.dumps({"commit": commit, "variants": dict(variants)}) + "\n")
    return sum(path.stat().st_size for path in kit.rglob("*") if path.is_file())


def install(kit: Path) -> None:
    """Copies base's libraries into the checkout, and unpacks wheels into the kit's `site`."""
    for library in (kit / "variants/base/mlora_ext").glob("*.so"):
        shutil.copy(library, ROOT / "mlora_ext")
    wheels = sorted((kit / "wheels").glob("*.whl"))
    if wheels and not (kit / "site").exists():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-index",
            "--no-deps",
            "--target",
            kit / "site",
        ]
        run([*pip, *wheels])


def variant(text: str) -> tuple[str, str]:
    """`NAME=SOURCE` of the command line."""
    name, equals, source = text.partition("=")
    if not (name.isidentifier() and equals and source):
        raise argparse.ArgumentTypeError(f"expected NAME=COMMIT or NAME=-DMACRO=VALUE, got {text}")
    return name, source


def main() -> int:
    """Builds the kit, or installs it; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kit", type=Path, nargs="?", default=ROOT / ".gpu", help="the folder; default: .gpu")
    parser.add_argument("--variant", type=variant, action="append", default=[], metavar="NAME=SOURCE")
    parser.add_argument("--python", default=sys.executable, help="that runs on the machine with the GPU")
    parser.add_argument("--no-wheels", action="store_true", help="that machine has all packages")
    parser.add_argument("--install", action="store_true", help="on the machine with the GPU: do not build")
    parser.add_argument("--load", action="store_true", help="only load the libraries that are here")
    options = parser.parse_args()
    kit = options.kit.resolve()
    if options.install:
        install(kit)
    if options.install or options.load:
        import mlora_ext._C

        from mlora_ext.library import LIBRARY, check_library

        check_library()
        print(f"libraries: {LIBRARY} and {mlora_ext._C.__file__} load")
        return 0
    size = build(kit, VARIANTS | dict(options.variant), options.python, not options.no_wheels)
    print(f"{kit}: {size / 1e6:.1f} MB, at most {LARGEST / 1e6:.0f}")
    return 0 if size <= LARGEST else 1
