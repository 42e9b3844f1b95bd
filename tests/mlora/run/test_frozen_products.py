"""The keys `base_gemm` and `pack_base` of a run."""

import fcntl
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mlora import train
from mlora.config.config_file import load_config, resolve_config
from mlora.engine.engine import Engine
from mlora.errors import RunError
from mlora.run import machine_choice
from mlora.run.machine_choice import base_gemm_of_gpu, base_gemm_of_machine, use_base_gemm
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


def record(rows: int, own: float) -> dict[str, Any]:
    """Of a product for which cuBLAS takes one second."""
    of = {"direction": "forward", "dtype": "bfloat16", "rows": rows, "d_in": 64, "d_out": 32}
    return {**of, "seconds": {"0,0": 1.0, "4,0": own}}


class OnAGPU:
    """Stands in for an engine on a GPU, and for those that measure there."""

    device = torch.device("cuda", 0)

    def __init__(self, *answers: list[dict[str, Any]]) -> None:
        self.answers = answers
        self.known: list[list[dict[str, Any]]] = []

    def measure_base_gemm(self, known: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        self.known.append([*known])
        return self.answers[len(self.known) - 1]


def told_of_gpu(engine: OnAGPU, keep: bool = True) -> list[str]:
    base_gemm_of_gpu(engine, heard := Watching(), keep=keep)  # type: ignore[arg-type]
    return heard.lines


def test_what_was_measured_on_a_gpu_serves_all_runs_there(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    first, both = [record(512, 1.04)], [record(512, 1.04), record(1024, 0.9)]
    choices = "forward 64 -> 32, bfloat16: cublas (1.04) at 512 rows, mlora (0.90) at 1024 rows"
    engine = OnAGPU(both, first, both, both, both)
    assert told_of_gpu(engine, keep=False) == [f"base_gemm: {choices}"]
    assert not own_cache.exists()
    (line,) = told_of_gpu(engine)
    (file,) = own_cache.glob("*.json")
    assert line == f"base_gemm: for each shape as measured here; to measure again, delete {file}"
    told_of_gpu(engine)
    told_of_gpu(engine)
    assert engine.known == [[], [], first, both], "new shapes are added"
    file.write_text('{"times": [{"rows": 3}]}')
    assert told_of_gpu(engine) == [f"base_gemm: measured for this run only: {file} is damaged; delete it"], (
        "and nothing is written over it"
    )
    assert file.read_text() == '{"times": [{"rows": 3}]}'
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU")
    told_of_gpu(other := OnAGPU([]))
    assert other.known == [[]]
    assert len([*own_cache.glob("*.json")]) == 1, "where there is no choice there is no file"


def test_what_is_known_stays_known(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    """Of a run without a choice, of one that cannot write, and of one that waits for another."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    first, second = record(512, 1.04), record(1024, 0.9)
    told_of_gpu(OnAGPU([first]))
    (file,) = own_cache.glob("*.json")
    content = file.read_text()
    assert told_of_gpu(engine := OnAGPU([])) == []
    assert (engine.known, file.read_text()) == ([[first]], content)
    lock = file.with_suffix(".lock")
    lock.unlink()
    lock.mkdir()
    (line,) = told_of_gpu(engine := OnAGPU([first]))
    assert line.startswith("base_gemm: for each shape as measured here")
    (line,) = told_of_gpu(engine := OnAGPU([first, second]))
    assert line.startswith("base_gemm: measured for this run only: [Errno 21] Is a directory")
    assert engine.known == [[first]]
    lock.rmdir()
    with lock.open("w") as held, ThreadPoolExecutor() as pool:
        fcntl.flock(held, fcntl.LOCK_EX)
        heard, engine = Watching(), OnAGPU([first, second])
        waiting = pool.submit(base_gemm_of_gpu, engine, heard, keep=True)  # type: ignore[arg-type]
        while not heard.lines:
            time.sleep(0.01)
        assert heard.lines == ["base_gemm: waiting for another run, which measures"]
        assert not engine.known
        fcntl.flock(held, fcntl.LOCK_UN)
        waiting.result(timeout=60)
    assert json.loads(file.read_text())["times"] == [first, second]


def test_a_run_sets_the_library_of_its_device() -> None:
    engine = SimpleNamespace(device=torch.device("cuda"), base_gemm="mlora")
    for given, expected in (("mlora", "mlora"), ("aten", None), ("cublas", "cublas"), (None, None)):
        use_base_gemm(engine, given)  # type: ignore[arg-type]
        assert engine.base_gemm == expected
    engine.device, engine.base_gemm = torch.device("cpu"), "onednn"
    use_base_gemm(engine, None)  # type: ignore[arg-type]
    assert engine.base_gemm == "onednn"


def test_all_stages_know_what_one_has_measured(tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, stages = [], iter([[record(512, 0.9)], [record(512, 1.1), record(1024, 0.8)], [], []])

    def times(model: object, device: torch.device, given: list) -> list[dict[str, Any]]:
        known.append(given)
        return next(stages)

    monkeypatch.setattr("mlora.engine.stage_worker.base_gemm_times", times)
    with Engine(str(tiny_base), device="cpu", stages=2) as engine:
        found = engine.measure_base_gemm([record(2048, 2.0)])
    assert sorted(one["rows"] for one in found) == [512, 1024]
    assert known == [[record(2048, 2.0)]] * 2 + [found] * 2, "of two measurements all take the same"


def test_a_cpu_has_no_choice_by_shape(tiny_base: Path) -> None:
    with Engine(str(tiny_base), device="cpu") as engine:
        assert engine.measure_base_gemm() == []


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

    monkeypatch.setattr("mlora.engine.base_gemm.set_base_gemm", choose)
    with pytest.raises(RunError, match=r"^base_gemm: 'onednn' for float32: not on this"):
        train(resolve_config(run_data(tiny_base, tmp_path, base_gemm="onednn"), folder=tmp_path))
    assert not (tmp_path / "run").exists()
