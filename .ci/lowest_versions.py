"""Run a few tests with the lowest versions that pyproject.toml allows, in an environment of their own.

Usage: python .ci/lowest_versions.py .venv build/lowest

The new environment sees the packages of the first one, and has older ones of those with a floor. torch and
Triton stay: building against their floors takes hours. Exits with 1 if a command or a test fails.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = {"torch", "triton"}
TESTS = ["tests/mlora/config", "tests/mlora/data", "tests/mlora/cli/test_cli_mistakes.py"]


def floors(project: Path) -> dict[str, str]:
    """Returns the lowest allowed version of each direct dependency, by name; SystemExit if one has none."""
    found = {}
    for requirement in tomllib.loads(project.read_text())["project"]["dependencies"]:
        match = re.match(r"([\w.-]+).*?>=([\w.]+)", requirement)
        if match is None:
            raise SystemExit(f"{project}: {requirement} has no lowest version")
        if match[1] not in KEPT:
            found[match[1]] = match[2]
    return found


def main(base: Path, env: Path) -> None:
    """Make `env` over the packages of `base`, then run the commands and tests."""
    versions = floors(ROOT / "pyproject.toml")
    subprocess.run([str(base / "bin" / "python"), "-m", "venv", "--clear", str(env)], check=True)
    packages = next((base / "lib").glob("python*/site-packages")).resolve()
    own = next((env / "lib").glob("python*/site-packages"))
    (own / "base.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    python = env / "bin" / "python"
    # with all else that they need: an old version may not work with today's versions of other packages
    pinned = [f"{name}=={version}" for name, version in versions.items()]
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    subprocess.run([*command, *pinned], check=True)
    print("lowest versions:", ", ".join(f"{name} {version}" for name, version in versions.items()))
    mlora = [str(python), "-m", "mlora"]
    for arguments, code in ((["--help"], 0), (["train", "--nonsense"], 2), (["train"], 2)):
        done = subprocess.run([*mlora, *arguments], capture_output=True, text=True)
        if done.returncode != code or "Traceback" in done.stderr:
            raise SystemExit(f"mlora {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
    settings = {
        key: 2 for key in ("defaults.max_steps", "adapters.reverse.max_steps", "adapters.sort.max_steps")
    }
    settings["output_dir"] = env.resolve() / "run"
    run = ["train", "examples/quickstart.yaml", *(f"--set={key}={value}" for key, value in settings.items())]
    subprocess.run([*mlora, *run], check=True, cwd=ROOT)
    tests = [str(python), "-m", "pytest", "-q", "-m", "not nightly and not peers and not soak and not gpu"]
    raise SystemExit(subprocess.run([*tests, *TESTS], cwd=ROOT).returncode)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
