"""What was learnt of one batch is not used for one whose samples are treated differently, or are others."""

import pytest
import torch
from arranged import NAMES, WIDTH, Inside, Pooled, assert_as_alone, ids_of, model_of
from models import converted, llama, token_ids
from peft import LoraConfig
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn
from transformers import DynamicCache

import mlora_ext as mx

UNKNOWN = "layer lin: cannot tell which rows of x"


class Unpadded(Inside):
    """Only the rows that a mask keeps."""

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        kept = attention_mask.bool()
        return self.out(self.embed(ids).masked_scatter(kept.unsqueeze(-1), self.lin(self.embed(ids)[kept])))


class SortedBy(Inside):
    """Samples sorted by a number of each, the largest first."""

    def forward(self, ids: Tensor, key: Tensor | list[int]) -> Tensor:
        order = torch.as_tensor(key).view(ids.shape[0], -1).sum(1).argsort(descending=True, stable=True)
        return self.out(self.lin(self.embed(ids)[order])[order.argsort()])


class SortedByPads(SortedBy):
    config = type("Config", (), {"to_dict": lambda self: {"pad_token_id": 3}})()

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids, (ids != 3).long())


def masks(*lengths: int) -> Tensor:
    return (torch.arange(6) < torch.tensor(lengths).unsqueeze(1)).long()


def right_or_refused(model: nn.Module, ids: Tensor, **more: object) -> bool:
    """Whether it was served; then every sample is as it is with one adapter for the whole batch."""
    names = [NAMES[sample % len(NAMES)] for sample in range(ids.shape[0])]
    try:
        together = model(ids, adapter_names=names, **more)
    except ValueError as error:
        if UNKNOWN not in str(error):
            raise
        return False
    for sample, name in enumerate(names):
        alone = model(ids, adapter_names=[name] * len(names), **more)
        assert_same_up_to_rounding(together[sample].detach(), alone[sample].detach(), f"sample {sample}")
    return True


@pytest.mark.parametrize("kind", [Unpadded, SortedBy])
@pytest.mark.parametrize("lengths", [(6, 2), (2, 6), (5, 3), (3, 5)], ids=str)
def test_masks_that_begin_to_differ(kind: type[Inside], lengths: tuple[int, int]) -> None:
    argument = "attention_mask" if kind is Unpadded else "key"
    model, ids = model_of(kind), ids_of(2, 6)
    assert right_or_refused(model, ids, **{argument: masks(4, 4)})
    for _ in range(2):
        assert not right_or_refused(model, ids, **{argument: masks(*lengths)})
    one = {argument: masks(*lengths)}
    assert model(ids, **one, adapter_names=["a", "a"]).shape == (2, 6, 5)
    assert right_or_refused(model, ids, **{argument: masks(4, 4)})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1, 1, 1, 1], [1, 2, 1, 3]),
        (torch.full((4,), 5), torch.tensor([5, 2, 4, 3])),
        (torch.ones(4), torch.tensor([0.1, 0.9, 0.2, 0.3])),
        ([4, 3, 2, 1], [1, 3, 2, 4]),
        (torch.tensor([4, 3, 2, 1]), torch.tensor([1, 3, 2, 4])),
        (torch.tensor([[2, 0]] * 4), torch.tensor([[2, 0], [3, 0], [1, 0], [4, 0]])),
    ],
    ids=str,
)
def test_numbers_that_samples_are_sorted_by(first: Tensor | list[int], second: Tensor | list[int]) -> None:
    model, ids = model_of(SortedBy), ids_of(4, 5)
    for key in (first, second, second):
        right_or_refused(model, ids, key=key)
    assert not right_or_refused(model, ids, key=second)


def test_padding_among_the_tokens() -> None:
    model, ids = model_of(SortedByPads), torch.randint(4, 50, (2, 6))
    assert right_or_refused(model, ids)
    ids[0, 3:] = 3
    for _ in range(2):
        assert not right_or_refused(model, ids)


def test_rows_by_an_index_argument() -> None:
    class Indexed(Inside):
        def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
            back = torch.empty_like(keep).scatter_(0, keep, torch.arange(len(keep)))
            return self.out(self.lin(self.embed(ids)[keep])[back])

    model, ids = model_of(Indexed), ids_of(4, 5)
    for keep in ([0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1]):
        assert not right_or_refused(model, ids, keep=torch.tensor(keep))


