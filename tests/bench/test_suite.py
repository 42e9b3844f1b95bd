"""Every section of the suite on tiny sizes, and that a wrong or missing contender is told of."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

OURS = "ours, cpu"


def suite(*arguments: object) -> int:
    from microbench import command

    return command.main(["--quick", "--rounds", "1", "--device", "cpu", *map(str, arguments)])


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "suite.json").read_text())


def test_layer_sections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite("operators", "linears", "adapters", "ablation", "--check", "--out", tmp_path) == 0
    data = results(tmp_path)
    assert not data["failed"]
    assert not data["not_run"]
    assert {row["section"] for row in data["rows"]} == {"operators", "linears", "adapters", "ablation"}
    for row in data["rows"]:
        assert OURS in row["contenders"]
        for name, found in row["contenders"].items():
            assert found["seconds"] > 0
            assert found["operator_calls"] > 0
            assert found["peak_bytes"] > 0
            assert "launches" not in found, "a CPU launches nothing"
            ratio = found["seconds"] / row["contenders"]["frozen"]["seconds"]
            assert found["ratio_to_frozen"] == pytest.approx(ratio)
            assert name == "frozen" or found["flops_per_second"] > 0
        assert row["limit"]["ratio_to_frozen"] > 1
    many = {row["adapters"]: row for row in data["rows"] if row["section"] == "adapters"}
    assert set(many) == {1, 2, 4}
    calls = {
        name: [many[n]["contenders"][name]["operator_calls"] for n in many] for name in (OURS, "PEFT loop")
    }
    assert calls[OURS][0] == calls[OURS][2]
    assert calls["PEFT loop"][2] > 3 * calls["PEFT loop"][0]
    layers = data["layers"]
    assert {layer["layout"] for layer in layers} == {"balanced", "skewed"}
    mine = [row for row in data["rows"] if row["section"] == "linears" and row["layout"] == "skewed"]
    expected = sum(row["count"] * row["contenders"][OURS]["seconds"] for row in mine)
    assert layers[1]["seconds"][OURS] == pytest.approx(expected)
    for key in ("processor", "torch", "commit", "command", "date"):
        assert data["machine"][key]
    assert "linears" in data["machine"]["command"]
    assert "op calls" in (tmp_path / "suite.txt").read_text()
    assert (tmp_path / "suite.png").stat().st_size > 10_000
    assert "seven linears of quick" in capsys.readouterr().out


def test_layers_that_share_x(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite("fused", "--check", "--out", tmp_path) == 0
    data = results(tmp_path)
    assert [layer["model"] for layer in data["layers"]] == ["quick, fused"] * 2
    for row, layer in zip(data["rows"], data["layers"], strict=True):
        assert set(row["contenders"]) == {
            "frozen",
            f"{OURS}, layer by layer",
            f"{OURS}, fused",
            f"{OURS}, fused, p=0",
        }
        ratio = row["contenders"][f"{OURS}, fused"]["ratio_to_frozen"]
        assert layer["ratio_to_frozen"][f"{OURS}, fused"] == pytest.approx(ratio)
    assert "seven linears of quick, fused" in capsys.readouterr().out


def test_ablation_measures_the_temporaries(tmp_path: Path) -> None:
    assert suite("ablation", "--rows", 4096, "--adapters", 2, "--out", tmp_path) == 0
    for row in results(tmp_path)["rows"]:
        memory = {name: found["peak_bytes"] for name, found in row["contenders"].items()}
        # the parts of y at least: all of them at once, beside y
        assert memory["parts, cat, add"] > memory["addmm_ loop"] + 4096 * row["d_out"] * 4


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_model_sections(tmp_path: Path, dtype: str) -> None:
    assert suite("decoder", "step", "--check", "--dtype", dtype, "--out", tmp_path) == 0
    data = results(tmp_path)
    decoder, step = data["rows"]
    assert set(decoder["contenders"]) == {"frozen", "PEFT loop", OURS}
    assert decoder["limit"]["ratio_to_frozen"] > 1
    assert set(step["contenders"]) == {"frozen", "PEFT, one after the other", OURS}
    assert step["contenders"][OURS]["tokens_per_second"] > 0


def test_a_wrong_result_is_named_and_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from linear import contenders

    right = contenders.ours

    def wrong(layer: Any, packed: Any = None, backend: Any = None) -> Any:
        """One gradient of one adapter is 3% too large."""
        found = right(layer, packed, backend)
        if backend == "reference":
            return found
        gradients = found.gradients

        def too_large(y: torch.Tensor, keep: bool = False) -> list[torch.Tensor]:
            *others, last = gradients(y, keep)
            return [*others, 1.03 * last]

        found.gradients = too_large
        return found

    monkeypatch.setattr(contenders, "ours", wrong)
    assert suite("ablation", "--out", tmp_path) == 1
    data = results(tmp_path)
    assert all(OURS not in row["contenders"] for row in data["rows"])
    (name, reason), *_ = data["failed"].items()
    assert name == f"check float32: {OURS}"
    assert reason.startswith(f"wrong result: {OURS}, torch.float32: relative error")
    assert f"FAILED {name}" in capsys.readouterr().out


def test_a_peer_that_cannot_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from linear import peers

    def unsupported(layer: Any) -> Any:
        raise RuntimeError("grouped gemm is not supported here\nlong tail")

    monkeypatch.setattr(peers, "grouped_mm", unsupported)
    assert suite("linears", "--layouts", "balanced", "--out", tmp_path) == 0
    data = results(tmp_path)
    name = "check float32: grouped_mm, padded ranks, p=0"
    assert data["skipped"][name] == "RuntimeError: grouped gemm is not supported here"
    assert all("grouped_mm, padded ranks, p=0" not in row["contenders"] for row in data["rows"])


def test_an_error_of_ours_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from linear import contenders

    right = contenders.ours

    def broken(layer: Any, packed: Any = None, backend: Any = None) -> Any:
        if backend == "reference":
            return right(layer, packed, backend)
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(contenders, "ours", broken)
    assert suite("ablation", "--out", tmp_path) == 1
    assert results(tmp_path)["failed"][f"check float32: {OURS}"] == "RuntimeError: out of shared memory"


def test_check_looks_at_the_shape_that_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from linear import contenders

    right = contenders.frozen

    def wrong_when_wide(layer: Any) -> Any:
        found = right(layer)
        if layer.weight.shape == (96, 64) and layer.x.dtype == torch.float32:
            compute = found.compute
            found.compute = lambda: compute() * 1.01
        return found

    monkeypatch.setattr(contenders, "frozen", wrong_when_wide)
    assert suite("ablation") == 0, "the small check does not see it"
    assert suite("ablation", "--check", "--out", tmp_path) == 1
    (name,) = results(tmp_path)["failed"]
    assert name == "quick gate/up, 96 rows, N=3, balanced, float32: frozen"


def test_time_limit_is_told_of(tmp_path: Path) -> None:
    assert suite("linears", "--time-limit", "0", "--out", tmp_path) == 1, "nothing was measured"
    data = results(tmp_path)
    assert len(data["not_run"]) == 8
    assert "out of time, not run: 8 rows, first linears: quick q/o" in (tmp_path / "suite.txt").read_text()


@pytest.mark.usefixtures("no_cuda_kernels")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nonsense"], "SECTION: expected of operators, linears"),
        (["--backend", "cuda"], "--backend: backend 'cuda': this build has no CUDA kernels"),
        (["--rows", "0"], "expected an integer of at least 1, got 0"),
        (["--dropout", "1"], "expected a probability"),
    ],
)
def test_errors_of_the_command_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        suite(*arguments)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_fewer_rows_than_adapters_is_told_of(tmp_path: Path) -> None:
    assert suite("adapters", "--rows", "2", "--adapters", "1", "4", "--out", tmp_path) == 0
    data = results(tmp_path)
    assert [row["adapters"] for row in data["rows"]] == [1]
    assert data["skipped"] == {"quick q/o, 2 rows": "fewer rows than adapters (4)"}


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    from microbench import command

    with pytest.raises(SystemExit):
        command.main(["--device", "cuda"])
    assert "--device: expected a device that this torch sees, got cuda" in capsys.readouterr().err
