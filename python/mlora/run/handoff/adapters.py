"""Finds an adapter of a run, and the weights that it has now or had at a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlora.config.adapter_config import AdapterConfig
from mlora.config.aliases import nearest
from mlora.config.dataset_config import DatasetConfig
from mlora.config.run_config import RunConfig
from mlora.errors import RunError
from mlora.store.checkpoint import checkpoint_name, list_checkpoints, read_checkpoint
from mlora.store.queue import TaskQueue
from mlora.store.run_folder import RunFolder
from mlora.store.state_files import read_state
from mlora.store.submission import submitted
from mlora.sweep.ranking import trials_begun

_TRIES = 5  # a run at work may remove a checkpoint while it is being read


@dataclass(frozen=True)
class RunAdapter:
    """An adapter of a run, with the datasets that were submitted with it."""

    config: AdapterConfig
    datasets: list[DatasetConfig] = field(default_factory=list)

    def chat_template(self, config: RunConfig) -> str | None:
        """Returns the file of the chat template that it was trained with; None: the base model's own."""
        known = {dataset.name: dataset for dataset in (*config.datasets, *self.datasets)}
        return known[self.config.dataset].chat_template


@dataclass(frozen=True)
class FoundWeights:
    """An adapter's weights.

    Attributes:
        step: the optimizer step after which the adapter had them.
        total_steps: optimizer steps that it was to make; None if that is not known.
        checkpoint: the iteration of the checkpoint that holds them; None = they are those it ended with.
        folder: the PEFT folder that holds them, or None.
        state: what `Engine.state_dict` returned, if there is no folder.
        losses: what is known of its losses, by what a card calls them.
        base: the digest of the base model in the checkpoint; empty = not known.
    """

    name: str
    step: int
    total_steps: int | None
    checkpoint: int | None
    folder: Path | None = None
    state: Mapping[str, Any] = field(default_factory=dict, repr=False)
    losses: Mapping[str, float] = field(default_factory=dict)
    base: str = ""

    @property
    def told(self) -> str:
        """What a message calls them, for example ``step 40 of 100, checkpoint 48``."""
        of = "" if self.total_steps in (None, self.step) else f" of {self.total_steps}"
        where = "as it ended" if self.checkpoint is None else f"checkpoint {self.checkpoint}"
        return f"step {self.step}{of}, {where}"


def open_run(run_dir: Path | str) -> tuple[RunFolder, RunConfig, dict[str, RunAdapter]]:
    """Returns a run's folder, its config, and its adapters by name: those of the config first.

    Raises RunError if there is no run, or it trains all weights of the model.
    """
    folder = RunFolder(Path(run_dir).resolve())
    config = folder.read_config()
    if config.method == "full":
        raise RunError(
            f"{folder.path}: method: full trains the model itself, not an adapter; its results in "
            f"{folder.adapters} are Transformers folders already"
        )
    found = {adapter.name: RunAdapter(adapter) for adapter in config.adapters}
    if folder.queue.is_file():
        with TaskQueue(folder.queue) as queue:
            came: dict[str, Mapping[str, Any]] = {
                request.task: request.content for request in queue.requests() if request.kind == "submit"
            }
            came |= trials_begun(queue)
        found |= {
            name: RunAdapter(*submitted(name, content)) for name, content in came.items() if name not in found
        }
    return folder, config, found


def named_adapter(folder: RunFolder, adapters: Mapping[str, RunAdapter], name: str) -> RunAdapter:
    """Returns the adapter of this name; raises RunError with the nearest right name."""
    if name not in adapters:
        raise RunError(
            f"{folder.path}: has no adapter {name!r}; {nearest(name, list(adapters), 'its adapters')}"
        )
    return adapters[name]


def find_weights(folder: RunFolder, name: str, checkpoint: int | None = None) -> FoundWeights:
    """Returns an adapter's weights at a checkpoint; None: those it ended with, else of the newest checkpoint.

    Raises RunError if there are none, or the checkpoint cannot be read.
    """
    if checkpoint is not None:
        path = folder.checkpoints / checkpoint_name(checkpoint)
        if not path.is_file():
            has = (
                ", ".join(
                    str(int(one.stem.removeprefix("step-"))) for one in list_checkpoints(folder.checkpoints)
                )
                or "none"
            )
            raise RunError(f"{folder.path}: has no checkpoint {checkpoint}; its checkpoints: {has}")
        return _at(folder, name, read_checkpoint(path))
    entry = _entry(folder, name)
    if entry.get("state") == "refused":
        raise RunError(f"{name}: was refused, so it has no weights: {entry['message']}")
    if entry.get("saved_step") is not None:
        return _ended(folder, name, entry["saved_step"], entry["max_steps"], None)
    if entry.get("state") in ("stopped", "cancelled", "pruned"):
        raise RunError(
            f"{name}: was {entry['state']} at step {entry['step']}; its weights are not kept, but an earlier "
            "checkpoint may hold some (--checkpoint)"
        )
    return _at(folder, name, _newest(folder, name))


