"""Fixtures of the training system's tests."""

import hashlib
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Run, invoke
from mlora.engine.dry_run import DryStage
from tiny_run import run_data, save_base, write_run

from mlora_ext.adapters.trained_parts import labels_of


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of two layers and a byte-level tokenizer."""
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture takes half of the time of a small run. Tests of pictures are marked `draws`."""
    if request.node.get_closest_marker("draws") is None:
        for module in ("mlora.run.loop", "mlora.run.run"):
            if module in sys.modules:
                monkeypatch.setattr(f"{module}.plot_losses", lambda *_: None)
        if "mlora.sweep.outcome" in sys.modules:
            monkeypatch.setattr("mlora.sweep.outcome.plot_trials", lambda *_: None)


@pytest.fixture(autouse=True)
def dry_runs_once(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A dry run is a function of model, adapters and shapes, and takes seconds: each is made once.

    The processes of one session share the results through files.
    """
    plain, base = DryStage.activations, tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "dry-runs"
    folder.mkdir(exist_ok=True)

    def activations(self: DryStage, loras: Any, shapes: Any, *, whole: bool = False) -> Any:
        config = self._model.config.to_dict()
        adapters = {name: lora.to_dict() | labels_of(lora) for name, lora in loras.items()}
        for one in (config, *adapters.values()):  # where they come from changes no size
            one.pop("_name_or_path", None)
            one.pop("base_model_name_or_path", None)
        key = repr((config, self._options, self._span, shapes, whole, adapters))
        path = folder / hashlib.sha256(key.encode()).hexdigest()
        if not path.exists():
            content = pickle.dumps(plain(self, loras, shapes, whole=whole))
            unfinished = path.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(content)
            unfinished.rename(path)
        return pickle.loads(path.read_bytes())

    monkeypatch.setattr(DryStage, "activations", activations)


@pytest.fixture
def run() -> Run:
    """The command line."""
    return invoke


@pytest.fixture(scope="session")
def trained(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, whose adapters the tests only read."""
    folder = tmp_path_factory.mktemp("trained")
    assert invoke("train", write_run(folder, run_data(tiny_base, folder))).exit_code == 0
    return folder / "run"
