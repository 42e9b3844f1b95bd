"""Initialises an adapter from its data or from original weights on an engine, over any number of stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlora.data.micro_batch import BASE, Observation
from mlora.data.packing import pack
from mlora.data.record import Sample
from mlora.engine.stage_starts import StageStarts
from mlora.model.task_heads import why_not_started
from mlora_ext.adapters.lora_config import init_kind
from mlora_ext.adapters.trained_parts import task_of
from mlora_ext.errors import AdapterError
from mlora_ext.layers.adapter_weights import adapter_layers
from mlora_ext.start.from_data import initialise
from mlora_ext.start.statistics import start_specs
from mlora_ext.targets.add_remove import NO_QUANTIZED_LAYER

if TYPE_CHECKING:
    from peft import LoraConfig


def start_from_weights(engine: Any, name: str, source: str) -> None:
    """Gives an adapter of LoftQ its initial values: each stage reads the weights of its own layers.

    Raises ValueError if the source lacks a weight or holds another one, or no layer is quantised. The adapter
    has to be removed then, which also closes the source.
    """

    def ask(verb: Callable[..., Any], **arguments: str) -> int:
        answers = engine._control(verb, name, **arguments)
        for answer in answers:
            if "fault" in answer:
                raise ValueError(answer["fault"])
        return sum(answer["layers"] for answer in answers)

    if ask(StageStarts.open_originals, source=source) == 0:
        raise AdapterError(name, NO_QUANTIZED_LAYER)
    for layer in adapter_layers(engine.registry, name):
        # one at a time: a large one takes a minute, and the watchdog ends processes that seem to hang
        ask(StageStarts.start_from_weights, layer=layer)
    ask(StageStarts.close_originals)


def start_from_data(
    engine: Any,
    name: str,
    config: LoraConfig,
    batches: Sequence[Sequence[Any]],
    put_again: Callable[[LoraConfig], None],
) -> None:
    """Gives an adapter initial values from passes of the base over its data; see `EnginePasses`."""
    passes = EnginePasses(engine, name, config, batches, put_again)
    specs = start_specs(engine.registry, name)
    passes.ask("begin")
    try:
        initialise(name, config, specs, passes)
    finally:
        if name in engine.adapters:
            passes.ask("end")


class EnginePasses:
    """Passes of the base over an adapter's batches; see `mlora_ext.start.from_data.Passes`.

    Args:
        engine: an `Engine`, whose module imports this one.
        name: of the adapter, which is on the engine and at rest.
        config: its PEFT config.
        batches: of its samples; those of preference data count as the sequences of their lines.
        put_again: puts the adapter on the engine again, with another config.

    Raises:
        ValueError: LoRA-GA needs a loss, which the base does not have for a classifier's labels.
    """

    def __init__(
        self,
        engine: Any,
        name: str,
        config: LoraConfig,
        batches: Sequence[Sequence[Any]],
        put_again: Callable[[LoraConfig], None],
    ) -> None:
        self._engine, self._name, self.put_again = engine, name, put_again
        self._how, self._settings = init_kind(config), config.eva_config
        reason = why_not_started(config)
        if reason is not None:
            raise AdapterError(name, reason)
        self._by_label = task_of(config) not in ("SEQ_CLS", "QUESTION_ANS")
        parts = [[part for sample in batch for part in sample.parts] for batch in batches]
        alone = [[part] for batch in parts for part in batch]
        self._given = alone if self._how == "corda" else parts
        self.batches = len(self._given)

    def ask(self, question: str, *arguments: Any) -> list[Any]:
        """Asks every stage of the adapter's replica."""
        answers: list[Any] = self._engine._control(
            StageStarts.ask_start, self._name, question=question, arguments=list(arguments)
        )
        return answers

    def run(self, index: int) -> None:
        """Runs the base on a batch; for LoRA-GA also backward, from the mean loss of its tokens."""
        samples = self._given[index]
        packed = pack({BASE: samples}, vocab_size=self._engine._vocab_size, device=self._engine.device)
        backward = self._how == "lora_ga"
        share = 1 / (max(1, sum(packed.counts)) * self.batches)
        start = Observation(self._name, self._rows(samples), share)
        replica = self._engine._states[self._name].replica
        number = self._engine._enter(replace(packed, start=start), train=backward, replica=replica)
        self._engine._leave(packed, number)

    def _rows(self, samples: Sequence[Sample]) -> list[bool] | None:
        """Returns which tokens count: for EVA those with a label, as in PEFT; all where lines have labels."""
        if self._settings is None or not self._settings.use_label_mask or not self._by_label:
            return None
        ignored = self._settings.label_mask_value
        return [label != ignored for sample in samples for label in sample.labels]
