"""Damaged files of a run folder: a resume ends as it would have, or says what is damaged."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.config.config_file import resolve_config
from mlora.errors import RunError
from mlora.run.run import resume, train
from mlora.store.disk import read_tensors, write_tensors

from tests.mlora.equal_states import assert_equal
from tests.mlora.limited_runs import Watching, ask, interrupt
from tests.mlora.tiny_run import lines, random_tokens, write_jsonl

FLIPS = 10
KINDS = {
    "newest checkpoint": "checkpoints/step-*[!0].pt",
    "best weights": "states/best.best-*.pt",
    "paused state": "states/aside-*.pt",
    "finished state": "finished/ended-*.pt",
    "adapter": "adapters/ended/adapter_model.safetensors",
    "adapter's config": "adapters/ended/adapter_config.json",
    "metrics": "metrics.jsonl",
    "samples": "samples.jsonl",
    "queue": "queue.sqlite",
    "config": "config.yaml",
    "summary": "summary.json",
    "environment": "environment.json",
}
"""The last file that matches each pattern is damaged."""


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(content)


def end_of(run: Path) -> tuple[Any, list[str]]:
    """Resumes a run, lets its paused task go on, and returns what it ends with and what it said."""
    said = Watching()
    resume(run, reporter=said)
    if "paused" in (run / "summary.json").read_text():
        ask(run, "unpause", "aside")
        resume(run, reporter=said)
    results = json.loads((run / "summary.json").read_text())["adapters"]
    for result in results.values():
        result.pop("seconds", None)
    files = {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.glob("adapters/*/*")
        if path.name != "README.md"
    }
    samples = run / "samples.jsonl"
    return (lines(run), files, results, samples.read_bytes() if samples.exists() else b""), said.lines


def outcome_of(run: Path, expected: Any) -> str:
    """What a resume of a damaged run comes to, in a word; "OTHER" must not happen."""
    try:
        end, said = end_of(run)
    except RunError as error:
        return "refused" if "\n" not in str(error) else f"OTHER: {error}"
    if end == expected:
        return "said, same end" if any("damaged" in line for line in said) else "same end"
    changed = any("at the checkpoint it was" in line for line in said)  # as after an edit by its user
    return "another end of a config that it says was changed" if changed else f"OTHER: {said}"


@pytest.fixture(scope="module")
def interrupted(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a task with best weights, one that is paused, and one that has ended after the first of its
    two checkpoints."""
    folder = tmp_path_factory.mktemp("damaged")
    rows = [{"prompt": f"{letter}=", "completion": letter.upper()} for letter in "abcdef"]
    write_jsonl(folder / "letters.jsonl", rows)
    write_jsonl(folder / "tokens.jsonl", random_tokens(11, 1))
    lora = {"r": 3, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
    best = {"eval_dataset": "letters", "eval_exact_match": True, "load_best_model_at_end": True}
    data = {
        "base_model": str(tiny_base),
        "output_dir": "run",
        "device": "cpu",
        "base_gemm": "aten",
        "defaults": {"max_steps": 7, "learning_rate": 0.02, "save_steps": 2},
        "datasets": [
            {"name": "letters", "path": "letters.jsonl", "format": "prompt_completion"},
            {"name": "tokens", "path": "tokens.jsonl", "format": "tokens"},
        ],
        "adapters": [
            {"name": "best", "dataset": "letters", "eval_steps": 1, "lora": lora, **best},
            {"name": "aside", "dataset": "tokens", "lora": lora},
            {"name": "ended", "dataset": "tokens", "max_steps": 5, "save_steps": None, "lora": lora},
        ],
    }
    run = folder / "run"
    actions = {("best", 1): lambda: ask(run, "pause", "aside"), ("best", 6): interrupt}
    assert train(resolve_config(data, folder=folder), reporter=Watching(actions)).status == "interrupted"
    return run


@pytest.fixture(scope="module")
def undisturbed(interrupted: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the run ends with."""
    end, said = end_of(shutil.copytree(interrupted, tmp_path_factory.mktemp("undisturbed") / "run"))
    assert not any("damaged" in line for line in said)
    assert {state["state"] for state in end[2].values()} == {"finished"}
    return end


def damaged_file(run: Path, kind: str) -> Path:
    return max(run.glob(KINDS[kind]))


@pytest.mark.parametrize(
    ("kind", "part", "expected"),
    [
        ("newest checkpoint", 0.5, "said, same end"),
        ("best weights", 0.5, "said, same end"),
        ("paused state", 0.5, "refused"),  # both checkpoints name it
        ("adapter", 0.9, "said, same end"),
        ("metrics", 0.99, "said, same end"),
        ("metrics", 0.1, "refused"),
    ],
)
def test_a_flipped_bit_gives_way_to_the_checkpoint_before(
    interrupted: Path, undisturbed: Any, tmp_path: Path, kind: str, part: float, expected: str
) -> None:
    run = shutil.copytree(interrupted, tmp_path / "run")
    path = damaged_file(run, kind)
    flip(path, 8 * int(part * path.stat().st_size))
    assert outcome_of(run, undisturbed) == expected


def test_answers_that_are_gone_are_told_of(interrupted: Path, tmp_path: Path) -> None:
    run = shutil.copytree(interrupted, tmp_path / "run")
    (run / "samples.jsonl").write_bytes(b"")
    with pytest.raises(RunError, match="is gone or empty; remove it to go on without these answers"):
        resume(run)
    (run / "samples.jsonl").unlink()
    said = Watching()
    assert resume(run, settings=["adapters.best.max_steps=12"], reporter=said).exit_code == 0
    assert f"{run}/samples.jsonl: is gone, and with it answers to held-out prompts" in said.lines
    assert any(": adapters.best.max_steps is 12; at the checkpoint it was " in line for line in said.lines)


def test_a_run_that_has_ended_looks_at_its_results(
    interrupted: Path, undisturbed: Any, tmp_path: Path
) -> None:
    run = shutil.copytree(interrupted, tmp_path / "run")
    end_of(run)
    flip(run / "adapters" / "aside" / "adapter_model.safetensors", 9000)
    assert outcome_of(run, undisturbed) == "said, same end"


def test_no_flipped_bit_of_a_file_is_read_as_another_value(tmp_path: Path) -> None:
    """Also those of the zip's directory that no checksum covers: torch takes an entry with the attribute of
    a folder for one without content, and leaves its tensor uninitialised."""
    path = tmp_path / "state.pt"
    content = {"step": 3, "share": 0.5, "weights": {"a": torch.randn(5, 3), "b": torch.arange(7)}}
    write_tensors(path, content)
    whole = path.read_bytes()
    entries = [place for place in range(len(whole)) if whole.startswith(b"PK\x01\x02", place)]
    attributes = [8 * (place + 38) + bit for place in entries for bit in range(32)]
    damaged = 0
    for bit in (*range(0, 8 * len(whole), 11), *attributes):
        flip(path, bit)
        try:
            assert_equal(read_tensors(path), content)
        except RunError:
            damaged += 1
        path.write_bytes(whole)
    assert damaged > len(attributes)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_one_flipped_bit_never_changes_the_end_in_silence(
    interrupted: Path, undisturbed: Any, tmp_path: Path, kind: str
) -> None:
    draw, found = random.Random(kind), Counter[str]()
    for number in range(FLIPS):
        run = shutil.copytree(interrupted, tmp_path / str(number))
        path = damaged_file(run, kind)
        flip(path, draw.randrange(8 * path.stat().st_size))
        found[outcome_of(run, undisturbed)] += 1
        shutil.rmtree(run)
    print(f"{kind}: {dict(found)}")
    assert not any(outcome.startswith("OTHER") for outcome in found), found
