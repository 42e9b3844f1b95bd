"""Small models of one's own, and a loop that trains them out of core or in memory."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from mlora.offload import offloaded
from torch import Tensor, nn

WIDTH = 48
IN_MEMORY = {"base": "device", "states": "device", "active": False}
OUT_OF_CORE = {"slots": 2, "poison": True}


class Block(nn.Module):
    """A residual block with two matrices and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Five blocks and a head; its output is a loss."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(5))
        self.head = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor, blocks: Sequence[int] = range(5)) -> Tensor:
        for number in blocks:
            x = self.blocks[number](x)
        return x

    def forward(self, x: Tensor, blocks: Sequence[int] = range(5)) -> Tensor:
        return self.head(self.body(x, blocks)).square().mean()


def inputs(step: int) -> Tensor:
    return torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(step))


def adamw(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def trained(
    net: Net, loss_of: Callable[[Net, int], Tensor] = lambda net, step: net(inputs(step)), **how: Any
) -> list[Tensor]:
    """The losses of four steps and the weights at the end."""
    optimizer, losses = adamw(net), []
    with offloaded(net, optimizer, **how):
        for step in range(4):
            loss = loss_of(net, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in net.parameters())]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)].count(False) == 0
