"""Create an environment with TRL and the quantisation libraries, which sees another environment's packages.

Usage: python3 .ci/make_peers_env.py .venv .venv-peers

They are apart because PEFT imports bitsandbytes and torchao wherever they are installed. That adds a second
to the start of each process, and tests start hundreds.
"""

import subprocess
import sys
from pathlib import Path

REQUIREMENTS = ["trl>=1.0", "bitsandbytes==0.50.2", "torchao==0.18.0"]


def main(base: Path, env: Path) -> None:
    """Create `env` (kept if it is there) with the interpreter of `base`, then install them into it."""
    python = env / "bin" / "python"
    if not python.exists():
        subprocess.run([str(base / "bin" / "python"), "-m", "venv", str(env)], check=True)
    packages = next((base / "lib").glob("python*/site-packages")).resolve()
    own = next((env / "lib").glob("python*/site-packages"))
    # addsitedir also follows the .pth files there, which a plain line would not
    (own / "base.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q", *REQUIREMENTS]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
