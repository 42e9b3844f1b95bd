"""Files of own losses that change while a run trains: it trains the code that it has read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlora
import pytest
from mlora.config.config_file import resolve_config
from mlora.config.run_config import RunConfig
from mlora.engine.stage_worker import StageWorker
from mlora.errors import RunError
from mlora.objectives import function_file
from mlora.objectives.objective import LogProbs
from mlora.objectives.options import ObjectiveError
from mlora.objectives.registry import objective_of, pinned
from mlora.run.run import resume
from torch import tensor, zeros

from tests.mlora.limited_runs import Watching, ask, interrupt, submission
from tests.mlora.tiny_run import losses, run_data, weights

BEFORE = "def loss(rows):\n    return -rows.sums()\n"
AFTER = BEFORE.replace("-rows", "-5 * rows")


def config_of(base: Path, folder: Path, **first: Any) -> RunConfig:
    """A run of one adapter with the loss of `mine.py`."""
    (folder / "mine.py").write_text(BEFORE)
    data = run_data(base, folder)
    data["adapters"] = [data["adapters"][0] | {"objective": "mine:loss", "eval_dataset": None}]
    data["adapters"][0] |= {"eval_steps": None, "gradient_accumulation_steps": 1} | first
    return resolve_config(data, folder=folder)


def new_process() -> None:
    """Forgets what was read, as a new process does."""
    function_file._folder.cache_clear()


def test_an_edit_while_it_trains_is_seen_by_a_resume(tiny_base: Path, tmp_path: Path) -> None:
    """Checkpoints after the edit hold the digest of the code that trains."""
    config, file = config_of(tiny_base, tmp_path), tmp_path / "mine.py"
    told = Watching({("first", 1): lambda: file.write_text(AFTER), ("first", 3): interrupt})
    assert mlora.train(config, reporter=told).status == "interrupted"
    with pytest.raises(RunError, match=r"^first: objective\.name: .*mine\.py has changed or is gone since"):
        resume(tmp_path / "run")
    new_process()
    with pytest.raises(RunError, match=r"^first: its loss \(\S+mine\.py\) changed since the checkpoint; put"):
        resume(tmp_path / "run")
    file.write_text(BEFORE)
    new_process()
    assert resume(tmp_path / "run").status == "finished"
    whole = config.model_copy(update={"output_dir": str(tmp_path / "whole")})
    assert mlora.train(whole).status == "finished"
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert losses(tmp_path / "run", "first") == losses(tmp_path / "whole", "first")


def test_a_new_run_does_not_train_old_code(tiny_base: Path, tmp_path: Path) -> None:
    config = config_of(tiny_base, tmp_path)
    objective_of(config.adapters[0].objective)
    (tmp_path / "mine.py").write_text(AFTER)
    with pytest.raises(RunError) as error:
        mlora.train(config)
    (line,) = str(error.value).splitlines()
    assert line.startswith("first: objective.name: ")
    assert "mine.py has changed or is gone since this process read it; put it back, or give" in line
    assert "in a notebook, you can also restart Python" in line


@pytest.mark.parametrize("leave", [Path.unlink, lambda file: file.rename(file.with_name("other.py"))])
def test_a_file_that_goes_does_not_end_the_run(
    tiny_base: Path, tmp_path: Path, leave: Callable[[Path], object]
) -> None:
    config = config_of(tiny_base, tmp_path)
    told = Watching({("first", 1): lambda: leave(tmp_path / "mine.py")})
    result = mlora.train(config, reporter=told)
    assert (result.status, result.adapters["first"].step) == ("finished", 6)


def test_a_submission_after_an_edit_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    """The run would train the code that it has read. One in a file of another name trains."""
    config = config_of(tiny_base, tmp_path)
    data = run_data(tiny_base, tmp_path)

    def submit() -> None:
        for file in ("mine", "new"):
            (tmp_path / f"{file}.py").write_text(AFTER)
            ask(tmp_path / "run", "submit", file, submission(data, tmp_path, file, objective=f"{file}:loss"))

    result = mlora.train(config, reporter=Watching({("first", 1): submit}))
    states = {name: adapter.state for name, adapter in result.adapters.items()}
    assert states == {"first": "finished", "mine": "refused", "new": "finished"}
    message = result.adapters["mine"].message
    assert "mine.py has changed or is gone since this process read it; put it back" in message


def test_a_stage_that_read_other_code_stops_the_adapter(tmp_path: Path) -> None:
    """Each process of a pipeline reads the file itself."""
    (tmp_path / "mine.py").write_text(BEFORE)
    spec = json.loads(json.dumps(pinned(f"{tmp_path / 'mine.py'}:loss")))
    rows = LogProbs(tensor([-1.0, -2.0]), [2], zeros(0))
    assert float(objective_of(spec).loss_of(rows).loss) == 3.0
    (tmp_path / "mine.py").write_text(AFTER)
    new_process()
    with pytest.raises(ObjectiveError, match=r"mine\.py:loss: this process read other code than the first"):
        objective_of(spec)
    worker = StageWorker.__new__(StageWorker)
    worker.__dict__["_objectives"] = {}
    with pytest.raises(RuntimeError, match="this process read other code than the first stage"):
        worker.objective(spec).loss_of(rows)
