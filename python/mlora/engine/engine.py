"""The engine: adapters over one base model, their gradients and their optimizer steps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from numbers import Integral
from pathlib import Path
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel

import mlora_ext
from mlora.cluster.device import existing_device, set_allocators
from mlora.config.sections import QuantizationConfig, checked_quantization, parse_size
from mlora.engine.adapter_start import start_from_data, start_from_weights
from mlora.engine.adapter_state import AdapterState, StepResult
from mlora.engine.batcher import Batcher
from mlora.engine.batches import FORESEEN, STAND_IN, BatchAdmission
from mlora.engine.dry_run import dry_stages
from mlora.engine.measured_samples import PIECES, MeasuredSamples
from mlora.engine.put_adapter import labelled, plain_lora, put_adapter
from mlora.engine.stage_group import StageGroup, StageOptions, stage_group_of_threads
from mlora.engine.stage_worker import StageWorker
from mlora.engine.start_beside import put_start_beside
from mlora.errors import MemoryLimitError, check_kind, check_kinds
from mlora.memory.adapter_memory import AdapterMemory
from mlora.memory.estimate import MemorySample
from mlora.memory.meter import peak_memory
from mlora.memory.room import MemoryLimit, nothing_left
from mlora.model.base_info import DIGEST, BaseInfo
from mlora.model.labels import label_objective
from mlora.model.pretrained import skeleton
from mlora.model.stored_quantization import write_quantization
from mlora.objectives.objective import Objective
from mlora.objectives.options import START, ObjectiveError
from mlora.objectives.registry import CROSS_ENTROPY, objective_of, pinned
from mlora.offload.base_bytes import BaseBytes
from mlora.offload.forecast_lines import Forecast
from mlora.offload.options import IN_MEMORY, OffloadOptions
from mlora.optim.optim_config import OptimConfig
from mlora.optim.optimizer import OptimizerError
from mlora.optim.registry import optimizer_kind
from mlora.optim.step_rule import LossScaler, StepRule, Update
from mlora.pipeline.order import held_at_once
from mlora.pipeline.stage import Verb
from mlora.pipeline.trace import Entry
from mlora_ext.adapters.lora_config import needs_data, needs_weights
from mlora_ext.backends.gpu_base_gemm import Record, Shape, times_of
from mlora_ext.errors import AdapterError, NamedError
from mlora_ext.frozen.base_gemm import base_gemm_of
from mlora_ext.interop.read_folder import adapter_weights, read_config
from mlora_ext.interop.side_files import warn_of_base
from mlora_ext.layers.adapter_weights import neutral_names
from mlora_ext.routing.router import router_of

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor

    from mlora.data.record import Sample


_PATH = (str, os.PathLike)
_STATE = {"weights", "gradients", "moments", "units", "rows", "updates", "scaler", "steps", "dropout_seed"}


class Engine(Batcher):
    """Trains many adapters over one frozen base model, in batches that they share.

    Accumulating and stepping are separate: call `forward_backward` once or several times, then `optim_step`
    for each adapter whose batch is complete. Nothing that happens to an adapter depends on the others.

    Over several stages, `start` and `finish` keep the pipeline full: batches may start while others are under
    way. While an adapter's batches are under way, you can start more of them and evaluate the adapter; other
    calls for it raise ValueError.

    Args:
        base_model: a folder, a hub id, or a Transformers model, which is converted in place.
        device: where to train.
        dtype: of the base's weights; adapters are fp32.
        fp16: short for `dtype=torch.float16`, which brings a dynamic loss scaler per adapter.
        gradient_checkpointing: recompute blocks in backward instead of keeping their activations.
        frozen_weight: the kind of the frozen weights: `plain`, `packed` (also keeps them packed for oneDNN:
            faster on a CPU, for three times their memory), or a name given to `register_frozen_weight`.
        seed: the engine's seed. An adapter's initial weights and dropout derive from it and the adapter's
            name.
        stages: the number of blocks of each stage of this process's pipeline, or a number of stages that
            share the blocks evenly.
        schedule: `lorapp`, `1f1b` or `gpipe`.
        micro_batches: the number of micro-batches that each batch is cut into.
        in_flight: for `lorapp`, the most micro-batches under way at once; see `Pipeline`.
        trace: the number of spans to keep of each stage, for `trace`.
        stage_group: the stages, if some of them are in other processes. Arguments about stages then have no
            effect: the group decides.
        offload: what of the base stays on disk; see `mlora.offload.options.OffloadOptions`.
        quantization: how the linear weights of a plain checkpoint are quantised while they are read. A model
            that is quantised already needs none. As in a run: `{"method": "bnb-nf4"}`.
        memory_limit: the most that each stage's process may use: bytes, or a size such as `8GiB`. See
            `limit_memory`.

    Raises:
        ValueError: if an argument is wrong, or the model cannot be loaded or trained on packed rows.

    Attributes:
        model: the base model with the adapters, or the first stage's piece of it.
        stages: the number of stages of each pipeline.
        replicas: the number of pipelines.
        peak_memory: the most bytes that any stage had used when its last results came.
        memory_after: bytes in use on each stage after the last micro-batch that came back; empty before the
            first one, and after adapters have come or gone.
        blocks: the number of decoder blocks of each stage, if there are several stages.
        alone: whether there is only one stage, in this process, so that `model` is whole.
        source: the base model as it was given.
        base_digest: tells the base model's files from others; None for a model that was in memory.
        registry: a model that knows the config, layers and shapes of all adapters, including those of other
            replicas.
        memory: what the limit leaves, and what adapters need of it; None = there is no limit.

    Example:
        >>> engine = Engine("path/to/base")
        >>> engine.create_adapter("a", LoraConfig(r=8), OptimConfig(learning_rate=1e-4, total_steps=100))
        >>> engine.forward_backward({"a": samples})
        >>> engine.optim_step("a")
    """

    _trains_base = False

    def __init__(
        self,
        base_model: str | os.PathLike[str] | PreTrainedModel,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        fp16: bool = False,
        gradient_checkpointing: bool = False,
        frozen_weight: str = "plain",
        seed: int = 0,
        stages: int | Sequence[int] = 1,
        schedule: str = "lorapp",
        micro_batches: int = 1,
        in_flight: int | None = None,
        trace: int = 0,
        stage_group: StageGroup | None = None,
        memory_limit: int | str | None = None,
        offload: OffloadOptions = IN_MEMORY,
        quantization: QuantizationConfig | Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype: expected a torch.dtype such as torch.bfloat16, got {dtype!r}")
        if fp16 and dtype is torch.float32:
            dtype = torch.float16
        if fp16 and dtype is not torch.float16:
            raise ValueError(f"fp16: expected dtype torch.float16 beside it, got {dtype}")
        check_kinds(
            (
                "base_model",
                base_model,
                "a folder, a hub id, or a Transformers model",
                *_PATH,
                PreTrainedModel,
            ),
            ("seed", seed, "a whole number", Integral),
            ("stages", stages, "a number, or a list of numbers of blocks", Integral, Sequence),
            ("micro_batches", micro_batches, "a whole number", Integral),
            ("in_flight", in_flight, "a whole number, or None", Integral, NoneType),
            ("trace", trace, "a whole number", Integral),
            ("frozen_weight", frozen_weight, "a name", str),
            ("schedule", schedule, "a name", str),
            ("offload", offload, "OffloadOptions", OffloadOptions),
            ("stage_group", stage_group, "a StageGroup, or None", StageGroup, NoneType),
            *(("stages", each, "numbers of blocks", Integral) for each in _listed(stages)),
        )
        if micro_batches < 1:
            raise ValueError(f"micro_batches: expected at least 1, got {micro_batches}")
        place = existing_device(device)
        self.dtype, self.seed = dtype, seed
        self._quantization = checked_quantization(quantization)
        self._gpu_base_gemm: str | None = None
        options = StageOptions(
            place,
            dtype,
            gradient_checkpointing,
            frozen_weight,
            offload,
            trained=self._trains_base,
            quantization=self._quantization,
        )
        self._dry = partial(dry_stages, base_model, options)
        self._held = partial(held_at_once, schedule, in_flight=in_flight)
        more: dict[str, Any] = {"in_flight": in_flight, "trace": trace}
        group = stage_group or stage_group_of_threads(base_model, stages, options, schedule, **more)
        super().__init__(group, place, micro_batches)
        self._part, self._spread, self.blocks = group.first, group.spread, list(group.blocks)
        self._last = group.last
        self._base = self._part.base
        self.model, self.source = self._base.model, base_model
        own = isinstance(base_model, PreTrainedModel)
        self.base_digest = None if own else BaseInfo(os.fspath(cast(str, base_model))).digest
        self.alone = self.stages * self.replicas == 1
        self.registry: PreTrainedModel = self.model
        if self.replicas > 1:  # without any weight, so that adapters on it take no memory
            self.registry = skeleton(os.fspath(cast(str, base_model)), torch.float32)
            mlora_ext.convert_model(self.registry, {}, every_linear=True)
        self.memory: MemoryLimit | None = None
        if memory_limit is not None:
            with ExitStack() as stack:  # a limit that is refused ends all stages
                stack.push(self)
                self.limit_memory(memory_limit)
                stack.pop_all()

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters, in the order in which they were created."""
        return self._states.named

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._states.under_way

    def used_memory(self) -> list[int]:
        """Returns the bytes that each stage of each replica has in use now.

        Stages that are threads of one process report that of the whole process.
        """
        return self._every(StageWorker.memory)

    def base_bytes(self) -> list[BaseBytes]:
        """Returns where the bytes of the base model are, for each stage of each replica."""
        return [BaseBytes(**answer) for answer in self._every(StageWorker.base_bytes)]

    def forecast(self, batches: Mapping[str, Sequence[Sample]]) -> list[Forecast]:
        """Runs a batch, drops its gradients, and predicts how long such batches take on each stage.

        Adapters whose objective fails add nothing.

        With `OffloadOptions.activations="auto"` each stage plans then what becomes of its blocks'
        activations. No result depends on the plan.

        Args:
            batches: samples by adapter name, such as one micro-batch of the run.

        Returns:
            A forecast of each stage; none where nothing is offloaded.

        Raises:
            ValueError: a name is unknown, a sample is malformed, or `device_memory` is too small.
            OptimizerError: if an adapter's optimizer failed in an earlier step. Remove the adapter.
        """
        self._every(StageWorker.watch)
        self.finish(self.start(batches, whole=True), raises=False)
        for name in batches:
            self.discard_gradients(name)
        tokens = sum(sample.rows for samples in batches.values() for sample in samples)
        in_flight = min(max(self._held(self.stages)), max(self.stages, self._micro_batches))
        sharing = 1 if self._spread else self.stages
        answers = self._every(StageWorker.forecast, tokens=tokens, in_flight=in_flight, sharing=sharing)
        return [Forecast(**found) for found in answers if found]

    def release_memory(self) -> None:
        """Makes each stage give back memory that nothing uses."""
        self._every(StageWorker.release_memory)

    def limit_memory(
        self,
        limit: int | str,
        *,
        enforce: bool = True,
        measured: bool = False,
        held: Sequence[int] | None = None,
        earlier: int = 0,
        name: str = "memory_limit",
    ) -> MemoryLimit:
        """Sets a limit on the memory of each stage's process, before any adapter is created.

        On a CPU it is on the process's resident memory, on a GPU on what PyTorch's allocator holds. From then
        on `create_adapter` refuses an adapter whose states do not fit. `start`, `forward_backward`,
        `evaluate` and `next_tokens` cut a batch into more micro-batches until each fits, which wait for each
        other in the pipeline, and refuse a sample that does not fit alone; nothing of the batch has been
        computed then. What micro-batches need is predicted from dry runs (on a GPU from small measured ones)
        and learned from those that pass.

        Args:
            limit: bytes, or a size such as `8GiB`.
            enforce: False = the caller asks `memory` itself what fits, as the training loop does.
            measured: measure samples where dry runs would do, too.
            held: batches that each stage holds at once; default: what the schedule says.
            earlier: bytes that this process's earlier runs left in use.
            name: what messages call the limit.

        Returns:
            What is also in `memory`.

        Raises:
            MemoryLimitError: if the limit is enforced and leaves no memory beside the base model.
            ValueError: if there are several replicas, or several stages in one process, or adapters.
        """
        try:
            limit = parse_size(limit)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if self.adapters:
            raise NamedError("memory_limit", f"set it before there are adapters, got {len(self.adapters)}")
        if self.replicas > 1:
            raise NamedError("memory_limit", "cannot be used with several replicas; use one")
        if self.stages > 1 and not self._spread:
            raise NamedError(
                "memory_limit",
                "needs a process for each stage, but these stages are threads of one process; "
                "use one stage, or start the run with `mlora train` or torchrun",
            )
        set_allocators(limit, self.device)
        samples = MeasuredSamples(self, limit)

        def unlimited(*asked: Any) -> Sequence[MemorySample]:
            """Measures without enforcing the limit: the samples keep to it by themselves."""
            admission, self._admission = self._admission, None
            try:
                return samples(*asked)
            finally:
                self._admission = admission

        stages = self._dry(self.blocks if self.stages > 1 else 1)
        own, *others = self._look()
        fault = nothing_left(limit, name, [max(0, own - earlier), *others])
        if fault is None:
            samples.warm_up()
        elif enforce:  # a run goes on with whom it has taken, and refuses each new task by name
            raise MemoryLimitError(fault)
        memory = MemoryLimit(
            AdapterMemory(stages, unlimited if measured or self.device.type != "cpu" else None),
            limit,
            self._look(),
            peak_memory(self.device),
            pieces=0 if self.device.type == "cpu" else limit // PIECES,
            look=self._look,
            earlier=earlier,
            held=self._held(self.stages) if held is None else held,
            name=name,
        )
        self.memory = memory
        if enforce:
            memory.adapters.know(STAND_IN, samples.stand_in(), OptimConfig(total_steps=1), FORESEEN)
            self._admission = BatchAdmission(memory, self._states)
            self._admission.check_room()
        return memory

    def _look(self) -> list[int]:
        self.release_memory()
        return self.used_memory()

    @property
    def base_gemm(self) -> str | None:
        """The library that multiplies by the frozen weights: on a CPU measured, unless it was set.

        On a GPU None, unless it was set; `fastest` for each shape, see `measure_base_gemm`. Rounding depends
        on it. The choice holds for the whole process; on a CPU by dtype.

        Raises:
            ValueError: when set to a library that does not serve this model here.
        """
        if self.device.type == "cuda":
            return self._gpu_base_gemm
        return base_gemm_of(self.dtype).get(_name(self.dtype))

    @base_gemm.setter
    def base_gemm(self, library: str | None) -> None:
        self._every(StageWorker.base_gemm, dtype=_name(self.dtype), library=library)
        if self.device.type == "cuda":
            self._gpu_base_gemm = library

    def measure_base_gemm(self, known: Sequence[Record] = ()) -> list[Record]:
        """Measures who multiplies faster by this model's frozen weights on a GPU, for each shape.

        All stages take over what is known, such as from an earlier run, and what any of them measures.

        Args:
            known: what an earlier call returned.

        Returns:
            What is known of this model now, as JSON can hold it; empty where there is no choice.

        Raises:
            ValueError: if `known` is something else.
        """
        times_of(known)
        answers = self._every(StageWorker.base_gemm_times, known=[*known])
        found = {
            tuple(record[key] for key in Shape._fields): record
            for answer in reversed(answers)
            for record in answer
        }
        merged = [*found.values()]
        if merged:
            self._every(StageWorker.base_gemm_times, known=merged)
            self.release_memory()
        return merged

    def create_adapter(
        self,
        name: str,
        lora: LoraConfig | None,
        optim: OptimConfig,
        *,
        objective: Any = CROSS_ENTROPY,
        init_from: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        replica: int = 0,
        start_batches: Sequence[Sequence[Sample]] | None = None,
        start_weights: str | os.PathLike[str] | None = None,
        num_labels: int | None = None,
        problem_type: str | None = None,
        label_names: Sequence[str] | None = None,
    ) -> None:
        """Puts a new adapter on the base; others may be under way.

        Args:
            name: of the adapter.
            lora: PEFT's config; None = that of `init_from`.
            optim: its optimizer and schedule.
            objective: what it is trained for: a name of `mlora.objectives.registry`, a mapping with the key
                `name` and options, an `Objective`, or a function that `CustomLoss` takes. Objectives on
                preferences take `mlora.data.preference` samples.
            init_from: a PEFT folder with initial weights; default: PEFT's random initialisation.
            seed: of initial weights and dropout, together with the name; default: the engine's.
            replica: the index of the pipeline that trains it.
            num_labels: of a classifier (`task_type` SEQ_CLS or TOKEN_CLS), which trains on
                `mlora.data.record.LabelledSample`; default: those of the head in `init_from`. QUESTION_ANS
                has none and takes `AnswerSample`.
            problem_type: of SEQ_CLS, as Transformers has it: `single_label_classification`, `regression`
                (the default if `num_labels` is 1) or `multi_label_classification`.
            label_names: of a classifier: what its labels are called, in the order of their ids. `save` writes
                them; `num_labels` is their number by default.
            start_batches: micro-batches of its samples for an `init_lora_weights` of `lora` that looks at
                data (eva, corda, lora_ga). The base runs on them; CorDA takes each sample alone. Without
                them, such an adapter needs `load_state_dict` before it is used.
            start_weights: for `init_lora_weights="loftq"`: a folder or hub id with the weights that the base
                had before it was quantised. Each stage reads those of its own layers, one at a time. Without
                it, such an adapter needs `load_state_dict`, too.

        Raises:
            MemoryLimitError: if its states do not fit into `memory_limit`.
            ValueError: if the name is taken, a config is not supported, targets match nothing, the folder
                does not fit, labels do not fit its task, the optimizer does not serve the device or the
                adapter, or initial values cannot be computed from `start_batches` or `start_weights`.
        """
        check_kinds(
            ("name", name, "a text", str),
            ("optim", optim, "an OptimConfig", OptimConfig),
            ("init_from", init_from, "the path of a PEFT folder, or None", *_PATH, NoneType),
            ("seed", seed, "a whole number, or None", Integral, NoneType),
            ("replica", replica, "a whole number", Integral),
            ("start_batches", start_batches, "a list of batches, or None", Sequence, NoneType),
            ("start_weights", start_weights, "a path or hub id, or None", *_PATH, NoneType),
            ("problem_type", problem_type, "a text, or None", str, NoneType),
            ("label_names", label_names, "a list of texts, or None", Sequence, NoneType),
        )
        if name in self._states:
            raise AdapterError(name, "the engine has an adapter of this name")
        if start_weights is not None and (lora is None or init_from is not None or not needs_weights(lora)):
            raise AdapterError(name, "start_weights: needs lora with init_lora_weights='loftq'")
        if start_batches is not None and (lora is None or init_from is not None or not needs_data(lora)):
            raise AdapterError(
                name,
                "start_batches: needs lora with an init_lora_weights that looks at data "
                "(eva, corda, lora_ga), and no init_from; remove it",
            )
        if lora is None and init_from is None:
            raise AdapterError(name, "expected lora or init_from, got neither")
        labels: dict[str, Any] = {"num_labels": num_labels, "problem_type": problem_type}
        labels["label_names"] = None if label_names is None else list(label_names)
        lora = labelled(name, lora, init_from, labels)
        if not 0 <= replica < self.replicas:
            raise ValueError(f"replica: expected one below {self.replicas}, got {replica}")
        seed = self.seed if seed is None else seed
        more: dict[str, Any] = {"objective": objective, "seed": seed, "replica": replica}
        self._put(name, lora, optim, init_from=init_from, **more)
        config = router_of(self.registry).adapters[name].config
        if init_from is not None:
            if self._states[name].objective.reference == START:
                put_start_beside(self, name, optim, init_from)
            return

        def put_again(other: LoraConfig) -> None:
            self.remove_adapter(name)
            self._put(name, other, optim, **more)

        with ExitStack() as unless_started:
            unless_started.callback(lambda: self.remove_adapter(name) if name in self._states else None)
            if needs_data(config) and start_batches is not None:
                start_from_data(self, name, config, start_batches, put_again)
            if needs_weights(config) and start_weights is not None:
                start_from_weights(self, name, os.fspath(start_weights))
            unless_started.pop_all()

    def _put(
        self,
        name: str,
        lora: LoraConfig | None,
        optim: OptimConfig,
        *,
        objective: Any,
        seed: int,
        replica: int,
        init_from: str | os.PathLike[str] | None = None,
        trained: bool = True,
    ) -> None:
        """Does `create_adapter` without initial values that depend on data."""
        rule = StepRule(optim)
        optimizer_kind(optim.optim).check(optim.optim, self.device)
        made, spec = self._objective(name, objective)
        if made.reference == START and init_from is None:
            raise ObjectiveError(f"{START}: give init_from, whose weights it compares with", ("reference",))
        if name in self._states:  # such as a user's adapter with the name of a start
            raise AdapterError(name, "the engine has an adapter of this name")
        if lora is not None and lora.inference_mode:
            raise AdapterError(name, "inference_mode=True: an engine trains its adapters; leave it out")
        folder = None if init_from is None else os.fspath(init_from)
        with ExitStack() as unless_created:
            if self._admission is not None and self.memory is not None:
                known = lora or read_config(Path(os.fspath(init_from or "")))
                silent = made.reference is not None
                self.memory.adapters.know(name, known, optim, FORESEEN, silent=silent, trained=trained)
                unless_created.callback(self.memory.adapters.forget, name)
                self._admission.check_states(name)
            put_adapter(self.registry, name, lora, folder, seed)
            unless_created.callback(mlora_ext.remove_adapter, self.registry, name)
            of_labels = label_objective(router_of(self.registry).adapters[name].config)
            if of_labels is not None:
                if spec != CROSS_ENTROPY:
                    raise AdapterError(name, "a classifier has a loss of its own; leave the objective out")
                made, spec = objective_of(of_labels), of_labels
            if self.registry is self.model:
                self._part.own(name, optim, trained=trained)
            unless_created.pop_all()
        self._states[name] = AdapterState(replica, rule, LossScaler.for_dtype(self.dtype), made, spec)
        self.memory_after = []
        if not self.alone:
            arguments = {
                "lora": plain_lora(router_of(self.registry).adapters[name].config),
                "optim": asdict(optim),
                "seed": seed,
                "trained": trained,
                "weights": None if folder is None else adapter_weights(self.registry, name, folder),
            }
            first_done = self.registry is self.model
            self._control(StageWorker.create, name, first_done=first_done, **arguments)

    def _objective(self, name: str, objective: Any) -> tuple[Objective, Any]:
        """Returns an objective, and what the last stage makes it of; raises ObjectiveError if it is wrong."""
        made = objective_of(objective)
        if isinstance(objective, str | Mapping):
            return made, pinned(objective)
        if self._last is None:
            raise ObjectiveError(
                "stages in other processes can make an objective from its name only; register it there, or "
                "name a function as module:function"
            )
        spec = f"given for {name}"
        self._last.objective(spec, made)
        return made, spec

    def remove_adapter(self, name: str) -> None:
        """Forgets an adapter, its gradients and its optimizer.

        Args:
            name: of the adapter.

        Raises:
            ValueError: if there is no adapter of this name, or a batch of it is under way.
        """
        own = self._states.at_rest(name)
        start, own.start = own.start, None
        if start is not None and not self._states.users_of(start):
            self.remove_adapter(start)
        self._control(StageWorker.remove, name)
        if self.registry is not self.model:
            mlora_ext.remove_adapter(self.registry, name)
        del self._states[name]
        self.memory_after = []
        if self._admission is not None and self.memory is not None:
            self.memory.adapters.forget(name)

    def optim_step(self, name: str) -> StepResult:
        """Steps an adapter's optimizer on the mean gradient over the tokens that it has accumulated.

        Over several stages, each stage makes the update just before the adapter's next forward.

        Args:
            name: of the adapter.

        Returns:
            What was decided. The adapter's gradients are gone.

        Raises:
            ValueError: if there is no such adapter, a batch of it is under way, or it has accumulated no
                trained token.
            OptimizerError: if the optimizer failed. Remove the adapter then: some of its weights may have
                changed. Other adapters go on. With several stages the adapter's next call or `finish` raises
                it, or `settle` returns it.
        """
        adapter = self._states.at_rest(name)
        if adapter.fault:
            raise OptimizerError(adapter.fault, name)
        if adapter.units == 0:
            raise AdapterError(name, "has no gradient; call forward_backward first")
        squares = adapter.squares
        if squares is None:
            squares = sum(float(part) for part in self._control(StageWorker.squares, name))
        done = adapter.decide(squares)
        if self.alone:
            self._flush(name)
        return done

    def discard_gradients(self, name: str) -> None:
        """Forgets what an adapter has accumulated since its last step.

        Args:
            name: of the adapter.

        Raises:
            ValueError: if there is no adapter of this name, or a batch of it is under way.
            OptimizerError: if its optimizer failed in an earlier step. Remove the adapter.
        """
        adapter = self._states.at_rest(name)
        self._flush(name)
        adapter.leave(Update())
        if self.alone:
            self._flush(name)

    def state_dict(self, name: str) -> dict[str, Any]:
        """Returns everything that continues an adapter bit for bit, as copies.

        Works in the middle of an accumulation, too.

        Args:
            name: of the adapter.

        Raises:
            ValueError: if there is no such adapter, or a batch of it is under way.
            OptimizerError: if its optimizer failed in an earlier step. Remove the adapter.
        """
        adapter = self._states.at_rest(name)
        self._flush(name)
        parts = self._control(StageWorker.state, name)
        merged = {key: _merged(part[key] for part in parts) for key in ("weights", "gradients", "moments")}
        info = router_of(self.registry).adapters[name]
        # ranks that EVA has distributed
        lora = {"lora": plain_lora(info.config)} if needs_data(info.config) else {}
        return {**merged, **adapter.state_dict(), "dropout_seed": info.seed, **lora}

    def load_state_dict(self, name: str, state: Mapping[str, Any]) -> None:
        """Continues an adapter from `state_dict`, over any number of stages.

        Args:
            name: of the adapter, created with the same configs.
            state: what `state_dict` returned.

        Raises:
            ValueError: if there is no such adapter, a batch of it is under way, or the state is that of
                another one.
        """
        adapter = self._states.of(name)
        check_kind("state", state, "what state_dict returned", Mapping)
        if lacking := _STATE - state.keys():
            raise ValueError(f"state: expected what state_dict returned, but it lacks {min(lacking)}")
        weights = mlora_ext.adapter_parameters(self.registry, name)
        shapes = {key: list(p.shape) for key, p in weights.items()}
        if {key: list(tensor.shape) for key, tensor in state["weights"].items()} != shapes:
            raise AdapterError(name, "the state is that of an adapter with other layers or ranks")
        names, kind = neutral_names(self.registry, name), optimizer_kind(adapter.rule.config.optim)
        # an optimizer has also those that it freezes itself, such as `lora_A` of LoRA-FA
        optimized = {key for key, p in weights.items() if p.requires_grad or not kind.trains(names[key])}
        if state["moments"] and state["moments"].keys() != optimized:
            raise AdapterError(name, "state: the optimizer's moments are those of other Parameters")
        if state.get("start_digest") != adapter.start_digest:
            raise AdapterError(
                name,
                "init_from holds other weights than those that it began with, and its "
                "objective compares with these; put them back",
            )
        tensors = {key: state[key] for key in ("weights", "gradients", "moments")}
        arguments = {"updates": state["updates"], "seed": state["dropout_seed"], "state": tensors}
        try:
            self._control(StageWorker.load, name, **arguments)
        except ValueError as error:
            raise AdapterError(name, str(error)) from error
        router_of(self.registry).adapters[name].seed = state["dropout_seed"]
        adapter.load_state_dict(state)

    def weights(self, name: str) -> dict[str, Tensor]:
        """Returns an adapter's weights under PEFT's keys, as copies on the CPU.

        Args:
            name: of the adapter.

        Raises:
            ValueError: if there is no adapter of this name, or a batch of it is under way.
            OptimizerError: if its optimizer failed in an earlier step. Remove the adapter.
        """
        self._states.at_rest(name)
        self._flush(name)
        return _merged(self._control(StageWorker.weights, name))

    def save(
        self, name: str, folder: str | os.PathLike[str], weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Writes an adapter as a PEFT folder; `quantization.json` in it says how the base is quantised.

        The metadata of the weights' file holds `base_digest`.

        Args:
            name: of the adapter.
            folder: the folder to write.
            weights: what `weights` returned before; default: today's weights.

        Raises:
            ValueError: if there is no adapter of this name, or the weights are those of another one.
            OptimizerError: if its optimizer failed in an earlier step, unless `weights` are given. Remove the
                adapter.
            OSError: if the folder cannot be written.
        """
        check_kind("folder", folder, "a path", *_PATH)
        check_kind("weights", weights, "what weights returned, or None", Mapping, NoneType)
        weights = self.weights(name) if weights is None else weights
        told = {} if self.base_digest is None else {DIGEST: self.base_digest}
        mlora_ext.save_adapter(self.registry, name, folder, weights, metadata=told)
        if self._quantization is not None:  # else `save_adapter` has said what there is to say
            write_quantization(folder, self._quantization)

    def load(self, name: str, folder: str | os.PathLike[str], optim: OptimConfig) -> None:
        """Creates an adapter from a PEFT folder: its config and weights, with a fresh optimizer.

        Warns if the folder's `quantization.json` names another kind of base.

        Args:
            name: of the adapter.
            folder: the PEFT folder.
            optim: its optimizer and schedule.

        Raises:
            ValueError: as `create_adapter`.
        """
        check_kind("folder", folder, "the path of a PEFT folder", *_PATH)
        warn_of_base(self.model, name, folder)
        self.create_adapter(name, None, optim, init_from=folder)

    def trace(self) -> tuple[list[Any], list[Entry]]:
        """Returns a timeline of each stage.

        Returns:
            The spans of each stage of each replica, as `mlora.pipeline.trace.Trace.by_the_wall` returns them,
            and the micro-batches that entered; the latest ones of both.
        """
        return self._every("spans"), self._pipeline.entries()

    def close(self) -> None:
        """Ends the pipeline; with one stage the model stays usable."""
        self._pipeline.close()

    def __enter__(self) -> Engine:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the engine; after an error, the stages of other processes end with an error, too."""
        if error is None:
            self.close()
        else:
            self._pipeline.abort(error)

    def _every(self, verb: Verb, **arguments: Any) -> list[Any]:
        """Asks every stage of each replica."""
        return [
            answer
            for replica in range(self.replicas)
            for answer in self._pipeline.control(verb, arguments, replica=replica)
        ]

    def _control(self, verb: Verb, name: str, *, first_done: bool = False, **arguments: Any) -> list[Any]:
        """Asks the stages that have an adapter."""
        replica = self._states.at_rest(name).replica
        arguments = {"name": name, **arguments}
        return self._pipeline.control(verb, arguments, first_done=first_done, replica=replica)


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


def _listed(stages: int | Sequence[int]) -> Sequence[int]:
    return stages if isinstance(stages, Sequence) else ()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
