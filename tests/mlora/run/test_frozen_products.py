"""The keys `base_gemm` and `pack_base` of a run."""

from pathlib import Path

import pytest
import torch
from mlora import train
from mlora.config.config_file import load_config, resolve_config
from mlora.errors import RunError
from tiny_run import losses, run_data

from mlora_ext.frozen import base_gemm as gemm
from mlora_ext.frozen.packed import packs


@pytest.mark.parametrize("library", ["aten", "onednn"])
def test_base_gemm_is_measured_unless_it_is_named(tiny_base: Path, tmp_path: Path, library: str) -> None:
    """What a run was trained with stands in its config.yaml."""
    before = gemm.base_gemm_of(torch.float32)
    try:
        gemm.set_base_gemm({"float32": library})
        train(resolve_config(run_data(tiny_base, tmp_path, base_gemm=None), folder=tmp_path))
        assert load_config(tmp_path / "run" / "config.yaml").base_gemm == library
        gemm.set_base_gemm({"float32": "aten" if library == "onednn" else "onednn"})
        train(load_config(tmp_path / "run" / "config.yaml"), overwrite=True)
        assert gemm.base_gemm_of(torch.float32) == {"float32": library}
    finally:
        gemm.set_base_gemm(before)


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
