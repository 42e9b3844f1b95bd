"""Stages that do not fit each other, the model or the launcher are refused at the start, in one line."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mlora.config.config_file import resolve_config
from mlora.errors import RunError
from mlora.run.run import train
from stage_runs import error_lines, many_kinds, ranks, save_deep_base
from tiny_run import write_run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_deep_base(tmp_path_factory.mktemp("base"))


def refused(folder: Path, base: Path, changes: Sequence[dict[str, Any]], before: str = "") -> str:
    """The line that a run ends with whose ranks each have a RUN.yaml of their own; `before`: of rank 1."""
    arguments = []
    for rank, change in enumerate(changes):
        own = folder / str(rank)
        own.mkdir()
        data = many_kinds(base, own, pipeline={"stages": 2}) | change
        data["adapters"] = data["adapters"][:4]
        arguments.append(["train", write_run(own, data)])
    with ranks(arguments, {1: before}) as running:
        codes, _, errors = running.end(timeout=60)  # who waited for the others would wait for minutes
    assert codes == [1] * len(changes)
    (line,) = error_lines(errors)
    assert "".join(errors) == f"{line}\n"
    assert not (folder / "0" / "run").exists()
    return line


ONE, OTHER = (rf"stage {stage} \(host \S+, pid \d+\)" for stage in (0, 1))


@pytest.mark.parametrize(
    ("change", "key", "values"),
    [
        ({"seed": 4}, "config.seed", (4, 3)),
        ({"bf16": True}, "config.bf16", (True, False)),
        ({"pipeline": {"stages": 3}}, "config.pipeline.stages", (3, 2)),
        ({"pipeline": {"stages": 1}}, "config.pipeline.stages", (1, 2)),
    ],
    ids=str,
)
def test_other_configs(
    base: Path, tmp_path: Path, change: dict[str, Any], key: str, values: tuple[Any, Any]
) -> None:
    line = refused(tmp_path, base, [{}, change])
    expected = f"{OTHER} has {key} {values[0]}, {ONE} has {values[1]}; all stages need the same"
    assert re.fullmatch(f"error: {expected}", line), line


def test_other_version(base: Path, tmp_path: Path) -> None:
    before = """
import mlora.run.stages
plain = mlora.run.stages.version
mlora.run.stages.version = lambda name: "2.11.0" if name == "torch" else plain(name)
"""
    line = refused(tmp_path, base, [{}, {}], before)
    assert re.match(f"error: {OTHER} has torch 2.11.0, {ONE} has ", line), line


def test_other_base_model(base: Path, tmp_path: Path) -> None:
    other = save_deep_base(tmp_path / "other")
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    line = refused(tmp_path, base, [{}, {"base_model": str(other)}])
    assert re.match(f"error: {OTHER} has base_model.rms_norm_eps 1e-05, {ONE} has 1e-06", line), line


def test_weights_that_one_stage_lacks(base: Path, tmp_path: Path) -> None:
    other = shutil.copytree(base, tmp_path / "other")
    (other / "model.safetensors").unlink()
    line = refused(tmp_path, base, [{}, {"base_model": str(other)}])
    missing = r"base_model files missing: there is no \*\.safetensors, stage 0 "
    assert re.match(rf"error: stage 1 \(.*\) has {missing}", line), line


@pytest.mark.parametrize(("stages", "processes"), [(2, 3), (3, 2)])
def test_number_of_processes(base: Path, tmp_path: Path, stages: int, processes: int) -> None:
    line = refused(tmp_path, base, [{"pipeline": {"stages": stages}}] * processes)
    expected = f"error: pipeline.stages: is {stages}, but the launcher has started {processes} processes"
    assert line.startswith(expected)


CUTS = [
    ({"stages": 5}, "pipeline.stages: is 5, but {base} has 4 decoder blocks"),
    (
        {"stages": 2, "partition": [1, 2]},
        "pipeline.partition: [1, 2] adds up to 3, but {base} has 4 decoder blocks",
    ),
]


@pytest.mark.parametrize(("pipeline", "expected"), CUTS, ids=str)
def test_cuts_that_the_model_does_not_allow(
    base: Path, tmp_path: Path, pipeline: dict[str, Any], expected: str
) -> None:
    line = refused(tmp_path, base, [{"pipeline": pipeline}] * pipeline["stages"])
    assert line == "error: " + expected.format(base=base)
    (tmp_path / "here").mkdir()
    data = many_kinds(base, tmp_path / "here", pipeline=pipeline)
    with pytest.raises(RunError, match="^" + re.escape(expected.format(base=base))):
        train(resolve_config(data, folder=tmp_path / "here"))
