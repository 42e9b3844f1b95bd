"""Measures adapters of a run, and its base model, on a dataset."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from safetensors import SafetensorError

from mlora.cluster.device import choose_device, dtype_of
from mlora.config.adapter_config import AdapterConfig
from mlora.config.aliases import nearest
from mlora.config.conflicts import data_faults
from mlora.config.dataset_config import WITH_PROMPTS, DatasetConfig
from mlora.config.run_config import RunConfig
from mlora.engine.engine import Engine
from mlora.errors import RunError, first_fault, first_line
from mlora.model.base_info import BaseInfo
from mlora.objectives.objective import CrossEntropy
from mlora.objectives.options import START
from mlora.objectives.registry import name_of
from mlora.run.evaluation import Answers, answer_prompts, evaluate_losses
from mlora.run.handoff.adapters import FoundWeights, RunAdapter, find_weights, named_adapter, open_run
from mlora.run.handoff.peft_folders import peft_folder_of
from mlora.run.machine_choice import base_gemm_of_gpu, use_base_gemm
from mlora.run.reporter import Reporter
from mlora.store.run_folder import RunFolder
from mlora.tasks.result import columns_of
from mlora.tasks.task import Task, TaskBuilder
from mlora_ext.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from mlora.data.dataset import Dataset

BASE = "__base__"
AT_ONCE = 8
"""Adapters whose samples share a batch."""


@dataclass(frozen=True)
class DataChoice:
    """What to measure on.

    Attributes:
        dataset: the name of a dataset of the run; None = each adapter's ``eval_dataset``.
        file: a file of samples, in place of a dataset.
        format: of `file`; None = that of the adapter's dataset.
        exact_match: also complete prompts, where the data has some; None = of chats only for adapters with
            ``eval_exact_match``, since long answers take long.
    """

    dataset: str | None = None
    file: Path | None = None
    format: str | None = None
    exact_match: bool | None = None


@dataclass(frozen=True)
class Measured:
    """One adapter, or the base model, on one dataset."""

    adapter: str
    dataset: str
    step: int | None
    samples: int
    tokens: int
    loss: float
    exact_match: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """The results, and lines on what was left out or where weights came from."""

    results: list[Measured]
    notes: list[str]

    def table(self) -> list[list[str]]:
        """Returns the rows of a table, titles first; empty columns are left out."""
        columns = columns_of(dict.fromkeys(name for one in self.results for name in one.metrics))
        rows = [["adapter", "dataset", "step", "samples", "loss", "exact match"]]
        rows[0] += [title for title, _ in columns.values()]
        for one in self.results:
            exact = "" if one.exact_match is None else f"{one.exact_match:.1%}"
            step = "" if one.step is None else str(one.step)
            cells = [one.adapter, one.dataset, step, str(one.samples), f"{one.loss:.4f}", exact]
            for name, (_, form) in columns.items():
                cells.append(format(one.metrics[name], form) if name in one.metrics else "")
            rows.append(cells)
        used = [place for place in range(len(rows[0])) if any(row[place] for row in rows[1:])]
        return [[row[place] for place in used] for row in rows]

    def as_json(self) -> dict[str, Any]:
        """Returns plain values; those that JSON cannot hold are None."""
        results = []
        for one in self.results:
            entry = vars(one) | {"metrics": dict(one.metrics)}
            entry["loss"] = one.loss if math.isfinite(one.loss) else None
            entry["metrics"] = {k: v if math.isfinite(v) else None for k, v in one.metrics.items()}
            results.append(entry)
        return {"results": results, "notes": self.notes}


def evaluate_adapters(
    run_dir: Path | str, names: Sequence[str], choice: DataChoice, *, checkpoint: int | None = None
) -> Evaluation:
    """Measures adapters together, over a base model that is loaded once, and the base model alone.

    The base is measured on data of adapters whose objective is cross-entropy over tokens.

    Args:
        run_dir: the run's ``output_dir``, which may be at work.
        names: of adapters; empty = all that have weights and data.
        choice: the data.
        checkpoint: as for `mlora.run.handoff.export.export_adapter`.

    Raises:
        RunError: there is no such run, adapter, checkpoint or data, or memory runs out.
    """
    folder, config, adapters = open_run(run_dir)
    chosen, left_out = _chosen(folder, adapters, names, checkpoint)
    builder = TaskBuilder(config, BaseInfo(config.base_model, config.base_folder))
    with ExitStack() as stack:
        tasks = []
        for name, found in chosen.items():
            source = stack.enter_context(peft_folder_of(config, adapters[name], found))
            try:
                tasks.append(_task(config, builder, adapters[name], source, choice))
            except RunError as error:
                if names:
                    raise
                left_out.append(str(error))
        if not tasks:
            raise RunError("\n".join(dict.fromkeys(left_out)))
        notes = [f"left out: {reason}" for reason in left_out]
        measured = {task.name: chosen[task.name] for task in tasks}
        for name, found in measured.items():
            if found.checkpoint is not None:
                notes.append(f"{name}: weights of {found.told}")
        if choice.exact_match:
            without = [task.name for task in tasks if not _has_prompts(task.eval_data)]
            notes += [f"{name}: no exact match: its data has no prompts with answers" for name in without]
        notes += [line.replace(": init_from: ", ": ", 1) for line in builder.warnings]
        results = _measure(config, stack, tasks, {name: one.step for name, one in measured.items()}, choice)
    bases = Counter(one.dataset for one in results if one.adapter == BASE)
    notes += [
        f"{name}: adapters read it with other settings, so {BASE} has a row for each"
        for name, count in bases.items()
        if count > 1
    ]
    return Evaluation(results, notes)


def _chosen(
    folder: RunFolder, adapters: Mapping[str, RunAdapter], names: Sequence[str], checkpoint: int | None
) -> tuple[dict[str, FoundWeights], list[str]]:
    """Returns the weights to measure, by adapter, and why those of others are left out."""
    found: dict[str, FoundWeights] = {}
    left_out: list[str] = []
    for name in names or adapters:
        named_adapter(folder, adapters, name)
        try:
            found[name] = find_weights(folder, name, checkpoint)
        except RunError as error:
            if names:
                raise
            left_out.append(str(error))
    if not found:
        raise RunError("\n".join(left_out))
    return found, left_out


def _task(
    config: RunConfig, builder: TaskBuilder, adapter: RunAdapter, source: Path, choice: DataChoice
) -> Task:
    """Returns an adapter as a task that begins with its weights, and whose evaluation data was chosen."""
    own = adapter.config
    if ":" in (code := name_of(own.objective)):
        raise RunError(
            f"{own.name}: its objective {code} is code that `mlora evaluate` does not run; it is measured "
            "while the adapter trains only (eval_dataset)"
        )
    data = _data(config, adapter, choice)
    update = {
        "init_from": str(source),
        "lora": None,
        "dataset": data.name,
        "eval_dataset": data.name,
        "eval_exact_match": _asks(choice, own, data) and data.format in WITH_PROMPTS,
    }
    changed = own.model_copy(update=update)
    for _, fault in data_faults(changed, {data.name: data.format}):
        raise RunError(f"{own.name}: {fault}")
    try:
        task = builder.build(changed, [*adapter.datasets, data], needs_prompts=False)
    except RunError as error:
        raise RunError(f"{own.name}: {error}") from error
    if task.objective.reference == START:
        raise RunError(
            f"{own.name}: its objective compares with the weights that it began with; this is measured while "
            "it trains only (eval_dataset)"
        )
    return task


def _asks(choice: DataChoice, own: AdapterConfig, data: DatasetConfig) -> bool:
    """Whether to complete the prompts of an adapter's data."""
    if choice.exact_match is None:
        return own.eval_exact_match or data.format not in ("messages", "sharegpt")
    return choice.exact_match


