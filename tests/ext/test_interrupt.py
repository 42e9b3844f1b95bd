"""A pass or a join that fails, is interrupted or meets a second thread leaves no trace in a model."""

import _thread
import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from arranged import Inside, ids_of, model_of
from head_models import VOCABULARY, lora
from head_models import llama as llama_with_head
from models import CONFIGS, NAMES, assert_same, converted, gradients, llama, token_ids
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import mlora_ext as mx
from mlora_ext import checkpoint_contexts
from mlora_ext.layers import copies
from mlora_ext.layers.adapter_layer import AdapterLayer
from mlora_ext.layers.adapter_weights import adapter_layers
from mlora_ext.routing.undisturbed import undisturbed
from tests.mixtures import mixture

IDS = torch.arange(2, 22).view(4, 5)
LAYOUT = mx.SegmentLayout.from_lengths([20])


def interrupted(model: nn.Module, work: Callable[[], object]) -> None:
    """Do `work`, which ends with `KeyboardInterrupt` in the second decoder layer."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        handle.remove()


def forward(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS, adapter_names=NAMES).logits


def routed(model: nn.Module) -> torch.Tensor:
    with mx.route(model, LAYOUT, names=["a"]):
        return model(input_ids=IDS).logits


def generated(model: nn.Module) -> torch.Tensor:
    return model.generate(IDS, adapter_names=NAMES, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("first", [forward, routed, generated])
@pytest.mark.parametrize("then", [forward, routed, generated])
def test_next_call_is_as_if_none_was_interrupted(
    first: Callable[[nn.Module], torch.Tensor], then: Callable[[nn.Module], torch.Tensor]
) -> None:
    model = converted().eval()
    expected = then(model)
    for _ in range(2):
        interrupted(model, lambda: first(model))
        assert torch.equal(then(model), expected)
        assert model.mlora_router.active is None
        with ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(then, model).result(), expected)


def test_route_around_the_interrupted_call_stays() -> None:
    model = converted().eval()
    expected = routed(model)
    with mx.route(model, LAYOUT, names=["a"]):
        interrupted(model, lambda: model(input_ids=IDS))
        assert torch.equal(model(input_ids=IDS).logits, expected)
    assert model.mlora_router.active is None
    assert model.mlora_router.thread_guard.thread is None


def test_interrupted_training_step_is_repeated_with_its_masks() -> None:
    model = converted().train()
    clone = copy.deepcopy(model)
    interrupted(model, lambda: forward(model))
    assert torch.equal(forward(model), forward(clone))
    assert model.mlora_router.step == 1


def test_only_adapter_does_not_stay_when_another_joins() -> None:
    model = converted(a=CONFIGS["a"]).eval()
    interrupted(model, lambda: model(input_ids=IDS))
    mx.add_adapter(model, "b", CONFIGS["b"])
    with pytest.raises(ValueError, match="2 adapters"):
        model(input_ids=IDS)


def test_call_inside_a_call_leaves_the_outer_one() -> None:
    """A model that calls itself is not interrupted."""
    model = converted(a=CONFIGS["a"]).eval()
    expected = model(input_ids=IDS).logits
    inner: list[torch.Tensor] = []

    def nested(*_: object) -> None:
        handle.remove()
        inner.append(model(input_ids=IDS).logits)
        assert model.mlora_router.active is not None

    handle = model.model.layers[1].register_forward_pre_hook(nested)
    assert torch.equal(model(input_ids=IDS).logits, expected)
    assert torch.equal(inner[0], expected)
    assert model.mlora_router.active is None


def test_refused_call_inside_a_call_leaves_the_outer_one() -> None:
    model = converted().eval()
    expected = forward(model)

    def refused(*_: object) -> None:
        with pytest.raises(ValueError, match="a route is already active; use adapter_names or"):
            forward(model)

    model.model.layers[1].register_forward_pre_hook(refused)
    assert torch.equal(forward(model), expected)


JOINS: dict[str, tuple[Any, LoraConfig]] = {
    "DoRA": (llama_with_head, LoraConfig(r=3, target_modules=["q_proj", "up_proj"], use_dora=True)),
    "copies": (llama_with_head, lora(target_modules=["q_proj"], modules_to_save=["lm_head", "norm"])),
    "rows": (llama_with_head, lora(target_modules=["q_proj"], trainable_token_indices=[3, 5])),
    "experts": (lambda: mixture("mixtral"), lora(target_modules=["q_proj", "w1", "w2", "w3"])),
}


@pytest.mark.parametrize("kind", JOINS)
@pytest.mark.parametrize("where", ["last", "inside"])
def test_an_adapter_is_taken_off(kind: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, config = JOINS[kind]
    model = mx.convert_model(build().eval(), {"a": lora(target_modules=["q_proj"])})
    ids, names = token_ids(2, 5) % VOCABULARY, ["a", "__base__"]
    expected = model(input_ids=ids, adapter_names=names).logits
    whole = mx.convert_model(build().eval(), {"b": config})
    last = list(adapter_layers(whole, "b"))[-1]

    def fails(function: Any, after: bool) -> Any:
        def wrapped(self: Any, *args: Any) -> Any:
            found = function(self, *args) if after or getattr(self, "name", last) != last else None
            if getattr(self, "name", last) == last:
                raise MemoryError("no memory for it")
            return found

        return wrapped

    with monkeypatch.context() as patch:
        if where == "last":
            for owner in {type(layer) for layer in adapter_layers(whole, "b").values()}:
                patch.setattr(owner, "put", fails(owner.put, True))
        else:
            patch.setattr(AdapterLayer, "bank", fails(AdapterLayer.bank, False))
            patch.setattr(copies, "_plain_copy", fails(copies._plain_copy, False))
        with pytest.raises(MemoryError):
            mx.add_adapter(model, "b", config)
    assert not adapter_layers(model, "b")
    assert not [key for key in model.state_dict() if ".b." in key]
    assert torch.equal(model(input_ids=ids, adapter_names=names).logits, expected)
    mx.add_adapter(model, "b", config)
    model(input_ids=ids, adapter_names=["a", "b"])
    assert mx.adapter_parameters(model, "b").keys() == mx.adapter_parameters(whole, "b").keys()


def while_inside(model: nn.Module, other: Callable[[], object]) -> torch.Tensor:
    """A forward of this thread, in the middle of which another thread does `other`."""

    def hook(*_: object) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other).result()

    handle = model.model.layers[1].register_forward_pre_hook(hook)
    try:
        return forward(model)
    finally:
        handle.remove()


def assert_refused_inside(model: nn.Module, other: Callable[[], object]) -> torch.Tensor:
    """Fails unless another thread's work is refused inside a forward, whose result it returns."""
    expected = forward(model)

    def refused() -> None:
        with pytest.raises(RuntimeError, match="another thread is inside a forward pass"):
            other()

    assert torch.equal(while_inside(model, refused), expected)
    return expected


