"""Tasks: what each adapter of a run needs before its first step, and how far it has come."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from huggingface_hub import constants

from mlora.config.adapter_config import AdapterConfig
from mlora.config.dataset_config import WITH_MESSAGES, DatasetConfig
from mlora.config.lora_fields import build_lora
from mlora.config.run_config import RunConfig
from mlora.data.chat import with_template
from mlora.data.dataset import Dataset, held_out, joined, load_dataset
from mlora.data.label_formats import FoundLabels, LabelRules, find_labels
from mlora.data.preference import joined as joint
from mlora.data.record import Sample, sequence_lengths
from mlora.data.sampler import BatchPlan, task_seed
from mlora.data.source import Source, sources_of
from mlora.errors import RunError, first_line
from mlora.model.base_info import BaseInfo
from mlora.objectives.objective import Objective
from mlora.objectives.options import ObjectiveError
from mlora.objectives.registry import check_unchanged, objective_of, reference_of, style_of
from mlora.optim.optim_config import OptimConfig
from mlora.tasks.classifiers import label_rules, needs_no_tokenizer, rows_of
from mlora.tasks.init_from import check_init_from, check_originals
from mlora_ext.interop.read_folder import read_config

if TYPE_CHECKING:
    from peft import LoraConfig

State = Literal["running", "paused", "finished", "stopped", "cancelled", "pruned"]
ALIVE = ("running", "paused")


@dataclass
class Progress:
    """How far a task has come: plain values, all of them part of a checkpoint.

    Args:
        state: ``running``, even while it waits for memory; ``paused`` by its user; ``finished`` (all steps or
            an early stop); ``stopped`` (a fault while training); ``cancelled`` by its user; ``pruned`` by its
            sweep.
        message: why it was stopped, that it stopped early, or that it no longer learns.
        batches: micro-batches taken.
        step: optimizer steps made.
        open_loss: sum of losses of the accumulation under way.
        open_tokens: its trained tokens.
        open_units: the divisor of its loss.
        open_metrics: sums of the objective's metrics.
        open_counts: what divides those metrics that are not divided by units.
        tokens: trained tokens so far.
        loss: mean loss of the last step.
        metrics: means of its objective's metrics in the last step.
        seconds: wall time in training so far.
        evaluations: one entry each: ``step``, ``eval_loss``, the objective's metrics with ``eval_`` before
            them and, if asked for, ``eval_exact_match``.
        best: the best value of the adapter's ``metric_for_best_model`` after a step.
        best_step: the step after which it was measured.
        worse: evaluations in a row that did not improve on it.
        no_gradient: the latest steps in a row with a loss but a gradient of exactly 0.
        evaluation_due: a signal came before the evaluation that is due after its last step.
        callbacks: what its callbacks go on with, see `mlora.run.callbacks`; empty if it has none.
        saved: the CRC-32 of each file of the result that it ended with, by name, but for its card.
    """

    state: State = "running"
    message: str = ""
    batches: int = 0
    step: int = 0
    open_loss: float = 0.0
    open_tokens: int = 0
    open_units: int = 0
    open_metrics: dict[str, float] = field(default_factory=dict)
    open_counts: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    best: float | None = None
    best_step: int | None = None
    worse: int = 0
    no_gradient: int = 0
    evaluation_due: bool = False
    callbacks: dict[str, Any] = field(default_factory=dict)
    saved: dict[str, int] = field(default_factory=dict)


@dataclass
class Task:
    """An adapter with its data and hyperparameters, ready to train.

    Args:
        seed: for initial weights, dropout and order of data.
        plan: its micro-batches.
        total_steps: optimizer steps to make.
        lora: PEFT's config; None if all weights are trained, or ``init_from`` gives it. That of a head of
            labels is here in any case.
    """

    config: AdapterConfig
    seed: int
    data: Dataset
    eval_data: Dataset | None
    plan: BatchPlan
    total_steps: int
    lora: LoraConfig | None
    optim: OptimConfig
    progress: Progress = field(default_factory=Progress)
    _next: tuple[int, list[int]] = field(default=(-1, []), init=False, repr=False, compare=False)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.progress.state in ALIVE

    @property
    def made_all_steps(self) -> bool:
        """Whether it has finished by making all its steps, not by an early stop or a request."""
        return self.progress.state == "finished" and self.progress.step >= self.total_steps

    @property
    def saved_step(self) -> int:
        """The step of the weights with which it ends: that of `kept_step`, or its last one."""
        best = self.kept_step
        return self.progress.step if best is None else best

    @property
    def kept_step(self) -> int | None:
        """The step of its best evaluation so far, if it ends with those weights; else None."""
        rule = self.config.best_rule
        return self.progress.best_step if rule is not None and rule.loads else None

    def evaluation(self, step: int) -> Mapping[str, Any]:
        """Returns what was measured after `step` optimizer steps; empty if it was not evaluated then."""
        return next((entry for entry in self.progress.evaluations if entry["step"] == step), {})

    def next_lengths(self) -> list[int]:
        """Returns the sequence lengths of its next micro-batch, in rows."""
        if self._next[0] != self.progress.batches:
            self._next = self.progress.batches, self.lengths_of(self.progress.batches)
        return self._next[1]

    def lengths_of(self, batch: int) -> list[int]:
        """Returns the sequence lengths of micro-batch `batch` (counted from 0), in rows."""
        return self.lengths([self.data.samples.hollow(row) for row in self.plan.batch(batch)])

    def lengths(self, samples: Sequence[Any]) -> list[int]:
        """Returns the sequence lengths, in rows, of a batch of samples, those without gradient included."""
        return sequence_lengths(joint(self.name, samples, self.objective))

    @cached_property
    def objective(self) -> Objective:
        """What it is trained for."""
        return objective_of(self.config.objective)

    def start_batches(self) -> list[list[Sample]]:
        """Returns its first micro-batches, for initial values: `init_samples` samples, one epoch at most."""
        count = min(-(-self.config.init_samples // self.plan.batch_size), self.plan.batches_per_epoch)
        rows = [self.plan.batch(index) for index in range(count)]
        return [[self.data.samples[row] for row in batch] for batch in rows]

    @cached_property
    def usual_lengths(self) -> list[int]:
        """Sequence lengths, in rows, of a typical micro-batch of its data: evenly spaced quantiles."""
        samples = self.data.samples
        order = samples.by_rows()
        batch = min(self.plan.batch_size, len(order)) if self.plan.shuffle else self.plan.batch_size
        places = ((2 * place + 1) * len(order) // (2 * batch) for place in range(batch))
        return self.lengths([samples.hollow(order[place]) for place in places])

    @property
    def name(self) -> str:
        """The adapter's name."""
        return self.config.name

    def every(self, steps: float | None) -> int | None:
        """Returns an interval in whole steps; `steps` below 1 is a ratio of the task's total steps."""
        return None if steps is None else _whole_steps(steps, self.total_steps)


