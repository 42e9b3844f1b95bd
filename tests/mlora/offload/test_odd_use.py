"""Models, passes and uses of `mlora.offload.offloaded` that it was not made for."""

import copy
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.offload import offloaded, optimizer_states, saved_tensors, swap_space
from mlora.offload.disk import Disk
from mlora.offload.optimizer_states import OptimizerStates
from mlora.offload.saved_tensors import SavedTensors
from mlora.offload.swap_space import SwapSpace
from mlora.offload.updates import AdamWStep, Updates, Weights
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


def test_an_error_inside_gives_all_back() -> None:
    net = Net()
    before = [p.detach().clone() for p in net.parameters()]
    threads = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError), offloaded(net, adamw(net), **OUT_OF_CORE):
        1 / net(inputs(0)).long().item()  # the loss is below 1
    assert_equal(list(net.parameters()), before)
    assert set(threading.enumerate()) == threads
    assert not [module for module in net.modules() if "forward" in vars(module)]
    net(inputs(0)).backward()
    assert all(p.grad is not None for p in net.parameters())
    assert copy.deepcopy(net).state_dict().keys() == net.state_dict().keys()


def test_a_forward_pass_of_ones_own_comes_back() -> None:
    net = Net()
    own = net.blocks[1].forward = lambda x: x + 1
    with offloaded(net, adamw(net)):
        assert net.blocks[1].forward is not own
    assert vars(net.blocks[1])["forward"] is own


def test_twice_inside_is_refused_and_twice_in_turn_is_not() -> None:
    net, losses = Net(), []
    for _ in range(2):
        optimizer = adamw(net)
        with offloaded(net, optimizer, **OUT_OF_CORE):
            with pytest.raises(ValueError, match=r"model: it is in a `with .* already"), offloaded(net):
                pass
            losses.append(net(inputs(0)).item())
            net(inputs(0)).backward()
            optimizer.step()
    assert losses[1] < losses[0]
    with pytest.raises(ValueError, match="optimizer: expected a new one"), offloaded(net, optimizer):
        pass


@pytest.mark.parametrize("activations", ["keep", "recompute", "swap"])
def test_a_backward_pass_that_comes_too_late_changes_no_weight(activations: str) -> None:
    net = Net()
    before = [p.detach().clone() for p in net.parameters()]
    with offloaded(net, adamw(net), **OUT_OF_CORE, activations=activations):
        loss = net(inputs(0))
    with pytest.raises(RuntimeError, match="run backward passes inside its `with`"):
        loss.backward()
    assert_equal(list(net.parameters()), before)


