"""The suite's own parts for a GPU: clock, launches, memory. They ask for one."""

import json
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_quick_sections(tmp_path: Path) -> None:
    from microbench import command

    arguments = ["linears", "adapters", "decoder", "step", "--quick", "--check", "--device", "cuda"]
    code = command.main([*arguments, "--out", str(tmp_path)])
    data = json.loads((tmp_path / "suite.json").read_text())
    assert data["failed"] == {}
    assert code == 0
    assert data["settings"]["backends"], "no backend of this build serves the GPU"
    assert data["machine"]["architecture"].startswith("sm_")
    for row in data["rows"]:
        for found in row["contenders"].values():
            assert found["launches"] > 0
            assert found["device_seconds"] > 0
            assert found["host"] > 0
            assert found["peak_bytes"] > 0
    many = {row["adapters"]: row["contenders"] for row in data["rows"] if row["section"] == "adapters"}
    for backend in data["settings"]["backends"]:
        launches = {number: each[f"ours, {backend}"]["launches"] for number, each in many.items()}
        assert launches[2] == launches[4], "launches do not grow with the adapters"
    assert many[4]["PEFT loop"]["launches"] > many[2]["PEFT loop"]["launches"]
    assert all(0 <= each["launch_share"] <= 1 for found in many.values() for each in found.values())


def test_clock_and_counts_of_a_large_product() -> None:
    from linear.limits import copy_speed
    from shared.counting import count
    from shared.timing import back_to_back, take_turns

    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    run = lambda: x @ x  # noqa: E731
    timed = take_turns({"product": run}, lambda: None, rounds=5, device="cuda")["product"].seconds
    steady = back_to_back(run, "cuda", 20)
    counts = count(run, "cuda")
    assert timed == pytest.approx(steady, rel=0.5)
    assert counts.launches is not None
    assert 1 <= counts.launches <= 3
    assert counts.device_seconds == pytest.approx(timed, rel=0.5)
    assert x.nbytes <= counts.peak_bytes < 8 * x.nbytes
    assert copy_speed("cuda") > 1e11
