"""Models that read weights without a call, whose heads return tuples, or whose embeddings have hooks."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from head_models import lora
from models import by_peft_key, copy_weights, peft_model, trained_parameters
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
        mine = ours(input_ids=tokens, adapter_names=[name] * 3)
        assert_same_up_to_rounding(mine, peft(tokens), name)
        mine.square().sum().backward()
    grads = [p.grad for p in mx.adapter_parameters(ours, "b").values()]
    assert all(grad is not None and grad.any() for grad in grads)
    with peft.disable_adapter():
        assert torch.equal(ours(input_ids=tokens, adapter_names=["__base__"] * 3), peft(tokens))
    names = ["a", "b", "__base__"]
    if reads_head:
        with pytest.raises(ValueError, match="layer head: another module reads its weights without calling"):
            ours(input_ids=tokens, adapter_names=names)
        return
    ours.zero_grad()
    peft.zero_grad()
    mixed = ours(input_ids=tokens, adapter_names=names)
    mixed.square().mean((1, 2)).sum().backward()
    for row, name in enumerate(names[:2]):
        peft.set_adapter(name)
        alone = peft(tokens[row : row + 1])
        assert_same_up_to_rounding(mixed[row].detach(), alone[0].detach(), name)
        alone.square().mean((1, 2)).sum().backward()
        state = trained_parameters(peft)
        for key, parameter in by_peft_key(ours, name).items():
            assert_same_up_to_rounding(parameter.grad, state[key].grad, key)
    with torch.no_grad(), peft.disable_adapter():
        assert_same_up_to_rounding(mixed[2].detach(), peft(tokens[2:])[0], "base")


@pytest.mark.parametrize("how", ["x @ w.T", "x @ w.t()", "x @ w.transpose(0, 1)", "x @ w.mT + 1"])
def test_products_of_a_mixed_batch(how: str) -> None:
    class Multiplies(PlainReader):
        def forward(self, input_ids: Tensor) -> Tensor:
            h = self.norm(torch.tanh(self.body(self.embed(input_ids))))
            return eval(how, {"x": h.flatten(0, 1), "w": self.embed.weight}).unflatten(0, h.shape[:2])

    ours, _ = both(Multiplies(), **ROWS)
    tokens, names = ids(), ["b", "a", "__base__"]
    mixed = ours(input_ids=tokens, adapter_names=names)
    for row, name in enumerate(names):
        alone = ours(input_ids=tokens[row : row + 1], adapter_names=[name])
        assert_same_up_to_rounding(mixed[row].detach(), alone[0].detach(), name)


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
