"""The keys `base_gemm` and `pack_base` of a run."""

import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from mlora import train
from mlora.config.config_file import load_config, resolve_config
from mlora.errors import RunError
from mlora.run import machine_choice
from mlora.run.machine_choice import base_gemm_of_machine
from tiny_run import losses, run_data

from mlora_ext.frozen import base_gemm as gemm
from mlora_ext.frozen.packed import packs
from tests.mlora.limited_runs import Watching


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's cache folder, and the process's library as it was."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = gemm.base_gemm_of(torch.float32)
    yield tmp_path / "cache" / "mlora" / "base_gemm"
    gemm.set_base_gemm(before)


@pytest.mark.parametrize("library", ["aten", "onednn"])
def test_the_first_run_of_a_machine_measures_for_all(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path, library: str
) -> None:
    """Whatever the process used, and whatever a clock says later; a run goes on with its own choice."""
    other = "aten" if library == "onednn" else "onednn"
    monkeypatch.setattr(machine_choice, "_faster", lambda _: library)
    told = Watching()
    data = run_data(tiny_base, tmp_path, base_gemm=None)
    data["defaults"]["max_steps"] = data["adapters"][1]["max_steps"] = 1
    train(resolve_config(data, folder=tmp_path), reporter=told)
    (file,) = own_cache.iterdir()
    assert f"base_gemm: {library}, as measured on this machine; to measure again, delete {file}" in told.lines
    gemm.set_base_gemm({"float32": other})
    monkeypatch.setattr(machine_choice, "_faster", lambda _: other)
    train(resolve_config(data, folder=tmp_path), overwrite=True)
    assert load_config(tmp_path / "run" / "config.yaml").base_gemm == library
    assert gemm.base_gemm_of(torch.float32) == {"float32": library}
    file.unlink()
    train(load_config(tmp_path / "run" / "config.yaml"), overwrite=True)
    assert gemm.base_gemm_of(torch.float32) == {"float32": library}


def test_runs_that_begin_at_the_same_time_agree(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    answers, both = iter(["aten", "onednn"]), threading.Barrier(2)

    def measure(_: object) -> str:
        both.wait(timeout=60)
        return next(answers)

    monkeypatch.setattr(machine_choice, "_faster", measure)
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(base_gemm_of_machine, torch.float32, Watching()) for _ in range(2)]
        assert len({each.result() for each in asked}) == 1


def test_a_choice_that_cannot_be_kept_is_the_run_s_own(own_cache: Path) -> None:
    def told() -> str:
        base_gemm_of_machine(torch.float32, heard := Watching())
        (line,) = heard.lines
        return line

    told()
    (file,) = own_cache.iterdir()
    file.write_text('{"base_gemm": "mkl"}')
    assert re.search(f"(aten|onednn), measured for this run only: {file} is damaged; delete it", told())
    shutil.rmtree(own_cache)
    own_cache.touch()
    assert re.search(r"measured for this run only: \[Errno 20\] Not a directory|File exists", told())


def test_what_is_measured_is_what_the_operators_offer() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert machine_choice._faster(dtype) in ("aten", "onednn")
    assert machine_choice._faster(torch.float16) == "aten"
    assert base_gemm_of_machine(torch.float64, Watching()) is None


def test_pack_base_is_a_key_of_the_run(tiny_base: Path, tmp_path: Path) -> None:
    """The same run to rounding; a run goes on with or without it."""
    if not packs(torch.empty(1, 1)):
        pytest.skip("this torch has no oneDNN")
    packed = run_data(tiny_base, tmp_path, pack_base=True)
    train(resolve_config(packed, folder=tmp_path))
    assert load_config(tmp_path / "run" / "config.yaml").pack_base
    train(resolve_config(run_data(tiny_base, tmp_path, output_dir=str(tmp_path / "plain")), folder=tmp_path))
    for name in ("first", "second"):
        found = [losses(tmp_path / folder, name) for folder in ("run", "plain")]
        assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_pack_base_that_does_not_serve_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path, pack_base=True, fp16=True)
    with pytest.raises(
        RunError, match=r"^pack_base: \S+: oneDNN does not serve float16 weights of shape .* on cpu"
    ):
        train(resolve_config(data, folder=tmp_path))
    assert not (tmp_path / "run").exists()


def test_a_base_gemm_that_does_not_serve_is_refused(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(choices: dict[str, str]) -> None:
        raise ValueError(f"base_gemm: {choices['float32']!r} for float32: not on this processor; use 'aten'")

    monkeypatch.setattr("mlora.engine.stage_worker.set_base_gemm", choose)
    with pytest.raises(RunError, match=r"^base_gemm: 'onednn' for float32: not on this"):
        train(resolve_config(run_data(tiny_base, tmp_path, base_gemm="onednn"), folder=tmp_path))
    assert not (tmp_path / "run").exists()
