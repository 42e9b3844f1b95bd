"""Small models whose layer `lin` sees its rows arranged in many ways."""

import torch
from peft import LoraConfig
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn

import mlora_ext as mx

WIDTH = 16
NAMES = ["a", "b", "__base__", "b"]


class Inside(nn.Module):
    """Token embeddings, one layer `lin` that sees what `arrange` makes of them, and a readout per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.shared = nn.Parameter(torch.randn(9, WIDTH))
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.arrange(self.embed(ids)))


class TimeFirst(Inside):
    def arrange(self, h: Tensor) -> Tensor:
        y = self.lin(h.transpose(0, 1))
        return y.view(-1, WIDTH).view(y.shape).transpose(0, 1)


class TimeFirstFlat(Inside):
    def arrange(self, h: Tensor) -> Tensor:
        flat = h.transpose(0, 1).reshape(-1, WIDTH)
        return self.lin(flat).view(h.shape[1], h.shape[0], WIDTH).transpose(0, 1)


class Flat(Inside):
    def arrange(self, h: Tensor) -> Tensor:
        return self.lin(h.reshape(-1, WIDTH)).view(h.shape)


class Pooled(Inside):
    def arrange(self, h: Tensor) -> Tensor:
        return self.lin(h[:, 0])


class Windows(Inside):
    """Two windows of each sample, side by side in the batch dimension."""

    def arrange(self, h: Tensor) -> Tensor:
        windows = torch.cat([h, h.flip(1)], 1).unflatten(1, (2, -1)).flatten(0, 1)
        return self.lin(windows).unflatten(0, (-1, 2)).flatten(1, 2)


class FramesFirst(Inside):
    """`[2, B * S, D]`: samples in the middle, several rows of each."""

    def arrange(self, h: Tensor) -> Tensor:
        frames = torch.stack([h, h.flip(1)]).flatten(1, 2)
        return self.lin(frames).unflatten(1, h.shape[:2]).sum(0)


class Queries(Inside):
    """Learned queries, the same for each sample: no row changes with its sample's contents."""

    def arrange(self, h: Tensor) -> Tensor:
        queries = self.shared.unsqueeze(1).expand(-1, h.shape[0], -1)
        return self.lin(queries).transpose(0, 1) + h.mean(1, keepdim=True)


class Positions(Inside):
    """Four learned rows that all samples share, as many as there are samples."""

    def arrange(self, h: Tensor) -> Tensor:
        return h + self.lin(self.shared[:4]).mean(0)


class Chosen(Inside):
    """Some of the tokens, as an expert of a mixture sees them."""

    def arrange(self, h: Tensor) -> Tensor:
        chosen = h[..., 0] > 0.5
        return h.masked_scatter(chosen.unsqueeze(-1), self.lin(h[chosen]))


class Sorted(Inside):
    """Samples in an order that depends on what they hold, as packed sequences of recurrent layers."""

    def arrange(self, h: Tensor) -> Tensor:
        order = h[:, 0, 0].argsort()
        return self.lin(h[order])[order.argsort()]


class AcrossSamples(Inside):
    def arrange(self, h: Tensor) -> Tensor:
        return self.lin(h - h.mean(0))


SERVED = [TimeFirst, TimeFirstFlat, Flat, Pooled, Windows, FramesFirst, Queries]
REFUSED = [
    (Positions, "do not depend on the samples"),
    (AcrossSamples, "not ordered by sample, or several samples share them"),
]


def model_of(
    kind: type[Inside], dropout: float = 0.0, targets: tuple[str, ...] = ("lin", "out")
) -> nn.Module:
    configs = {
        name: LoraConfig(r=rank, target_modules=list(targets), lora_dropout=dropout, init_lora_weights=False)
        for name, rank in (("a", 2), ("b", 5))
    }
    return mx.convert_model(kind(), configs)


def assert_as_alone(model: nn.Module, together: Tensor, ids: Tensor) -> None:
    for sample, name in enumerate(NAMES[: ids.shape[0]]):
        alone = model(ids[sample : sample + 1], adapter_names=[name])
        assert_same_up_to_rounding(together[sample : sample + 1].detach(), alone.detach(), f"sample {sample}")


def ids_of(batch: int, length: int) -> Tensor:
    return torch.randint(0, 50, (batch, length))
