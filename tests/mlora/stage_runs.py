"""Runs over several stages for tests: a config of many kinds of adapters, processes, and what came of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.store.run_folder import read_metrics
from safetensors.torch import load_file

from tests.mlora.stages import ROOT, Stages, stages
from tests.mlora.tiny_run import random_tokens, save_base, write_jsonl
from tests.tolerances import STEADY_EPSILON, assert_same_up_to_rounding

TOLERANCE = 1e-5
PATHS = [str(ROOT / "python"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}
"""Of a process that imports these sources."""
LASTING = ("wide", "queries", "head", "deep")
COMMAND = """
{before}
sys.argv = ["mlora", *{arguments!r}]
from mlora.cli.app import main
main()
"""


def save_deep_base(folder: Path) -> Path:
    """Save a random Llama of four blocks, whose gradients are no rounding errors."""
    return save_base(folder, layers=4, initializer_range=0.2)


def write_data(folder: Path) -> list[dict[str, str]]:
    """Write data sets of several lengths, one of them wrong, and return their entries of a config."""
    write_jsonl(folder / "one.jsonl", random_tokens(11, 1))
    write_jsonl(folder / "two.jsonl", random_tokens(7, 2, longest=20))
    write_jsonl(folder / "long.jsonl", random_tokens(5, 3, longest=40))
    write_jsonl(folder / "wrong.jsonl", [{"input_ids": [1, 2, 900]}])
    sums = [(a, b) for a in range(3) for b in range(2)]
    write_jsonl(folder / "sums.jsonl", [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in sums])
    formats = dict.fromkeys(("one", "two", "long", "wrong"), "tokens") | {"sums": "prompt_completion"}
    return [{"name": name, "path": f"{name}.jsonl", "format": kind} for name, kind in formats.items()]


def many_kinds(base: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """A config of adapters that have as little in common as can be.

    Four last to their end, one of them to an early one; one is refused, and one is stopped by a loss that is
    not a number.
    """
    data: dict[str, Any] = {
        "base_model": str(base),
        "output_dir": str(folder / "run"),
        "seed": 3,
        "device": "cpu",
        "base_gemm": "aten",
        "defaults": {
            "max_steps": 6,
            "learning_rate": 2e-3,
            "adam_epsilon": 100 * STEADY_EPSILON,  # the gradients of this base are as much larger
            "logging_steps": 2,
            "save_steps": 2,
        },
        "datasets": write_data(folder),
        "adapters": [
            {
                "name": "wide",
                "dataset": "one",
                "eval_dataset": "two",
                "eval_steps": 3,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 3,
                "lora": {"r": 4, "lora_dropout": 0.2, "target_modules": "all-linear"},
            },
            {
                "name": "queries",
                "dataset": "long",
                "max_steps": 9,
                "per_device_train_batch_size": 3,
                "shuffle": False,
                "weight_decay": 0.1,
                "max_grad_norm": 0.3,
                "lora": {"r": 7, "lora_alpha": 14, "target_modules": ["q_proj", "v_proj"]},
            },
            {
                "name": "head",
                "dataset": "sums",
                "eval_dataset": "sums",
                "eval_exact_match": True,
                "max_steps": 5,
                "per_device_train_batch_size": 4,
                "lora": {"r": 3, "lora_dropout": 0.1, "target_modules": ["o_proj", "lm_head"]},
            },
            {
                "name": "deep",
                "dataset": "two",
                "eval_dataset": "one",
                "eval_steps": 2,
                "early_stopping_patience": 1,
                "early_stopping_threshold": 10,
                "max_steps": 8,
                "lora": {"r": 8, "use_rslora": True, "target_modules": ["up_proj"]},
            },
            {"name": "refused", "dataset": "wrong", "lora": {"r": 2, "target_modules": "all-linear"}},
            {
                "name": "explodes",
                "dataset": "one",
                "learning_rate": 1e30,
                "lora": {"r": 2, "target_modules": "all-linear"},
            },
        ],
    }
    data["adapters"][3]["lora"]["layers_to_transform"] = [3]
    return data | changes


def by_adapter(run: Path) -> dict[str, list[dict[str, Any]]]:
    """The metrics of each adapter of a run, without what a clock or the machine says."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in read_metrics(run / "metrics.jsonl"):
        kept = {k: v for k, v in record.items() if k not in ("seconds", "peak_memory_bytes", "adapter")}
        found.setdefault(record["adapter"], []).append(kept)
    return found


def tensors(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of the adapters that a run has saved."""
    files = sorted(run.glob("adapters/*/adapter_model.safetensors"))
    return {file.parent.name: load_file(file) for file in files}


def assert_alike(run: Path, expected: Path) -> None:
    """Metrics and adapters of two runs agree, to rounding."""
    found, wanted = by_adapter(run), by_adapter(expected)
    assert found.keys() == wanted.keys()
    for name, records in wanted.items():
        assert len(found[name]) == len(records), name
        for record, other in zip(found[name], records, strict=True):
            assert record.pop("best", None) == other.pop("best", None), name
            assert record == pytest.approx(other, rel=TOLERANCE, abs=TOLERANCE), name
    weights, others = tensors(run), tensors(expected)
    assert weights.keys() == others.keys()
    for name, adapter in others.items():
        assert weights[name].keys() == adapter.keys()
        for key, tensor in adapter.items():
            assert_same_up_to_rounding(weights[name][key], tensor, f"{name}: {key}", TOLERANCE)
        first, second = (
            (folder / "adapters" / name / "adapter_config.json").read_text() for folder in (run, expected)
        )
        assert first == second


def assert_equal(run: Path, expected: Path) -> None:
    """Metrics and adapters of two runs are the same, bit for bit."""
    assert by_adapter(run) == by_adapter(expected)
    weights, others = tensors(run), tensors(expected)
    assert weights.keys() == others.keys()
    for name, adapter in others.items():
        assert all(torch.equal(weights[name][key], tensor) for key, tensor in adapter.items()), name


@contextmanager
def commands(
    arguments: Sequence[object], size: int, before: Mapping[int, str] | None = None
) -> Iterator[Stages]:
    """`mlora` in one process per stage, as a launcher would start it.

    Args:
        arguments: of the command line.
        size: the number of processes.
        before: Python that a rank runs first.
    """
    with ranks([arguments] * size, before or {}) as running:
        yield running


@contextmanager
def ranks(arguments: Sequence[Sequence[object]], before: Mapping[int, str]) -> Iterator[Stages]:
    """As `commands`, with a command line for each rank."""
    words = [[str(word) for word in own] for own in arguments]
    bodies = [COMMAND.format(before=before.get(r, ""), arguments=own) for r, own in enumerate(words)]
    with stages(*bodies) as running:
        yield running


def run_stages(arguments: Sequence[object], size: int) -> tuple[list[int | None], list[str], list[str]]:
    """As `commands`, to the end: exit codes, standard outputs and standard errors."""
    with commands(arguments, size) as running:
        return running.end(timeout=120)


def error_lines(errors: Sequence[str]) -> list[str]:
    """The lines that tell the user of a fault."""
    return [line for text in errors for line in text.splitlines() if line.startswith("error: ")]