def _data(config: RunConfig, adapter: RunAdapter, choice: DataChoice) -> DatasetConfig:
    own = adapter.config
    known = {data.name: data for data in [*config.datasets, *adapter.datasets]}
    if choice.dataset is not None and choice.file is not None:
        raise RunError("give --dataset or --data, not both")
    if choice.format is not None and choice.file is None:
        raise RunError("--format is of the file in --data; datasets of the run have theirs")
    if choice.file is not None:
        path = choice.file.absolute()
        if not path.is_file():
            raise RunError(f"--data: there is no file {path}")
        try:
            like = known[own.dataset].model_dump(include={"format", "columns", "chat_template"})
            if choice.format is not None:
                like |= {"format": choice.format, "columns": {}}
            return DatasetConfig.model_validate({"name": path.name, "path": str(path)} | like)
        except ValidationError as error:
            raise RunError(f"--data: {first_fault(error)}") from error
    name = choice.dataset or own.eval_dataset
    if name is None:
        raise RunError(
            f"{own.name}: has no eval_dataset; give --dataset NAME ({', '.join(known)}) or --data FILE"
        )
    if name not in known:
        raise RunError(f"--dataset: no dataset is named {name!r}; {nearest(name, list(known), 'datasets')}")
    return known[name]


def _measure(
    config: RunConfig,
    stack: ExitStack,
    tasks: Sequence[Task],
    steps: Mapping[str, int],
    choice: DataChoice,
) -> list[Measured]:
    """Returns the results of the base model on each dataset, then those of adapters."""
    dtype = dtype_of(config)
    try:
        device = choose_device(config.device, dtype)
        engine = stack.enter_context(
            Engine(config.base_model, device=device, dtype=dtype, quantization=config.quantization)
        )
        use_base_gemm(engine, config.base_gemm)  # rounds as the run does
        if config.base_gemm == "fastest":
            base_gemm_of_gpu(engine, Reporter(), keep=True)
        for task in tasks:
            engine.create_adapter(
                task.name, None, task.optim, objective=task.config.objective, init_from=task.config.init_from
            )
        results = []
        for task in _of_base(tasks):  # one by one: they share a name
            results += _results(engine, config, [task], steps, choice)
        for start in range(0, len(tasks), AT_ONCE):
            results += _results(engine, config, tasks[start : start + AT_ONCE], steps, choice)
        return results
    except (ValueError, OSError, SafetensorError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(first_line(error)) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise RunError("out of memory while evaluating; name fewer adapters") from error


def _of_base(tasks: Sequence[Task]) -> list[Task]:
    """Returns a task of the base model for each dataset that it can be measured on."""
    found: dict[int, Task] = {}
    for task in tasks:
        assert task.eval_data is not None
        if type(task.objective) is CrossEntropy and not task.eval_data.samples[0].is_labelled:
            found.setdefault(
                id(task.eval_data), replace(task, config=task.config.model_copy(update={"name": BASE}))
            )
    return list(found.values())


def _results(
    engine: Engine,
    config: RunConfig,
    tasks: Sequence[Task],
    steps: Mapping[str, int],
    choice: DataChoice,
) -> list[Measured]:
    losses = evaluate_losses(engine, tasks, _always)
    prompted = [task for task in tasks if _has_prompts(task.eval_data)]
    answers: Mapping[str, Answers] = {}
    if prompted:
        base = BaseInfo(config.base_model, config.base_folder)
        answers = answer_prompts(engine, prompted, base, _always)
    results = []
    for task in tasks:
        assert task.eval_data is not None
        found, name = losses[task.name], task.name
        if found.fault:
            raise RunError(f"{name}: {found.fault}")
        loss = found.loss_sum / found.units if found.units else math.nan
        metrics = {key: value for key, value in found.mean_metrics().items() if key != "loss"}
        count = len(task.eval_data.samples)
        dataset = str(task.config.eval_dataset)
        exact = answers[name].share if name in answers else None
        results.append(Measured(name, dataset, steps.get(name), count, found.tokens, loss, exact, metrics))
    return results


def _has_prompts(data: Dataset | None) -> bool:
    return data is not None and bool(data.prompts) and all(prompt.input_ids for prompt in data.prompts)


def _always(lengths: Mapping[str, Sequence[int]]) -> bool:
    return True