class TaskBuilder:
    """Builds the tasks of a run. Reads each dataset once for each way in which adapters read it.

    Attributes:
        warnings: lines about data and adapter folders, each once.
    """

    def __init__(self, config: RunConfig, base: BaseInfo) -> None:
        self.warnings: list[str] = []
        self._config = config
        self._base = base
        self._datasets = {dataset.name: dataset for dataset in config.datasets}
        self._cache = Path(config.data_cache or os.path.join(constants.HF_HOME, "mlora"))
        self._found_labels: dict[Hashable, FoundLabels] = {}
        self._loaded: dict[tuple[Hashable, ...], Dataset] = {}

    def build(
        self, adapter: AdapterConfig, datasets: Sequence[DatasetConfig] = (), *, needs_prompts: bool = True
    ) -> Task:
        """Reads an adapter's data and checks everything that needs no weights of the model.

        `datasets` were submitted together with the adapter. `needs_prompts`: with `eval_exact_match`,
        evaluation data without prompts is refused. A RunError says what is wrong.
        """
        if adapter.init_from is not None:
            self._warn(adapter, *check_init_from(adapter, self._base, self._config.quantization))
        lora = None
        if adapter.init_from is None and self._config.method == "lora":
            try:
                lora = build_lora(adapter.lora or {})
            except ValueError as error:
                raise RunError(f"lora: {first_line(error)}") from error
            check_originals(lora, self._config, self._base)
        read = lora
        if adapter.init_from is not None:
            try:
                read = read_config(Path(adapter.init_from))
            except ValueError as error:
                raise RunError(f"init_from: {first_line(error)}") from error
        known = self._datasets | {dataset.name: dataset for dataset in datasets}
        labels = None
        if self._config.method == "lora" and read is not None:
            labels = label_rules(adapter, read, known, self._find_labels)
            lora = lora if labels is None else read
        data = self._load(known[adapter.dataset], adapter, labels)
        eval_data = None
        if adapter.eval_dataset:
            held_in = known[adapter.eval_dataset]
            eval_data = self._load(held_in, adapter, labels, held=held_in.validation_split is not None)
        if needs_prompts and adapter.eval_exact_match and eval_data is not None:
            _check_prompts(adapter, eval_data)
        plan = self._plan(adapter, data)
        total = adapter.max_steps if adapter.max_steps > 0 else plan.steps_of(adapter.num_train_epochs)
        optim = optim_config(adapter, total)
        if optim.warmup_steps > total and optim.lr_scheduler_type != "constant":  # it has no warm-up
            reached = f"the learning rate does not reach {optim.learning_rate:g}"
            steps = f"warmup_steps is {optim.warmup_steps}, but training ends at step {total}"
            self._warn(adapter, f"{steps}; {reached}")
        if read is not None and read.lora_dropout and reference_of(adapter.objective) is not None:
            noisy = "the reference has no dropout, so rewards are noisy; TRL sets it to 0"
            self._warn(adapter, f"lora_dropout is {read.lora_dropout:g}, and {noisy}")
        return Task(adapter, plan.seed, data, eval_data, plan, total, lora, optim)

    def ended(self, adapter: AdapterConfig, total_steps: int) -> Task:
        """Returns the task of an adapter that has ended, without reading its data: it has no samples."""
        data = Dataset()
        plan = self._plan(adapter, data)
        return Task(
            adapter, plan.seed, data, None, plan, total_steps, None, optim_config(adapter, total_steps)
        )

    def _warn(self, adapter: AdapterConfig, *lines: str) -> None:
        """Notes warnings of an adapter; of trials, each once for all of them."""
        who = adapter.name if self._config.sweep is None else "sweep"
        self.warnings += [line for each in lines if (line := f"{who}: {each}") not in self.warnings]

    def _find_labels(self, dataset: DatasetConfig, task: str) -> FoundLabels:
        """Returns `find_labels`, read once for all adapters of a dataset."""
        key = task, *self._versions(dataset)
        if key not in self._found_labels:
            self._found_labels[key] = find_labels(rows_of(dataset), task)
        return self._found_labels[key]

    def _versions(self, dataset: DatasetConfig) -> list[Hashable]:
        """Returns a dataset's sources, each with what tells its file from an earlier one.

        A submitted task reads files that have changed anew; all trials of a sweep read the first.
        """
        trials = self._config.sweep is not None
        read = [source for source, _ in sources_of(dataset)]
        read += [Source(dataset.chat_template)] if dataset.chat_template else []
        return [(source, None if trials else source.version) for source in read]

    def _plan(self, adapter: AdapterConfig, data: Dataset) -> BatchPlan:
        return BatchPlan(
            samples=len(data.samples),
            batch_size=adapter.per_device_train_batch_size,
            accumulation=adapter.gradient_accumulation_steps,
            shuffle=adapter.shuffle,
            seed=task_seed(self._config.seed, adapter.name) if adapter.seed is None else adapter.seed,
        )

    def _load(
        self, dataset: DatasetConfig, adapter: AdapterConfig, labels: LabelRules | None, *, held: bool = False
    ) -> Dataset:
        """Returns a dataset without the samples that it holds out, or these, as an adapter reads it."""
        style = style_of(adapter.objective)
        asks = adapter.eval_exact_match and dataset.name == adapter.eval_dataset
        ends = self._base.end_tokens() if asks else ()
        how = adapter.max_length, adapter.assistant_only_loss, style, labels, ends
        key = dataset.model_dump_json(), held, *how, *self._versions(dataset)
        if key in self._loaded:
            return self._loaded[key]
        tokenizer = None if needs_no_tokenizer(dataset) else self._base.tokenizer()
        if tokenizer is not None and dataset.format in (*WITH_MESSAGES, "preference", "unpaired"):
            only = adapter.assistant_only_loss
            tokenizer = with_template(tokenizer, dataset.chat_template, assistant_only_loss=only)
        if tokenizer is not None and _is_dated(tokenizer, dataset):
            dated = "the chat template writes the day on which data is read (strftime_now)"
            hint = "a resume on a later day may read other tokens; name a template with a fixed day"
            line = f"dataset {dataset.name!r}: {dated}: {hint} in chat_template"
            self.warnings += [line] if line not in self.warnings else []
        parts = [
            load_dataset(
                dataset.name,
                source,
                dataset.format,
                max_length=adapter.max_length,
                vocab_size=self._base.vocab_size,
                max_positions=self._base.max_positions,
                tokenizer=tokenizer,
                assistant_only_loss=adapter.assistant_only_loss,
                style=style,
                labels=labels,
                ends=ends,
                cache=self._cache,
                processes=self._config.dataset_num_proc or 1,
            )
            for source, _ in sources_of(dataset)
        ]
        seed, share = task_seed(self._config.seed, f"dataset {dataset.name}"), dataset.validation_split
        if share is not None:
            parts = [pair[held] for pair in held_out(parts, share, seed)]
        weights = [1.0 if held else weight for _, weight in sources_of(dataset)]
        self._loaded[key] = _with_template_of(joined(parts, weights, seed), tokenizer, self._base)
        self.warnings += [line for line in self._loaded[key].warnings if line not in self.warnings]
        return self._loaded[key]