@pytest.mark.parametrize(
    "other",
    [
        lambda model: model(input_ids=IDS, adapter_names=["b"] * 4),
        lambda model: model.generate(IDS, adapter_names=["b"] * 4, max_new_tokens=1),
        lambda model: model.model.layers[0].mlp(torch.randn(20, 32)),
        routed,
    ],
    ids=["forward", "generate", "layer", "route"],
)
def test_second_thread_is_refused(other: Callable[[nn.Module], object]) -> None:
    model = converted().eval()
    expected = assert_refused_inside(model, lambda: other(model))
    assert torch.equal(forward(model), expected)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(forward, model).result(), expected)


def test_backward_of_another_thread_does_not_change_routes() -> None:
    """A recomputation enters a route too."""
    model = converted().train()
    model.gradient_checkpointing_enable()
    loss = model(input_ids=IDS, adapter_names=["b"] * 4).logits.sum()
    assert_refused_inside(model.eval(), loss.backward)


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


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.name, self.last = 0, "none", None
        self.seen: list[int] = []
        self.by_key: dict[str, int] = {}
        self.plain = torch.zeros(3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("wide", torch.zeros(1).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.name, self.last = "some", x
        self.seen.append(self.count)
        self.by_key["k"] = self.count
        self.plain += 1
        self.mean.mul_(0.9)
        self.mean = self.mean + 1
        self.register_buffer("added", x.clone())
        self.new = x
        self.register_forward_hook(lambda *_: None)
        return x


def test_all_state_is_put_back() -> None:
    model = nn.Sequential(Stateful())
    part = model[0]
    keys, mean, plain, seen = set(part.__dict__), part.mean, part.plain, part.seen
    random = torch.get_rng_state()
    with undisturbed(model):
        model(torch.rand(3))
        assert part.count == 1
    assert set(part.__dict__) == keys
    assert (part.count, part.name, part.last, part.by_key) == (0, "none", None, {})
    assert part.mean is mean
    assert part.plain is plain
    assert part.seen is seen
    assert seen == []
    assert not part._forward_hooks
    assert set(part._buffers) == {"mean", "wide"}
    assert not mean.any()
    assert not plain.any()
    assert torch.equal(torch.get_rng_state(), random)


def test_frequencies_that_grow_with_the_length() -> None:
    """Llama with dynamic scaling keeps the length that its frequencies are for beside them."""
    config = llama().config.to_dict() | {
        "max_position_embeddings": 8,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    }
    targets = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    model = mx.convert_model(
        LlamaForCausalLM(LlamaConfig(**config)), {name: LoraConfig(r=2, **targets) for name in "ab"}
    ).eval()
    ids = token_ids(2, 24)
    with torch.no_grad():
        together = model(input_ids=ids, adapter_names=["a", "b"]).logits
        for sample, name in enumerate("ab"):
            alone = model(input_ids=ids, adapter_names=[name, name]).logits
            torch.testing.assert_close(together[sample], alone[sample], rtol=1e-5, atol=1e-5)


def test_a_graph_in_flight_keeps_its_buffers() -> None:
    class Gained(Inside):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gain", torch.rand(16))

        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.out(self.lin(self.embed(ids)) * self.gain) * attention_mask.unsqueeze(-1)

    model, ids = model_of(Gained), ids_of(2, 5)
    even, uneven = torch.ones(2, 5), torch.tensor([[1.0] * 5, [1.0, 1.0, 1.0, 0.0, 0.0]])
    chosen = model(ids, attention_mask=even, adapter_names=["a", "b"])
    rejected = model(ids, attention_mask=uneven, adapter_names=["a", "b"])
    (chosen - rejected).sum().backward()
    assert all(p.grad is not None for name in "ab" for p in mx.adapter_parameters(model, name).values())


def test_buffers_made_in_inference_mode() -> None:
    class Growing(Inside):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(1), persistent=False)
            self.longest = 0

        def arrange(self, h: Tensor) -> Tensor:
            if h.shape[1] > self.longest:
                self.longest = h.shape[1]
                self.register_buffer("scale", torch.full((1,), 1 / self.longest), persistent=False)
            return self.lin(h) * self.scale

    model = model_of(Growing)
    with torch.inference_mode():
        model(ids_of(2, 5), adapter_names=["a", "a"])
    with torch.no_grad():
        assert model(ids_of(2, 5), adapter_names=["a", "b"]).shape == (2, 5, 5)
        assert model.scale == pytest.approx(0.2)
