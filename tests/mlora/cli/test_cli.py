"""The command line: its help, its error lines, and the machine it finds."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Run, only_line
from mlora.cluster.device import load_operators
from mlora.errors import RunError
from tiny_run import run_data, write_run


def test_help_comes_without_torch() -> None:
    code = "import sys, mlora.cli.app as cli; "
    code += "cli.app(['--help'], standalone_mode=False); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "validate" in done.stdout
    assert done.stdout.endswith("False\n")


def test_faults_of_the_config_come_without_torch(tmp_path: Path) -> None:
    data = run_data(tmp_path, tmp_path)
    data["adapters"][0]["lora"]["rr"] = 4
    code = "import sys, mlora.cli.app as cli; "
    code += "cli.app(sys.argv[1:], standalone_mode=0); print('torch' in sys.modules)"
    path = write_run(tmp_path, data)
    shutil.copy(path, tmp_path / "config.yaml")
    for command in (["validate", path], ["train", path], ["resume", tmp_path]):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, command)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert "adapters.first.lora.rr: unknown key; did you mean 'r'?" in done.stderr
        assert done.stdout.endswith("False\n")


CONFIG_FAULTS = [
    ("adapters.0.lora.rr=4", "adapters.first.lora.rr: unknown key; did you mean 'r'?"),
    ("adapters.0.lora.r=0", "adapters.first.lora.r: must be at least 1, got 0"),
    ("adapters.0.lora.lora_dropout=1.0", "lora_dropout: must be below 1, got 1.0"),
    ("adapters.0.name=a/b", "adapters[0].name: 'a/b' is not a plain name"),
    ("adapters.0.name=second", "adapters: the name 'second' is used twice"),
    ("base_model=/no/such/base", "base_model: no such folder: /no/such/base"),
    ("device=cuda:99", "device: cuda:99 is not there"),
]


@pytest.mark.parametrize(("override", "expected"), CONFIG_FAULTS)
def test_faults_of_the_config_end_the_run(
    run: Run, tiny_base: Path, tmp_path: Path, override: str, expected: str
) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    assert expected in only_line(run("train", path, "--set", override))
    assert expected in only_line(run("validate", path, "--set", override))
    assert not (tmp_path / "run").exists()


def test_missing_operators_are_one_line_at_the_start(
    run: Run, trained: Path, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlora_ext.library.LOADED", False)
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    for command in (("train", path), ("validate", path), ("generate", trained, "-p", "x")):
        assert only_line(run(*command)).startswith("error: the compiled operators are missing (")
    assert not (tmp_path / "run").exists()


def test_operators_of_another_torch_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlora_ext").mkdir()
    (tmp_path / "mlora_ext" / "__init__.py").write_text("raise OSError('undefined symbol: aoti')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mlora_ext")
    with pytest.raises(RunError, match="operators cannot be loaded: undefined symbol: aoti; build them anew"):
        load_operators()


def test_lines_are_not_wrapped(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    assert str(deep) in only_line(run("train", deep / "run.yaml"))
