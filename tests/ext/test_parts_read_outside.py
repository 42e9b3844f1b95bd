"""Models that read weights without a call, whose heads return tuples, or whose embeddings have hooks."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from head_models import lora
from memory import most_at_once
from models import assert_same_gradients, copy_weights, peft_model
from peft import LoraConfig
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mlora_ext as mx

V, D = 23, 16


class Head(nn.Module):
    """Gives its rows twice, as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y, y.mean(-1, keepdim=True)


class Reader(nn.Module):
    """Multiplies by the embedding's weight; may read the head's part, too."""

    def __init__(self, reads_head: bool = False) -> None:
        super().__init__()
        self.embed, self.body, self.norm, self.head = (
            nn.Embedding(V, D),
            nn.Linear(D, D),
            nn.LayerNorm(D),
            Head(),
        )
        self.steps = nn.ModuleDict({"norm": nn.Identity()})
        self.reads_head, self.unread = reads_head, False

    def forward(self, input_ids: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.body(self.embed(input_ids))))
        assert self.embed.weight.dtype == h.dtype
        assert self.embed.weight.shape == (V, D)
        y, mean = self.head(h)
        if self.reads_head:
            y = y + self.head.inner(h)
        return y + mean if self.unread else F.linear(y + mean, self.embed.weight)


class PlainReader(Reader):
    """Leaves the head out."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.linear(self.norm(torch.tanh(self.body(self.embed(input_ids)))), self.embed.weight)


def both(model: nn.Module, **fields: Any) -> tuple[nn.Module, nn.Module]:
    configs = {
        name: lora(target_modules=["body"], r=rank, **fields) for name, rank in {"a": 2, "b": 3}.items()
    }
    peft = peft_model(model, configs).eval()
    ours = mx.convert_model(copy.deepcopy(model).eval(), configs)
    copy_weights(peft, ours, configs)
    return ours, peft


def ids() -> Tensor:
    return torch.randint(0, V, (3, 5))


def assert_same_step(ours: nn.Module, peft: nn.Module, name: str, mine: Tensor, theirs: Tensor) -> None:
    """Compares results of PEFT's active adapter, and the gradients that a loss of them gives."""
    assert_same_up_to_rounding(mine.detach(), theirs.detach(), name)
    mine.square().mean((1, 2)).sum().backward()
    theirs.square().mean((1, 2)).sum().backward()
    assert_same_gradients(ours, peft, name)


def assert_each_as_alone(ours: nn.Module, peft: Any, tokens: Tensor, names: list[str]) -> None:
    """Compares a mixed batch, whose last row is the base's, with PEFT's adapters alone."""
    mixed = ours(input_ids=tokens, adapter_names=names)
    mixed.square().mean((1, 2)).sum().backward()
    for row, name in enumerate(names[:2]):
        peft.set_adapter(name)
        alone = peft(tokens[row : row + 1])
        assert mixed.dtype == alone.dtype
        assert_same_up_to_rounding(mixed[row].detach(), alone[0].detach(), name)
        alone.square().mean((1, 2)).sum().backward()
        assert_same_gradients(ours, peft, name)
    with torch.no_grad(), peft.disable_adapter():
        assert_same_up_to_rounding(mixed[2].detach(), peft(tokens[2:])[0], "base")


ROWS: dict[str, Any] = {"trainable_token_indices": {"embed": list(range(0, V, 2))}}


@pytest.mark.parametrize(
    ("fields", "reads_head"),
    [(ROWS, False), ({"modules_to_save": ["embed"]}, False), ({"modules_to_save": ["head"]}, True)],
)
def test_one_adapter_reads_its_own_and_a_mixed_batch_multiplies_by_them(
    fields: dict[str, Any], reads_head: bool
) -> None:
    ours, peft = both(Reader(reads_head), **fields)
    tokens = ids()
    for name in "ab":
        peft.set_adapter(name)
        assert_same_step(ours, peft, name, ours(input_ids=tokens, adapter_names=[name] * 3), peft(tokens))
    with peft.disable_adapter():
        assert torch.equal(ours(input_ids=tokens, adapter_names=["__base__"] * 3), peft(tokens))
    names = ["a", "b", "__base__"]
    if reads_head:
        with pytest.raises(ValueError, match="layer head: another module reads its weights without calling"):
            ours(input_ids=tokens, adapter_names=names)
        return
    ours.zero_grad()
    peft.zero_grad()
    assert_each_as_alone(ours, peft, tokens, names)


