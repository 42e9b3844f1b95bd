"""Files of own losses, and the files that they import from their folders."""

from __future__ import annotations

import hashlib
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from mlora.objectives.custom import LossError
from mlora.objectives.function_file import changed_source, function_of, sources_of
from mlora.objectives.objective import LogProbs
from mlora.objectives.options import ObjectiveError
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


def test_loss_files_of_a_folder_share_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a module registers is registered once; also if the process has imported the module itself."""
    shared = "import torch\nOPS = torch.library.Library('{}', 'DEF')\nOPS.define('f(Tensor x) -> Tensor')\n"
    text = "import {}\ndef loss(rows):\n    return -rows.sums()\n"
    for module in ("at_once", "by_loss"):
        write(tmp_path, **{module: shared.format(f"mlora_test_{module}")})
        for name in "ab":
            write(tmp_path, **{f"{name}_{module}": text.format(module)})
    monkeypatch.syspath_prepend(tmp_path)
    imported = import_module("at_once")
    for module in ("at_once", "by_loss"):
        names = [name_of(resolved(f"{name}_{module}:loss", tmp_path)) for name in "ab"]
        first, second = (sys.modules[function_of(name).__module__] for name in names)
        assert getattr(first, module) is getattr(second, module)
        assert [len(sources_of(name)) for name in names] == [2, 2]
    assert sys.modules["at_once"] is imported
    assert "by_loss" not in sys.modules
    del sys.modules["at_once"]


def test_digests_do_not_depend_on_what_was_read_before(tmp_path: Path) -> None:
    """Checkpoints hold them, and another process may read other losses first."""
    one = "import common\ntry:\n    import broken\nexcept SyntaxError: ...\n"
    losses = {"first": f"{one}def loss(rows): ...\n", "second": "import only\nfrom common import factor\n"}
    helpers = {"common": COMMON.format(1), "helpers__numbers": "from . import more\nsign = 1\n"}
    more = {"helpers__more": "", "only": "", "broken": "def (:"}
    for folder in ("a", "b"):
        write(tmp_path / folder, **losses, **helpers, **more)
        (tmp_path / folder / "helpers" / "__init__.py").touch()
    found = {
        (folder, name): [Path(file).relative_to(tmp_path / folder) for file in sources_of(f"{path}:loss")]
        for folder, names in (("a", ("first", "second")), ("b", ("second", "first")))
        for name in names
        for path in [tmp_path / folder / f"{name}.py"]
    }
    assert found["a", "first"] == found["b", "first"]
    assert found["a", "second"] == found["b", "second"]
    assert sorted(map(str, found["b", "first"])) == [
        "broken.py", "common.py", "first.py", "helpers/__init__.py", "helpers/more.py", "helpers/numbers.py"
    ]  # fmt: skip
    assert Path("only.py") in found["a", "second"]
    assert Path("broken.py") not in found["a", "second"]


def test_a_module_is_read_anew_after_a_loss_that_could_not_be_imported(tmp_path: Path) -> None:
    write(tmp_path, loss=LOSS.replace("import common", "import common\ncommon.factor"), common="")
    with pytest.raises(ObjectiveError, match="has no attribute 'factor'"):
        loss_of(tmp_path)
    write(tmp_path, common="def factor():\n    return -2.0 \n")
    assert loss_of(tmp_path) == 6.0
