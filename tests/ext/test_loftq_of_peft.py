"""LoftQ over bases of bitsandbytes and torchao, against PEFT's `replace_lora_weights_loftq`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import VOCABULARY, losses_of_own, token_ids
from peft import LoftQConfig, LoraConfig, get_peft_model, replace_lora_weights_loftq
from peft.utils import loftq_utils
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TorchAoConfig,
)

pytest.importorskip("bitsandbytes", reason="`make peers` makes an environment with bitsandbytes and torchao")

import torchao.quantization as ao
from peft.tuners.lora import Linear4bit

import mlora_ext as mx
from mlora_ext.start.statistics import signs_of

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
TOLERANCE = 1e-4
METHODS: dict[str, Any] = {
    "nf4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4 twice": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "fp4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao float8": lambda: TorchAoConfig(ao.Float8WeightOnlyConfig()),
    "torchao int8": lambda: TorchAoConfig(ao.Int8WeightOnlyConfig()),
    "torchao int4": lambda: TorchAoConfig(
        ao.IntxWeightOnlyConfig(weight_dtype=getattr(torch, "int4"), granularity=ao.PerGroup(32))  # noqa: B009
    ),
}
OF_PEFT = ("nf4", "nf4 twice", "fp4")
OTHERS = {
    "plain": LoraConfig(r=3, target_modules=["q_proj", "up_proj"], lora_dropout=0.3),
    "pissa": LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights="pissa", lora_dropout=0.2),
    "dora": LoraConfig(r=3, target_modules=["up_proj"], use_dora=True),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that bitsandbytes' blocks of 64 divide, in several files."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("original")
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


def quantised(folder: Path, method: str, **options: Any) -> PreTrainedModel:
    options = {"dtype": torch.float32, **options}
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=METHODS[method](), **options)


def config_of(r: int = 4, **fields: Any) -> LoraConfig:
    return LoraConfig(**{"r": r, "lora_alpha": r, "target_modules": "all-linear", **fields})


def loftq(**fields: Any) -> LoraConfig:
    return config_of(init_lora_weights="loftq", loftq_config=LoftQConfig(), **fields)


def by_peft(folder: Path, method: str, config: LoraConfig) -> nn.Module:
    """PEFT's own function, whose device is always a GPU, on the device of these tests.

    The signs of singular vectors, which are arbitrary, are ours.
    """
    peft = get_peft_model(quantised(folder, method), copy.deepcopy(config))
    to, here = Tensor.to, torch.get_default_device()

    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = here
        return to(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to", moved)
        patch.setattr(loftq_utils, "clear_device_cache", lambda: None)
        replace_lora_weights_loftq(peft, str(folder))
    for layer in (module for module in peft.modules() if isinstance(module, Linear4bit)):
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        signs = signs_of(a.data)
        a.data *= signs
        b.data *= signs.t()
    return peft


def converted(folder: Path, method: str, config: LoraConfig, **others: LoraConfig) -> nn.Module:
    model = mx.convert_model(quantised(folder, method), {**others, "own": config})
    mx.initialise_from_weights(model, "own", folder)
    return model


def pairs(model: nn.Module, name: str = "own") -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each layer, of PEFT's model or of ours."""
    ending = f".lora_A.{name}.weight"
    found = dict(model.named_parameters())
    return {
        key.removeprefix("base_model.model.").removesuffix(ending): (
            p.detach(),
            found[key.replace("lora_A", "lora_B")].detach(),
        )
        for key, p in found.items()
        if key.endswith(ending)
    }


@pytest.mark.parametrize("method", OF_PEFT)
def test_trains_as_pefts(original: Path, method: str) -> None:
    """Alone and in a mixed batch with three other kinds, over the same base; ranks by layer."""
    ranks = {"rank_pattern": {"up_proj": 7}, "alpha_pattern": {"up_proj": 7}}
    peft = by_peft(original, method, config_of(**ranks))
    begin = {key: (a.clone(), b.clone()) for key, (a, b) in pairs(peft, "default").items()}
    expected = losses_of_own(peft.train())
    end = pairs(peft, "default")
    for others in ({}, OTHERS):
        model = converted(original, method, loftq(**ranks), **others)
        base = {key: t.clone() for key, t in model.named_buffers()}
        start = {key: (a.clone(), b.clone()) for key, (a, b) in pairs(model).items()}
        assert start.keys() == begin.keys()
        for key, (a, b) in start.items():
            theirs_a, theirs_b = begin[key]
            assert_same_up_to_rounding(b @ a, theirs_b @ theirs_a, f"{key}: B A", TOLERANCE)
            assert_same_up_to_rounding(a, theirs_a, f"{key}: A", TOLERANCE)
        losses = losses_of_own(model.train(), names=["own", "own", *others])
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5
        for key, after in pairs(model).items():
            for part in (0, 1):
                change, theirs = after[part] - start[key][part], end[key][part] - begin[key][part]
                assert_same_up_to_rounding(change, theirs, f"{key}: {'AB'[part]}", TOLERANCE)
        for key, tensor in base.items():
            assert torch.equal(model.get_buffer(key), tensor), key


