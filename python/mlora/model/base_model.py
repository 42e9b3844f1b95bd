"""A frozen base model, split into body and head, that trains packed rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedModel

import mlora_ext
from mlora.model.attention import PACKED_ATTENTION, PackedSequences, register_packed_attention
from mlora.model.cut import BlockSpan, Cut, find_blocks
from mlora.model.pretrained import stop_noise
from mlora.model.task_heads import own_heads
from mlora.objectives.token_losses import Head, LogitRule, Scorer
from mlora.offload.base_bytes import BaseBytes
from mlora_ext import MultiLoRALinear, checkpoint_contexts
from mlora_ext.frozen.packed import PackedWeight, packs
from mlora_ext.frozen.plain import PlainWeight
from mlora_ext.frozen.quantized.torchao import stored_bytes
from mlora_ext.frozen.weight import FrozenWeight
from mlora_ext.layers.bank import AdapterBank, AdapterSlot
from mlora_ext.layers.over_module import OverModule

if TYPE_CHECKING:
    from mlora.offload.activations import Activations
    from mlora.offload.disk import Disk
    from mlora.offload.options import OffloadOptions
    from mlora.offload.stream import BlockStream


@dataclass(eq=False)
class BaseModel:
    """A frozen, converted causal language model that trains packed rows."""

    # the Transformers model, with its usual attention; `generate(..., adapter_names=)` works
    model: PreTrainedModel
    body: nn.Module  # the part before the head
    rule: LogitRule
    vocab_size: int
    configs: Sequence[Any]  # every config that names an attention function for a part of the model
    head_weight: FrozenWeight | None = None  # the head's frozen weight if it is not plain
    cut: Cut | None = None  # runs this stage's part of the model; None if the whole model is here
    stream: BlockStream | None = None  # reads the blocks' weights from disk; None if they are in memory
    activations: Activations | None = None  # says what becomes of them; None = autograd keeps them
    _disk: Disk | None = None

    @property
    def span(self) -> BlockSpan | None:
        """The decoder blocks that are here; None if the whole model is."""
        return None if self.cut is None else self.cut.span

    @property
    def nbytes(self) -> BaseBytes:
        """Bytes of the frozen weights and buffers that are here, without packed copies."""
        own = [m for m in self.model.modules() if not isinstance(m, AdapterBank | AdapterSlot)]
        tensors = {id(t): t for m in own for t in (*m._parameters.values(), *m._buffers.values())}
        resident = sum(stored_bytes(t) for t in tensors.values() if t is not None and not t.is_meta)
        if self.stream is None:
            return BaseBytes(resident)
        stored = [t for layout in self.stream.layouts for t in layout.tensors.values()]
        converted = sum(t.nbytes for t in stored if t.scratch)
        return BaseBytes(resident, sum(t.nbytes for t in stored), self.stream.nbytes, converted)

    @property
    def is_last(self) -> bool:
        """Whether the head is here."""
        return self.cut is None or self.cut.span.is_last

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states between blocks."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def head(self) -> nn.Module:
        """The layer that makes logits; another object once an adapter targets it."""
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Module)
        return head

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Switches the model to packed attention inside `with`. Recomputation in backward needs it, too."""
        before = [config._attn_implementation for config in self.configs]
        for config in self.configs:
            config._attn_implementation = PACKED_ATTENTION
        try:
            yield
        finally:
            for config, attention in zip(self.configs, before, strict=True):
                config._attn_implementation = attention

    def hidden(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor,
        sequences: PackedSequences,
        received: Tensor | None = None,
    ) -> Tensor:
        """Returns the head's input, or on earlier stages the next stage's input; call it inside `packed`.

        Args:
            input_ids: `[1, T]`; read by the first stage only.
            position_ids: `[1, T]`.
            received: `[T, D]` the hidden state of the stage before, which gets a gradient; None at the first.

        Returns:
            `[T, D]`.
        """
        with nullcontext() if self.activations is None else self.activations.of_pass():
            output = self.run(
                self.body,
                input_ids,
                received,
                position_ids=position_ids,
                use_cache=False,
                packed_sequences=sequences,
                cu_seq_lens_q=sequences.cu_seq_lens,
                cu_seq_lens_k=sequences.cu_seq_lens,
            )
        hidden: Tensor = output if isinstance(output, Tensor) else output[0]
        return hidden.reshape(-1, hidden.shape[-1])

    def run(self, module: nn.Module, input_ids: Tensor | None, received: Tensor | None, **inputs: Any) -> Any:
        """Calls the model or its body; returns its result, or `[1, T, D]` on a stage that is not the last."""
        if self.cut is None:
            return module(input_ids=input_ids, **inputs)
        return self.cut.call(module, input_ids, received, **inputs)

    def frozen_head(self) -> Head | None:
        """Returns the head for the chunked loss (last stage only), or None if it is targeted or not linear.

        A head that all adapters have left counts as frozen again: earlier adapters do not change results.
        """
        head = self.head
        if isinstance(head, OverModule):
            head = head.base
        if isinstance(head, MultiLoRALinear):
            return None if head.specs or head.fan_in_fan_out else Head(head.frozen, head.bias, self.rule)
        if type(head) is not nn.Linear:
            return None
        return Head(self.head_weight or PlainWeight(head), head.bias, self.rule)

    def own_heads(self, names: Sequence[str]) -> dict[str, Scorer]:
        """Returns what makes logits, by name, for those adapters that train a head; last stage only."""
        return {} if not self.is_last else own_heads(self.model, self.head, self.rule, names)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the model's logits `[..., V]` for the head's input `[..., D]`; last stage only."""
        return self.rule.apply(self.head(hidden))

    def set_frozen_weights(self, kind: str) -> None:
        """Gives the linear layers another kind of frozen weight; see `mlora_ext.set_frozen_weights`.

        `packed` also packs the head's weight for the chunked loss; `generate` uses the plain head. ValueError
        if there is no such kind, or it does not serve these weights.
        """
        if kind != "packed":
            mlora_ext.set_frozen_weights(self.model, kind)
            return
        try:
            mlora_ext.pack_base(self.model)
        except ValueError as error:
            raise ValueError(f"pack_base: {error}") from error
        head = self.head
        if self.is_last and type(head) is nn.Linear and packs(head.weight):
            self.head_weight = PackedWeight(head)
            self.head_weight.fused(head.weight)

    def wrap_blocks(self, options: OffloadOptions, mode: str, *, converted: bool) -> None:
        """Wraps the blocks, so that it can be chosen what becomes of their activations.

        Args:
            mode: of all blocks: `keep`, `recompute`, `swap` to disk, or `auto`.
            converted: whether adapters are trained, not the weights.

        Raises:
            ValueError: the decoder blocks are not found.
            OSError: a folder for scratch files is missing.
        """
        from mlora.offload.activations import Activations  # needs the compiled library
        from mlora.offload.swap_space import SwapSpace

        name = find_blocks(self.model)[0] if self.cut is None else self.cut.blocks
        first = 0 if self.span is None else self.span.first
        last = None if self.span is None else self.span.last
        blocks = list(self.model.get_submodule(name).children())[first:last]
        weights = []
        for number, block in enumerate(blocks):
            streamed = {} if self.stream is None else self.stream.layouts[number].tensors
            own = block.named_parameters(prefix=f"{name}.{first + number}")
            weights.append({key: parameter for key, parameter in own if key in streamed})
        self.activations = Activations(
            self.model,
            blocks,
            SwapSpace(self.disk(options)),
            self.stream,
            weights,
            checkpoint_contexts(self.model) if converted else None,
        )
        # until a plan is made, `auto` takes the least memory
        self.activations.choose(["recompute" if mode == "auto" else mode] * len(blocks))  # type: ignore[list-item]

    def disk(self, options: OffloadOptions) -> Disk:
        """Returns what reads and writes all of this stage's files: one warning, and one bound on bytes."""
        from mlora.offload.disk import Disk  # needs the compiled library

        if self._disk is None:
            own = None if self.stream is None else self.stream.disk
            self._disk = own or Disk(options.folders, rate=options.rate)
        return self._disk

    def checkpoint_activations(self) -> None:
        """Recomputes each block in backward instead of keeping its activations; ValueError if unsupported."""
        if not self.model.supports_gradient_checkpointing:
            raise ValueError(f"gradient_checkpointing: {type(self.model).__name__} does not support it")
        options = {"use_reentrant": False, "context_fn": checkpoint_contexts(self.model)}
        if hasattr(self.model, "activation_checkpointing_enable"):
            self.model.activation_checkpointing_enable(options)
        else:
            self.model.gradient_checkpointing_enable(options)


def take_apart(model: PreTrainedModel, cut: Cut | None = None) -> BaseModel:
    """Splits a model into body and head, and makes it ready for packed rows; neither checks nor converts it.

    `cut` runs this stage's part of the model; None: the whole model is here. ValueError if there is no body
    and head.
    """
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) is not None:
        # SDPA cannot soft-cap: generation and the check of packed rows need the model's own attention.
        model.set_attn_implementation("eager")
    stop_noise(model)
    body = model.base_model
    if body is model or model.get_output_embeddings() is None:
        raise ValueError(
            f"base_model: {type(model).__name__} is not a causal language model with a body and a head"
        )
    register_packed_attention()
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    rule = LogitRule.of(config)
    return BaseModel(model, body, rule, config.vocab_size, list(configs.values()), cut=cut)