def _newest(folder: RunFolder, name: str) -> dict[str, Any]:
    """Returns the newest checkpoint that can be read."""
    for _ in range(_TRIES):
        paths = list_checkpoints(folder.checkpoints)
        for path in reversed(paths):
            try:
                return read_checkpoint(path)
            except RunError:
                if path.is_file() and path == paths[0]:
                    raise
        if not paths:
            break
    raise RunError(f"{name}: has no weights yet: {folder.path} has no checkpoint; save_steps says when")


def _at(folder: RunFolder, name: str, checkpoint: Mapping[str, Any]) -> FoundWeights:
    """Returns an adapter's weights at a checkpoint."""
    iteration, task = checkpoint["iteration"], checkpoint["tasks"].get(name)
    where = f"checkpoint {iteration}"
    if task is None:
        reason = checkpoint["refused"].get(name)
        said = f"was refused: {reason}" if reason else f"is not in {where}: it came later"
        raise RunError(f"{name}: {said}")
    step, total, state = task["step"], checkpoint["total_steps"].get(name), task["state"]
    losses, base = losses_of({"loss": task["loss"]}), checkpoint.get("base", "")
    if state == "finished":
        entry = _entry(folder, name)
        saved = entry.get("saved_step")
        # one that has gone on since has the folder of a later step
        if not entry or (saved is not None and entry["step"] == step):
            return _ended(folder, name, step if saved is None else saved, total, iteration)
    kept = _kept_file(folder, name, checkpoint)
    if state not in ("running", "paused") and kept is None:
        raise RunError(f"{name}: was {state} at step {step}; {where} does not hold its weights")
    if name in checkpoint["adapters"]:
        return FoundWeights(name, step, total, iteration, None, checkpoint["adapters"][name], losses, base)
    if not task["batches"]:
        raise RunError(f"{name}: has no weights yet: it had not begun at {where}")
    if kept is None:
        raise RunError(f"{name}: {where} does not hold its weights")
    stamp = {"task": name, "batches": task["batches"]}
    found = read_state(kept, "state", stamp, f"the state of {name} at {where}")
    return FoundWeights(name, step, total, iteration, None, found, losses, base)


def _kept_file(folder: RunFolder, name: str, checkpoint: Mapping[str, Any]) -> Path | None:
    """Returns the file with the state of an adapter that was not on the engine at a checkpoint, or None."""
    decisions = checkpoint["decisions"]
    if name in decisions["kept"]:
        return folder.states / decisions["kept"][name]
    files = decisions.get("longer", {}).get(name)
    return folder.finished / files[0] if files else None


def _entry(folder: RunFolder, name: str) -> dict[str, Any]:
    """Returns an adapter's entry in the run's summary; empty if there is none."""
    summary = folder.read_summary()
    found: dict[str, Any] = (summary["adapters"] if summary else {}).get(name, {})
    return found


def _ended(
    folder: RunFolder, name: str, step: int, total: int | None, checkpoint: int | None
) -> FoundWeights:
    own = folder.adapters / name
    if not (own / "adapter_config.json").is_file():
        raise RunError(f"{name}: has ended, but {own} is gone or holds no adapter_config.json")
    return FoundWeights(name, step, total, checkpoint, own, losses=losses_of(_entry(folder, name)))


def losses_of(entry: Mapping[str, Any]) -> dict[str, float]:
    """Returns the losses in an adapter's entry of a summary, by what a card calls them."""
    evaluated = entry.get("eval_loss", {})
    found = {
        "Training loss of the last step": entry.get("loss"),
        "Evaluation loss before training": evaluated.get("before"),
        "Evaluation loss": evaluated.get("after"),
    }
    return {key: value for key, value in found.items() if value is not None}
