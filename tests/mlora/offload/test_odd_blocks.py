"""Models of unusual shape, and unusual passes, train out of core as in memory or are refused."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from mlora.offload import offloaded, optimizer_states, saved_tensors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.mlora.offload.nets import (
    IN_MEMORY,
    OUT_OF_CORE,
    WIDTH,
    Block,
    Net,
    adamw,
    assert_equal,
    inputs,
    trained,
)


@pytest.fixture(autouse=True)
def _small_things_leave_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tensors, "SMALLEST", 256)
    monkeypatch.setattr(optimizer_states, "SMALL", 64)
    monkeypatch.setattr(optimizer_states, "UNIT", 2048)


class Tied(Net):
    """Weights that two blocks share, and that a block shares with a module before or behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.behind = nn.Linear(WIDTH, 2 * WIDTH)
        self.blocks[3].up.weight = self.blocks[0].up.weight
        self.blocks[2].up.weight = self.behind.weight
        self.blocks[4].down.weight = self.before.weight

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "blocks":
            super().__setattr__("before", nn.Linear(2 * WIDTH, WIDTH))
        super().__setattr__(name, value)

    def forward(self, x: Tensor, blocks: Any = range(5)) -> Tensor:
        return super().forward(x, blocks) + self.before(self.behind(x)).square().mean()


class Tuples(Block):
    """Takes and returns more than a hidden state."""

    def forward(self, x: Any, *, scale: Any = None) -> Any:
        hidden = x[0] if isinstance(x, tuple) else x
        return super().forward(hidden), {"more": hidden.mean()}


class TupleNet(Net):
    def body(self, x: Tensor, blocks: Any = range(5)) -> Tensor:
        found: Any = x
        for number in blocks:
            found = self.blocks[number](x=found, scale=x)
        return found[0] + found[1]["more"]


class Empty(Block):
    """Has Parameters of no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.none = nn.Parameter(torch.empty(0, 5)), nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.nothing.sum() + self.none.sum()


class Turned(Block):
    """Has a matrix that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.up.weight = nn.Parameter(self.up.weight.detach().t().contiguous().t())


class Inner(Block):
    """Checkpoints a part of itself."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def partly_frozen() -> Net:
    net = Net()
    net.blocks[1].requires_grad_(False)
    net.blocks[2].up.requires_grad_(False)
    return net


def only_a_head() -> Net:
    net = Net()
    net.blocks.requires_grad_(False)
    return net


NETS: dict[str, Callable[[], Net]] = {
    "tied": Tied,
    "tuples and keywords": lambda: TupleNet(Tuples),
    "no numbers": lambda: Net(Empty),
    "checkpoints inside": lambda: Net(Inner),
    "partly frozen": partly_frozen,
    "only a head": only_a_head,
    "fp16": lambda: Net().half(),
}


@pytest.mark.parametrize("activations", ["keep", "recompute", "swap"])
@pytest.mark.parametrize("name", NETS)
def test_it_trains_as_in_memory(name: str, activations: str) -> None:
    def loss_of(net: Net, step: int) -> Tensor:
        return net(inputs(step).to(net.head.weight.dtype))

    expected = trained(NETS[name](), loss_of, **IN_MEMORY)
    assert_equal(trained(NETS[name](), loss_of, **OUT_OF_CORE, activations=activations), expected)


@pytest.mark.parametrize("activations", ["keep", "swap"])
def test_weights_that_are_frozen_and_shared_stay_right(activations: str) -> None:
    net = Tied().requires_grad_(False)
    expected = net(inputs(0))
    with offloaded(net, **OUT_OF_CORE, activations=activations):
        assert torch.equal(net(inputs(0)), expected)
    assert torch.equal(net(inputs(0)), expected)


def test_a_matrix_that_is_not_contiguous_streams_and_is_refused_in_memory() -> None:
    expected = trained(Net(), **OUT_OF_CORE)
    for one, other in zip(trained(Net(Turned), **OUT_OF_CORE), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # a product of another layout
    with pytest.raises(ValueError, match=r"blocks\.0\.up\.weight is not contiguous; set its data to"):
        trained(Net(Turned), **IN_MEMORY)


def test_fp64_is_refused_before_anything_moves() -> None:
    net = Net().double()
    with pytest.raises(ValueError, match=r"blocks\.0\.norm\.weight is torch\.float64; expected float32"):
        trained(net, **OUT_OF_CORE)
    assert all(p.isfinite().all() for p in net.parameters())


ORDERS = [(0, 1, 2, 3, 4), (0, 3, 4), (1, 2, 3), (0, 2, 1, 4, 2)]


@pytest.mark.parametrize("activations", ["keep", "recompute", "swap"])
@pytest.mark.parametrize("whole", [True, False], ids=["model", "blocks alone"])
def test_blocks_that_are_dropped_repeated_or_called_alone(whole: bool, activations: str) -> None:
    """What autograd saves is right without the model's own forward pass, and whatever was read meanwhile."""

    def loss_of(net: Net, step: int) -> Tensor:
        loss = net(inputs(step), ORDERS[step]) if whole else net.body(inputs(step), ORDERS[step]).mean()
        with torch.no_grad():
            net(inputs(9), (4, 0, 3, 2))
        return loss

    expected = trained(Net(), loss_of, **IN_MEMORY)
    assert_equal(trained(Net(), loss_of, **OUT_OF_CORE, activations=activations), expected)


def test_gradients_of_blocks_that_the_last_pass_drops_count() -> None:
    def run(**how: Any) -> list[Tensor]:
        net = Net()
        optimizer = adamw(net)
        with offloaded(net, optimizer, **how) as tuned:
            for step in range(6):
                with nullcontext() if step % 2 else tuned.accumulate():
                    net(inputs(step), [n for n in range(5) if (n + step) % 3]).backward()
                if step % 2:
                    optimizer.step()
        assert all(p.grad is None for p in net.parameters())
        return list(net.parameters())

    assert_equal(run(**OUT_OF_CORE), run(**IN_MEMORY))


@pytest.mark.parametrize("activations", ["keep", "recompute", "swap"])
def test_a_graph_is_used_several_times(activations: str) -> None:
    """A saved tensor is unpacked again, by each pass and by each of its users."""

    def run(**how: Any) -> list[Tensor]:
        net = Net()
        optimizer = adamw(net)
        with offloaded(net, optimizer, **how) as tuned:
            for step in range(2):
                loss = net(inputs(step))
                with tuned.accumulate():
                    loss.backward(retain_graph=True)
                    loss.backward(retain_graph=True)
                loss.backward()
                optimizer.step()
        return list(net.parameters())

    assert_equal(run(**OUT_OF_CORE, activations=activations), run(**IN_MEMORY))


@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_that_are_recomputed_together_are_refused(reentrant: bool) -> None:
    def loss_of(net: Net, step: int) -> Tensor:
        hidden = inputs(step).requires_grad_()
        return checkpoint(net.body, hidden, range(5), use_reentrant=reentrant).mean()

    with pytest.raises(RuntimeError, match=r"blocks 0 and 1 are recomputed together, .*; checkpoint each"):
        trained(Net(), loss_of, **OUT_OF_CORE)
