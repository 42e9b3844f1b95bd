"""What a pipeline's processes have in common: they join it, and leave it in order or with one line."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mlora.run.stages import facts
from safetensors.torch import save_file
from transformers import LlamaConfig

from tests.mlora.stages import stages

JOIN = """
from types import SimpleNamespace
import mlora.run.stages
mlora.run.stages.end_with_parent = lambda parent: None  # the tests' fork server is no launcher
from mlora.cli.common import errors_as_lines
from mlora.errors import RunError
from mlora.run.stages import membership
import typer
values = {"seed": 1}
config = SimpleNamespace(pipeline=SimpleNamespace(stages=2, replicas=1, processes=2))
mlora.run.stages.facts = lambda config: {"config": values}
def joined(work):
    try:
        with errors_as_lines(), membership(config) as member:
            work(member)
    except typer.Exit as end:
        sys.exit(end.exit_code)
def fail(member):
    raise RunError("disk full")
def idle(member):
    print("ready", flush=True)
    time.sleep(60)
"""


def ends(*bodies: str) -> tuple[list[int | None], list[str], list[str]]:
    with stages(*[JOIN + body for body in bodies]) as running:
        codes, outputs, errors = running.end()
    return codes, outputs, [line for text in errors for line in text.splitlines() if "error: " in line]


def test_members_join_and_leave() -> None:
    """Stage 0 may find that there is nothing to do: the others wait for no work then."""
    show = "joined(lambda member: print(member.world.rank, member.world.size))"
    serve = "joined(lambda member: mlora.run.stages.run_stage(config, member))"
    assert ends(show, serve) == ([0, 0], ["0 2\n", ""], [])


@pytest.mark.parametrize("stage", [0, 1])
def test_error_of_a_run_is_one_line(stage: int) -> None:
    bodies = ["joined(idle)"] * 2
    bodies[stage] = "joined(fail)"
    codes, _, lines = ends(*bodies)
    assert codes == [1, 1]
    assert lines == ["error: disk full"]


def test_error_of_all_is_one_line() -> None:
    codes, _, lines = ends("joined(fail)", "joined(fail)")
    assert codes == [1, 1]
    assert lines == ["error: disk full"]


def test_processes_that_differ_are_one_line() -> None:
    codes, _, lines = ends("joined(idle)", "values['seed'] = 2; joined(idle)")
    assert codes == [1, 1]
    assert len(lines) == 1
    assert ") has config.seed 2, stage 0 (" in lines[0]


def test_signal_that_follows_a_death_does_not_hide_it() -> None:
    with stages(*[JOIN + "joined(idle)"] * 2) as running:
        running.until_ready()
        running.signal(1, signal.SIGKILL)
        running.signal(0, signal.SIGTERM)  # as torchrun does
        codes, _, errors = running.end()
    assert codes == [1, -signal.SIGKILL]
    assert [line.split(" (")[0] for line in errors[0].splitlines()] == ["error: stage 1"]


def test_signal_before_the_loop_ends_all_quietly() -> None:
    with stages(*[JOIN + "joined(idle)"] * 2) as running:
        running.until_ready()
        running.signal(0, signal.SIGTERM)
        codes, _, errors = running.end()
    assert codes == [128 + signal.SIGTERM, 1]
    assert not [line for text in errors for line in text.splitlines() if line.startswith("error")]


def test_number_of_processes_must_be_that_of_the_config() -> None:
    codes, _, lines = ends(*["config.pipeline.stages = config.pipeline.processes = 3; joined(idle)"] * 2)
    assert codes == [1, 1]
    assert len(lines) == 1
    assert lines[0].startswith(
        "error: pipeline.stages: is 3, but the launcher has started 2 processes; start"
    )


def test_machines_may_have_the_base_in_other_places(tmp_path: Path) -> None:
    found = []
    for layers, place, weight in ((2, "a", 1.0), (2, "b", 1.0), (3, "c", 1.0), (2, "d", 2.0)):
        LlamaConfig(num_hidden_layers=layers).save_pretrained(tmp_path / place)
        save_file({"w": torch.full((300, 300), weight)}, tmp_path / place / "model.safetensors")
        config: Any = SimpleNamespace(
            base_model=str(tmp_path / place), base_folder=None, model_dump=lambda mode, exclude: {}
        )
        found.append(facts(config))
    assert found[0] == found[1] != found[2]
    assert found[3]["base_model"] == found[0]["base_model"]
    assert found[3]["base_model files"] != found[0]["base_model files"]
