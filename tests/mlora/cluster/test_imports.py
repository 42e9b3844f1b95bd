"""SIGINT while a module is imported ends the process, whatever the module makes of exceptions."""

import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, signal, sys
from mlora.cluster.imports import end_imports_at_once
{before}
end_imports_at_once()
try:
    {inside}
except KeyboardInterrupt:
    print("raised")
"""
KILL = "os.kill(os.getpid(), signal.SIGINT)"


def run(folder: Path, inside: str, before: str = "") -> tuple[int, str, str]:
    (folder / "stubborn.py").write_text(
        f"import os, signal\ntry:\n    {KILL}\nexcept BaseException:\n    pass\n"
    )
    (folder / "program.py").write_text(PROGRAM.format(inside=inside, before=before))
    done = subprocess.run([sys.executable, folder / "program.py"], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_while_a_module_is_imported(tmp_path: Path) -> None:
    assert run(tmp_path, "import stubborn; print('went on')") == (130, "", "error: interrupted\n")


def test_elsewhere(tmp_path: Path) -> None:
    assert run(tmp_path, f"{KILL}; print('went on')") == (0, "raised\n", "")


def test_one_that_ignores_it_goes_on(tmp_path: Path) -> None:
    ignores = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    assert run(tmp_path, "import stubborn; print('went on')", ignores) == (0, "went on\n", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "importing alone changes nothing"


def test_ctrl_c_is_heard_before_the_command_line_is_imported() -> None:
    code = """
import signal, sys
import mlora.__main__ as entry

class Probe:
    def find_spec(self, name, path=None, target=None):
        if name == "mlora.cli.app":
            print("typer" in sys.modules, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
            sys.exit()

sys.meta_path.insert(0, Probe())
entry.main()
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"]
