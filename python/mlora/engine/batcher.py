"""Packs batches, cuts them into micro-batches, sends these through the pipeline, and collects results."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from operator import index
from typing import Any

import torch

from mlora.data.micro_batch import BASE, MicroBatch, StageNote
from mlora.data.packing import pack, pack_prompts
from mlora.data.record import Sample
from mlora.engine.adapter_state import AdapterStates, BatchFuture, BatchResult
from mlora.engine.batches import Batch, BatchAdmission, check_batches, checked_samples, cut_batch
from mlora.engine.stage_group import StageGroup
from mlora.engine.stage_worker import StageWorker
from mlora.errors import check_kind
from mlora.memory.estimate import MemorySample
from mlora.model.base_info import router_loss_fault
from mlora.objectives.custom import FailuresOfLoss, LossError
from mlora.objectives.label_losses import LabelObjective, SingleLabel
from mlora.objectives.registry import CROSS_ENTROPY
from mlora.optim.optimizer import OptimizerError
from mlora.optim.step_rule import Update
from mlora.pipeline.order import ALONE, RoundPosition
from mlora_ext.errors import AdapterError


class Batcher:
    """The verbs of an `Engine` on batches, which enter and leave its pipeline."""

    def __init__(self, group: StageGroup, device: torch.device, micro_batches: int) -> None:
        self.device = device
        self.stages, self.replicas = len(group.blocks), group.replicas
        self.peak_memory = 0
        self.memory_after: list[int] = []
        self._admission: BatchAdmission | None = None  # None = the caller sees to memory
        self._pipeline, self._states = group.driver, AdapterStates()
        self._vocab_size, self._micro_batches = group.first.base.vocab_size, micro_batches
        self._measures = count(1)
        self._fault = router_loss_fault(group.first.base.model.config)  # why nothing can be trained

    def forward_backward(
        self, batches: Mapping[str, Sequence[Sample]], *, ends: Sequence[str] = ()
    ) -> dict[str, BatchResult]:
        """Runs one batch and adds each adapter's gradient, a sum over its tokens, to what it has.

        Args:
            batches: samples by adapter name.
            ends: adapters whose accumulation this batch completes. Naming them spares `optim_step` a journey
                through the stages.

        Returns:
            Results by adapter name. A loss that is not finite spoils that adapter's gradient only; call
            `discard_gradients` or `remove_adapter` for it.

        Raises:
            ValueError: if a name is unknown, a sample is malformed, or the base model's config asks for its
                routers' auxiliary loss.
            LossError: if an adapter's objective failed. That adapter loses what it has accumulated; the
                others have their gradients.
            OptimizerError: if the optimizer of an adapter of the batch failed in an earlier step. Remove that
                adapter; the others have their gradients.
            Exception: what the model raises, such as `torch.OutOfMemoryError`. A single stage goes on, and
                the batch's adapters lose what they have accumulated, also from earlier batches.
        """
        return self.finish(self.start(batches, ends=ends))

    def start(
        self,
        batches: Mapping[str, Sequence[Sample]],
        *,
        ends: Sequence[str] = (),
        measure: bool = False,
        whole: bool = False,
    ) -> BatchFuture:
        """Lets a batch enter the pipeline and returns at once; `finish` returns its results.

        Args:
            batches: samples by adapter name, of adapters of one replica.
            ends: adapters whose accumulation this batch completes.
            measure: measure the memory of each micro-batch on each stage; after `finish` it is in
                `BatchFuture.measured`.
            whole: do not cut the batch into micro-batches.

        Returns:
            The batch's future, for `finish` and `first_done`.

        Raises:
            ValueError: if a name is unknown, adapters are in several replicas, `ends` names one without
                samples, or a sample is malformed; nothing has entered then.
        """
        if self._fault:
            raise ValueError(self._fault)
        check_batches(batches, "samples")
        check_kind("ends", ends, "a list of adapter names", Sequence, Set)
        for name in ends:
            if name not in batches:
                raise ValueError(f"ends: expected adapters of the batch ({', '.join(batches)}), got {name!r}")
        for name in batches:
            self._states.of(name)
            if any(name in future.ends for future in self._states.under_way):
                raise AdapterError(
                    name, "a batch that ends its accumulation is under way; call finish and optim_step first"
                )
        replicas = {self._states[name].replica for name in batches}
        if len(replicas) > 1:
            raise ValueError(f"batches: the adapters {', '.join(batches)} are in several replicas")
        batches = checked_samples(self._states, batches)
        pieces = self._cut(batches, 1 if whole else self._micro_batches)
        if self._admission is not None:
            measure = measure or self._admission.worth_measuring(pieces)
        rows = {name: self._states[name].rows for name in batches}
        packed = []
        for piece in pieces:
            packed.append(self._pack(piece, rows))
            for name, length in zip(packed[-1].names, packed[-1].lengths, strict=True):
                rows[name] += length
        trained = [batch for batch in packed if batch.rows.numel()]
        if trained:
            planned = self._planned(ends, packed)
            packed = [
                replace(batch, ends=list(ends), planned=planned) if batch is trained[-1] else batch
                for batch in packed
            ]
        parts: list[tuple[MicroBatch, int | None]] = []
        entered, stream = 0, "+".join(batches)
        for batch in packed:
            position = RoundPosition(entered, len(trained)) if batch.rows.numel() else ALONE
            entered += bool(batch.rows.numel())
            batch = replace(batch, measure=next(self._measures) if measure else None)
            parts.append((batch, self._enter(batch, position, stream, train=True)))
        for batch, _ in parts:
            for name, length in zip(batch.names, batch.lengths, strict=True):
                self._states[name].entered(length, batch.units[name])
        bounds = () if self._admission is None else self._admission.bounds(pieces)
        future = BatchFuture(parts, ends if trained else (), bounds)
        self._states.under_way.append(future)
        return future

    def _planned(self, ends: Sequence[str], packed: Sequence[MicroBatch]) -> dict[str, Update]:
        """Returns the updates that are known before a batch; by default none."""
        return {}

    def _cut(self, batches: Batch, least: int) -> list[Batch]:
        """Cuts a batch into micro-batches: at least so many, more where memory is short."""
        return (self._admission.cut if self._admission else cut_batch)(batches, least)

    def first_done(self, futures: Sequence[BatchFuture]) -> BatchFuture:
        """Works until one of these batches has passed its pipeline.

        Args:
            futures: of `start`, in the order in which they started; at least one.

        Returns:
            The first of the batches that have passed.

        Raises:
            ValueError: if none of them is under way, as after an error.
        """
        check_kind("futures", futures, "a list of what start returned", Sequence)
        for future in futures:
            check_kind("futures", future, "what start returned", BatchFuture)
        by_last = {future.last: future for future in futures}
        return by_last[0] if 0 in by_last else by_last[self._pipeline.first_done(list(by_last))]

    def finish(self, future: BatchFuture, *, raises: bool = True) -> dict[str, BatchResult]:
        """Waits until a batch has passed the pipeline.

        Args:
            future: of `start`; batches end in the order in which they started.
            raises: whether a failed objective or optimizer is an error. If not, see `BatchResult.fault`.

        Returns:
            Results by adapter name.

        Raises:
            ValueError: if the batch is not under way, as after an error in one that started before it.
            LossError, OptimizerError, Exception: as `forward_backward`. Over several stages, a stage may have
                made the step that failed just before this batch.
        """
        check_kind("future", future, "what start returned", BatchFuture)
        results: dict[str, BatchResult] = {}
        for place, (batch, number) in enumerate(future.parts):
            with ExitStack() as unless_back:
                unless_back.callback(self._take_back, future, future.parts[place:])
                notes, losses = self._leave(batch, number)
                unless_back.pop_all()
            if any(note.failed for note in notes):
                self._note_failures(note.failed for note in notes)
            phases = tuple(tuple(note.memory) for note in notes if note.memory is not None)
            if notes and len(phases) == len(notes):
                future.measured.append(MemorySample(batch.all_lengths, phases))
            for name, found in losses.items():
                results[name] = results[name].plus(found) if name in results else found
            for name in future.ends:
                if notes and all(name in note.squares for note in notes):
                    self._states[name].squares = sum(float(note.squares[name]) for note in notes)
        if self._admission is not None:
            others = [other for other in self._states.under_way if other is not future]
            after = () if others else self.memory_after
            self._admission.passed(future.measured, self.peak_memory, after)
        self._states.landed(future)
        faulty = [name for name, result in results.items() if result.fault or self._states[name].fault]
        for name in faulty:
            self._states[name].leave(Update())
        if faulty:
            results = self._with_failed(results)
            if raises:
                self._raise_faults(results)
        return results

    def settle(self, names: Sequence[str]) -> dict[str, str]:
        """Makes the stages apply the steps that were decided; with one stage they have been.

        Over several stages, each stage else makes a step just before the adapter's next forward.

        Args:
            names: of adapters.

        Returns:
            Why optimizers failed, by adapter. Remove these adapters: some of their weights may have changed.

        Raises:
            ValueError: if a name is unknown.
        """
        replicas: dict[int, list[str]] = {}
        check_kind("names", names, "a list of adapter names", Sequence)
        for name in names:
            replicas.setdefault(self._states.of(name).replica, []).append(name)
        for replica, own in replicas.items():
            updates = self._states.updates(own)
            if updates:
                answers = self._pipeline.control(StageWorker.update, {"updates": updates}, replica=replica)
                self._note_failures(answers)
        return {name: self._states[name].fault for name in names if self._states[name].fault}

    def _flush(self, *names: str) -> None:
        """Makes the stages apply decided updates, if they have not; raises OptimizerError if one failed."""
        self.settle(names)
        self._raise_failed(names)

    def _raise_failed(self, names: Iterable[str]) -> None:
        """Raises OptimizerError for the first adapter whose optimizer has failed; the base has none."""
        for name in names:
            if name in self._states and self._states[name].fault:
                raise OptimizerError(self._states[name].fault, name)

    def _raise_faults(self, results: Mapping[str, BatchResult]) -> None:
        """Raises OptimizerError if an optimizer has failed, LossError if an objective has."""
        self._raise_failed(results)
        for name, result in results.items():
            if result.fault:
                raise LossError(f"adapter {name!r}: {result.fault}")

    def _with_failed(self, results: Mapping[str, BatchResult]) -> dict[str, BatchResult]:
        """Returns results in which adapters whose optimizer has failed have the reason and no loss."""
        found = dict(results)
        for name in results:
            if name in self._states and self._states[name].fault:
                found[name] = replace(results[name], loss_sum=math.nan, fault=self._states[name].fault)
        return found

    def _note_failures(self, of_stages: Iterable[Mapping[str, str]]) -> None:
        """Notes which optimizers have failed; of several stages the first one counts."""
        for name, message in (each for failed in of_stages for each in failed.items()):
            self._states[name].fault = self._states[name].fault or message

    def _take_back(self, future: BatchFuture, parts: Sequence[tuple[MicroBatch, int | None]]) -> None:
        """Drops what adapters have accumulated: a backward that failed may have added to some gradients."""
        self._states.landed(future)
        for name in (name for batch, _ in parts for name in batch.names):
            self._states[name].leave(Update())

    def evaluate(self, batches: Mapping[str | None, Sequence[Sample]]) -> dict[str, BatchResult]:
        """Returns losses without gradients or dropout.

        Args:
            batches: samples by adapter name; None or `__base__` is the base model alone.

        Returns:
            Results by name; `__base__` for the base model.

        Raises:
            ValueError: if a name is unknown, or a sample is malformed.
            LossError: if an adapter's objective failed.
            OptimizerError: if the optimizer of an adapter of the batch failed in an earlier step; nothing of
                the batch has been computed then. Remove that adapter.
        """
        return next(self.evaluate_each([batches]))

    def evaluate_each(
        self, batches: Iterable[Mapping[str | None, Sequence[Sample]]], *, raises: bool = True
    ) -> Iterator[dict[str, BatchResult]]:
        """Evaluates batch after batch; over several stages, some are under way at once.

        Args:
            batches: as for `evaluate`; taken as the pipeline has room for more.
            raises: as for `finish`.

        Yields:
            The results of each batch, in their order.

        Raises:
            ValueError, LossError, OptimizerError: as `evaluate`.
        """
        check_kind("batches", batches, "an iterable of batches", Iterable)
        under_way: deque[BatchFuture] = deque()
        try:
            for batch in batches:
                check_batches(batch, "samples")
                pieces = self._pieces(checked_samples(self._states, batch))
                packed = [self._pack(piece, None) for piece in pieces]
                self.settle([name for part in packed for name in part.all_owners])
                if raises:  # not for adapters that the batch only reads, as in training
                    self._raise_failed(name for part in packed for name in part.names)
                under_way.append(BatchFuture([(part, self._enter(part, train=False)) for part in packed]))
                self._states.under_way.append(under_way[-1])
                if len(under_way) == 2 * self.stages * self.replicas:
                    yield self._evaluated(under_way, raises)
            while under_way:
                yield self._evaluated(under_way, raises)
        finally:
            while under_way:  # a batch was malformed, or the caller stopped early
                self._evaluated(under_way, raises=False)

    def _evaluated(self, under_way: deque[BatchFuture], raises: bool) -> dict[str, BatchResult]:
        """Returns the results of the oldest batch; after an error none of the others comes back."""
        found: dict[str, BatchResult] = {}
        with ExitStack() as unless_back:
            unless_back.callback(self._forget, under_way)
            for batch, number in under_way[0].parts:
                for name, result in self._leave(batch, number)[1].items():
                    found[name] = found[name].plus(result) if name in found else result
            unless_back.pop_all()
        self._states.landed(under_way.popleft())
        found = self._with_failed(found)
        if raises:
            self._raise_faults(found)
        return found

    def _forget(self, under_way: deque[BatchFuture]) -> None:
        while under_way:
            self._states.landed(under_way.popleft())

    def next_tokens(self, batches: Mapping[str | None, Sequence[Sequence[int]]]) -> dict[str, list[int]]:
        """Returns the most likely next token of sequences, or a classifier's label, without dropout.

        An adapter of SEQ_CLS or TOKEN_CLS that predicts one of several labels gives the id of the label of
        each sequence's last token.

        Args:
            batches: token ids by adapter name; None or `__base__` is the base model alone.

        Returns:
            One token, or label, per sequence, by name.

        Raises:
            ValueError: if a name is unknown, a sequence is empty, or an adapter predicts numbers, several
                labels at once, or answers.
            OptimizerError: as `evaluate`.
        """
        check_batches(batches, "sequences of token ids")
        for owner in batches:
            for ids in batches[owner]:
                check_kind(f"adapter {owner!r}", ids, "a list of sequences of token ids", Sequence)
            objective = None if owner in (None, BASE) else self._states.of(str(owner)).objective
            if isinstance(objective, LabelObjective) and not isinstance(objective, SingleLabel):
                raise AdapterError(
                    owner,
                    "its head predicts neither a token nor one label; save it, and load its folder with PEFT",
                )
        found: dict[str, list[int]] = {}
        samples = {
            name: [Sample(tuple(ids), tuple(ids)) for ids in prompts] for name, prompts in batches.items()
        }
        self._flush(*(str(name) for name in batches if name not in (None, BASE)))
        for part in self._pieces(samples):
            prompts = {name: [sample.input_ids for sample in own] for name, own in part.items()}
            packed = pack_prompts(prompts, device=self.device)
            number = self._enter(packed, train=False)
            assert number is not None
            tokens = iter(self._pipeline.finish(number).report.next_tokens.tolist())
            for name, own in part.items():
                found.setdefault(name or BASE, []).extend(next(tokens) for _ in own)
        return found

    def _pieces(self, batches: Batch) -> list[Batch]:
        """Cuts batches by replica, the base model's go to the first, and as small as memory needs."""
        found: dict[int, dict[Any, Any]] = {}
        for name, rows in batches.items():
            replica = 0 if name in (None, BASE) else self._states.of(name).replica
            found.setdefault(replica, {})[name] = rows
        return [piece for part in found.values() for piece in self._cut(part, 1)]

    def _pack(self, batches: Mapping[Any, Sequence[Sample]], row0: Mapping[str, int] | None) -> MicroBatch:
        starts = {name: s.start for name in batches if (s := self._states.get(name)) and s.start is not None}
        packed = pack(batches, row0=row0, vocab_size=self._vocab_size, device=self.device, starts=starts)
        for (name, samples), tokens in zip(batches.items(), packed.counts, strict=True):
            if name not in (None, BASE):
                objective = self._states[name].objective
                packed.units[name] = tokens
                try:
                    with FailuresOfLoss(objective):
                        units = index(objective.units(samples, tokens))
                        if units < 0:
                            raise ValueError(f"units: expected 0 or more, got {units}")
                        packed.units[name] = units
                except LossError as error:
                    packed.faults[name] = str(error)
        return packed

    def _enter(
        self,
        batch: MicroBatch,
        position: RoundPosition = ALONE,
        stream: str = "",
        *,
        train: bool,
        replica: int = 0,
    ) -> int | None:
        """Lets a micro-batch enter the pipeline; returns None if it has nothing to compute.

        In traces, `stream` joins the micro-batches of one batch. Rows without an adapter go to `replica`.
        Without `train`, only the last stage answers: call `_flush` before the first micro-batch of the batch,
        which tells of failed optimizers.
        """
        if not batch.rows.numel():
            return None
        owners = [None if name == BASE else self._states[name] for name in batch.names]
        adapters = [state for state in owners if state is not None]
        objectives = [CROSS_ENTROPY if state is None else state.objective_spec for state in owners]
        plain = batch.targets is None or all(spec == CROSS_ENTROPY for spec in objectives)
        batch = replace(
            batch,
            facts=() if plain else batch.facts,
            steps=[state.steps for state in adapters],
            scales=[1.0 if state is None else state.scaler.scale for state in owners],
            objectives=None if plain else objectives,
            updates=self._states.updates(batch.all_owners),
        )
        return self._pipeline.start(
            batch,
            train=train,
            position=position,
            stream=stream,
            rows=sum(batch.all_lengths),
            replica=adapters[0].replica if adapters else replica,
        )

    def _leave(
        self, batch: MicroBatch, number: int | None
    ) -> tuple[Sequence[StageNote], dict[str, BatchResult]]:
        """Waits for a micro-batch; returns the stages' notes on it and its results by name."""
        if number is None:
            return (), {name: BatchResult(0.0, 0) for name in batch.names}
        result = self._pipeline.finish(number)
        self.peak_memory = max([self.peak_memory, *(note.peak_memory for note in result.notes)])
        if result.notes:
            self.memory_after = [note.used_memory for note in result.notes]
        report = result.report
        metrics = report.metrics or [{} for _ in batch.names]
        faults = report.faults or ["" for _ in batch.names]
        found = {}
        for name, tokens, loss, own, fault in zip(
            batch.names, batch.counts, report.losses.tolist(), metrics, faults, strict=True
        ):
            units = batch.units.get(name, tokens)
            totals = {key: total for key, (total, _) in own.items()}
            counts = {key: count for key, (_, count) in own.items() if count is not None}
            if name in batch.faults:
                loss, fault = math.nan, batch.faults[name]
            found[name] = BatchResult(loss, tokens, units, totals, counts, fault)
        return result.notes, found