class ShortOnesTimeFirst(Inside):
    """`[S, B, D]` inside, where sequences are short."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return self.out(self.lin(h.transpose(0, 1)).transpose(0, 1) if ids.shape[1] < 5 else self.lin(h))


@pytest.mark.parametrize("lengths", [(7, 4), (4, 7), (3, 4, 7)], ids=str)
def test_a_length_that_equals_the_batch(lengths: tuple[int, ...]) -> None:
    """Rows in another order would have a shape that layers know."""
    model = model_of(ShortOnesTimeFirst)
    for length in lengths:
        right_or_refused(model, ids_of(4, length))
    assert right_or_refused(model, ids_of(4, 4))
    assert right_or_refused(model, ids_of(5, 5))


@pytest.mark.parametrize("count", [3, 4, 8])
def test_rows_of_nobody_beside_those_of_samples(count: int) -> None:
    """Learned prototypes behind the samples' own rows: no adapter's."""

    class Prototypes(Inside):
        def __init__(self) -> None:
            super().__init__()
            self.prototypes = nn.Parameter(torch.randn(count, WIDTH))

        def arrange(self, h: Tensor) -> Tensor:
            z = self.lin(torch.cat([h[:, 0], self.prototypes]))
            return h + (z[: h.shape[0]] @ z[h.shape[0] :].T).sum(1)[:, None, None]

    assert not right_or_refused(model_of(Prototypes), ids_of(4, 5))


class Unused(Inside):
    """Samples sorted by scores; the last columns of what they are made of are not used yet."""

    def forward(self, x: Tensor, score: Tensor) -> Tensor:
        order = score.argsort()
        return self.out(self.lin(x[order])[order.argsort()])


class BehindDropout(Inside):
    def forward(self, ids: Tensor, score: Tensor) -> Tensor:
        order = score.argsort()
        h = nn.functional.dropout(self.embed(ids), 0.5, self.training)
        return self.out(self.lin(h[order])[order.argsort()])


def cache_of(held: Tensor) -> DynamicCache:
    cache = DynamicCache()
    cache.update(held, held, 0)
    return cache


class BehindACache(Inside):
    """What a cache holds of each sample is added before samples are sorted."""

    def forward(self, ids: Tensor, score: Tensor) -> Tensor:
        same = torch.Generator(torch.get_default_device()).manual_seed(0)
        return self.step(ids, score, cache_of(torch.randn(4, 1, 6, WIDTH, generator=same)))

    def step(self, ids: Tensor, score: Tensor, cache: DynamicCache) -> Tensor:
        h = self.embed(ids)
        keys, _ = cache.update(h[:, None], h[:, None], 0)
        h, order = h + keys.mean((1, 2))[:, None], score.argsort()
        return self.out(self.lin(h[order])[order.argsort()])


class GivenACache(BehindACache):
    def forward(self, ids: Tensor, score: Tensor, cache: DynamicCache) -> Tensor:
        return self.step(ids, score, cache)


@pytest.mark.parametrize("kind", [Unused, BehindDropout, BehindACache, GivenACache])
def test_an_order_by_scores_is_seen(kind: type[Inside]) -> None:
    """Also in the first call, whose scores happen to be in the order of the samples."""
    model, given = model_of(kind), ids_of(4, 3)
    if kind is Unused:
        given = torch.cat([torch.randn(4, 3, WIDTH - 4), torch.zeros(4, 3, 4)], -1)
    for scores in ([1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 4.0, 3.0]):
        more = {"score": torch.tensor(scores)}
        if kind is GivenACache:
            more["cache"] = cache_of(torch.randn(4, 1, 6, WIDTH))
        with pytest.raises(ValueError, match=UNKNOWN):
            model(given, adapter_names=NAMES, **more)


def test_an_order_by_values_is_seen_where_samples_look_alike() -> None:
    model, ids = model_of(BehindDropout).eval(), ids_of(1, 5).expand(4, 5)
    with pytest.raises(ValueError, match="the order of its rows depends on their values"):
        model(ids, score=torch.tensor([1.0, 2.0, 3.0, 4.0]), adapter_names=NAMES)


@pytest.mark.parametrize("lengths", [(3, 5, 4), (5, 3, 4), (2, 6, 4), (4, 4, 4)], ids=str)
def test_rows_of_a_token_that_never_changes(lengths: tuple[int, ...]) -> None:
    """Behind one another without padding, each sample beginning with the same special token."""

    class Packed(Inside):
        config = type("Config", (), {"to_dict": lambda self: {"bos_token_id": 1, "pad_token_id": 0}})()

        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            kept = attention_mask.bool()
            parts = self.embed(ids)[kept].split(attention_mask.sum(1).tolist())
            rows = torch.cat([part.cumsum(0) for part in parts])
            return self.out(self.embed(ids).masked_scatter(kept.unsqueeze(-1), self.lin(rows)))

    model, ids = model_of(Packed, targets=("lin",)), torch.randint(2, 50, (3, 6))
    ids[:, 0] = 1
    mask = masks(*lengths)
    served = right_or_refused(model, ids.masked_fill(mask == 0, 0), attention_mask=mask)
    assert served == (len(set(lengths)) == 1)


def test_rows_that_share_what_a_list_of_states_holds() -> None:
    class Sharing(Inside):
        def forward(self, ids: Tensor, states: list[Tensor]) -> Tensor:
            return self.out(
                self.lin(self.embed(ids) + states[0].unsqueeze(0))
            )  # [B, B, D]: as if by position

    model, ids = model_of(Sharing), ids_of(4, 4)
    with pytest.raises(ValueError, match=UNKNOWN):
        model(ids, states=[torch.randn(4, WIDTH)], adapter_names=NAMES)


def test_states_that_are_no_plain_numbers() -> None:
    class Drawing(Inside):
        def forward(self, ids: Tensor, probabilities: list[Tensor]) -> Tensor:
            torch.multinomial(probabilities[0], 1)
            return self.out(self.lin(self.embed(ids)))

    model, ids = model_of(Drawing), ids_of(4, 4)
    assert right_or_refused(model, ids, probabilities=[torch.full((4, 3), 0.01)])


def test_a_model_that_calls_itself_on_parts_of_the_batch() -> None:
    class Halves(Inside):
        def forward(self, ids: Tensor) -> Tensor:
            if len(ids) > 2:
                return torch.cat([self(ids=part) for part in ids.split(2)])
            return self.out(self.lin(self.embed(ids)))

    model, ids = model_of(Halves), ids_of(4, 5)
    for _ in range(2):
        with pytest.raises(ValueError, match="got 4 names, but the model calls itself with 2 samples"):
            model(ids, adapter_names=NAMES)
        assert_as_alone(model, model(ids[:2], adapter_names=NAMES[:2]), ids[:2])
    assert model(ids, adapter_names=["a"] * 4).shape == (4, 5, 5)


@pytest.mark.parametrize("change", [lambda ids: ids[1:], lambda ids: ids.repeat(2, 1), lambda ids: ids[:1]])
def test_generate_with_other_samples_than_names(change: object) -> None:
    """As Whisper's long form drops samples that are done, and guidance doubles the batch."""
    targets = {"target_modules": ["q_proj"], "init_lora_weights": False}
    model = mx.convert_model(llama(), {name: LoraConfig(r=2, **targets) for name in "ab"}).eval()

    class Changing(type(model)):
        def generate(self, input_ids: Tensor, **others: object) -> Tensor:
            return self(input_ids=change(input_ids)).logits

    model.__class__ = Changing
    with pytest.raises(ValueError, match=r"got 2 names, but the model calls itself with [14] samples"):
        model.generate(token_ids(2, 5), adapter_names=["a", "b"])


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_copies_of_a_prompt_follow_it(how: dict[str, object]) -> None:
    model, ids = converted().eval(), token_ids(2, 5)

    def generate(names: list[str]) -> Tensor:
        torch.manual_seed(0)
        return model.generate(ids, adapter_names=names, max_new_tokens=4, **how)

    together, copies = generate(["a", "b"]), int(how.get("num_return_sequences", 1))
    if "num_beams" in how:
        for sample, name in enumerate("ab"):
            own = generate([name, name])[sample * copies : (sample + 1) * copies]
            assert torch.equal(together[sample * copies : (sample + 1) * copies], own)
    assert together.shape[0] == 2 * copies
    assert "_expand_inputs_for_generation" not in model.__dict__


