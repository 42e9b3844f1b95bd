"""Create an environment with TRL, quantisation libraries and trackers, which sees another one's packages.

Usage: python3 .ci/make_peers_env.py .venv .venv-peers [--gptqmodel]

They are apart because PEFT imports bitsandbytes and torchao wherever they are installed. That adds a second
to the start of each process, and tests start hundreds. gptqmodel, which PEFT imports, too, adds ten.
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


def main(base: Path, env: Path, gptqmodel: bool) -> None:
    """Create `env` (kept if it is there) with the interpreter of `base`, then install them into it."""
    python = env / "bin" / "python"
    if not python.exists():
        subprocess.run([str(base / "bin" / "python"), "-m", "venv", str(env)], check=True)
    packages = next((base / "lib").glob("python*/site-packages")).resolve()
    own = next((env / "lib").glob("python*/site-packages"))
    # addsitedir also follows the .pth files there, which a plain line would not
    (own / "base.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    subprocess.run([*command, *REQUIREMENTS, *(GPTQMODEL if gptqmodel else TRACKERS)], check=True)
    if gptqmodel:
        subprocess.run([*command, "--no-deps", *WITHOUT_TORCH], check=True)


if __name__ == "__main__":
    more = sys.argv[3:]
    if len(sys.argv) < 3 or more not in ([], ["--gptqmodel"]):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), bool(more))
