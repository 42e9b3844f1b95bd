"""Create an environment with TRL that sees another environment's packages behind its own.

Usage: python3 .ci/make_trl_env.py .venv .venv-trl
"""

import subprocess
import sys
from pathlib import Path

REQUIREMENT = "trl>=1.0"


def main(base: Path, env: Path) -> None:
    """Create `env` (kept if it is there) with the interpreter of `base`, then install TRL into it."""
    python = env / "bin" / "python"
    if not python.exists():
        subprocess.run([str(base / "bin" / "python"), "-m", "venv", str(env)], check=True)
    packages = next((base / "lib").glob("python*/site-packages")).resolve()
    own = next((env / "lib").glob("python*/site-packages"))
    # addsitedir also follows the .pth files there, which a plain line would not
    (own / "base.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q", REQUIREMENT]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
