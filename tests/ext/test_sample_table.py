"""The table of where samples lie: mixed batches of Transformers' models run the base once."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from arranged import NAMES
from models import token_ids
from peft import LoraConfig
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    XLNetConfig,
    XLNetLMHeadModel,
)

import mlora_ext as mx
from mlora_ext.routing import sample_table
from mlora_ext.routing.sample_table import LayerTable, PlaceLine, TablePlaces, are_even, keys_of, rows_of
from mlora_ext.routing.samples import SampleDim

_SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48}
_SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
LLAMA = LlamaConfig(**_SIZES, num_key_value_heads=2)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LLAMA),
    "bert": lambda: BertForSequenceClassification(BertConfig(**_SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**_SIZES, num_key_value_heads=2, num_local_experts=4)
    ),
    "xlnet": lambda: XLNetLMHeadModel(
        XLNetConfig(vocab_size=61, d_model=32, n_layer=2, n_head=4, d_inner=48)
    ),
}


def of(base: nn.Module, targets: str | list[str] = "all-linear") -> nn.Module:
    task = "SEQ_CLS" if isinstance(base, BertForSequenceClassification) else None
    configs = {
        name: LoraConfig(r=rank, target_modules=targets, init_lora_weights=False, task_type=task)
        for name, rank in (("a", 2), ("b", 5))
    }
    return mx.convert_model(base, configs).eval()


def calls_of(model: nn.Module) -> list[str]:
    """Names of the model's layers, one more with each call."""
    seen: list[str] = []
    for name, part in model.named_modules():
        if isinstance(part, mx.MultiLoRALinear):
            part.register_forward_hook(lambda *_, name=name: seen.append(name))
    return seen


def batch_of(model: nn.Module, length: int, masked: bool) -> dict[str, Tensor]:
    batch = {"input_ids": token_ids(4, length)}
    if masked:
        batch["attention_mask"] = torch.ones(4, length, dtype=torch.int64)
        batch["attention_mask"][1, : length // 2] = 0
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = token_ids(4, 3)
    return batch


def assert_each_as_alone(model: nn.Module, batch: Mapping[str, Any]) -> None:
    together = model(**batch, adapter_names=NAMES).logits.detach()
    for sample, name in enumerate(NAMES):
        alone = model(**batch, adapter_names=[name] * 4).logits.detach()
        assert_same_up_to_rounding(together[sample], alone[sample], f"sample {sample} of {name}")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_the_first_mixed_call_is_one_pass(kind: str, masked: bool) -> None:
    model = of(MODELS[kind]())
    seen = calls_of(model)
    for length in (6, 4, 1):
        batch = batch_of(model, length, masked)
        seen.clear()
        model(**batch, adapter_names=NAMES)
        assert seen
        assert len(seen) == len(set(seen)), length
        assert_each_as_alone(model, batch)


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_generate_runs_nothing_twice(kind: str, how: dict[str, Any]) -> None:
    model, ids = of(MODELS[kind]()), token_ids(4, 4)
    seen = calls_of(model)
    how = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, **how}

    def generate(names: list[str]) -> tuple[Tensor, int]:
        seen.clear()
        return model.generate(ids, adapter_names=names, **how), len(seen)

    together, count = generate(NAMES)
    for sample, name in enumerate(NAMES):
        alone, calls = generate([name] * 4)
        assert torch.equal(together[sample], alone[sample])
        assert count == calls


def test_a_step_with_a_cache() -> None:
    model = of(MODELS["mixtral"]())

    def after(names: list[str], ids: Tensor) -> Tensor:
        cache = DynamicCache(config=model.config)
        model(input_ids=ids, adapter_names=names, past_key_values=cache)
        step = {"input_ids": ids[:, :1], "past_key_values": cache}
        return model(**step, adapter_names=names).logits.detach()

    ids = token_ids(4, 5)
    together = after(NAMES, ids)
    for sample, name in enumerate(NAMES):
        assert_same_up_to_rounding(together[sample], after([name] * 4, ids)[sample], name)


class Reversing(LlamaForCausalLM):
    """Turns the samples round: the layers of Transformers inside cannot tell."""

    def forward(self, input_ids: Tensor, **rest: Any) -> Any:
        return super().forward(input_ids=input_ids.flip(0), **rest)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MODELS["llama"]()

    def forward(self, input_ids: Tensor) -> Any:
        return self.inner(input_ids=input_ids.flip(0))


class Turned(nn.Module):
    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor, *args: Any, **rest: Any) -> Any:
        return self.own(x.flip(0), *args, **rest).flip(0)


def between() -> nn.Module:
    base = MODELS["llama"]()
    base.model.layers[1].mlp = Turned(base.model.layers[1].mlp)
    return base


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MODELS["llama"]()

    def forward(self, input_ids: Tensor) -> Any:
        return self.inner(input_ids=input_ids)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [(lambda: Reversing(LLAMA), "q_proj"), (Around, "q_proj"), (between, "up_proj")],
    ids=["class", "around", "between"],
)
def test_foreign_code_that_turns_samples_round_is_refused(
    kind: Callable[[], nn.Module], targets: str
) -> None:
    """Trial passes see it; the layers of Transformers inside cannot."""
    model = of(kind(), [targets])
    with pytest.raises(ValueError, match=rf"layer .*{targets}: cannot tell which rows of x"):
        model(input_ids=token_ids(4, 6), adapter_names=NAMES)
    assert model(input_ids=token_ids(4, 6), adapter_names=["a"] * 4)


