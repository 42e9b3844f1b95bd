"""The files that a run reads, by their digests: a resumed run must find them as they were."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlora.config.run_config import RunConfig
from mlora.data.source import fingerprint, sources_of
from mlora.errors import RunError
from mlora.objectives.options import ObjectiveError
from mlora.objectives.registry import digests_of, name_of, sources_of_loss
from mlora.run.reporter import some
from mlora.tasks.task import Task, check_loss
from mlora_ext.adapters.trained_parts import labels_of


def check_sweep(inputs: Mapping[str, list[str]], checkpoint: Mapping[str, Any]) -> None:
    """Raises RunError if what a sweep's trials begin with changed since the checkpoint.

    Args:
        inputs: what `inputs_of_sweep` returns now.
        checkpoint: with the `sweep_inputs` of then.
    """
    kept = checkpoint["sweep_inputs"]
    for what in {**kept, **inputs}:
        if kept.get(what) != inputs.get(what):
            raise RunError(
                f"sweep: {what} changed since the checkpoint, and its trials could not be compared; put that "
                "back, or train anew with `mlora sweep RUN.yaml --overwrite`"
            )


def check_inputs(task: Task, checkpoint: Mapping[str, Any]) -> None:
    """Raises RunError if a task's data, labels or loss changed since the checkpoint."""
    kept = checkpoint["data"][task.name]
    if fingerprints(task) != kept:
        changed = _changed_input(task, kept)
        raise RunError(
            f"{task.name}: {changed} changed since the checkpoint; put that back, or "
            "train anew with `mlora train RUN.yaml --overwrite`"
        )


def inputs_of_sweep(config: RunConfig) -> dict[str, list[str]]:
    """Returns the SHA-256 of each file that trials of a sweep may begin with, by what messages call it.

    These are data, the files of their own losses, and the adapters in folders of `init_from`. A run without a
    sweep has none: its tasks have `fingerprints`.

    Raises:
        RunError: if a loss's file changed since this process read it.
    """
    if config.sweep is None:
        return {}
    found: dict[str, list[str]] = {}
    samples = [config.defaults.model_dump() | sample for sample in config.sweep.samples()]
    named = {sample.get(key) for sample in samples for key in ("dataset", "eval_dataset")}
    for data in (each for each in config.datasets if each.name in named):
        with suppress(RunError):  # trials whose data cannot be read are refused
            found[f"the dataset {data.name}"] = [source.fingerprint() for source, _ in sources_of(data)]
            if data.chat_template:
                found[f"the chat template of {data.name}"] = [fingerprint(data.chat_template)]
    for folder in config.sweep.folders:
        files = sorted([*Path(folder).glob("adapter_*.*"), *Path(folder).glob("labels.json")])
        found[f"init_from ({folder})"] = [fingerprint(file) for file in files]
    for sample in samples:
        with suppress(ObjectiveError):  # trials with this loss are refused
            if digests := digests_of(sample["objective"]):
                check_loss(sample["objective"])
                found[f"the loss {name_of(sample['objective'])}"] = digests
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


def _changed_input(task: Task, stored: Sequence[str]) -> str:
    """Returns what differs from the `stored` result of `fingerprints`; at least one part does."""
    data = _digests_of_data(task)
    changed = [what for (what, now), old in zip(data.items(), stored, strict=False) if now != old]
    code, before = sources_of_loss(task.config.objective), set(stored[len(data) :])
    files = [path for path, digest in code.items() if digest not in before]
    if files:
        changed.append(f"its loss ({some(files)})")
    return " and ".join(changed) or "the files that its loss imports"