@pytest.mark.parametrize("fields", [ROWS, {"modules_to_save": ["embed"]}])
@pytest.mark.parametrize(
    "how",
    [
        *("x @ w.T", "x @ w.t()", "x @ w.transpose(0, 1)", "x @ w.mT + 1"),
        *("x.to(w) @ w.to(x.dtype).T", "x.double() @ w.T.to(torch.float64)", "x.type_as(w) @ w.float().T"),
        *("F.linear(x.double(), w.double())", "F.linear(x, w) if w.is_cuda == x.is_cuda else 0"),
    ],
)
def test_products_of_a_mixed_batch(how: str, fields: dict[str, Any]) -> None:
    class Multiplies(PlainReader):
        def forward(self, input_ids: Tensor) -> Tensor:
            h = self.norm(torch.tanh(self.body(self.embed(input_ids))))
            given = {"x": h.flatten(0, 1), "w": self.embed.weight, "F": F, "torch": torch}
            return eval(how, given).unflatten(0, h.shape[:2])

    ours, peft = both(Multiplies(), **fields)
    assert_each_as_alone(ours, peft, ids(), ["b", "a", "__base__"])


@pytest.mark.parametrize("fields", [ROWS, {"modules_to_save": ["embed"]}])
def test_packed_rows_of_one_adapter_read_its_own(fields: dict[str, Any]) -> None:
    """Also where the route names another adapter first."""
    ours, peft = both(PlainReader(), **fields)
    tokens = ids()
    for owner, name in enumerate("ab"):
        ours.zero_grad()
        peft.zero_grad()
        peft.set_adapter(name)
        lengths, owners = [0, tokens.numel()], [1 - owner, owner]
        with mx.route(ours, mx.SegmentLayout.from_lengths(lengths, owners), names=["a", "b"]):
            mine = ours(input_ids=tokens)
        assert_same_step(ours, peft, name, mine, peft(tokens))
    nobodys = mx.SegmentLayout.from_lengths([tokens.numel()], [-1])
    with mx.route(ours, nobodys, names=["a", "b"]), peft.disable_adapter():
        assert torch.equal(ours(input_ids=tokens), peft(tokens))


def test_packed_rows_of_several_adapters_read_their_own() -> None:
    ours, peft = both(PlainReader(), **ROWS)
    tokens = ids()
    with mx.route(ours, mx.SegmentLayout.from_lengths([5, 10], [1, 0]), names=["a", "b"]):
        mixed = ours(input_ids=tokens)
    for name, own in {"b": slice(0, 1), "a": slice(1, 3)}.items():
        peft.set_adapter(name)
        assert_same_up_to_rounding(mixed[own].detach(), peft(tokens[own]).detach(), name)


def test_a_mixed_batch_adds_the_bias_of_a_head_of_which_rows_are_trained() -> None:
    class Adds(PlainReader):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(D, V)

        def forward(self, input_ids: Tensor) -> Tensor:
            h = torch.tanh(self.body(self.embed(input_ids)))
            return F.linear(h, self.out.weight, self.out.bias) + self.out.bias.exp()

    config = lora(target_modules=["body"], trainable_token_indices={"out": [1, 2]})
    ours = mx.convert_model(Adds(), {"a": config, "b": config})
    for name in "ab":
        for parameter in mx.adapter_parameters(ours, name).values():
            parameter.data.normal_()
    tokens, names = ids(), ["b", "a", "__base__"]
    mixed = ours(input_ids=tokens, adapter_names=names)
    for row, name in enumerate(names):
        alone = ours(input_ids=tokens[row : row + 1], adapter_names=[name])
        assert_same_up_to_rounding(mixed[row].detach(), alone[0].detach(), name)


class Outer(nn.Module):
    """Calls its only part."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = PlainReader()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids)


@pytest.mark.parametrize("fields", [ROWS, {"modules_to_save": ["embed"]}])
def test_a_part_called_by_itself_reads_what_its_layers_use(fields: dict[str, Any]) -> None:
    ours, peft = both(Outer(), **fields)
    tokens, base = ids(), ours.inner.embed.base.weight
    assert ours.inner.embed.weight is base
    with pytest.raises(ValueError, match="this model has 2 adapters"):
        ours.inner(tokens)
    mx.remove_adapter(ours, "b")
    peft.set_adapter("a")
    assert_same_up_to_rounding(ours.inner(tokens).detach(), peft(tokens).detach(), "a")
    assert ours.inner.embed.weight is base
    with mx.disable_adapter(ours), peft.disable_adapter():
        assert torch.equal(ours.inner(tokens), peft(tokens))


class Reads(nn.Module):
    """A module around a converted model, which reads a weight of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        weight = self.model.embed.weight
        assert weight.shape == (V, D)
        return F.linear(x, weight)


