"""Files of own losses, and the files that they import from their folders."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from mlora.objectives.function_file import changed_source, sources_of
from mlora.objectives.loss_folder import digest_of
from mlora.objectives.objective import LogProbs
from mlora.objectives.options import ObjectiveError
from mlora.objectives.registry import check_unchanged, name_of, objective_of, resolved
from torch import tensor, zeros

ROWS = LogProbs(tensor([-1.0, -2.0]), [2], zeros(0))


def write(folder: Path, **files: str) -> Path:
    """Writes Python files; `a__b` and `a/b` are `a/b.py`."""
    for name, text in files.items():
        path = folder / f"{name if '/' in name else name.replace('__', '/')}.py"
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
    assert sources_of(name) == {str(f): digest_of(f.read_bytes()) for f in files}
    assert changed_source(name) is None
    files[2].write_text("sign = 2\n")
    assert changed_source(name) == str(files[2])
    files[0].unlink()
    assert changed_source(name) == str(files[0])


def test_standard_modules_and_torch_are_not_hidden(tmp_path: Path) -> None:
    text = "import json, torch\ndef loss(rows):\n    return -torch.abs(rows.sums()) * len(json.dumps([1]))\n"
    write(tmp_path, loss=text, json="raise RuntimeError", torch="raise RuntimeError")
    assert loss_of(tmp_path) == -9.0
    assert len(sources_of(name_of(resolved("loss:loss", tmp_path)))) == 1


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


def test_digests_are_of_the_code_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of what the process imported itself before, and also if the import comes late."""
    late = "def loss(rows):\n    import late\n    return late.factor * rows.sums()\n"
    write(tmp_path, loss=LOSS, common="def factor(): return -1.0\n", other=late, late="factor = -3.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "common", raising=False)
    __import__("common")
    write(tmp_path, common="def factor(): return -500.0\n")
    assert loss_of(tmp_path) == 1500.0
    found = sources_of(f"{tmp_path / 'loss.py'}:loss")
    assert found[str(tmp_path / "common.py")] == digest_of((tmp_path / "common.py").read_bytes())
    other = objective_of(resolved("other:loss", tmp_path))
    found = sources_of(f"{tmp_path / 'other.py'}:loss")
    (tmp_path / "late.py").unlink()
    assert float(other.loss_of(ROWS).loss) == 9.0
    assert found[str(tmp_path / "late.py")] == digest_of(b"factor = -3.0\n")
    del sys.modules["common"]


def test_an_error_names_the_loss_and_the_file_that_it_imports(tmp_path: Path) -> None:
    text = "import common\ndef loss(rows):\n    return -rows.sums()\n"
    write(tmp_path, first=text, common="factor = 1\n", new=text)
    first = resolved("first:loss", tmp_path)
    objective_of(first)
    write(tmp_path, common="factor = 2\n")
    for spec, name in ((first, "first"), (resolved("new:loss", tmp_path), "new")):
        with pytest.raises(ObjectiveError) as error:
            check_unchanged(spec)
        common, loss = tmp_path / "common.py", tmp_path / f"{name}.py"
        assert str(error.value).startswith(
            f"objective.name: {common}, which {loss} imports, has changed or is gone since this process read "
            "it; put it back, or give both files new names, so that a new loss imports the new file; in a"
        )
    write(tmp_path, common_2="factor = 2\n", new_2=text.replace("common", "common_2"))
    check_unchanged(resolved("new_2:loss", tmp_path))