def _is_dated(tokenizer: Any, dataset: DatasetConfig) -> bool:
    """Whether samples hold the day on which they are read, as far as the format tells."""
    chats = dataset.format in ("messages", "sharegpt") or dataset.chat_template is not None
    return chats and "strftime_now" in str(tokenizer.chat_template)


def _with_template_of(data: Dataset, tokenizer: Any, base: BaseInfo) -> Dataset:
    """Returns data whose fingerprint tells a chat template that is not the base model's own."""
    template = tokenizer and tokenizer.chat_template
    if template is None or template == base.tokenizer().chat_template:
        return data
    told = repr((data.fingerprint, template))
    digest = hashlib.sha256(told.encode()).hexdigest()
    return replace(data, fingerprint=digest, path=f"{data.path}, or its chat template")


def check_loss(objective: Any) -> None:
    """Imports a loss of one's own. RunError if that fails, or if its file has changed since it was read."""
    try:
        check_unchanged(objective)
        objective_of(objective)
    except ObjectiveError as error:
        raise RunError(str(error)) from error


def _check_prompts(adapter: AdapterConfig, data: Dataset) -> None:
    where = f"eval_exact_match: the dataset {adapter.eval_dataset!r}"
    if not data.prompts:
        raise RunError(f"{where} has no sample that fits in max_length and whose answer an end token ends")
    if not all(prompt.input_ids for prompt in data.prompts):
        raise RunError(f"{where} has a prompt without tokens; each prompt needs at least one")


def optim_config(adapter: AdapterConfig, total_steps: int) -> OptimConfig:
    """Returns an adapter's optimizer config; ``warmup_steps`` below 1 is a ratio of `total_steps`."""
    shared = [each.name for each in fields(OptimConfig) if each.name != "total_steps"]
    values: dict[str, Any] = {key: getattr(adapter, key) for key in shared}
    values["warmup_steps"] = _whole_steps(adapter.warmup_steps, total_steps)
    return OptimConfig(**values, total_steps=total_steps)


def _whole_steps(steps: float, total_steps: int) -> int:
    """Returns a number of steps as it is; one below 1 is a ratio of `total_steps`."""
    return int(steps) if steps >= 1 else math.ceil(total_steps * steps)