def test_a_module_around_the_model_reads_what_the_only_adapter_has() -> None:
    ours, peft = both(PlainReader(), **ROWS)
    x = torch.randn(3, D)
    with pytest.raises(ValueError, match="this model has 2 adapters"):
        Reads(ours)(x)
    mx.remove_adapter(ours, "b")
    peft.set_adapter("a")
    assert_same_up_to_rounding(Reads(ours)(x).detach(), Reads(peft.base_model.model)(x).detach(), "a")


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_hook_of_backward_may_ask_for_a_shape(trains: bool, training: bool) -> None:
    config = lora(target_modules=["body"], **ROWS) if trains else lora(target_modules=["body", "embed"])
    model, shapes = PlainReader(), []
    if not trains:
        model.forward = lambda input_ids: model.body(model.embed(input_ids))  # type: ignore[method-assign]
    ours = mx.convert_model(model, {"a": config, "b": config}).train(training)
    for parameter in mx.adapter_parameters(ours, "b").values():
        parameter.register_hook(lambda _: shapes.append(ours.embed.weight.shape))
    passes = [ours(input_ids=ids(), adapter_names=[name] * 3) for name in "ab"]
    sum(y.sum() for y in passes).backward()
    assert set(shapes) == {(V, D)}
    if trains:
        mx.adapter_parameters(ours, "b")["body.lora_A.b.weight"].register_hook(
            lambda grad: grad + ours.embed.weight.sum()
        )
        passes = [ours(input_ids=ids(), adapter_names=[name] * 3) for name in "ab"]
        with pytest.raises(ValueError, match="layer embed: its weights are read, but not by a call of it"):
            sum(y.sum() for y in passes).backward()


def in_half_precision(ours: Any, peft: Any, name: str) -> tuple[Tensor, Tensor]:
    """Returns an adapter's results here and in PEFT; they must agree."""
    tokens = ids()
    peft.set_adapter(name)
    mine, theirs = ours(input_ids=tokens, adapter_names=[name] * 3), peft(tokens)
    assert mine.dtype == theirs.dtype == torch.bfloat16
    assert_same_up_to_rounding(mine.detach().float(), theirs.detach().float(), name, 2e-2)
    return mine, theirs


@pytest.mark.parametrize("reads_head", [True, False])
def test_parts_beside_a_half_precision_base(reads_head: bool) -> None:
    """PEFT trains the part in half precision; here only what is read from outside is used in it."""
    ours, peft = both(Reader(reads_head).bfloat16(), modules_to_save=["head"])
    for name in "ab":
        mine, theirs = in_half_precision(ours, peft, name)
        mine.float().square().mean((1, 2)).sum().backward()
        theirs.float().square().mean((1, 2)).sum().backward()
        assert_same_gradients(ours, peft, name, 5e-2)


def test_a_part_with_buffers_beside_a_half_precision_base() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(D))
            self.register_buffer("scale", torch.rand(D), persistent=False)
            self.register_buffer("order", torch.randperm(D), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight * self.scale)[..., self.order]

    model = Reader(reads_head=True)
    model.head.inner = nn.Sequential(Scaled(), nn.Linear(D, D))  # type: ignore[assignment]
    ours, peft = both(model.bfloat16(), modules_to_save=["head"])
    for name in "ab":
        in_half_precision(ours, peft, name)
    assert ours.head.modules_to_save.of("a").inner[0].scale.dtype == torch.float32


def test_a_part_with_batch_normalisation_beside_a_half_precision_base() -> None:
    class Normed(Head):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(5))  # type: ignore[assignment]

    model = Reader(reads_head=True)
    model.head = Normed()
    config = lora(target_modules=["body"], modules_to_save=["head"])
    ours = mx.convert_model(model.bfloat16(), {"a": config}).train()
    before = ours.head.modules_to_save.of("a").inner[1].running_mean.clone()
    ours(input_ids=ids()).float().sum().backward()
    own = ours.head.modules_to_save.of("a").inner
    assert not torch.equal(own[1].running_mean, before)
    assert all(p.dtype == torch.float32 and p.grad is not None for p in own.parameters())


def test_a_read_of_a_mixed_batch_keeps_no_table_of_each_adapter() -> None:
    class Wide(PlainReader):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20000, D)

        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids)[..., :1]

    config = lora(target_modules=["body"], trainable_token_indices={"embed": [1, 2, 3]})
    ours = mx.convert_model(Wide(), dict.fromkeys("abcd", config))
    table, tokens = ours.embed.weight.nbytes, torch.randint(0, 20000, (4, 1))

    def step() -> None:
        ours(input_ids=tokens, adapter_names=list("abcd")).sum().backward()

    step()
    assert most_at_once(step) < 1.5 * table


