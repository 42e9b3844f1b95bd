"""Create the virtual environment that the Makefile uses, and install mlora-ext into it.

Usage: python3 .ci/make_env.py .venv

A torch >= 2.11 that the calling interpreter already has is kept: the new environment then sees that
interpreter's packages behind its own. Otherwise the pinned CPU-sized torch is installed first, because a
plain `torch` requirement would fetch several gigabytes.
"""

import importlib.util
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

TORCH_PIN = "torch==2.13.0"
TORCH_MINIMUM = (2, 11)
BUILD_TOOLS = ["setuptools>=77", "wheel", "cmake>=3.25", "ninja", "pybind11>=2.13"]
ROOT = Path(__file__).resolve().parent.parent


def active_torch_is_new_enough() -> bool:
    """Whether the calling interpreter has a torch of at least `TORCH_MINIMUM`."""
    if importlib.util.find_spec("torch") is None:
        return False
    from importlib.metadata import version

    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= TORCH_MINIMUM


def see_packages_of_caller(env: Path) -> None:
    """Append the calling interpreter's package folders to the environment's search path."""
    site = next((env / "lib").glob("python*/site-packages"))
    folders = dict.fromkeys(sysconfig.get_path(key) for key in ("purelib", "platlib"))
    (site / "caller.pth").write_text("".join(f"{folder}\n" for folder in folders))


def main(env: Path) -> None:
    """Create `env` (kept if it is there), then install torch, the build tools and mlora-ext."""
    if sys.version_info < (3, 11):  # noqa: UP036 - runs before pip can say it
        raise SystemExit(f"mlora-ext needs Python 3.11 or newer, this is {sys.version.split()[0]}")
    python = env / "bin" / "python"
    if not python.exists():
        venv.create(env, with_pip=True)
        if active_torch_is_new_enough():
            see_packages_of_caller(env)

    def pip(*arguments: str) -> None:
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q", *arguments]
        subprocess.run(command, check=True)

    has_torch = subprocess.run([str(python), "-c", "import torch"], capture_output=True).returncode == 0
    if not has_torch:
        pip(TORCH_PIN)
    pip(*BUILD_TOOLS)
    pip("--no-build-isolation", "-e", f"{ROOT}[dev]")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