def test_names_that_pass_by_the_model_are_refused() -> None:
    model, ids = converted().eval(), token_ids(2, 5)
    model.set_adapter("a")
    for call in (model.forward, model.model):
        with pytest.raises(ValueError, match=r"^adapter_names: only the converted model itself takes them"):
            call(input_ids=ids, adapter_names=["a", "b"])
    for names in (["a", None], [["a"], "b"], 5):
        with pytest.raises(ValueError, match=r"^adapter_names: expected one name per sample \(2\)"):
            model(input_ids=ids, adapter_names=names)


def test_batch_normalisation_that_came_later_is_refused() -> None:
    class Normed(Inside):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Identity()

        def arrange(self, h: Tensor) -> Tensor:
            return self.norm(self.lin(h).transpose(1, 2)).transpose(1, 2)

    model, ids = model_of(Normed), ids_of(4, 5)
    model.norm = nn.BatchNorm1d(WIDTH)
    with pytest.raises(
        ValueError, match="layer norm: a BatchNorm in training mode uses statistics of the whole batch"
    ):
        model.train()(ids, adapter_names=NAMES)
    model.eval()(ids, adapter_names=NAMES)


def test_adapters_of_other_layers_do_not_matter() -> None:
    """A layer that holds none of the batch's adapters is not asked whose its rows are."""

    class Both(Inside):
        def __init__(self) -> None:
            super().__init__()
            self.mixing = nn.Linear(WIDTH, WIDTH)

        def arrange(self, h: Tensor) -> Tensor:
            return self.lin(h) + self.mixing(self.shared[:4]).mean(0)

    model, ids = model_of(Both), ids_of(4, 5)
    mx.add_adapter(model, "c", LoraConfig(r=2, target_modules=["mixing"], init_lora_weights=False))
    assert model(ids, adapter_names=NAMES).shape == (4, 5, 5)
    with pytest.raises(ValueError, match="layer mixing: cannot tell"):
        model(ids, adapter_names=["a", "b", "c", "b"])


def test_arguments_that_cannot_be_copied_are_told_of() -> None:
    class Taking(Pooled):
        def forward(self, ids: Tensor, source: object) -> Tensor:
            return super().forward(ids)

    model, ids = model_of(Taking), ids_of(4, 5)
    with pytest.raises(
        ValueError, match=r"layer lin: .*the model failed in a trial pass \(TypeError: cannot"
    ):
        model(ids, adapter_names=NAMES, source=(number for number in ids))
