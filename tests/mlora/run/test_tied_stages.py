"""Runs with trained rows of a tied embedding over stages: as on one stage, killed and resumed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import mlora
import pytest
from mlora.config.config_file import resolve_config

from tests.mlora.seam_runs import train_and_resume
from tests.mlora.stage_runs import assert_alike, assert_equal, commands, run_stages, tensors
from tests.mlora.tiny_run import run_data, save_base, write_run
from tests.tolerances import STEADY_EPSILON

KILLED = """
import mlora.engine.stage_worker
plain, calls = mlora.engine.stage_worker.StageWorker.forward, 0
def forward(*arguments, **named):
    global calls
    calls += 1
    if calls == 14:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*arguments, **named)
mlora.engine.stage_worker.StageWorker.forward = forward
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), initializer_range=0.2, tie_word_embeddings=True)


def data_of(base: Path, folder: Path, stages: int) -> dict[str, Any]:
    data = run_data(base, folder, pipeline={"stages": stages})
    data["defaults"]["adam_epsilon"] = 100 * STEADY_EPSILON
    data["adapters"][0]["lora"]["trainable_token_indices"] = [5, 9, 12, 200]
    return data


def test_two_stages_are_one_and_resume_bit_for_bit(base: Path, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    data = data_of(base, tmp_path / "alone", 1)
    mlora.train(resolve_config(data, folder=tmp_path / "alone"))
    whole = train_and_resume(data_of(base, tmp_path, 2), tmp_path)
    assert (
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta" in tensors(whole)["first"]
    )
    assert_alike(whole, tmp_path / "alone" / "run")


@pytest.mark.nightly
def test_a_killed_stage_of_its_own_process_goes_on(base: Path, tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    path = write_run(tmp_path / "whole", data_of(base, tmp_path / "whole", 2))
    assert run_stages(["train", path], 2)[0] == [0, 0]
    path = write_run(tmp_path / "cut", data_of(base, tmp_path / "cut", 2))
    with commands(["train", path], 2, {1: KILLED}) as running:
        assert running.end(timeout=60)[0] == [1, -signal.SIGKILL]
    codes, outputs, errors = run_stages(["resume", tmp_path / "cut" / "run"], 2)
    assert codes == [0, 0], errors
    assert "at iteration 0" not in outputs[0]
    assert_equal(tmp_path / "cut" / "run", tmp_path / "whole" / "run")
