"""Where samples lie in a layer's input: every row meets its own sample's adapter, or the layer is refused."""

import copy
import warnings

import pytest
import torch
from arranged import (
    NAMES,
    REFUSED,
    SERVED,
    WIDTH,
    Chosen,
    Flat,
    Inside,
    Pooled,
    Sorted,
    TimeFirst,
    Windows,
    assert_as_alone,
    ids_of,
    model_of,
)
from models import llama, token_ids
from peft import LoraConfig
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    XLNetConfig,
    XLNetLMHeadModel,
)

import mlora_ext as mx


@pytest.mark.parametrize("shape", [(4, 7), (4, 4), (4, 8), (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("kind", SERVED)
def test_every_sample_meets_its_own_adapter(kind: type[Inside], shape: tuple[int, int]) -> None:
    model, ids = model_of(kind), ids_of(*shape)
    assert_as_alone(model, model(ids, adapter_names=NAMES[: shape[0]]), ids)


@pytest.mark.parametrize("kind", SERVED)
def test_gradients_are_those_of_training_alone(kind: type[Inside]) -> None:
    """Masks, too, where rows are in the order of samples; a batch of one adapter takes rows as they come."""
    plain = kind in (Flat, Pooled, Windows)
    model, ids = model_of(kind, dropout=0.3 if plain else 0.0).train(), ids_of(4, 4)
    model(ids, adapter_names=NAMES).square().sum().backward()
    together = {n: [p.grad.clone() for p in mx.adapter_parameters(model, n).values()] for n in "ab"}
    for name in "ab":
        model.zero_grad()
        model.mlora_router.step = 0
        own = [sample for sample, other in enumerate(NAMES) if other == name]
        model(ids[own], adapter_names=[name] * len(own)).square().sum().backward()
        alone = [p.grad for p in mx.adapter_parameters(model, name).values()]
        for one, other in zip(together[name], alone, strict=True):
            assert_same_up_to_rounding(one, other, name)
    loss = model(ids, adapter_names=NAMES)[0].sum()
    model.zero_grad()
    loss.backward()
    for parameter in mx.adapter_parameters(model, "b").values():
        assert not parameter.grad.any()


@pytest.mark.parametrize(("kind", "reason"), REFUSED)
@pytest.mark.parametrize("shape", [(4, 7), (4, 4)], ids=str)
def test_rows_of_nobody_are_refused(kind: type[Inside], reason: str, shape: tuple[int, int]) -> None:
    model = model_of(kind)
    with pytest.raises(ValueError, match=f"layer lin: cannot tell which rows of x.*{reason}"):
        model(ids_of(*shape), adapter_names=NAMES)
    model(ids_of(*shape), adapter_names=["b"] * 4)


@pytest.mark.parametrize("kind", [Chosen, Sorted])
def test_rows_that_depend_on_values_are_refused_or_right(kind: type[Inside]) -> None:
    """By chance they lie as samples do in one batch; then they may be refused in a later one only."""
    for _ in range(20):
        model, ids = model_of(kind), ids_of(4, 5)
        for _ in range(2):
            try:
                together = model(ids, adapter_names=NAMES)
            except ValueError as error:
                if "layer lin: cannot tell which rows" not in str(error):
                    raise
                continue
            assert_as_alone(model, together, ids)
            ids = ids_of(4, 5)


def test_samples_that_hold_the_same_are_told_apart() -> None:
    model, ids = model_of(TimeFirst), torch.full((4, 4), 7)
    assert_as_alone(model, model(ids, adapter_names=NAMES), ids)


@pytest.mark.parametrize("shape", [(4, 7), (4, 4)], ids=str)
def test_a_route_of_packed_rows_refuses_what_is_not_packed(shape: tuple[int, int]) -> None:
    layout = mx.SegmentLayout.from_lengths([shape[1]] * shape[0], adapters=[0, 1, -1, 1])
    ids = ids_of(*shape)
    model = model_of(Flat)
    with mx.route(model, layout, names=["a", "b"]):
        packed = model(ids)
    assert_same_up_to_rounding(packed.detach(), model(ids, adapter_names=NAMES).detach(), "packed")
    model = model_of(TimeFirst)
    with (
        mx.route(model, layout, names=["a", "b"]),
        pytest.raises(ValueError, match=r"layer lin: .* not in the order of the route; use adapter_names="),
    ):
        model(ids)


def test_a_graph_never_holds_another_order() -> None:
    """A compiled model runs such a layer outside of its graphs; a single graph refuses it."""
    model, ids = model_of(TimeFirst), ids_of(4, 4)
    expected = model(ids, adapter_names=NAMES).detach()
    compiled = torch.compile(model, backend="eager")
    assert_same_up_to_rounding(compiled(ids, adapter_names=NAMES).detach(), expected, "compiled")
    torch._dynamo.reset()
    layer = torch.compile(model.lin, backend="eager", fullgraph=True)
    router = model.mlora_router
    with (
        router.entered(router.sampled(NAMES, rows=16)),
        pytest.raises(Exception, match="a compiled layer needs samples in the first dimension of x"),
    ):
        layer(torch.randn(4, 4, WIDTH))


@pytest.mark.parametrize("shape", [(4, 6), (4, 4)], ids=str)
def test_xlnet(shape: tuple[int, int]) -> None:
    config = XLNetConfig(vocab_size=61, d_model=32, n_layer=2, n_head=4, d_inner=48)
    adapters = {
        n: LoraConfig(r=4, target_modules=["layer_1", "layer_2"], init_lora_weights=False) for n in "ab"
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = mx.convert_model(XLNetLMHeadModel(config), adapters).eval()
    ids = token_ids(*shape)
    together = model(input_ids=ids, adapter_names=NAMES).logits
    for sample, name in enumerate(NAMES):
        alone = model(input_ids=ids[sample : sample + 1], adapter_names=[name]).logits
        assert_same_up_to_rounding(together[sample : sample + 1].detach(), alone.detach(), name)


@pytest.mark.parametrize(
    ("how", "targets"),
    [({}, "all-linear"), ({"num_beams": 2}, "all-linear"), ({}, r"decoder.*\.[qv]")],
    ids=str,
)
def test_generate_of_an_encoder_decoder(how: dict, targets: str) -> None:
    """`generate` calls the encoder by itself, outside of the model's own forward."""
    config = T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    adapters = {n: LoraConfig(r=4, target_modules=targets, init_lora_weights=False) for n in "ab"}
    model = mx.convert_model(T5ForConditionalGeneration(config), adapters).eval()
    ids, names = token_ids(3, 3), ["a", "b", "__base__"]
    how = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, **how}
    together = model.generate(input_ids=ids, adapter_names=names, **how)
    for sample, name in enumerate(names):
        alone = model.generate(input_ids=ids[sample : sample + 1], adapter_names=[name], **how)
        assert torch.equal(together[sample : sample + 1], alone)


def test_batch_statistics_of_the_base_stay_fixed() -> None:
    class Normalised(Inside):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def arrange(self, h: Tensor) -> Tensor:
            return self.norm(self.lin(h).transpose(1, 2)).transpose(1, 2)

    with pytest.warns(UserWarning, match="1 batch normalisations of the base model stay in evaluation mode"):
        model = model_of(Normalised)
    ids, before = ids_of(4, 5), model.norm.running_mean.clone()
    for one in (model.train(), copy.deepcopy(model).train()):
        assert not one.norm.training
        together = one(ids, adapter_names=NAMES)
        assert_same_up_to_rounding(
            together[:1].detach(), one(ids[:1], adapter_names=["a"]).detach(), "sample 0"
        )
        assert torch.equal(one.norm.running_mean, before)
    assert mx.merge_and_unload(model, "a").norm.training


def test_experts_that_take_tokens_by_the_batch_are_warned_of() -> None:
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 40, "num_experts": 2}
    for every, expected in ((0, 0), (2, 1)):
        steps = {"encoder_sparse_step": every, "decoder_sparse_step": every}
        model = NllbMoeForConditionalGeneration(NllbMoeConfig(d_model=8, **sizes, **heads, **steps))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mx.convert_model(model, {"a": LoraConfig(target_modules=["q_proj"])})
        assert sum("depends on the whole batch" in str(one.message) for one in caught) == expected


def test_statistics_of_the_batch_alone_are_refused() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, track_running_stats=False))
    with pytest.raises(ValueError, match=r"layer 1: BatchNorm1d with track_running_stats=False .* GroupNorm"):
        mx.convert_model(model, {"a": LoraConfig(r=2, target_modules=["0"])})
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("keyword", ["X", "input_values", "past_values", "pixel_values", "anything"])
def test_a_batch_by_any_name(keyword: str) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, 3)

        def forward(self, mask: Tensor, **inputs: Tensor) -> Tensor:
            return self.lin(inputs[keyword]) * mask

    model = mx.convert_model(
        Named(), {n: LoraConfig(r=2, target_modules=["lin"], init_lora_weights=False) for n in "ab"}
    )
    x, mask = torch.randn(2, 4, WIDTH), torch.ones(())
    together = model(mask=mask, adapter_names=["a", "b"], **{keyword: x})
    alone = model(mask=mask, adapter_names=["b"], **{keyword: x[1:]})
    assert_same_up_to_rounding(together[1:].detach(), alone.detach(), keyword)


