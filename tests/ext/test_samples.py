"""Where samples lie in a layer's input: every row meets its own sample's adapter, or the layer is refused."""

import copy
import warnings

import pytest
import torch
from models import converted, llama, token_ids
from peft import LoraConfig
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    DynamicCache,
    LlamaConfig,
    T5Config,
    T5ForConditionalGeneration,
    XLNetConfig,
    XLNetLMHeadModel,
)

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
    (Positions, "do not follow from the samples"),
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


def test_kinds_of_input_are_learnt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = model_of(Flat), []
    monkeypatch.setattr(
        model.embed, "forward", lambda ids, own=model.embed.forward: calls.append(1) or own(ids)
    )
    model(ids_of(4, 5), adapter_names=["a"] * 4)
    assert len(calls) == 1
    model(ids_of(4, 5), adapter_names=NAMES)
    first = len(calls)
    assert first > 2
    for shape in ((4, 4), (4, 9), (4, 1)):
        model(ids_of(*shape), adapter_names=NAMES)
    assert len(calls) == first + 3


def test_one_token_per_sample_does_not_tell_the_order_of_more() -> None:
    model, ids = model_of(TimeFirstFlat), ids_of(4, 6)
    model(ids[:, :1], adapter_names=NAMES)
    together = model(ids, adapter_names=NAMES)
    alone = model(ids[1:2], adapter_names=["b"])
    assert_same_up_to_rounding(together[1:2].detach(), alone.detach(), "sample 1")


def test_trial_passes_leave_no_trace() -> None:
    model = converted().train()
    modes = {key: module.training for key, module in model.named_modules()}
    cache = DynamicCache()
    logits = model(input_ids=token_ids(2, 5), adapter_names=["a", "b"], past_key_values=cache).logits
    assert logits.requires_grad
    assert cache.get_seq_length() == 5
    assert model.mlora_router.step == 1
    assert {key: module.training for key, module in model.named_modules()} == modes


def test_random_numbers_are_those_of_a_forward_without_trials() -> None:
    model, ids = converted().train(), token_ids(2, 5)
    torch.manual_seed(7)
    model(input_ids=ids, adapter_names=["a", "b"])
    after_trials = torch.rand(3)
    torch.manual_seed(7)
    model(input_ids=ids, adapter_names=["a", "b"])
    assert torch.equal(torch.rand(3), after_trials)


def test_a_model_that_fails_on_other_contents_is_refused() -> None:
    class Particular(Inside):
        def arrange(self, h: Tensor) -> Tensor:
            if not torch.equal(h, self.expected):
                raise RuntimeError("not these")
            return self.lin(h)

    model, ids = model_of(Particular), ids_of(2, 3)
    model.expected = model.embed(ids).detach()
    with pytest.raises(
        ValueError, match=r"fails when the contents of samples change \(RuntimeError: not these"
    ):
        model(ids, adapter_names=["a", "b"])
    assert model(ids, adapter_names=["a", "a"]).shape == (2, 3, 5)


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
        pytest.raises(
            ValueError, match=r"layer lin: .* another order than those of the route; use adapter_names="
        ),
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
        pytest.raises(Exception, match="not the first dimension of x"),
    ):
        layer(torch.randn(4, 4, WIDTH))


def test_a_copy_learns_for_itself_and_new_layers_are_learnt() -> None:
    model = model_of(TimeFirst, targets=("out",))
    ids = ids_of(4, 4)
    model(ids, adapter_names=NAMES)
    mx.add_adapter(model, "c", LoraConfig(r=3, target_modules=["lin"], init_lora_weights=False))
    for one in (model, copy.deepcopy(model)):
        together = one(ids, adapter_names=["c", "b", "__base__", "c"])
        alone = one(ids[3:], adapter_names=["c"])
        assert_same_up_to_rounding(together[3:].detach(), alone.detach(), "sample 3")


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


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}], ids=str)
def test_generate_of_an_encoder_decoder(how: dict) -> None:
    """`generate` calls the encoder by itself, outside of the model's own forward."""
    config = T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    adapters = {n: LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) for n in "ab"}
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


