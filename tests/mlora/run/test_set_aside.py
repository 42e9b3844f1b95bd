"""Tasks set aside and brought back: bit for bit; files that are wrong, and files that nobody needs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from equal_states import assert_equal
from full_disk import fill_disk
from limited_runs import Watching, ask, five_tasks, interrupt, replace_memory, submission
from mlora.config.config_file import resolve_config
from mlora.engine.engine import Engine
from mlora.errors import RunError
from mlora.run.prepare import Prepared, prepare
from mlora.run.reporter import Reporter
from mlora.run.run import resume, train
from mlora.run.task_states import bring_back, set_aside, state_file
from mlora.store.checkpoint import list_checkpoints, save_checkpoint
from mlora.store.run_folder import RunFolder
from mlora.store.state_files import StateFiles
from mlora.tasks.task import Task
from stage_runs import tensors
from tiny_run import lines, run_data, weights

from tests.tolerances import assert_same_up_to_rounding

KINDS: list[dict[str, Any]] = [
    {"optim": "sgd"},
    {"optim": "adamw_torch"},
    {"optim": "adamw_torch_fused"},
]


def prepared(base: Path, folder: Path, **fields: Any) -> Prepared:
    data = run_data(base, folder)
    fp16 = fields.pop("fp16", False)
    data["adapters"] = [data["adapters"][0] | fields]
    return prepare(resolve_config(data | {"fp16": fp16}, folder=folder), Reporter())


def advance(engine: Engine, task: Task, batches: int) -> list[float]:
    losses = []
    for _ in range(batches):
        samples = [task.data.samples[row] for row in task.plan.batch(task.progress.batches)]
        losses.append(engine.forward_backward({task.name: samples})[task.name].loss_sum)
        if task.plan.ends_step(task.progress.batches):
            losses.append(engine.optim_step(task.name).grad_norm)
        task.progress.batches += 1
    return losses


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["optim"])
def test_it_goes_on_bit_for_bit_from_every_point(
    tiny_base: Path, tmp_path: Path, kind: dict[str, Any], fp16: bool
) -> None:
    """Before its first step, in the middle of accumulations, after steps; with dropout."""
    run = prepared(tiny_base, tmp_path, fp16=fp16, **kind)
    with run.engine as engine:
        (task,) = run.table.tasks
        whole, states = [], []
        for _ in range(7):
            states.append(engine.state_dict(task.name))
            whole.append(advance(engine, task, 1))
        states.append(engine.state_dict(task.name))
        engine.remove_adapter(task.name)
        task.progress.batches = 0
        bring_back(engine, task, 0, tmp_path / "states")
        for batch in range(7):
            set_aside(engine, task, tmp_path / "states")
            assert task.name not in engine.adapters
            assert (tmp_path / "states" / state_file(task)).is_file() == (batch > 0)
            bring_back(engine, task, 0, tmp_path / "states")
            assert_equal(engine.state_dict(task.name), states[batch])
            assert advance(engine, task, 1) == whole[batch]
        assert_equal(engine.state_dict(task.name), states[-1])


def _cut(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:900])


def _foreign(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (lambda path, _: path.unlink(), "cannot be read: No such file or directory; first cannot go on"),
        (lambda path, _: path.write_bytes(b""), "cannot be read: it is damaged or incomplete; first cannot"),
        (
            lambda path, _: path.write_bytes(b"no"),
            "cannot be read: it is damaged or incomplete; first cannot",
        ),
        (_cut, "cannot be read: it is damaged or incomplete; first cannot go on"),
        (_foreign, "is not the state of first after 4 micro-batches"),
        (lambda path, _: torch.save([1], path), "is not the state of first after 4 micro-batches"),
        (
            lambda path, _: torch.save({"task": "first", "batches": 4, "state": 3}, path),
            "does not hold an adapter's state (TypeError",
        ),
        (
            lambda path, _: torch.save({"task": "first", "batches": 4, "state": {}}, path),
            ".pt: state: expected what state_dict returned, but it lacks dropout_seed",
        ),
    ],
)
def test_a_file_that_is_wrong_is_one_line(
    tiny_base: Path, tmp_path: Path, break_it: Any, expected: str
) -> None:
    run = prepared(tiny_base, tmp_path)
    with run.engine as engine:
        (task,) = run.table.tasks
        advance(engine, task, 3)
        set_aside(engine, task, tmp_path / "states")
        other = tmp_path / "states" / state_file(task)
        bring_back(engine, task, 0, tmp_path / "states")
        advance(engine, task, 1)
        set_aside(engine, task, tmp_path / "states")
        path = tmp_path / "states" / state_file(task)
        break_it(path, other)
        with pytest.raises(RunError) as error:
            bring_back(engine, task, 0, tmp_path / "states")
    assert expected in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_random_bytes_are_one_line(tiny_base: Path, tmp_path: Path) -> None:
    run = prepared(tiny_base, tmp_path)
    generator = torch.Generator().manual_seed(3)
    with run.engine as engine:
        (task,) = run.table.tasks
        advance(engine, task, 1)
        set_aside(engine, task, tmp_path / "states")
        path = tmp_path / "states" / state_file(task)
        whole = path.read_bytes()
        for _ in range(200):
            place = int(torch.randint(len(whole), (), generator=generator))
            head = bytes(torch.randint(256, (12,), generator=generator, dtype=torch.uint8).tolist())
            path.write_bytes(head if place % 2 else whole[:place])
            with pytest.raises(RunError, match="cannot be read: it is damaged or incomplete"):
                bring_back(engine, task, 0, tmp_path / "states")


def preempted(base: Path, folder: Path, run: str) -> tuple[dict[str, Any], Watching]:
    """A config, and what submits a task that goes before all others."""
    data = five_tasks(base, folder, output_dir=run)
    content = submission(data, folder, "urgent", priority=9)
    return data, Watching({("high", 1): lambda: ask(folder / run, "submit", "urgent", content)})


def test_a_full_disk_while_a_task_is_set_aside(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_memory(monkeypatch)
    data, watching = preempted(tiny_base, tmp_path, "whole")
    train(resolve_config(data, folder=tmp_path), reporter=watching)
    data, watching = preempted(tiny_base, tmp_path, "run")

    config = resolve_config(data, folder=tmp_path)
    with monkeypatch.context() as patch:
        fill_disk(patch, lambda path: path.parent.name == "states")
        with pytest.raises(RunError) as error:
            train(config, reporter=watching)
    assert str(error.value).startswith(f"{tmp_path}/run/states/first-00000001.pt: cannot be saved: ")
    assert resume(tmp_path / "run").exit_code == 0
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert not (tmp_path / "run" / "states").exists()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def of(kept: dict[str, str], iteration: int) -> dict[str, Any]:
    return {"iteration": iteration, "decisions": {"kept": kept}, "tasks": {}, "config": {}}


def test_files_go_when_no_checkpoint_names_them(tmp_path: Path) -> None:
    states, checkpoints = tmp_path / "states", tmp_path / "checkpoints"
    states.mkdir()
    files, tasks = StateFiles(RunFolder(tmp_path)), ["a", "b", "c", "nobody"]
    a, b, c = (f"{name}-00000001.pt" for name in "abc")
    for number, kept in enumerate([[a], [b], [b, c], []], start=1):
        for name in kept:
            (states / name).touch()
        (states / f"nobody-0000000{number}.pt").touch()
        payload = of({k: k for k in kept}, number)
        files.name(payload)
        files.prune(tasks)  # while the checkpoint is written
        assert set(kept) <= set(names(states))
        save_checkpoint(checkpoints, number, payload, keep=2)
        files.prune(tasks)
        wanted = {1: [a], 2: [a, b], 3: [b, c], 4: [b, c]}
        assert names(states) == wanted[number]
    # another process knows what checkpoints name from them alone
    again = StateFiles(RunFolder(tmp_path))
    again.name(of({}, 5))
    (states / ".b-00000002.pt.tmp").touch()
    again.prune(tasks)
    assert names(states) == [b, c]
    newest = list_checkpoints(checkpoints)[-1]
    newest.write_bytes(b"damaged")
    StateFiles(RunFolder(tmp_path)).prune(tasks)
    assert names(states) == [b, c]  # who knows
    newest.unlink()
    save_checkpoint(checkpoints, 5, of({}, 5), keep=1)
    again.prune(tasks)
    assert not states.exists()


def test_a_run_keeps_what_its_checkpoints_name(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_memory(monkeypatch)
    data, watching = preempted(tiny_base, tmp_path, "run")
    data["defaults"]["save_steps"] = 1
    run = tmp_path / "run"
    train(resolve_config(data, folder=tmp_path), reporter=watching)
    assert names(run / "states") == []
    data, watching = preempted(tiny_base, tmp_path, "other")
    data["defaults"]["save_steps"] = 1
    watching.actions = {**watching.actions, ("urgent", 2): interrupt}
    train(resolve_config(data, folder=tmp_path), reporter=watching)
    run = tmp_path / "other"
    named = {
        name
        for path in list_checkpoints(run / "checkpoints")
        for name in torch.load(path, weights_only=True)["decisions"]["kept"].values()
    }
    assert named == {"first-00000001.pt"} == set(names(run / "states"))
    while resume(run, reporter=Watching({1: interrupt})).status == "interrupted":
        found = set(names(run / "states"))
        for path in list_checkpoints(run / "checkpoints"):
            assert set(torch.load(path, weights_only=True)["decisions"]["kept"].values()) <= found
    assert not (run / "states").exists()
    assert lines(run) == lines(tmp_path / "run")
    assert weights(run) == weights(tmp_path / "run")


def broken(base: Path, folder: Path, run: str, break_it: Any) -> tuple[dict[str, Any], Watching]:
    """As `preempted`, with the file of the task that gives way broken while it lies there."""
    data, watching = preempted(base, folder, run)
    path = folder / run / "states" / "first-00000001.pt"
    watching.actions = {**watching.actions, ("urgent", 2): lambda: break_it(path, path)}
    return data, watching


@pytest.mark.parametrize(
    "break_it",
    [_cut, lambda path, _: path.unlink(), lambda path, _: _without_moments(path)],
    ids=["cut", "gone", "lacks something"],
)
def test_a_damaged_file_stops_its_task_alone(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, break_it: Any
) -> None:
    replace_memory(monkeypatch)
    data, watching = preempted(tiny_base, tmp_path, "whole")
    train(resolve_config(data, folder=tmp_path), reporter=watching)
    data, watching = broken(tiny_base, tmp_path, "run", break_it)
    result = train(resolve_config(data, folder=tmp_path), reporter=watching)
    states = {name: adapter.state for name, adapter in result.adapters.items()}
    assert states.pop("first") == "stopped"
    assert set(states.values()) == {"finished"}
    assert result.exit_code == 1
    path = tmp_path / "run" / "states" / "first-00000001.pt"
    assert str(path) in result.adapters["first"].message
    found, expected = tensors(tmp_path / "run"), tensors(tmp_path / "whole")
    assert found.keys() == expected.keys() - {"first"}
    for name, adapter in found.items():  # in other batches, without `first`
        for key, weight in expected[name].items():
            assert_same_up_to_rounding(adapter[key], weight, f"{name}: {key}")


def _without_moments(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    del content["state"]["moments"]
    torch.save(content, path)
