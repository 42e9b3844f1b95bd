"""Runs some of a model's decoder blocks inside of the model's own loop over them.

Shapes: T packed rows, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class LeftStage(Exception):
    """Carries the hidden state out of the model's loop after a stage's last block."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(eq=False)
class Pass:
    """One pass of the model's loop over the blocks, in which blocks `first` to `last - 1` run."""

    first: int
    last: int
    # whether to leave the loop behind block `last - 1`; otherwise later blocks are skipped
    leaves: bool = False
    # `[1, T, D]` input of the first block, in place of the loop's hidden state
    received: Tensor | None = None
    begun: bool = False  # whether the loop has called a block

    def call(self, index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns a block's result to the loop: runs the block, skips it, or leaves the loop."""
        self.begun = True
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        if index >= self.last and self.leaves:
            raise LeftStage(hidden)
        if not self.first <= index < self.last:
            # Its values are not used, but it must survive `outputs[0]`, which some loops do.
            return hidden if hidden.dim() > 2 else hidden.unsqueeze(0)
        if index == self.first and self.received is not None:
            if args:
                args = (self.received, *args[1:])
            else:
                kwargs = {**kwargs, "hidden_states": self.received}
        return block(*args, **kwargs)


class _Turn:
    """A block as the loop sees it during a pass: calls go to the pass, everything else to the block."""

    def __init__(self, block: nn.Module, index: int, by: Pass) -> None:
        self._block, self._index, self._by = block, index, by

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._by.call(self._index, self._block, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


class BlockList(nn.ModuleList):
    """A model's decoder blocks under their own names; outside of `running` an ordinary list."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__(blocks)
        self._pass: Pass | None = None

    @contextmanager
    def running(self, this: Pass) -> Iterator[None]:
        """Inside `with`, a loop over the list runs this pass."""
        self._pass = this
        try:
            yield
        finally:
            self._pass = None

    def _turns(self) -> list[Any]:
        blocks = list(self._modules.values())
        this = self._pass
        if this is None:
            return blocks
        return [_Turn(block, index, this) for index, block in enumerate(blocks) if block is not None]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._turns())

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) if self._pass is None else self._turns()[index]


class StandIn:
    """Is called in place of a module whose parameters are not here; returns rows of the right width.

    The rows are never used: the stage's first block gets the received hidden state.

    Args:
        module: has parameters, maybe on the meta device.
        noise: draws the rows; None = zeros, or the input if the right width is unknown.
        called: is called at each call.
    """

    def __init__(
        self,
        module: nn.Module,
        noise: torch.Generator | None = None,
        called: Callable[[], None] | None = None,
    ) -> None:
        self._module, self._noise, self._called = module, noise, called

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._called is not None:
            self._called()
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        shape, dtype = x.shape, next(self._module.parameters(recurse=False)).dtype
        if isinstance(self._module, nn.Embedding):
            shape = torch.Size([*shape, self._module.embedding_dim])
        elif isinstance(width := getattr(self._module, "out_features", None), int):
            shape = torch.Size([*shape[:-1], width])
        elif self._noise is None:
            return x
        return rows(shape, dtype, x.device, self._noise)


def rows(
    shape: Iterable[int], dtype: torch.dtype, device: torch.device, noise: torch.Generator | None
) -> Tensor:
    """Returns zeros, or noise, in new memory, because some models scale the embedding in place."""
    if noise is None:
        return torch.zeros(*shape, dtype=dtype, device=device)
    return torch.randn(*shape, generator=noise, device="cpu").to(device, dtype)


@contextmanager
def standing_in(stand_ins: Iterable[StandIn]) -> Iterator[None]:
    """Inside `with`, these are called in place of their modules."""
    stand_ins = list(stand_ins)
    for stand_in in stand_ins:
        stand_in._module.__dict__["forward"] = stand_in
    try:
        yield
    finally:
        for stand_in in stand_ins:
            del stand_in._module.__dict__["forward"]
