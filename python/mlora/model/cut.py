"""Cuts a Transformers model into stages: which tensors a stage holds, and how it runs.

A stage keeps the whole skeleton, every module under its name. Tensors of other stages are on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mlora.model.block_list import BlockList, LeftStage, Pass, StandIn, rows, standing_in
from mlora_ext.layers.over_module import plain_module
from mlora_ext.targets.find import linear_layers

BEFORE, BEHIND = "before", "behind"


@dataclass(frozen=True)
class BlockSpan:
    """The decoder blocks of one stage: `first` to `last - 1`.

    The first stage also holds the modules before the blocks, such as the embedding. The last stage also holds
    the modules behind them, such as the final norm and the head.
    """

    stage: int
    stages: int
    first: int
    last: int

    @property
    def is_first(self) -> bool:
        """Whether the stage reads token ids."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage returns logits."""
        return self.stage == self.stages - 1


class Cut:
    """A model cut to one stage.

    Args:
        blocks: name of the list of decoder blocks.
        outer: for each module with parameters around the blocks, by name, where it is called: `BEFORE` and
            `BEHIND` the blocks.
    """

    def __init__(
        self, model: PreTrainedModel, span: BlockSpan, blocks: str, outer: Mapping[str, frozenset[str]]
    ) -> None:
        self.model, self.span, self.blocks, self.outer = model, span, blocks, outer

    def holds(self, name: str) -> bool:
        """Whether the stage holds a parameter or buffer, by its name in the state dict.

        Every stage holds those in neither blocks nor `outer`, such as those of the modules above the blocks.
        """
        if name.startswith(f"{self.blocks}."):
            block = int(name.removeprefix(f"{self.blocks}.").partition(".")[0])
            return self.span.first <= block < self.span.last
        module = name.rpartition(".")[0]
        if module not in self.outer:
            return True
        places = self.outer[module]
        return (self.span.is_first and BEFORE in places) or (self.span.is_last and BEHIND in places)

    def linear_weights(self) -> dict[int, list[str]]:
        """Returns the names of the linear layers' weights in each block of the stage that has some."""
        return self._by_block(f"{name}.weight" for name in linear_layers(self.model))

    def matrices(self) -> dict[int, list[str]]:
        """Returns the names of all matrices in each block of the stage that has some."""
        return self._by_block(name for name, p in self.model.named_parameters() if p.ndim >= 2)

    def _by_block(self, names: Iterable[str]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name in names:
            if name.startswith(f"{self.blocks}.") and self.holds(name):
                block = int(name.removeprefix(f"{self.blocks}.").partition(".")[0])
                found.setdefault(block, []).append(name)
        return dict(sorted(found.items()))

    def call(
        self,
        module: nn.Module,
        input_ids: Tensor | None,
        received: Tensor | None,
        *,
        noise: torch.Generator | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the stage through `module`, the model or its body.

        Args:
            input_ids: `[1, T]`, read by the first stage only.
            received: `[T, D]` the hidden state of the stage before; None at the first stage.
            noise: draws the stand-in for the missing embedding; default: zeros.

        Returns:
            `[1, T, D]`, the hidden state behind the stage's last block; the last stage: the module's result.
        """
        this = Pass(self.span.first, self.span.last, not self.span.is_last)
        if self.span.is_first:
            inputs["input_ids"] = input_ids
            absent = []
        else:
            assert received is not None
            this.received = received.unsqueeze(0)
            weight: Any = plain_module(self.model.get_input_embeddings()).weight
            shape = (1, received.shape[0], weight.shape[-1])
            inputs["inputs_embeds"] = rows(shape, received.dtype, received.device, noise)
            absent = [
                StandIn(self.model.get_submodule(name), noise)
                for name, places in self.outer.items()
                if BEFORE in places and not (self.span.is_last and BEHIND in places)
            ]
        blocks = self.model.get_submodule(self.blocks)
        assert isinstance(blocks, BlockList)
        try:
            with blocks.running(this), standing_in(absent):
                return module(**inputs)
        except LeftStage as left:
            return left.hidden


def cut_model(model: PreTrainedModel, span: BlockSpan) -> Cut:
    """Cuts a model, not yet converted, to one stage in place, and drops the tensors of other stages.

    Tensors may be on the meta device already. ValueError if the span does not fit or the blocks are unknown.
    """
    blocks, count = find_blocks(model)
    fits = 0 <= span.stage < span.stages and 0 <= span.first < span.last <= count
    if not fits or span.is_first is not (span.first == 0) or span.is_last is not (span.last == count):
        raise ValueError(
            f"span: stage {span.stage} of {span.stages} cannot have blocks {span.first} to {span.last - 1}: "
            f"{type(model).__name__} has {count} blocks"
        )
    cut = Cut(model, span, blocks, outer_modules(model, blocks))
    _drop_others(model, cut)
    return cut


def find_blocks(model: PreTrainedModel) -> tuple[str, int]:
    """Returns name and length of the list of decoder blocks; ValueError unless there is exactly one."""
    lists = {name: list(m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    outermost = {
        name: children
        for name, children in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists)
    }
    whole = set(model._no_split_modules or ())
    found = [name for name, blocks in outermost.items() if {type(b).__name__ for b in blocks} <= whole]
    if not found:
        alike = {name: len(c) for name, c in outermost.items() if len({type(block) for block in c}) == 1}
        found = [name for name, size in alike.items() if size == max(alike.values())]
    if len(found) != 1:
        raise ValueError(
            f"base_model: {type(model).__name__} cannot be cut into stages: expected one list of decoder "
            f"blocks, found {', '.join(found) or 'none'}"
        )
    return found[0], len(outermost[found[0]])


def outer_modules(model: PreTrainedModel, blocks: str) -> dict[str, frozenset[str]]:
    """Returns where the modules with parameters around the blocks are called: `BEFORE` or `BEHIND` them.

    Runs the body on two rows without any weight, and replaces its list of blocks with a `BlockList`. Tensors
    may be on the meta device, except buffers that no checkpoint holds. ValueError if the body does not run
    without its blocks.
    """
    parent, _, child = blocks.rpartition(".")
    listed = BlockList(model.get_submodule(blocks).children())
    setattr(model.get_submodule(parent), child, listed.train(model.get_submodule(blocks).training))
    own = {
        name: module
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
        and not f"{blocks}.".startswith(f"{name}." if name else "")
        and not name.startswith(f"{blocks}.")
    }
    body = {id(module) for module in model.base_model.modules()}
    places: dict[str, set[str]] = {
        name: set() if id(module) in body else {BEHIND} for name, module in own.items()
    }
    this = Pass(0, 0)

    def called(name: str) -> None:
        places[name].add(BEHIND if this.begun else BEFORE)

    stand_ins = [StandIn(module, called=partial(called, name)) for name, module in own.items()]
    device = next((t.device for t in (*model.buffers(), *model.parameters()) if not t.is_meta), "cpu")
    training = model.training
    model.eval()  # no block is left out at random
    try:
        with torch.no_grad(), listed.running(this), standing_in(stand_ins):
            model.base_model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device), use_cache=False)
    except (TypeError, AttributeError, LookupError, ValueError, RuntimeError, StopIteration) as error:
        raise ValueError(
            f"base_model: {type(model).__name__} cannot be cut into stages: its body does not run without "
            f"its blocks: {' '.join(str(error).split())}"
        ) from error
    finally:
        model.train(training)
    return {name: frozenset(found) for name, found in places.items()}


def _drop_others(model: PreTrainedModel, cut: Cut) -> None:
    """Moves the tensors of other stages to the meta device; a tied tensor stays under the names held here."""
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not cut.holds(f"{prefix}.{name}"):
                empty = torch.empty_like(parameter, device="meta")
                module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and not cut.holds(f"{prefix}.{name}"):
                module._buffers[name] = torch.empty_like(buffer, device="meta")
