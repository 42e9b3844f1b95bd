"""The passes that find where samples lie: once for each kind of call, anew for another, without a trace."""

import copy

import pytest
import torch
from arranged import (
    NAMES,
    WIDTH,
    Flat,
    Inside,
    TimeFirst,
    TimeFirstFlat,
    assert_as_alone,
    ids_of,
    model_of,
)
from models import converted, token_ids
from peft import LoraConfig
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
)

import mlora_ext as mx


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
    for shape in ((4, 6), (4, 9), (4, 1)):
        model(ids_of(*shape), adapter_names=NAMES)
    assert len(calls) == first + 3
    model(ids_of(4, 4), adapter_names=NAMES)
    square = len(calls)
    assert square > first + 4
    model(ids_of(4, 4), adapter_names=NAMES)
    assert len(calls) == square + 1


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


@pytest.mark.parametrize(
    ("prompts", "following"),
    [([0, 1], [7, 7]), ([0, 0, 1, 1], [7, 7, 7, 7]), ([0, 0, 1, 1], [7, 8, 7, 8]), ([0, 1, 2], [7, 7, 7])],
    ids=str,
)
def test_equal_tokens_after_different_prompts(prompts: list[int], following: list[int]) -> None:
    """Rows that stay alike when samples move on: their caches stay where they are."""
    model, ids = converted().eval(), token_ids(3, 5)[prompts]
    names = [NAMES[prompt] for prompt in prompts]

    def after_the_prompts(names: list[str]) -> Tensor:
        cache = DynamicCache()
        model(input_ids=ids, adapter_names=names, past_key_values=cache)
        step = {"input_ids": torch.tensor(following).unsqueeze(1), "use_cache": True}  # a kind of its own
        return model(**step, adapter_names=names, past_key_values=cache).logits.detach()

    together = after_the_prompts(names)
    for sample, name in enumerate(names):
        alone = after_the_prompts([name] * len(names))
        assert_same_up_to_rounding(together[sample], alone[sample], f"sample {sample}")


def test_what_follows_from_the_cache_alone() -> None:
    """Of a source of one token a decoder reads the same whatever its own tokens are."""
    sizes = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": 16, "max_position_embeddings": 32}
    base = BartForConditionalGeneration(BartConfig(vocab_size=61, dropout=0.0, init_std=0.2, **sizes))
    targets = {"target_modules": ["q_proj", "out_proj"], "init_lora_weights": False}
    model = mx.convert_model(base, {name: LoraConfig(r=2, **targets) for name in "ab"}).eval()
    source, words = token_ids(3, 1), token_ids(3, 3)

    def after_the_first(names: list[str]) -> Tensor:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        first = {"input_ids": source, "decoder_input_ids": words[:, :2], "past_key_values": cache}
        encoded = (model(**first, adapter_names=names).encoder_last_hidden_state,)
        step = {"encoder_outputs": encoded, "decoder_input_ids": words[:, 2:], "past_key_values": cache}
        return model(**step, adapter_names=names).logits.detach()

    together = after_the_first(["a", "b", "__base__"])
    for sample, name in enumerate(["a", "b", "__base__"]):
        assert_same_up_to_rounding(together[sample], after_the_first([name] * 3)[sample], name)


def test_rounding_by_other_samples_is_no_change() -> None:
    """As where experts see other numbers of rows: little beside what a row's own sample changes."""

    class Rounding(Inside):
        def arrange(self, h: Tensor) -> Tensor:
            state = h.new_zeros(4, 1, 1)  # as a cache, it does not grow with the batch
            return self.lin(h + state + 2e-6 * h.roll(1, 0))

    model, ids = model_of(Rounding), ids_of(4, 3)
    together = model(ids, adapter_names=NAMES).detach()
    for sample, name in enumerate(NAMES):
        alone = model(ids, adapter_names=[name] * 4).detach()
        assert_same_up_to_rounding(together[sample], alone[sample], name)


OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("raised", "told", "message"),
    [
        (
            RuntimeError("not these"),
            ValueError,
            r"the model failed in a trial pass \(RuntimeError: not these",
        ),
        (RuntimeError(OUT_OF_MEMORY), RuntimeError, f"^{OUT_OF_MEMORY}"),
        (torch.OutOfMemoryError(OUT_OF_MEMORY), torch.OutOfMemoryError, f"^{OUT_OF_MEMORY}"),
    ],
    ids=["other contents", "memory", "a GPU's memory"],
)
def test_a_model_that_fails_in_a_trial_pass(
    raised: RuntimeError, told: type[Exception], message: str
) -> None:
    class Particular(Inside):
        def arrange(self, h: Tensor) -> Tensor:
            if not torch.equal(h, self.expected):
                raise raised
            return self.lin(h)

    model, ids = model_of(Particular), ids_of(2, 3)
    model.expected = model.embed(ids).detach()
    with pytest.raises(told, match=message):
        model(ids, adapter_names=["a", "b"])
    assert model(ids, adapter_names=["a", "a"]).shape == (2, 3, 5)


def test_a_copy_learns_for_itself_and_new_layers_are_learnt() -> None:
    model = model_of(TimeFirst, targets=("out",))
    ids = ids_of(4, 4)
    model(ids, adapter_names=NAMES)
    mx.add_adapter(model, "c", LoraConfig(r=3, target_modules=["lin"], init_lora_weights=False))
    for one in (model, copy.deepcopy(model)):
        together = one(ids, adapter_names=["c", "b", "__base__", "c"])
        alone = one(ids[3:], adapter_names=["c"])
        assert_same_up_to_rounding(together[3:].detach(), alone.detach(), "sample 3")


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
    with pytest.raises(
        ValueError, match=r"layer lin: .* another shape in the trial passes; call the model again"
    ):
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
