"""Two threads and one converted model: the second is refused while the first is inside, and harms nothing."""

import _thread
import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import CONFIGS, NAMES, assert_same, converted, gradients, token_ids
from torch import nn
from torch.utils.checkpoint import checkpoint

import mlora_ext as mx
from mlora_ext import checkpoint_contexts

IDS = torch.arange(2, 22).view(4, 5)
LAYOUT = mx.SegmentLayout.from_lengths([20])


def while_inside(model: nn.Module, other: Callable[[], object]) -> torch.Tensor:
    """A forward of this thread, in the middle of which another thread does `other`."""

    def hook(*_: object) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other).result()

    handle = model.model.layers[1].register_forward_pre_hook(hook)
    try:
        return model(input_ids=IDS, adapter_names=NAMES).logits
    finally:
        handle.remove()


def enter_route(model: nn.Module) -> None:
    with mx.route(model, LAYOUT, names=["a"]):
        pass


@pytest.mark.parametrize(
    "other",
    [
        lambda model: model(input_ids=IDS, adapter_names=["b"] * 4),
        lambda model: model.generate(IDS, adapter_names=["b"] * 4, max_new_tokens=1),
        lambda model: model.model.layers[0].mlp(torch.randn(20, 32)),
        enter_route,
    ],
    ids=["forward", "generate", "layer", "route"],
)
def test_second_thread_is_refused(other: Callable[[nn.Module], object]) -> None:
    model = converted().eval()
    expected = model(input_ids=IDS, adapter_names=NAMES).logits

    def refused() -> None:
        with pytest.raises(RuntimeError, match="another thread is inside a forward pass"):
            other(model)

    assert torch.equal(while_inside(model, refused), expected)
    assert torch.equal(model(input_ids=IDS, adapter_names=NAMES).logits, expected)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(model, input_ids=IDS, adapter_names=NAMES).result().logits, expected)


def test_backward_of_another_thread_does_not_change_routes() -> None:
    """A recomputation enters a route too."""
    model = converted().eval()
    expected = model(input_ids=IDS, adapter_names=NAMES).logits
    model.gradient_checkpointing_enable()
    model.train()
    loss = model(input_ids=IDS, adapter_names=["b"] * 4).logits.sum()
    model.eval()

    def refused() -> None:
        with pytest.raises(RuntimeError, match="another thread is inside a forward pass"):
            loss.backward()

    assert torch.equal(while_inside(model, refused), expected)


def test_copies_are_free() -> None:
    model = converted().eval()
    clone = copy.deepcopy(model)
    expected = clone(input_ids=IDS, adapter_names=["b"] * 4).logits
    found = []
    while_inside(model, lambda: found.append(clone(input_ids=IDS, adapter_names=["b"] * 4).logits))
    assert torch.equal(found[0], expected)
    with mx.route(model, LAYOUT, names=["a"]):
        inside = copy.deepcopy(model)
    while_inside(model, lambda: found.append(inside(input_ids=IDS, adapter_names=["b"] * 4).logits))
    assert torch.equal(found[1], expected)


def test_threads_that_take_turns_train() -> None:
    """Under a lock of the caller, forwards and backwards of two threads give what one thread gets."""
    model, lock = converted(a=CONFIGS["b"], b=CONFIGS["b"]).train(), threading.Lock()
    model.gradient_checkpointing_enable()
    ids = token_ids(2, 6)

    def train(name: str) -> None:
        for _ in range(3):
            with lock:
                model.mlora_router.step = 7
                loss = model(input_ids=ids, adapter_names=[name] * 2).logits.square().sum()
                loss.backward()

    for name in "ab":
        train(name)
    expected = gradients(model)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, "ab"))
    assert_same(gradients(model), expected)


def in_a_thread_unknown_to_python(work: Callable[[], None]) -> list[RuntimeError]:
    """Run `work` as autograd runs a backward pass on a GPU; returns what it raised."""
    done, raised = threading.Event(), []

    def run() -> None:
        try:
            work()
        except RuntimeError as error:
            raised.append(error)
        finally:
            done.set()

    _thread.start_new_thread(run, ())
    assert done.wait(60)
    return raised


def test_autograds_own_threads_recompute_inside_a_route() -> None:
    model, x = converted().train(), torch.randn(20, 32, requires_grad=True)
    mlp, contexts = model.model.layers[0].mlp, checkpoint_contexts(model)
    with mx.route(model, LAYOUT, names=["a"], steps=[3]):
        mlp(x).square().sum().backward()
        expected = gradients(model)
        loss = checkpoint(mlp, x, use_reentrant=False, context_fn=contexts).square().sum()
        assert not in_a_thread_unknown_to_python(loss.backward)
    assert_same(gradients(model), expected)


def test_route_that_autograds_thread_has_entered_is_not_taken_for_ones_own() -> None:
    """Nobody else can tell for which thread autograd recomputes: a layer called meanwhile is refused."""
    model, x = converted().train(), torch.randn(20, 32, requires_grad=True)
    entered, go_on = threading.Event(), threading.Event()
    mlp, contexts = model.model.layers[0].mlp, checkpoint_contexts(model)

    def block(value: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() != -1:
            entered.set()
            assert go_on.wait(60)
        return mlp(value)

    with mx.route(model, LAYOUT, names=["b"]):
        loss = checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum()
    raised: list[RuntimeError] = []
    thread = threading.Thread(target=lambda: raised.extend(in_a_thread_unknown_to_python(loss.backward)))
    thread.start()
    assert entered.wait(60)
    with pytest.raises(RuntimeError, match="another thread is inside a forward pass"):
        mlp(x)
    go_on.set()
    thread.join()
    assert not raised
