"""Files of own losses, and the files that they import from their folders."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from mlora.objectives.function_file import changed_source, function_of, renew, sources_of
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


DEF = "import torch\nOPS = torch.library.Library('{}', 'DEF')\nOPS.define('f(Tensor x) -> Tensor')\n"


def value(folder: Path, name: str) -> float:
    return float(objective_of(resolved(name, folder)).loss_of(ROWS).loss)


WAYS: Mapping[str, Mapping[str, str]] = {
    "folders without __init__": {
        "loss": "from lib.sub import x\nimport lib.sub.x\nimport lib.sub.x as y\n"
        "def loss(rows): return x.k * lib.sub.x.k * y.k * rows.sums()\n",
        "lib__sub__x": "from . import z\nfrom ..top import k\nassert k == z.k\n",
        "lib__sub__z": "from lib.top import *\n",
        "lib__top": "k = -1.0\n",
    },
    "packages that import each other": {
        "loss": "import lib.b, json, lib.a as a\ndef loss(rows): return lib.b.k() * a.one * rows.sums()\n",
        "lib/__init__": "from .a import one\n",
        "lib__a": "import lib.b\none = 1.0\n",
        "lib__b": "import lib.a\ndef k(): return -lib.a.one\n",
    },
    "a decorator that compiles": {
        "loss": "import torch, common\n@torch.compile(backend='eager')\n"
        "def inner(x):\n    return common.g(x)\ndef loss(rows):\n    return inner(rows.sums())\n",
        "common": "from lib import k\ndef g(x):\n    return x * k\n",
        "lib/__init__": "k = -1.0\n",
    },
    "compiled code that imports": {
        "loss": "import torch\n@torch.compile(backend='eager')\n"
        "def inner(x):\n    import common\n    return common.g(x)\n"
        "def loss(rows):\n    return inner(rows.sums())\n",
        "common": "k = -1.0\ndef g(x):\n    return x * k\n",
    },
    "pickled": {
        "loss": "import common, pickle\ndef own(x): return -x\ndef loss(rows):\n"
        "    for one in (own, common.same, common.One(1)):\n"
        "        assert pickle.loads(pickle.dumps(one)) == one\n"
        "    return own(common.same(rows.sums()))\n",
        "common": "from __future__ import annotations\nimport typing\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass One:\n    a: int\n    b: One | None = None\n"
        "def same(x):\n    typing.get_type_hints(One)\n    return x\n",
    },
    "late": {
        "loss": "def loss(rows):\n    import lib.late\n    return lib.late.k() * rows.sums()\n",
        "lib__late": "def k():\n    from . import later\n    return later.k\n",
        "lib__later": "k = -1.0\n",
    },
    "another loss": {
        "loss": "from second import sign\ndef loss(rows): return sign * rows.sums()\n",
        "second": "import loss\nsign = -1.0\n",
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_import(tmp_path: Path, way: str) -> None:
    """Two folders with files of the same names stay apart, and all files have digests."""
    for folder, factor in (("a", "1.0"), ("b", "2.0")):
        texts = {name: text.replace("1.0", factor) for name, text in WAYS[way].items()}
        write(tmp_path / folder, **texts)
    before = set(sys.modules)
    powers = {"folders without __init__": 3, "packages that import each other": 2, "pickled": 0}
    power = powers.get(way, 1)
    for _ in range(2):
        assert [value(tmp_path / folder, "loss:loss") for folder in "ab"] == [3.0, 3.0 * 2**power]
    tops = {name.replace("/", "__").partition("__")[0] for name in WAYS[way]}
    assert not {name for name in set(sys.modules) - before if name.partition(".")[0] in tops}
    files = sources_of(name_of(resolved("loss:loss", tmp_path / "a")))
    assert len(files) == len(WAYS[way])


def test_a_folder_gives_way_to_a_package_of_its_name(tmp_path: Path) -> None:
    """Files come before packages elsewhere, as beside a script; folders without __init__.py do not."""
    write(tmp_path, peft__data="", yaml="k = -1.0\n")
    write(
        tmp_path,
        loss="import peft, yaml\npeft.LoraConfig\ndef loss(rows): return yaml.k * rows.sums()\n",
    )
    assert value(tmp_path, "loss:loss") == 3.0
    assert [Path(file).name for file in sources_of(f"{tmp_path / 'loss.py'}:loss")] == ["loss.py", "yaml.py"]


def test_names_of_files(tmp_path: Path) -> None:
    write(tmp_path, **{"v1.2-a": "import v1\ndef loss(rows): return v1.k * rows.sums()\n", "v1": "k = -1.0"})
    assert value(tmp_path, "v1.2-a.py:loss") == 3.0
    write(tmp_path, **{"v1/__init__": "", "gone": "import v1.gone\n"})
    with pytest.raises(ObjectiveError, match=r"v1/__init__\.py; rename one of them"):
        objective_of(resolved("v1:loss", tmp_path))
    with pytest.raises(ObjectiveError, match=r"cannot be imported: No module named 'v1\.gone'"):
        objective_of(resolved("gone:loss", tmp_path))


def test_loss_files_of_a_folder_share_its_modules(tmp_path: Path) -> None:
    """What a module registers is registered once; a loss that another imports is the same."""
    text = "import registers\ndef loss(rows): return -rows.sums()\n"
    write(tmp_path, registers=DEF.format("mlora_test_shared"), a=text, b=f"import a\n{text}")
    names = [name_of(resolved(f"{name}:loss", tmp_path)) for name in "ab"]
    first, second = (sys.modules[function_of(name).__module__] for name in names)
    assert first.__dict__["registers"] is second.__dict__["registers"]
    assert second.__dict__["a"] is first
    assert [len(sources_of(name)) for name in names] == [2, 3]


def test_a_module_that_the_process_imported_stays_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, state="calls = []\n")
    write(
        tmp_path, loss="import state\ndef loss(rows):\n    state.calls.append(1)\n    return -rows.sums()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "state", raising=False)
    own = import_module("state")
    assert value(tmp_path, "loss:loss") == 3.0
    assert sys.modules.pop("state") is own
    assert own.__dict__["calls"] == []


def test_files_executed_anew(tmp_path: Path) -> None:
    """From the code that was read; those that cannot be stay as they are."""
    text = "import {0}\ndef loss(rows):\n    {0}.calls.append(1)\n    return -len({0}.calls) * rows.sums()\n"
    ops = DEF.format("mlora_test_anew")
    write(tmp_path / "a", loss=text.format("lib.kept"), lib__kept="calls = []\n")
    write(tmp_path / "b", loss=text.format("ops"), ops=f"calls = []\n{ops}")
    folders = [tmp_path / "a", tmp_path / "b"]
    assert [value(folder, "loss:loss") for folder in folders] == [3.0, 3.0]
    write(tmp_path / "a", lib__kept="raise RuntimeError\n")
    faults = renew([f"{folder / 'loss.py'}:loss" for folder in folders] + ["json:loads"])
    assert len(faults) == 1
    assert "b/loss.py:loss: cannot be imported: RuntimeError: Only a single TORCH_LIBRARY can" in faults[0]
    assert [value(folder, "loss:loss") for folder in folders] == [3.0, 6.0]