@pytest.mark.parametrize("asked", [False, True])
def test_foreign_code_is_looked_at_once(asked: bool) -> None:
    """By itself, or by `find_sample_dims` before."""
    model, batch = of(Wrapped(), ["q_proj"]), {"input_ids": token_ids(4, 6)}
    seen = calls_of(model)
    if asked:
        told = mx.find_sample_dims(model, batch)
        assert set(told.values()) == {"dimension 0, single"}
        assert {name.partition(",")[0] for name in told} == set(seen)
    for looked in (not asked, False):
        seen.clear()
        model(**batch, adapter_names=NAMES)
        assert (len(seen) > len(set(seen))) == looked
    assert_each_as_alone(model, batch)


def test_foreign_code_elsewhere_in_the_model_needs_no_look() -> None:
    model = of(between(), ["q_proj"])
    seen = calls_of(model)
    model(input_ids=token_ids(4, 6), adapter_names=NAMES)
    assert len(seen) == len(set(seen)) > 0
    assert_each_as_alone(model, {"input_ids": token_ids(4, 6)})


def test_a_class_that_inherits_its_forward_is_the_one_it_inherits_from() -> None:
    """As FSDP2 makes them of every module that it shards."""
    base = MODELS["llama"]()
    for part in (base, *base.model.layers):
        part.__class__ = type(f"Sharded{type(part).__name__}", (type(part),), {})
    assert_each_as_alone(of(base), {"input_ids": token_ids(4, 4)})


def test_what_the_table_lacks_needs_a_shape_without_doubt() -> None:
    """`[batch, sequence, D]`, where no other dimension may count samples."""
    table = LayerTable(MODELS["llama"](), "")
    places = TablePlaces(table, 4, frozenset({1, 6}), True)
    layer = "model.layers.0.self_attn.q_proj"
    assert places.of(layer, [4, 6, 8]) == SampleDim(0, "single")
    for shape in [4, 1, 6, 8], [4, 6, 1, 8]:
        assert places.of(layer, shape) == SampleDim(0, "single"), shape
    for shape in [4, 4, 6, 8], [24, 8, 1, 1], [6, 4, 1, 8], [4, 5, 1, 8]:
        assert "mlora_ext.find_sample_dims(model, call)" in str(places.of(layer, shape)), shape
    assert table.is_whole
    assert not LayerTable(Around(), "", ["inner.lm_head"]).is_whole


def test_models_of_classes_that_the_table_lacks_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_table, "entries", dict)
    for kind, targets in {"bert": r"bert\.pooler\.dense", "xlnet": ["layer_1"]}.items():  # [B, D], [S, B, D]
        other = of(MODELS[kind](), targets)
        assert_each_as_alone(other, batch_of(other, 4, False))


@pytest.mark.parametrize(
    ("text", "shape", "rows", "fits"),
    [
        ("single 0", [4, 7, 8], {1, 7}, True),
        ("single 0", [4, 4, 8], {1, 4}, True),
        ("single 0", [4, 4, 8], {1}, False),  # a state [B, D] added to [B, 1, D] mixes samples
        ("single 0 any", [4, 4, 8], {1}, True),
        ("single 0", [3, 7, 8], {1, 7}, False),
        ("single 0", [8, 7, 8], {1, 7}, False),
        ("single 1", [7, 4, 8], {1, 7}, True),
        ("single 1", [4, 7, 8], {1, 7}, False),
        ("blocks 0", [28, 8], {1, 7}, True),
        ("blocks 0", [20, 8], {1, 7}, False),  # rows that were selected
        ("blocks 0", [0, 8], {1, 7}, False),
        ("blocks 0 any", [20, 3, 8], {1, 7}, True),
        ("blocks 0 any", [21, 3, 8], {1, 7}, False),
        ("interleaved 0", [28, 8], {1, 7}, True),
    ],
)
def test_an_entry_and_a_shape(text: str, shape: list[int], rows: set[int], fits: bool) -> None:
    entry = PlaceLine.parse(text)
    assert isinstance(entry, PlaceLine)
    assert str(entry) == text
    assert entry.fits(shape, 4, frozenset(rows)) == fits
    assert PlaceLine.parse("!why") == "why"


def test_rows_that_a_sample_may_have() -> None:
    call = (torch.zeros(4, 7),), {"x": [torch.zeros(4, 5, 3)], "other": torch.zeros(3, 9), "flag": True}
    assert rows_of(call, 4) == {1, 7, 5, 15}


def test_keys_are_of_the_innermost_class_of_transformers() -> None:
    keys = keys_of(MODELS["llama"]())
    assert keys["model.layers.1.self_attn.q_proj"] == ("llama.LlamaAttention", "q_proj")
    assert keys["model.layers.1"] == ("llama.LlamaModel", "layers.#")
    assert keys["lm_head"] == ("llama.LlamaForCausalLM", "lm_head")
    assert keys_of(Around())["inner.lm_head"] == ("", "inner.lm_head")
    assert not SampleDim(1, "single").is_plain


@pytest.mark.parametrize(
    ("images", "counts", "even"),
    [((2, 3, 4, 4), (2, 2), True), ((2, 3, 4, 4), (4, 0), False), ((4, 3, 4, 4), (2, 2), False)],
    ids=str,
)
def test_images_that_tokens_stand_for(images: tuple[int, ...], counts: tuple[int, int], even: bool) -> None:
    tokens = torch.ones(2, 6, dtype=torch.int64)
    for sample, count in enumerate(counts):
        tokens[sample, :count] = 9
    call: Any = ((), {"input_ids": tokens, "pixel_values": torch.zeros(images)})
    assert are_even(call, tokens, torch.tensor([9]), {}) == even
    assert are_even(((), {"input_ids": tokens}), tokens, torch.tensor([9]), {})
    assert are_even(call, tokens, torch.tensor([], dtype=torch.int64), {})
    assert not are_even(call, torch.zeros(2, 6, 8), torch.tensor([9]), {})
