"""The files that a run reads, by their digests: a resumed run must find them as they were."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlora.config.run_config import RunConfig
from mlora.errors import RunError
from mlora.objectives.options import ObjectiveError
from mlora.objectives.registry import digests_of, name_of, sources_of_loss
from mlora.run.reporter import some
from mlora.tasks.task import Task
from mlora_ext.adapters.trained_parts import labels_of


def check_losses(losses: Mapping[str, list[str]], checkpoint: Mapping[str, Any]) -> None:
    """Raises RunError if a loss of a sweep's trials changed since the checkpoint.

    Args:
        losses: what `losses_of` returns now.
        checkpoint: with `losses`; one of an earlier version has none, and is taken as it is.
    """
    kept = checkpoint.get("losses", losses)
    for name in {**kept, **losses}:
        if kept.get(name) != losses.get(name):
            raise RunError(
                f"sweep: the loss {name} changed since the checkpoint, and its trials could not be compared; "
                "put its files back, or train anew with `mlora sweep RUN.yaml --overwrite`"
            )


def check_inputs(task: Task, checkpoint: Mapping[str, Any]) -> None:
    """Raises RunError if a task's data, labels or loss changed since the checkpoint."""
    if not _is_as_in(checkpoint, task):
        changed = _changed_input(task, checkpoint["data"][task.name])
        raise RunError(
            f"{task.name}: {changed} changed since the checkpoint; put that back, or "
            "train anew with `mlora train RUN.yaml --overwrite`"
        )


def losses_of(config: RunConfig) -> dict[str, list[str]]:
    """Returns the SHA-256 of each file of the own losses that trials of a sweep may have, by their names."""
    found: dict[str, list[str]] = {}
    for sample in config.sweep.samples() if config.sweep else []:
        with suppress(ObjectiveError):  # trials with this loss are refused
            objective = sample.get("objective", config.defaults.objective)
            if digests := digests_of(objective):
                found[name_of(objective)] = digests
    return found


def fingerprints(task: Task) -> list[str]:
    """Returns the SHA-256 of each of a task's data files, of its labels and of its own loss, as read."""
    return [*_digests_of_data(task).values(), *digests_of(task.config.objective)]


def _digests_of_data(task: Task) -> dict[str, str]:
    """Returns the SHA-256 of a task's data files and of its labels, by what they are called in messages."""
    found = {"its data": task.data, "its evaluation data": task.eval_data}
    digests = {f"{what} ({data.path})": data.fingerprint for what, data in found.items() if data is not None}
    labels = {} if task.lora is None else labels_of(task.lora)
    if labels:
        file = task.config.init_from and Path(task.config.init_from) / "labels.json"
        what = f"its labels ({file})" if file else "its labels"
        digests[what] = hashlib.sha256(json.dumps(labels, sort_keys=True).encode()).hexdigest()
    return digests


def _is_as_in(checkpoint: Mapping[str, Any], task: Task) -> bool:
    """Whether a task's data, labels and loss are those of a checkpoint.

    One of an earlier version may have the digest of a loss's own file without those of files that it imports.
    """
    now, kept = fingerprints(task), checkpoint["data"][task.name]
    imported = len(digests_of(task.config.objective)[1:])
    return now == kept or ("losses" not in checkpoint and now[: len(now) - imported] == kept)


def _changed_input(task: Task, stored: Sequence[str]) -> str:
    """Returns what differs from the `stored` result of `fingerprints`; at least one part does."""
    data = _digests_of_data(task)
    changed = [what for (what, now), old in zip(data.items(), stored, strict=False) if now != old]
    code, before = sources_of_loss(task.config.objective), set(stored[len(data) :])
    files = [path for path, digest in code.items() if digest not in before]
    if files:
        changed.append(f"its loss ({some(files)})")
    return " and ".join(changed) or "the files that its loss imports"
