"""Files of own losses, and the files that they import from their folders."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
from mlora.objectives.custom import LossError
from mlora.objectives.function_file import changed_source, sources_of
from mlora.objectives.objective import LogProbs
from mlora.objectives.registry import name_of, objective_of, resolved
from torch import tensor, zeros

ROWS = LogProbs(tensor([-1.0, -2.0]), [2], zeros(0))


def write(folder: Path, **files: str) -> Path:
    """Writes Python files; `a__b` is `a/b.py`."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def loss_of(folder: Path) -> float:
    return float(objective_of(resolved("loss:loss", folder)).loss_of(ROWS).loss)


LOSS = "import common\ndef loss(rows):\n    return common.factor() * rows.sums()\n"
COMMON = "from helpers import numbers\ndef factor():\n    return numbers.sign * {}\n"


def test_folders_with_files_of_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither gets the other's, nor a module that this process has imported, which stays as it is."""
    theirs = ModuleType("common")
    monkeypatch.setitem(sys.modules, "common", theirs)
    before, path = set(sys.modules), list(sys.path)
    for name, sign in (("a", 1), ("b", -1)):
        files = {"loss": LOSS, "common": COMMON.format(2), "helpers__numbers": f"sign = {sign}\n"}
        write(tmp_path / name, **files)
    assert [loss_of(tmp_path / name) for name in ("a", "b", "a")] == [-6.0, 6.0, -6.0]
    assert sys.modules["common"] is theirs
    assert [name for name in set(sys.modules) - before if not name.startswith("mlora")] == []
    assert sys.path == path


def test_digests_cover_what_the_file_imports_from_its_folder(tmp_path: Path) -> None:
    common = COMMON.format(3).replace("from helpers", "import json, peft\nfrom helpers")
    write(tmp_path, loss=LOSS, common=common, helpers__numbers="sign = 1\n", other="")
    assert loss_of(tmp_path) == -9.0
    name = name_of(resolved("loss:loss", tmp_path))
    files = [tmp_path / file for file in ("loss.py", "common.py", "helpers/numbers.py")]
    assert sources_of(name) == {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    assert changed_source(name) is None
    files[2].write_text("sign = 2\n")
    assert changed_source(name) == str(files[2])
    files[0].unlink()
    assert changed_source(name) == str(files[0])


def test_standard_and_installed_modules_are_not_hidden(tmp_path: Path) -> None:
    text = "import json, torch\ndef loss(rows):\n    return -torch.abs(rows.sums()) * len(json.dumps([1]))\n"
    write(tmp_path, loss=text, json="raise RuntimeError", torch="raise RuntimeError")
    assert loss_of(tmp_path) == -9.0
    assert len(sources_of(name_of(resolved("loss:loss", tmp_path)))) == 1


def test_an_import_inside_of_the_function_is_not_found(tmp_path: Path) -> None:
    write(tmp_path, late="", loss="def loss(rows):\n    import late\n    return -rows.sums()\n")
    with pytest.raises(LossError, match="ModuleNotFoundError: No module named 'late'"):
        loss_of(tmp_path)