@pytest.mark.parametrize("how", ["x @ (2 * w).T", "x @ w.sum(0)", "w[:3].sum() * x", "w.T.T @ x[0]"])
def test_other_functions_of_a_mixed_batch_are_refused(how: str) -> None:
    class Computes(PlainReader):
        def forward(self, input_ids: Tensor) -> Tensor:
            h = self.norm(torch.tanh(self.body(self.embed(input_ids))))
            return eval(how, {"x": h.flatten(0, 1), "w": self.embed.weight})

    ours, _ = both(Computes(), **ROWS)
    tokens = ids()
    ours(input_ids=tokens, adapter_names=["a"] * 3)
    with pytest.raises(ValueError, match="layer embed: another module reads its weights without calling"):
        ours(input_ids=tokens, adapter_names=["b", "a", "__base__"])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_read_that_backward_recomputes(reentrant: bool) -> None:
    class Checkpointed(Reader):
        def forward(self, input_ids: Tensor) -> Tensor:
            h = self.norm(torch.tanh(self.body(self.embed(input_ids))))
            return checkpoint(lambda x: F.linear(x, self.embed.weight), h, use_reentrant=reentrant)

    plain, again = (
        both(kind(), modules_to_save=["embed", "norm"])[0] for kind in (PlainReader, Checkpointed)
    )
    again.load_state_dict(plain.state_dict())
    tokens = ids()
    names = ["b", "a", "b"] if not reentrant else ["b"] * 3
    for model in (plain, again):
        model.train()(input_ids=tokens, adapter_names=names).square().sum().backward()
    for key, p in mx.adapter_parameters(plain, "b").items():
        assert_same_up_to_rounding(mx.adapter_parameters(again, "b")[key].grad, p.grad, key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixed_batch_may_ask_for_shape_and_dtype_and_gets_tuples(dtype: torch.dtype) -> None:
    model = Reader().to(dtype)
    model.unread = True
    ours, peft = both(model, **ROWS, modules_to_save=["head"])
    tokens, names = ids(), ["b", "a", "__base__"]
    mixed, most = ours(input_ids=tokens, adapter_names=names), 1e-5 if dtype == torch.float32 else 2e-2
    assert mixed.dtype == dtype
    for row, name in enumerate(names[:2]):
        peft.set_adapter(name)
        assert_same_up_to_rounding(mixed[row].float(), peft(tokens)[row].float(), name, most)
    with peft.disable_adapter():
        assert_same_up_to_rounding(mixed[2].float(), peft(tokens)[2].float(), "base", most)


def test_a_head_that_returns_something_else_is_refused() -> None:
    class Sums(Head):
        def forward(self, x: Tensor) -> Any:
            return x, x.sum()

    model = Reader()
    model.head, model.unread = Sums(), True
    ours, _ = both(model, modules_to_save=["head"])
    with pytest.raises(ValueError, match="a Sums that returns something else than rows cannot be mixed"):
        ours(input_ids=ids(), adapter_names=["a", "b", "a"])


def test_a_part_without_parameters_stays_as_it_is() -> None:
    ours = mx.convert_model(Reader(), {"a": lora(target_modules=["body"], modules_to_save=["norm"])})
    assert type(ours.steps["norm"]) is nn.Identity
    assert "norm.modules_to_save.a.weight" in mx.adapter_parameters(ours, "a")


def test_hooks_of_an_embedding_still_run() -> None:
    """As `enable_input_require_grads` puts one there before the model is converted."""
    model, seen = Reader(), []
    model.unread = True
    model.embed.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    config = LoraConfig(r=2, target_modules=["body", "embed"], init_lora_weights=False)
    ours = mx.convert_model(model, {"a": config, "b": config})
    ours(input_ids=ids(), adapter_names=["a", "a", "a"])
    assert seen == [(3, 5, D)]
    merged = mx.merge_and_unload(ours, "a")
    merged(ids())
    assert len(seen) == 2
    copied = lora(target_modules=["body"], modules_to_save=["embed"])
    with pytest.raises(ValueError, match="layer embed: has forward hooks, which conversion would discard"):
        mx.convert_model(merged, {"a": copied})


def test_rows_by_name_where_a_model_names_no_embedding_of_its_own() -> None:
    """As CLIP's models, which have no single input embedding."""

    class Several(Reader):
        def get_input_embeddings(self) -> nn.Module:
            raise NotImplementedError

    ours = mx.convert_model(Several(), {"a": lora(target_modules=["body"], **ROWS)})
    assert "embed.trainable_tokens_delta.a.weight" in mx.adapter_parameters(ours, "a")
    with pytest.raises(ValueError, match="trainable_token_indices: 'embed_tokens' matches nothing"):
        mx.convert_model(Several(), {"a": lora(target_modules=["body"], trainable_token_indices=[1])})
