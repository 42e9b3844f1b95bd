"""One stage's part of an engine: a piece of the base model, and what each adapter has on it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mlora_ext
from mlora.data.micro_batch import MicroBatch, MicroBatchResult, Observation, PackedRows, StageNote
from mlora.engine.base_gemm import base_gemm_times, set_base_gemm_on
from mlora.engine.put_adapter import lora_of, put_adapter
from mlora.engine.stage_starts import StageStarts
from mlora.errors import first_line
from mlora.memory.meter import PeakMemory, WorkMemory, free_memory, release_memory, used_memory, work_memory
from mlora.model.base_model import BaseModel
from mlora.objectives.custom import Unmade
from mlora.objectives.objective import Objective
from mlora.objectives.options import ObjectiveError
from mlora.objectives.registry import objective_of
from mlora.objectives.token_losses import (
    Head,
    Owners,
    TokenLosses,
    chunked_losses,
    log_probabilities,
    losses_of_own_heads,
    plain_losses,
)
from mlora.offload.options import IN_MEMORY, OffloadOptions
from mlora.offload.planner.workload import Update as UpdateKind
from mlora.optim.groups import layer_norms_among
from mlora.optim.optim_config import OptimConfig
from mlora.optim.optimizer import Optimizer, OptimizerError
from mlora.optim.registry import optimizer_kind
from mlora.optim.step_rule import Update
from mlora.pipeline import Worker, verb
from mlora.pipeline.stage import verb_of
from mlora.pipeline.trace import Trace
from mlora_ext.backends.gpu_base_gemm import Record
from mlora_ext.interop.peft_folder import adapter_state
from mlora_ext.layers.adapter_weights import neutral_names, scalings, write_weights, written_marks
from mlora_ext.layers.embedding import TrainedRowsLinear
from mlora_ext.out_of_memory import is_out_of_memory
from mlora_ext.routing.router import router_of


class StageWorker(Worker):
    """Does one stage's work: forward, backward, updates, and what the first stage asks for.

    Its micro-batches are a `MicroBatch`. It returns hidden states or the head's input. If an adapter targets
    the head, the head belongs to the last stage, which returns whole logits.
    """

    def __init__(self, base: BaseModel, device: torch.device, offload: OffloadOptions = IN_MEMORY) -> None:
        self.base, self.device, self.offload = base, device, offload
        self._objectives: dict[str, Objective] = {}
        self._optimizers: dict[str, Optimizer] = {}
        self._in_flight: dict[str, int] = {}
        self._failed: dict[str, str] = {}  # why the optimizer failed, until the first stage is told
        self._starts = StageStarts(base)
        self._latest: Sequence[str] = ()
        self._peaks = PeakMemory(device)
        self._measured: dict[int, WorkMemory] = {}
        self._current: WorkMemory | None = None

    @property
    def in_flight(self) -> list[str]:
        """Names of the adapters between forward and backward on this stage; if none, the latest ones."""
        found = [name for name, count in list(self._in_flight.items()) if count]
        return found or [name for name in self._latest if name in self._in_flight]

    @contextmanager
    def around(self, train: bool, batch: MicroBatch, given: Sequence[Tensor]) -> Iterator[None]:
        """Sets packed attention and the model's mode, and measures; see `Worker.around`."""
        if self.base.model.training is not train:
            self.base.model.train(train)
        number = batch.measure if train else None
        with self.base.packed(), ExitStack() as stack:
            if self.base.cut is not None:
                stack.callback(self._give_head, {})
            if number is None:
                yield
                return
            if number in self._measured:
                self._measured[number].mark()
            else:
                self._measured[number] = work_memory(self._peaks)
            self._current = self._measured[number]
            self._current.adopt(given)
            try:
                with self._current:
                    yield
            finally:
                self._current = None

    def for_next(self, batch: MicroBatch) -> MicroBatch:
        """Returns what the next stage gets; see `Worker.for_next`."""
        return batch.for_next()

    def after_backward(self, batch: MicroBatch) -> StageNote:
        """Returns squares of complete gradients, failed optimizers and memory."""
        measured = None if batch.measure is None else self._measured.pop(batch.measure, None)
        for name in batch.names:
            self._in_flight[name] -= 1
        memory = None
        if measured is not None:  # only the last stage has a loss between forward and backward
            forward, *loss, backward = measured.peaks
            memory = (forward, *(loss or [0]), backward)
        return StageNote(
            {name: self._optimizers[name].squares() for name in batch.ends},
            {name: self._failed.pop(name) for name in batch.updates if name in self._failed},
            self._peaks.read(),
            used_memory(self.device),
            memory,
        )

    def traced(self, trace: Trace) -> None:
        """Lets what disk and optimizer do into the stage's trace; see `Worker.traced`."""
        first = 0 if self.base.span is None else self.base.span.first
        if self.base.stream is not None:
            self.base.stream.on_read = lambda block, *times: trace.add_beside(
                "read", f"block {first + block}", *times
            )

    def control(self, verb: str, arguments: Mapping[str, Any]) -> Any:
        """Calls a verb of this worker or of `StageStarts`; see `Worker.control`."""
        if hasattr(StageStarts, verb):
            return verb_of(self._starts, verb)(**arguments)
        return super().control(verb, arguments)

    @verb
    def squares(self, name: str) -> Tensor | float:
        """Returns the sum of the squares of an adapter's gradients on this stage."""
        return self._optimizers[name].squares()

    @verb
    def weights(self, name: str) -> dict[str, Tensor]:
        """Returns an adapter's weights on this stage under PEFT's keys."""
        return adapter_state(self.base.model, name)

    @verb
    def base_gemm(self, dtype: str, library: str) -> None:
        """Sets who multiplies by the frozen weights."""
        set_base_gemm_on(self.device, dtype, library)

    @verb
    def base_gemm_times(self, known: Sequence[Record]) -> list[Record]:
        """Returns the times by which a GPU's products were chosen."""
        return base_gemm_times(self.base.body, self.device, known)

    @verb
    def base_bytes(self) -> dict[str, Any]:
        """Returns where the bytes of the base model are."""
        return dataclasses.asdict(self.base.nbytes)

    @verb
    def memory(self) -> int:
        """Returns the bytes in use."""
        return used_memory(self.device)

    @verb
    def release_memory(self) -> None:
        """Gives back memory that nothing uses."""
        release_memory(self.device)

    @verb
    def watch(self) -> None:
        """Begins to watch the next micro-batch, by which `_forecast` predicts those after it."""
        if self.base.activations is not None:
            self.base.activations.watch(swaps=self.offload.activations in ("auto", "swap"))

    @verb
    def forecast(self, tokens: int, in_flight: int, sharing: int) -> dict[str, Any] | None:
        """Predicts the time of a step of so many tokens; if asked to, chooses what becomes of activations.

        So many micro-batches are `in_flight` here at once, and so many stages share this process's memory.
        """
        from mlora.offload.forecast import forecast

        base = self.base
        if base.activations is None:
            return None
        found = forecast(
            base.activations,
            base.stream,
            self.offload,
            tokens,
            trained=self._trained_numbers(),
            update=self._update_kind(),
            in_flight=in_flight,
            used=used_memory(self.device),
            free=(free_memory(self.device) or 0) // sharing,
        )
        return dataclasses.asdict(found)

    def _trained_numbers(self) -> list[int]:
        """Returns how many weights of each block, and of the rest, an optimizer on disk updates."""
        return []

    def _update_kind(self) -> UpdateKind:
        """Returns when an optimizer on disk works."""
        return "active"

    def own(self, name: str, optim: OptimConfig, *, trained: bool = True) -> None:
        """Takes charge of an adapter on the model, and gives it gradients that last if it is `trained`."""
        own, model = self._own_parameters(name), self.base.model
        if not trained:
            for parameter in own.values():
                parameter.requires_grad_(False)
        found = zip(own.items(), scalings(model, name), written_marks(model, name), strict=True)
        stepped = [one for one in found if one[0][1].requires_grad]
        names = neutral_names(model, name)
        parameters = {names[key]: parameter for (key, parameter), *_ in stepped}
        optimizer = self._optimizers[name] = optimizer_kind(optim.optim)(parameters, optim)
        optimizer.keys = [key for (key, _), *_ in stepped]
        optimizer.spare_layer_norms(layer_norms_among(parameters.values(), model))
        optimizer.scalings = [scaling for _, scaling, _ in stepped]
        optimizer.hold_gradients(name, [mark for *_, mark in stepped])
        router_of(self.base.model).moved()

    @verb
    def create(
        self,
        name: str,
        lora: dict[str, Any],
        optim: dict[str, Any],
        seed: int,
        trained: bool,
        weights: Mapping[str, Mapping[str, Tensor]] | None,
    ) -> None:
        """Creates here an adapter that the first stage has created."""
        put_adapter(self.base.model, name, lora_of(lora), None, seed)
        self.own(name, OptimConfig(**optim), trained=trained)
        if weights is not None:
            write_weights(self.base.model, name, weights)

    @verb
    def remove(self, name: str) -> None:
        """Forgets an adapter."""
        self._starts.close_originals(name)
        mlora_ext.remove_adapter(self.base.model, name)
        del self._optimizers[name]
        self._in_flight.pop(name, None)
        self._failed.pop(name, None)

    @verb
    def update(self, updates: Mapping[str, Update]) -> dict[str, str]:
        """Makes each adapter's update; returns why an optimizer failed, by adapter.

        An error of a later stage would end all adapters.
        """
        failed: dict[str, str] = {}
        for name, update in updates.items():
            try:
                with FailuresOf(self._optimizers[name]):
                    self._optimizers[name].apply(update)
            except OptimizerError as error:
                failed[name] = str(error)
            finally:
                self._changed(name)
        return failed

    @verb
    def state(self, name: str) -> dict[str, Any]:
        """Returns copies of an adapter's weights, gradients and moments on this stage, by their names."""
        parameters, gradients = self._own_parameters(name), self._optimizers[name].gradients()
        trained = [key for key, parameter in parameters.items() if parameter.requires_grad]
        return {
            "weights": {key: p.detach().clone() for key, p in parameters.items()},
            "gradients": {key: gradients[i].clone() for i, key in enumerate(trained) if i in gradients},
            "moments": self._optimizers[name].state_dict(),
        }

    @verb
    def load(self, name: str, state: Mapping[str, Any], updates: int, seed: int) -> None:
        """Takes over an adapter's state, which may hold other stages' tensors too.

        `updates` is how many the optimizer has made; `seed` is of the adapter's dropout.
        """
        self._optimizers[name].load_state_dict(updates, state["moments"])
        self._optimizers[name].drop_gradients()
        with torch.no_grad():
            for key, parameter in self._own_parameters(name).items():
                parameter.copy_(state["weights"][key])
                if key in state["gradients"]:
                    assert parameter.grad is not None
                    parameter.grad.copy_(state["gradients"][key])
        self._changed(name)
        router_of(self.base.model).adapters[name].seed = seed
        router_of(self.base.model).adapters[name].awaits_start = False

    def _changed(self, name: str) -> None:
        """Notes that an adapter's weights were changed in place."""
        router_of(self.base.model).updates.record(name)

    def _own_parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Returns those of an adapter's Parameters that are on this stage."""
        parameters = mlora_ext.adapter_parameters(self.base.model, name)
        return {key: p for key, p in parameters.items() if not p.is_meta}

    def forward(self, given: Sequence[Tensor], batch: MicroBatch) -> Tensor | tuple[Tensor, ...]:
        """Makes the updates decided since the last forward, and runs a micro-batch.

        Rows without gradient, such as references, are run first: without autograd and without dropout. So
        nothing of them is kept, and backward never meets them. Memory is measured from here: without updates,
        and without gradients, which all exist from here on. What was received counts.

        Args:
            given: what the previous stage returned: `[T, D]`; `[S, D]` of the rows without gradient, if there
                are any; and rows of tied embeddings, see `rows_to_pass`. Nothing on the first stage.
            batch: the micro-batch.

        Returns:
            `[T, D]`, or the logits `[T, V]` if an adapter targets the head; the same of the silent rows, if
            there are any; and on earlier stages rows of tied embeddings.
        """
        if batch.updates:
            self._failed |= self.update(batch.updates)
        if batch.measure is not None:
            self._measured[batch.measure].restart(given)
        if torch.is_grad_enabled():
            self._latest = batch.names
            for name in batch.names:
                self._in_flight[name] = self._in_flight.get(name, 0) + 1
        states = 1 if batch.silent is None else 2
        passed = [] if self.base.cut is None else self._pass_rows(batch, given[states:])
        hidden, silent = (*given[:states], None, None)[:2]
        quiet = [] if batch.silent is None else [self._run_silent(batch.silent, silent)]
        output = self._run(batch, hidden, batch.steps, batch.start)
        return (output, *quiet, *passed) if quiet or passed else output

    def _pass_rows(self, batch: MicroBatch, received: Sequence[Tensor]) -> list[Tensor]:
        """Returns what this stage sends on of `rows_to_pass`; the last stage gives them to its head.

        `received` are those of the stage before; none on the first.
        """
        base, span = self.base, self.base.span
        names = [*batch.names, *(() if batch.silent is None else batch.silent.names)]
        rows = rows_to_pass(base, names)
        if span is None or not rows:
            return []
        if span.is_first:
            return [row.clone() for row in rows.values()]
        if base.is_last:
            self._give_head(dict(zip(rows, received, strict=True)))
            return []
        return list(received)

    def _give_head(self, rows: Mapping[str, Tensor]) -> None:
        """Gives the head the rows of a micro-batch, in place of those before."""
        head = self.base.head
        if isinstance(head, TrainedRowsLinear):
            head.received = rows

    def _run(
        self,
        rows: PackedRows,
        received: Tensor | None,
        steps: Sequence[int],
        start: Observation | None = None,
    ) -> Tensor:
        """Runs packed rows through this stage."""
        base, (position_ids, sequences) = self.base, rows.places(self.device)
        with mlora_ext.route(base.model, rows.layout, rows.adapters, steps=steps):
            if start is not None:
                self._starts.observe(start)
            hidden = base.hidden(rows.input_ids, position_ids, sequences, received)
            if not base.is_last or self._frozen_head() is not None:
                return hidden
            return base.logits(hidden)

    def _run_silent(self, rows: PackedRows, received: Tensor | None) -> Tensor:
        """Runs packed rows without gradient and without dropout."""
        model, adapters = self.base.model, rows.adapters
        drops = model.training and bool(adapters)  # rows of the base model alone have no dropout
        with torch.no_grad(), ExitStack() as stack:
            if drops:
                model.eval()
                stack.callback(model.train)
            return self._run(rows, received, [0] * len(adapters))

    def _frozen_head(self) -> Head | None:
        """Returns the head that `losses` computes in chunks; None if `forward` computes it with autograd."""
        return self.base.frozen_head()

    def _logits(self, output: Tensor) -> Tensor:
        """Returns the logits of rows `[M, D]` of the last stage's output; a head with adapters has made them.

        A frozen head is not called: it may be a layer that needs a route, since other adapters train it.
        """
        head = self._frozen_head()
        return output if head is None else head.rule.apply(head.frozen.matmul(output, head.bias))

    def loss(
        self, output: Tensor | tuple[Tensor, Tensor], batch: MicroBatch
    ) -> tuple[Tensor, MicroBatchResult]:
        """Computes the pipeline's loss, or the most likely next tokens of prompts.

        Args:
            output: the last stage's, `[T, D]`; the logits `[T, V]` if an adapter targets the head. Beside it
                that of rows without gradient, if there are any.
            batch: the micro-batch.

        Returns:
            The scaled total to differentiate, zero for prompts; and what goes back to the first stage.
        """
        if self._current is not None:
            self._current.mark()
        output, quiet = output if isinstance(output, tuple) else (output, None)
        rows, tokens = batch.rows.to(output.device, torch.int64), batch.targets
        if tokens is None:
            own = self.base.own_heads(batch.names)
            picked = output.index_select(0, rows).split(batch.counts)
            parts = zip(batch.names, picked, strict=True)
            logits = [own[name](part) if name in own else self._logits(part) for name, part in parts]
            total = output.new_zeros(())
            found = MicroBatchResult(next_tokens=torch.cat([each.argmax(-1) for each in logits]))
        else:
            tokens = tokens.to(output.device, torch.int64)
            losses = self._token_losses(output, rows, tokens, self._owners(batch, quiet), batch.names)
            total = losses.total
            found = MicroBatchResult(losses.sums, list(losses.metrics), list(losses.faults))
        if self._current is not None:
            self._current.mark()
        return total, found

    def _token_losses(
        self, output: Tensor, rows: Tensor, tokens: Tensor, owners: Owners, names: Sequence[str]
    ) -> TokenLosses:
        head, own = self._frozen_head(), self.base.own_heads(names)
        if own:
            assert head is not None
            heads = [own.get(name, head) for name in names]
            return losses_of_own_heads(output, heads, rows, tokens, owners)
        if head is not None:
            return chunked_losses(output, head, rows, tokens, owners)
        return plain_losses(self._logits(output.index_select(0, rows)), tokens, owners)

    def _owners(self, batch: MicroBatch, quiet: Tensor | None) -> Owners:
        """Returns the owners of trained rows, with what their objectives read."""
        if batch.objectives is None:
            return Owners(batch.counts, batch.scales)
        more: dict[str, Any] = {}
        if quiet is not None and batch.silent is not None:
            more = {"reads": batch.reads, "silent": self._silent_log_p(quiet, batch.silent)}
        objectives = [self.objective(spec) for spec in batch.objectives]
        return Owners(batch.counts, batch.scales, objectives, batch.trained, batch.facts, **more)

    def objective(self, spec: Any, made: Objective | None = None) -> Objective:
        """Returns the objective of a spec; the first one is kept: what it is made of, or `made`."""
        key = json.dumps(spec, sort_keys=True)
        if key not in self._objectives or made is not None:
            try:
                self._objectives[key] = made or objective_of(spec)
            except ObjectiveError as error:  # it would end the run of all adapters
                self._objectives[key] = Unmade(str(error))
        return self._objectives[key]

    def _silent_log_p(self, output: Tensor, silent: PackedRows) -> Sequence[Tensor]:
        """Returns the log-probabilities of each silent sequence's tokens."""
        assert silent.targets is not None
        rows, tokens = (each.to(output.device, torch.int64) for each in (silent.rows, silent.targets))
        head, own = self._frozen_head(), self.base.own_heads(silent.names)
        if head is not None:
            heads = [own.get(name, head) for name in silent.names]
            log_p = log_probabilities(output, heads, rows, tokens, silent.counts)
        else:
            with torch.no_grad():
                logits = self._logits(output.index_select(0, rows))
                log_p = -F.cross_entropy(logits.float(), tokens, reduction="none")
        return log_p.split([length for own in silent.trained for length in own])