def test_llama_with_as_many_tokens_as_samples() -> None:
    model = mx.convert_model(
        llama(), {n: LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) for n in "ab"}
    ).eval()
    ids = token_ids(4, 4)
    together = model(input_ids=ids, adapter_names=NAMES).logits
    for sample, name in enumerate(NAMES):
        alone = model(input_ids=ids[sample : sample + 1], adapter_names=[name]).logits
        assert_same_up_to_rounding(together[sample : sample + 1].detach(), alone.detach(), name)


@pytest.mark.parametrize(("images", "served"), [([1, 1], True), ([2, 0], False)])
def test_images_that_are_as_many_as_samples(images: list[int], served: bool) -> None:
    """Two images of one sample, and none of the other: their rows are not the samples'."""

    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = LlamaConfig(image_token_id=49)
            self.embed, self.see = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
            h = self.embed(input_ids)
            return h.masked_scatter((input_ids == 49).unsqueeze(-1), self.see(pixel_values))

    model = mx.convert_model(
        Seeing(), {n: LoraConfig(r=2, target_modules=["see"], init_lora_weights=False) for n in "ab"}
    )
    ids = torch.randint(0, 49, (2, 6))
    for sample, count in enumerate(images):
        ids[sample, : 2 * count] = 49
    pixels, names = torch.randn(2, 2, WIDTH), ["a", "b"]
    if not served:
        with pytest.raises(ValueError, match="layer see: cannot tell which rows"):
            model(input_ids=ids, pixel_values=pixels, adapter_names=names)
        return
    together = model(input_ids=ids, pixel_values=pixels, adapter_names=names)
    for sample, name in enumerate(names):
        own = slice(sample, sample + 1)
        alone = model(input_ids=ids[own], pixel_values=pixels[own], adapter_names=[name])
        assert_same_up_to_rounding(together[own].detach(), alone.detach(), name)
