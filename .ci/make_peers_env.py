"""Create an environment with other packages in front of those of another environment, which it sees.

Usage: python3 .ci/make_peers_env.py .venv .venv-peers [--gptqmodel | --lowest]

The packages are TRL, quantisation libraries and trackers; or, with `--gptqmodel`, that library. They are
apart because PEFT imports bitsandbytes and torchao wherever they are installed. That adds a second to the
start of each process, and tests start hundreds. gptqmodel, which PEFT imports, too, adds ten.

With `--lowest` they are the lowest versions of our dependencies that `pyproject.toml` allows, and the newest
of theirs. torch and Triton stay: the default wheels of other versions take gigabytes.
"""

import subprocess
import sys
from pathlib import Path

REQUIREMENTS = ["trl>=1.0", "bitsandbytes==0.50.2", "torchao==0.18.0"]
# mlflow-skinny is mlflow without its server; the tests keep runs in folders
TRACKERS = ["tensorboard==2.21.0", "wandb==0.31.0", "mlflow-skinny==3.17.2", "trackio==0.43.0"]

# gptqmodel works with our torch, but its metadata asks for a newer one
GPTQMODEL = ["optimum==2.3.0", "requests", "threadpoolctl>=3.7"]
WITHOUT_TORCH = [
    "gptqmodel==7.7.0",
    "defuser==0.0.28",
    "device-smi==0.5.7",
    "logbar==0.4.15",
    "pypcre==0.6.4",
    "tokenicer==0.0.14",
]


ROOT = Path(__file__).resolve().parent.parent
# uv finds the lowest versions that go together, which pip cannot
UV = "uv==0.13.9"
LEFT = ("torch", "triton", "nvidia", "cuda")


def lowest_versions(python: Path) -> list[str]:
    """Requirements of the lowest versions of our dependencies, and of what these need."""
    compile_ = [str(python), "-m", "uv", "pip", "compile", "--quiet", "--resolution=lowest-direct"]
    plain = ["--no-header", "--no-annotate", f"--python={python}", str(ROOT / "pyproject.toml")]
    found = subprocess.run([*compile_, *plain], check=True, capture_output=True, text=True).stdout
    return [line for line in found.split("\n") if "==" in line and not line.startswith(LEFT)]


def main(base: Path, env: Path, kind: str) -> None:
    """Create `env` (kept if it is there) with the interpreter of `base`, then install them into it."""
    python = env / "bin" / "python"
    if not python.exists():
        subprocess.run([str(base / "bin" / "python"), "-m", "venv", str(env)], check=True)
    packages = next((base / "lib").glob("python*/site-packages")).resolve()
    own = next((env / "lib").glob("python*/site-packages"))
    # addsitedir also follows the .pth files there, which a plain line would not
    (own / "base.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    if kind == "--lowest":
        subprocess.run([*command, UV], check=True)
        uv = [str(python), "-m", "uv", "pip", "install", "--quiet", f"--python={python}", "--no-deps"]
        subprocess.run([*uv, *lowest_versions(python)], check=True)
        return
    subprocess.run([*command, *REQUIREMENTS, *(GPTQMODEL if kind else TRACKERS)], check=True)
    if kind:
        subprocess.run([*command, "--no-deps", *WITHOUT_TORCH], check=True)


if __name__ == "__main__":
    more = sys.argv[3:]
    if len(sys.argv) < 3 or more not in ([], ["--gptqmodel"], ["--lowest"]):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), more[0] if more else "")