def rows_to_pass(base: BaseModel, names: Iterable[str]) -> dict[str, Tensor]:
    """Returns rows of a tied embedding that adapters train, where embedding and head are on different stages.

    The first stage holds the rows, and is the only one that steps, counts and saves them. They go through the
    pipeline with each micro-batch, beside the hidden state. The last stage's head reads them, and their
    gradient comes back to the first stage as that of the hidden state does. So a step, a checkpoint and a
    fault know nothing of it.

    Returns rows `[n, D]`, n trained ones of hidden size D, by adapter; empty if one stage has all layers. All
    stages return the same names in the same order. The rows are Parameters on the first stage, and on the
    meta device elsewhere. `names` are of the adapters of a micro-batch.
    """
    span, head = base.span, base.head
    if span is None or span.stages == 1 or not isinstance(head, TrainedRowsLinear):
        return {}
    tied = [name for name in dict.fromkeys(names) if name in head.specs and head.specs[name].tied_to]
    return {name: head.held_rows(name) for name in tied}


class FailuresOf:
    """Raises whatever an optimizer raises as an OptimizerError that names the optimizer.

    An optimizer of one's own may raise anything. Errors of files and of memory pass as they are: they concern
    the whole run.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, OSError) or is_out_of_memory(error):
            return
        optimizer = self._optimizer
        what = f"its optimizer ({optimizer.config.optim}) failed in step"
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise OptimizerError(f"{what} {optimizer.steps + 1}: {reason}") from error
