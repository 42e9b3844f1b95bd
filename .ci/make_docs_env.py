"""Create an environment with the packages that build the documentation's site.

Usage: python3 .ci/make_docs_env.py .venv-docs

They are `docs` under optional-dependencies in pyproject.toml. The site's API pages are read from the source,
so that this environment needs neither torch nor the package itself.
"""

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(env: Path) -> None:
    """Create `env` (kept if it is there) and install the packages into it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = env / "bin" / "python"
    if not python.exists():
        venv.create(env, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    subprocess.run([*command, *project["optional-dependencies"]["docs"]], check=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
