"""The example with callbacks: the adapter whose loss is low enough ends, and the others go on."""

import sys
from pathlib import Path

import callbacks
import pytest
from mlora.store.run_folder import read_metrics


def test_it_stops_the_one_that_is_good_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(callbacks.StopAtLoss, "__init__", lambda self, enough: setattr(self, "enough", 20.0))
    monkeypatch.setattr(sys, "argv", ["callbacks.py", "--output", str(tmp_path / "run"), "--steps", "2"])
    callbacks.main()
    told = capsys.readouterr().out.splitlines()
    assert "reverse: finished at step 1 stopped by StopAtLoss" in told
    assert [f"{name}: finished at step 2" in told for name in ("sums", "sort", "dates")] == [True] * 3
    losses = {
        line["step"]: line["eval_loss"]
        for line in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if line["adapter"] == "reverse" and "eval_loss" in line
    }
    assert f"reverse: epoch 0.00, held-out loss {losses[0]:.4f}" in told
    assert f"reverse: epoch 0.02, held-out loss {losses[1]:.4f}" in told