def test_a_graph_that_is_older_than_an_update_is_refused() -> None:
    """As PyTorch does in memory."""
    for out_of_core in (False, True):
        net = Net()
        optimizer = adamw(net)
        with offloaded(net, optimizer, slots=2) if out_of_core else nullcontext():
            older = net(inputs(0))
            net(inputs(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(RuntimeError, match=r"updated after its forward|modified by an inplace"):
                older.backward()


@pytest.mark.parametrize("take", [copy.deepcopy, copy.copy, pickle.dumps])
def test_copies_are_refused_inside(take: Callable[[Any], Any]) -> None:
    net = Net()
    with (
        offloaded(net, adamw(net)),
        pytest.raises(RuntimeError, match="copy or pickle it after the `with`"),
    ):
        take(net)
    take(net)


def test_the_optimizer_itself_has_no_states() -> None:
    net = Net()
    optimizer = adamw(net)
    with offloaded(net, optimizer):
        with pytest.raises(RuntimeError, match=r"state_dict: use save\(\) of the `optimizer` of the object"):
            optimizer.state_dict()
        with pytest.raises(RuntimeError, match=r"load_state_dict: use load\(\) of the `optimizer`"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        with pytest.raises(ValueError, match="other Parameters than when `with` began"):
            optimizer.step()
    assert optimizer.state_dict()["state"] == {}


def test_a_schedule_that_begins_inside_works() -> None:
    net = Net()
    optimizer = adamw(net)
    with offloaded(net, optimizer):
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 0.1, total_iters=4)
        net(inputs(0)).backward()
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * (0.5 - 0.1))


def settled(space: SwapSpace) -> list[Any]:
    """The scratch files once writes of what was dropped have ended."""
    while space._dropped:
        space._free_room()
    return space._chunks


def test_what_is_dropped_does_not_wait_for_its_write(tmp_path: Path) -> None:
    space = SwapSpace(Disk([tmp_path], rate=32 << 20))
    content = torch.ones(8 << 20, dtype=torch.uint8)  # a quarter of a second
    for _ in range(4):
        assert space.swap_out(content).content().eq(1).all()
    assert len(space._dropped) >= 3
    assert [chunk.areas for chunk in settled(space)] == [0]


def test_passes_without_a_backward_pass_leave_no_room_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are swapped out and never read: their memory and their room on disk come back."""
    monkeypatch.setattr(swap_space, "CHUNK", 1 << 20)
    spaces = []

    class Watched(SwapSpace):
        def __init__(self, disk: Disk) -> None:
            super().__init__(disk)
            spaces.append(self)

    monkeypatch.setattr("mlora.offload.offloaded_model.SwapSpace", Watched)
    net = Net()
    optimizer = adamw(net)
    with offloaded(net, optimizer, **OUT_OF_CORE, activations="swap"):
        chunks = []
        for step in range(20):
            net(inputs(step))
            chunks.append([(chunk.used, chunk.areas) for chunk in settled(spaces[0])])
        assert chunks == [[(0, 0)]] * 20
        assert spaces[0].written > 20 * 5 * inputs(0).nbytes
        net(inputs(0)).backward()
        optimizer.step()
        assert [chunk.areas for chunk in settled(spaces[0])] == [0]


def test_a_backward_pass_reads_one_block_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all blocks, which would undo the swap."""
    out, found = [], []
    swap_out = SavedTensors._swap_out

    def watched(self: SavedTensors, whole: torch.Tensor) -> Any:
        swapped = swap_out(self, whole)
        swapped.leave()  # a slow disk would keep it in memory, which looks as if it was read
        out.append((self._block, weakref.ref(swapped)))
        return swapped

    monkeypatch.setattr(SavedTensors, "_swap_out", watched)

    def look(block: int) -> None:
        """As the gradient of a block's output comes."""
        there = {number for number, ref in out if (swapped := ref()) and swapped._memory is not None}
        found.append((block, sorted(number for number in there if number <= block)))

    def watch(number: int, _: Any, __: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: look(number))

    net = Net()
    for number, block in enumerate(net.blocks):
        block.register_forward_hook(partial(watch, number))
    optimizer = adamw(net)
    with offloaded(net, optimizer, **OUT_OF_CORE, activations="swap"):
        net(inputs(0)).backward()
        optimizer.step()
    assert [block for block, _ in found] == [4, 3, 2, 1, 0]
    assert all(set(there) <= {block - 1, block} for block, there in found)
    assert all(block in there for block, there in found[1:])


def test_gradients_wait_for_room() -> None:
    """At most `waiting` bytes of gradients are there at once, except for one that is larger."""
    names = [f"w{number}" for number in range(12)]
    disk = Disk(rate=20e6)
    states = OptimizerStates(dict.fromkeys(names, 3000), disk, on_disk=True)
    for name in names:
        states.put(name, torch.zeros(3000))
    weights = {name: Weights(torch.zeros(3000), torch.float32) for name in names}
    one = 4 * 3000
    seen: list[int] = []
    for waiting, most in ((3 * one, 3 * one), (one // 2, one)):
        own = Updates(states, weights, waiting=waiting)
        for name in names:
            own.submit(name, torch.ones(3000), AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.0, 1))
            seen.append(own._bytes)
        assert 0 < max(seen) <= most
        seen.clear()
        assert own.finish() == pytest.approx(12 * 3000)
        own.close()
        with pytest.raises(RuntimeError, match="the optimizer's thread has ended"):
            own.submit("w0", torch.ones(3000), AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.0, 1))


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
