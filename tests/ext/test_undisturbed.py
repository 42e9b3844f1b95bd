"""Passes that leave no trace in a model: state is as before, graphs in flight live."""

import pytest
import torch
from arranged import Inside, ids_of, model_of
from models import llama, token_ids
from peft import LoraConfig
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import mlora_ext as mx
from mlora_ext.routing.undisturbed import undisturbed


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