def weights_of(folder: Path) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


@pytest.mark.parametrize("fields", [{"lora_alpha": 9}, {"use_rslora": True}, {"lora_alpha": -2}])
def test_any_scaling_gives_the_nearest_product(original: Path, fields: dict[str, Any]) -> None:
    """PEFT's product is that of a scaling of 1."""
    expected = pairs(by_peft(original, "nf4", config_of(target_modules=["o_proj"])), "default")
    model = converted(original, "nf4", loftq(target_modules=["o_proj"], **fields))
    for key, (a, b) in pairs(model).items():
        scaling = model.get_submodule(key).specs["own"].scaling
        assert scaling != 1
        theirs_a, theirs_b = expected[key]
        assert_same_up_to_rounding(scaling * b @ a, theirs_b @ theirs_a, key, TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gets_the_best_product_of_its_rank(original: Path, method: str) -> None:
    """What is left is the part of the quantisation error beyond the rank (Eckart and Young)."""
    model, weights = converted(original, method, loftq(r=6)), weights_of(original)
    for key, (a, b) in pairs(model).items():
        error = weights[f"{key}.weight"].to(a.device) - model.get_submodule(key).frozen.dense()
        best = torch.linalg.svdvals(error.double())[6:].norm()
        left = (error.double() - b.double() @ a.double()).norm()
        assert 0 < left < error.norm()
        assert left == pytest.approx(best.item(), rel=1e-5), key


def test_logits_are_nearer_those_of_the_original(original: Path) -> None:
    """With rank 16 of 64 a third of the quantisation's error in the logits is gone, or more; as with PEFT."""
    ids = torch.randint(2, VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(1), device="cpu")
    ids = ids.to(torch.get_default_device())
    peft = by_peft(original, "nf4", config_of(16)).train()
    model = converted(original, "nf4", loftq(r=16), zero=config_of(16)).train()
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)(input_ids=ids).logits
        zero, own = (
            (model(input_ids=ids, adapter_names=[name] * 8).logits - wanted).norm() / wanted.norm()
            for name in ("zero", "own")
        )
        theirs = (peft(input_ids=ids).logits - wanted).norm() / wanted.norm()
    assert own == pytest.approx(theirs.item(), rel=1e-3)
    assert own < 0.67 * zero


@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_transposed_weights_of_conv1d(tmp_path: Path, method: str) -> None:
    """GPT-2's files hold weights as `[d_in, d_out]`, without the model's prefix; c_proj is square."""
    config = GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=VOCABULARY, n_positions=64)
    GPT2LMHeadModel(config).transformer.save_pretrained(tmp_path)
    model = converted(tmp_path, method, loftq(target_modules=["c_attn", "c_proj"]))
    weights = weights_of(tmp_path)
    assert len(pairs(model)) == 3
    for key, (a, b) in pairs(model).items():
        error = weights[f"{key}.weight"].t().to(a.device) - model.get_submodule(key).frozen.dense()
        best = torch.linalg.svdvals(error.double())[4:].norm()
        assert (error - b @ a).norm().item() == pytest.approx(best.item(), rel=1e-5), key


def test_a_half_precision_base(original: Path) -> None:
    """A and B are fp32, of the weights that are computed with."""
    model = mx.convert_model(quantised(original, "nf4", dtype=torch.bfloat16), {"own": loftq()})
    mx.initialise_from_weights(model, "own", original)
    weights = weights_of(original)
    for key, (a, b) in pairs(model).items():
        assert a.dtype == b.dtype == torch.float32
        error = weights[f"{key}.weight"].to(a.device) - model.get_submodule(key).frozen.dense().float()
        best = torch.linalg.svdvals(error.double())[4:].norm()
        assert (error - b @ a).norm().item() == pytest.approx(best.item(), rel=1e-5), key


def test_folders_load_in_peft_over_the_same_base(original: Path, tmp_path: Path) -> None:
    model = converted(original, "nf4", loftq()).train()
    mx.save_adapter(model, "own", tmp_path)
    theirs = quantised(original, "nf4")
    theirs.load_adapter(str(tmp_path))
    again = quantised(original, "nf4")
    mx.load_adapter(again, "x", tmp_path)
    ids = token_ids(2, 6)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        assert_same_up_to_rounding(theirs.train()(input_ids=ids).logits, expected, "PEFT's logits")
        assert_same_up_to_rounding(again.train()(input_ids=ids).logits, expected, "logits of what was loaded")
        assert_same_up_to_rounding(copy.deepcopy(model)(input_ids=ids).logits, expected, "a copy's logits")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("nf4", r"its weight in the files is quantised \(uint8\)"),
        ("torchao int8", "has no tensor model.layers"),
    ],
)
def test_quantised_files_hold_no_original(original: Path, tmp_path: Path, method: str, message: str) -> None:
    quantised(original, method).save_pretrained(tmp_path)
    model = mx.convert_model(quantised(original, method), {"own": loftq()})
    with pytest.raises(ValueError, match=rf"^adapter 'own': layer model\.layers\.0\..*{message}.*original"):
        mx.initialise_from_weights(model, "own", tmp_path)
