"""Objectives of one's own whose units or losses are no good: they stop their own adapter, not the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlora
import pytest
from mlora.config.config_file import resolve_config
from mlora.objectives import registry
from mlora.objectives.objective import LossOfOwner, Objective
from mlora.objectives.registry import register_objective
from mlora.run.validation import validate

from tests.mlora.tiny_run import losses, run_data


class Low(Objective):
    """Counts samples that hold a token below 20: some batches have none."""

    def units(self, samples: Sequence[Any], trained: int) -> int:
        return sum(min(sample.input_ids) < 20 for sample in samples)

    def loss(self, log_p: Any, lengths: Any) -> LossOfOwner:
        return LossOfOwner(-log_p.double().sum())


class Zero(Low):
    def units(self, samples: Sequence[Any], trained: int) -> int:
        return 0


class Negative(Low):
    def units(self, samples: Sequence[Any], trained: int) -> int:
        return -3


@pytest.fixture
def objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_OBJECTIVES", dict(registry._OBJECTIVES))
    for kind in (Low, Zero, Negative):
        register_objective(kind.__name__.lower(), kind)


@pytest.mark.usefixtures("objectives")
@pytest.mark.parametrize("evaluated", [True, False])
@pytest.mark.parametrize("name", ["zero", "negative", "low"])
@pytest.mark.parametrize("stages", [1, 2])
def test_units_that_divide_nothing(
    name: str, evaluated: bool, stages: int, tiny_base: Path, tmp_path: Path
) -> None:
    data = run_data(tiny_base, tmp_path, pipeline={"stages": stages})
    mlora.train(resolve_config(data | {"output_dir": str(tmp_path / "alone")}, folder=tmp_path))
    data["adapters"][0] |= {"objective": name, "max_steps": 30, "per_device_train_batch_size": 1}
    data["adapters"][0] |= {"gradient_accumulation_steps": 1}
    if not evaluated:
        data["adapters"][0] |= {"eval_dataset": None, "eval_steps": None}
    found = mlora.train(resolve_config(data, folder=tmp_path)).adapters
    assert found["first"].state == "stopped"
    assert ("units: expected 0 or more, got -3" if name == "negative" else "sum to 0") in found[
        "first"
    ].message
    assert found["second"].state == "finished"
    for steps in (losses(tmp_path / "run", "second"), losses(tmp_path / "alone", "second")):
        assert len(steps) == 9
    assert losses(tmp_path / "run", "second") == pytest.approx(losses(tmp_path / "alone", "second"), rel=1e-5)


LOSS = """
calls = 0

def loss(rows):
    global calls
    calls += 1
    if calls > {after}:
        raise NameError("torhc")
    return -rows.sums()
"""


def test_a_loss_that_fails_while_activations_are_planned(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "planned.py").write_text(LOSS.format(after=1))
    (tmp_path / "checked.py").write_text(LOSS.format(after=1))
    data = run_data(tiny_base, tmp_path, offload={"activations": "auto"})
    for adapter in data["adapters"]:
        adapter |= {"eval_dataset": None, "eval_steps": None}
    data["adapters"][0] |= {"objective": "checked:loss"}
    assert validate(resolve_config(data, folder=tmp_path)).placement is not None
    data["adapters"][0] |= {"objective": "planned:loss"}
    found = mlora.train(resolve_config(data, folder=tmp_path)).adapters
    assert found["first"].state == "stopped"
    assert "loss failed: NameError: torhc" in found["first"].message
    assert found["second"].state == "finished"
