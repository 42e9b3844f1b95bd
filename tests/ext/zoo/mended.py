"""A fault of PEFT that hides what an adapter computes, mended for the comparison."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import Tensor, nn

from mlora_ext.layers.embedding import peft_drops_bias


@contextmanager
def bias_beside_trained_rows() -> Iterator[None]:
    """Adds the bias of a linear layer with trained rows, which PEFT applies only once they are merged.

    This is its issue 3649: `F.linear` gets no bias. Its open pull request 3688 passes the bias.
    """
    if not peft_drops_bias():
        yield
        return
    theirs = TrainableTokensLayer.forward_adapters

    def forward_adapters(
        self: TrainableTokensLayer, x: Tensor, active_adapters: Sequence[str], *args: Any, **kwargs: Any
    ) -> Tensor:
        y = theirs(self, x, active_adapters, *args, **kwargs)
        whole = self.disable_adapters or not active_adapters or self.merged
        bias = self.base_layer.bias if isinstance(self.base_layer, nn.Linear) else None
        return y if whole or bias is None else y + bias

    with mock.patch.object(TrainableTokensLayer, "forward_adapters", forward_adapters):
        yield