class Unpadded(Inside):
    """The tokens that a mask leaves, one after the other."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.embed(ids)
        return self.out(h.masked_scatter(mask.bool().unsqueeze(-1), self.lin(h[mask.bool()])))


def test_what_held_without_padding_is_looked_at_anew_with_it() -> None:
    model, ids, mask = model_of(Unpadded), ids_of(4, 6), torch.ones(4, 6, dtype=torch.int64)
    together = model(ids, mask=mask, adapter_names=NAMES)
    alone = model(ids[1:2], mask=mask[1:2], adapter_names=["b"])
    assert_same_up_to_rounding(together[1:2].detach(), alone.detach(), "sample 1")
    mask[0, 1:] = mask[2, 3:] = 0
    with pytest.raises(ValueError, match="layer lin: cannot tell which rows"):
        model(ids, mask=mask, adapter_names=NAMES)
    assert model(ids, mask=mask, adapter_names=["a"] * 4).shape == (4, 6, 5)


def test_another_way_through_the_model_is_looked_at_anew() -> None:
    class EitherWay(Inside):
        def forward(self, ids: Tensor, time_first: bool = False, labels: Tensor | None = None) -> Tensor:
            h = self.embed(ids)
            h = self.lin(h.transpose(0, 1)).transpose(0, 1) if time_first else self.lin(h)
            return h if labels is None else self.out(h)

    model, ids = model_of(EitherWay), ids_of(4, 4)
    for how in ({}, {"time_first": True}, {"labels": ids}, {}):
        together = model(ids, adapter_names=NAMES, **how)
        for sample, name in enumerate(NAMES):
            own = {
                key: value[sample : sample + 1] if key == "labels" else value for key, value in how.items()
            }
            alone = model(ids[sample : sample + 1], adapter_names=[name], **own)
            assert_same_up_to_rounding(together[sample : sample + 1].detach(), alone.detach(), str(how))


def test_another_number_of_rows_of_each_sample_is_refused_once() -> None:
    class Folded(Inside):
        """A dimension of samples and halves where there is a half, else of samples alone."""

        def arrange(self, h: Tensor) -> Tensor:
            parts = 3 if h.shape[1] > 6 else 2
            return self.lin(h.unflatten(1, (parts, -1)).flatten(0, 1)).unflatten(0, (-1, parts)).flatten(1, 2)

    model = model_of(Folded)
    model(ids_of(4, 6), adapter_names=NAMES)
    ids = ids_of(4, 12)
    with pytest.raises(ValueError, match=r"layer lin: .* another form; the next call makes them anew"):
        model(ids, adapter_names=NAMES)
    assert_as_alone(model, model(ids, adapter_names=NAMES), ids)


def test_layers_that_only_training_calls_are_found() -> None:
    class Auxiliary(Inside):
        def __init__(self) -> None:
            super().__init__()
            self.train_only = nn.Linear(WIDTH, WIDTH)

        def arrange(self, h: Tensor) -> Tensor:
            return self.lin(h) + (self.train_only(h) if self.training else 0)

    model, ids = model_of(Auxiliary, targets=("lin", "train_only", "out")).train(), ids_of(4, 4)
    assert_as_alone(model, model(ids, adapter_names=NAMES), ids)
    assert model.train_only.training


def test_trial_passes_leave_state_and_arguments_alone() -> None:
    class Counting(Inside):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, ids: Tensor, state: list[Tensor]) -> Tensor:
            self.calls.add_(1)
            state[0].add_(1)
            return self.out(self.lin(self.embed(ids)))

    model, state = model_of(Counting), [torch.zeros(4)]
    model(ids_of(4, 3), state=state, adapter_names=NAMES)
    assert model.calls == 1
    assert torch.equal(state[0], torch.ones(4))


def test_a_cache_may_hold_tensors_of_a_graph() -> None:
    model, ids = converted().eval(), token_ids(2, 5)
    key = torch.randn(2, 2, 3, 8, requires_grad=True)
    cache = DynamicCache()
    for layer in range(2):
        cache.update(key * 2, key * 3, layer)
    logits = model(input_ids=ids, adapter_names=["a", "b"], past_key_values=cache).logits
    logits.sum().backward()
    assert cache.get_seq_length() == 8
    assert key.grad is not None


def test_memory_that_runs_out_is_said_to() -> None:
    class Hungry(Inside):
        def arrange(self, h: Tensor) -> Tensor:
            if not torch.equal(h, self.expected):
                raise torch.OutOfMemoryError("no more")
            return self.lin(h)

    model, ids = model_of(Hungry), ids_of(2, 3)
    model.expected = model.embed(ids).detach()
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        model(ids, adapter_names=["a", "b"])


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


def test_forwards_of_two_kinds_in_flight_are_not_alike() -> None:
    """A reentrant checkpoint cannot tell which of them is recomputed, and says so."""

    class Checkpointed(Inside):
        def forward(self, ids: Tensor, time_first: bool) -> Tensor:
            h = self.embed(ids).requires_grad_()
            h = h.transpose(0, 1) if time_first else h
            return self.out(checkpoint(self.lin, h, use_reentrant=True))

    model, ids = model_of(Checkpointed).train(), ids_of(4, 4)
    losses = [model(ids, time_first=first, adapter_names=NAMES).sum() for first in (True, False)]
    with pytest.raises(ValueError, match="2 forward passes are in flight"):
        losses[0].backward()


def test_training_may_arrange_rows_otherwise() -> None:
    class ByMode(Inside):
        def arrange(self, h: Tensor) -> Tensor:
            return self.lin(h.transpose(0, 1)).transpose(0, 1) if self.training else self.lin(h)

    model, ids = model_of(ByMode), ids_of(4, 4)
    for mode in (True, False, True):
        model.train(mode)
        assert_as_alone(model, model(ids, adapter_names=NAMES), ids)


def test_lengths_that_begin_to_differ_are_looked_at_anew() -> None:
    class ByLength(Inside):
        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            order = lengths.argsort(stable=True)
            return self.out(self.lin(self.embed(ids)[order])[order.argsort()])

    model, ids = model_of(ByLength), ids_of(4, 5)
    model(ids, lengths=torch.full((4,), 5), adapter_names=NAMES)
    with pytest.raises(ValueError, match="layer lin: cannot tell which rows"):
        model(ids, lengths=torch.tensor([5, 2, 4, 3]), adapter_names=NAMES)


def test_tokens_that_labels_choose_are_refused() -> None:
    class Sparse(Inside):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return self.out(self.lin(self.embed(ids)[labels != -100]))

    model, ids = model_of(Sparse, targets=("lin",)), ids_of(5, 5)
    model(ids, labels=ids, adapter_names=[*NAMES, "a"])
    labels = torch.full_like(ids, -100)
    labels[:2] = ids[:2]
    for _ in range(2):
        with pytest.raises(ValueError, match="layer lin: cannot tell which rows"):
            model(ids, labels=labels, adapter_names=[*NAMES, "a"])
