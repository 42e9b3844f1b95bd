"""LoftQ over a base that is quantised in a simple way: its layers, its files, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from memory import most_at_once
from mixtures import mixture
from models import llama, token_ids
from peft import LoftQConfig, LoraConfig
from safetensors.torch import save_file
from test_packed_groups import layer_and_weight
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn

import mlora_ext as mx
from mlora_ext.frozen.plain import PlainWeight
from mlora_ext.frozen.quantized.awq import AwqWeight
from mlora_ext.frozen.quantized.blocks import QuantizedWeight
from mlora_ext.frozen.quantized.gptq import GptqWeight
from mlora_ext.start import from_weights

pytestmark = pytest.mark.filterwarnings("ignore")
ROUGH = 0.25


class Rounded(QuantizedWeight):
    """W rounded to multiples of a quarter."""

    def __init__(self, layer: Any) -> None:
        numbers = (layer.frozen.dense() / ROUGH).round().to(torch.int8)
        layer.register_buffer("rounded", numbers)
        layer.weight = None
        self._buffers = layer._buffers

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self._buffers["rounded"].shape)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device(self) -> torch.device:
        return self._buffers["rounded"].device

    @property
    def nbytes(self) -> int:
        return self._buffers["rounded"].nbytes

    def rows(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        return self._buffers["rounded"][begin:end].to(dtype).mul_(ROUGH)


def loftq(**fields: Any) -> LoraConfig:
    given = {"r": 3, "lora_alpha": 6, "target_modules": "all-linear", **fields}
    return LoraConfig(init_lora_weights="loftq", loftq_config=LoftQConfig(), **given)


def rounded(base: nn.Module, **adapters: LoraConfig) -> nn.Module:
    model = mx.convert_model(copy.deepcopy(base), {}, every_linear=True)
    mx.set_frozen_weights(model, Rounded)
    model.mlora_router.frozen_kind = None
    for name, config in adapters.items():
        mx.add_adapter(model, name, config)
    return model


def values(model: nn.Module, name: str = "own") -> dict[str, Tensor]:
    return {key: p.detach().clone() for key, p in mx.adapter_parameters(model, name).items()}


def test_only_the_adapter_changes_and_only_in_quantised_layers(tmp_path: Path) -> None:
    """Embedding and head, which are not quantised, begin as plain LoRA."""
    base, config = llama(), {"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]}
    base.save_pretrained(tmp_path)
    model = rounded(base, own=loftq(**config), other=LoraConfig(r=2, target_modules=["q_proj"]))
    plain = rounded(base, own=LoraConfig(r=3, lora_alpha=6, **config))
    others = {key: t.clone() for key, t in model.state_dict().items() if ".own." not in key}
    mx.initialise_from_weights(model, "own", tmp_path)
    expected, weights = values(plain), base.state_dict()
    for key, value in values(model).items():
        if "self_attn" not in key and "mlp" not in key:
            assert torch.equal(value, expected[key]), key
        elif "lora_A" in key:
            layer = key.partition(".lora_A")[0]
            error = weights[f"{layer}.weight"] - model.get_submodule(layer).frozen.dense()
            product = 2 * values(model)[key.replace("lora_A", "lora_B")] @ value
            left, singular = (error - product).norm().item(), torch.linalg.svdvals(error.double())
            assert left == pytest.approx(singular[3:].norm().item(), rel=1e-5), layer
    for key, tensor in others.items():
        assert torch.equal(model.state_dict()[key], tensor), key


def test_a_rank_above_the_width_makes_up_for_everything(tmp_path: Path) -> None:
    base, ids = llama(), token_ids(2, 5)
    base.save_pretrained(tmp_path)
    model = rounded(base, own=loftq(r=40, lora_alpha=40))
    mx.initialise_from_weights(model, "own", tmp_path)
    assert mx.adapter_parameters(model, "own")["model.layers.0.mlp.up_proj.lora_A.own.weight"].shape[0] == 40
    with torch.no_grad():
        expected = base(input_ids=ids).logits
        found = model(input_ids=ids).logits
        assert (mx.convert_model(copy.deepcopy(base), {})(input_ids=ids).logits - expected).norm() == 0
        assert (rounded(base)(input_ids=ids).logits - expected).norm() > 0.1 * expected.norm()
    assert_same_up_to_rounding(found, expected, "logits", 1e-4)


def test_layers_that_lost_nothing_begin_as_plain_lora(tmp_path: Path) -> None:
    base = llama()
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.copy_((parameter / ROUGH).round() * ROUGH)
    base.save_pretrained(tmp_path)
    model = rounded(base, own=loftq())
    before = values(model)
    mx.initialise_from_weights(model, "own", tmp_path)
    assert any(tensor.any() for tensor in before.values())
    for key, tensor in values(model).items():
        assert torch.equal(tensor, before[key]), key


def test_names_with_and_without_the_base_models_prefix(tmp_path: Path) -> None:
    base, found = llama(), []
    base.save_pretrained(tmp_path / "head")
    base.model.save_pretrained(tmp_path / "body")
    for part, name in ((base, "head"), (base, "body"), (base.model, "head"), (base.model, "body")):
        model = rounded(part, own=loftq(target_modules=["v_proj"]))
        mx.initialise_from_weights(model, "own", tmp_path / name)
        found.append(list(values(model).values()))
    for tensors in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(tensors, found[0], strict=True))


def test_experts_begin_as_plain_lora_beside_quantised_attention(tmp_path: Path) -> None:
    """A mixture's experts are parameters of three dimensions, which stay as they are."""
    base = mixture("mixtral")
    base.save_pretrained(tmp_path)
    fields = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}
    model = rounded(base, own=loftq(**fields))
    before = values(model)
    mx.initialise_from_weights(model, "own", tmp_path)
    for key, tensor in values(model).items():
        assert torch.equal(tensor, before[key]) == ("experts" in key), key
    model(input_ids=token_ids(2, 5))


def test_an_adapter_waits_for_the_weights(tmp_path: Path) -> None:
    base, ids = llama(), token_ids(1, 5)
    base.save_pretrained(tmp_path / "base")
    model = rounded(base, own=loftq(), other=LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"needs the original weights; call mlora_ext\.initialise_from_weig"):
        model(input_ids=ids, adapter_names=["own"])
    model(input_ids=ids, adapter_names=["other"])
    with pytest.raises(ValueError, match="adapter 'other': init_lora_weights=True needs no weights; expect"):
        mx.initialise_from_weights(model, "other", tmp_path / "base")
    with pytest.raises(ValueError, match="adapter 'own': init_lora_weights='loftq' needs no data"):
        mx.initialise_from_data(model, "own", [{"input_ids": ids}])
    mx.initialise_from_weights(model, "own", tmp_path / "base")
    mx.save_adapter(model, "own", tmp_path / "own")
    again = rounded(base, own=loftq())
    mx.load_adapter(again, "own", tmp_path / "own")
    with torch.no_grad():
        expected = model(input_ids=ids, adapter_names=["own"]).logits
        assert torch.equal(again(input_ids=ids).logits, expected)
        third, part = rounded(base, own=loftq()), again.state_dict()
        some = {key: part[key] for key in list(values(again))[:-1]}
        third.load_state_dict(some, strict=False)
        with pytest.raises(ValueError, match="needs the original weights"):
            third(input_ids=ids)
        wrong = part | {next(iter(some)): torch.zeros(5, 5)}
        with pytest.raises(RuntimeError, match="size mismatch"):
            third.load_state_dict(wrong)
        with pytest.raises(ValueError, match="needs the original weights"):
            third(input_ids=ids)
        third.load_state_dict(part)
        assert torch.equal(third(input_ids=ids).logits, expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora is not supported with init_lora_weights='loftq'"),
        ({"lora_alpha": 0}, "lora_alpha: init_lora_weights='loftq' needs another than 0"),
    ],
)
def test_settings_that_do_not_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^adapter 'own': {message}"):
        rounded(llama(), own=loftq(**fields))


def test_the_base_says_how_it_is_quantised() -> None:
    config = LoraConfig(init_lora_weights="loftq", loftq_config=LoftQConfig(loftq_iter=5))
    with pytest.raises(ValueError, match=r"loftq_config=.*'loftq_iter': 5.* is not supported: the base's"):
        rounded(llama(), own=config)


def test_a_plain_base_is_refused() -> None:
    """Also if another layer is quantised: none of the adapter's is."""
    message = (
        "adapter 'own': init_lora_weights='loftq' needs a quantised base, and none of the adapter's layers"
    )
    with pytest.raises(ValueError, match=f"^{message} .*; quantise the base, or use 'pissa'$"):
        mx.convert_model(llama(), {"own": loftq()})
    with pytest.raises(ValueError, match=f"^{message}"):
        rounded(llama(), own=loftq(target_modules=["lm_head"]))


def scaled_by_awq() -> nn.Module:
    """Converted, with random weights of AWQ."""
    model = mx.convert_model(llama(), {}, every_linear=True)
    kind = "AWQ of 4 bits"

    def quantised(layer: Any) -> AwqWeight:
        source, _ = layer_and_weight(kind, (layer.in_features, layer.out_features, 32))
        return AwqWeight(layer, source, torch.float32)

    mx.set_frozen_weights(model, quantised)
    return model


def as_gptqmodel_loads_awq() -> nn.Module:
    class AWQuantLinear(nn.Module):
        in_features, out_features = 32, 32

    AWQuantLinear.__module__ = "gptqmodel.nn_modules.qlinear"
    model = llama()
    model.model.layers[1].self_attn.q_proj = AWQuantLinear()
    model.model.layers[1].self_attn.q_proj.register_buffer("qweight", torch.zeros(32, 4, dtype=torch.int32))
    return model


@pytest.mark.parametrize("build", [scaled_by_awq, as_gptqmodel_loads_awq])
def test_awq_is_refused(build: Callable[[], nn.Module]) -> None:
    """Its W is scaled by columns, so the original differs by more than what the quantisation lost."""
    model, message = build(), r"^adapter 'own': layer .*q_proj: init_lora_weights='loftq' is not supported ov"
    add = (
        mx.add_adapter
        if build is scaled_by_awq
        else lambda *given: mx.convert_model(given[0], {"own": given[2]})
    )
    with pytest.raises(ValueError, match=message):
        add(model, "own", loftq(target_modules=["q_proj"]))


class Packed(nn.Module):
    """W in 2 bits, as gptqmodel's layers hold it: each row rounded from its least number on."""

    bits = 2

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        groups = weight.unsqueeze(1)
        least, most = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        self.scales = ((most - least) / 3).t()
        zeros = (-least / self.scales.t()).round()
        numbers = (groups / self.scales.t().unsqueeze(2)).round() + zeros.unsqueeze(2)
        self.qweight = self.words(numbers.clamp(0, 3).reshape(weight.shape)).t()
        self.qzeros = self.words(zeros.t())

    def words(self, numbers: Tensor) -> Tensor:
        """Sixteen numbers of 2 bits in each word of 32 bits."""
        parts = numbers.long().view(len(numbers), -1, 16) << (2 * torch.arange(16))
        return parts.sum(2).to(torch.int32)


def test_originals_of_a_base_of_2_bits(tmp_path: Path) -> None:
    """Rounding to 2 bits changes W by more than 4 bits could."""
    base = llama()
    with torch.no_grad():
        for key, parameter in base.named_parameters():
            if key.endswith("_proj.weight"):
                parameter[:, 0] = 5 * parameter.std()  # large numbers make the steps of their rows large
                parameter[:, 1] = -parameter[:, 0]
    base.save_pretrained(tmp_path)
    model = mx.convert_model(copy.deepcopy(base), {}, every_linear=True)
    mx.set_frozen_weights(model, lambda layer: GptqWeight(layer, Packed(layer.frozen.dense()), torch.float32))
    model.mlora_router.frozen_kind = None
    mx.add_adapter(model, "own", loftq(lora_alpha=3))
    mx.initialise_from_weights(model, "own", tmp_path)
    own, weights, lost = values(model), base.state_dict(), list[float]()
    for key in own:
        if "lora_A" in key:
            layer = key.partition(".lora_A")[0]
            weight, rounded = weights[f"{layer}.weight"], model.get_submodule(layer).frozen.dense()
            error = weight - rounded
            lost.append(float(error.norm() / rounded.norm()))
            left = error - own[key.replace("lora_A", "lora_B")] @ own[key]
            assert left.norm() == pytest.approx(torch.linalg.svdvals(error)[3:].norm().item(), rel=1e-4)
    assert min(lost) > QuantizedWeight.most_lost


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
def test_what_was_lost_takes_one_copy_of_the_layer(dtype: torch.dtype, turned: bool) -> None:
    """The tensor that the layer dequantises becomes the residual; the original stays, in either way."""
    original, layer = torch.randn(1024, 1024).to(dtype), nn.Linear(1024, 1024)
    layer.frozen = PlainWeight.of(original.float())
    layer.frozen = Rounded(layer)
    given = original.t().contiguous() if turned else original
    before, found = given.clone(), list[Tensor]()
    assert most_at_once(lambda: found.append(from_weights._residual(given, layer))) <= 1.3 * 4 * 1024**2
    assert torch.equal(found[0], original.float() - layer.frozen.dense())
    assert torch.equal(given, before)


def test_weights_of_another_size_in_number(tmp_path: Path) -> None:
    """Zeros, and half of the weights, are no originals of what was quantised."""
    for factor in (0.0, 0.5):
        other = llama()
        base = copy.deepcopy(other)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(factor)
        other.save_pretrained(tmp_path / "other")
        model = rounded(base, own=loftq())
        weight = base.model.layers[0].self_attn.q_proj.weight.detach()
        found = model.model.layers[0].self_attn.q_proj.frozen.dense()
        lost = float((factor * weight - found).norm() / found.norm())
        with pytest.raises(ValueError, match=rf"not the one that was quantised: .* by {lost:.0%} of its"):
            mx.initialise_from_weights(model, "own", tmp_path / "other")


def test_files_that_hold_no_original(tmp_path: Path) -> None:
    base = llama()
    base.save_pretrained(tmp_path / "base")
    weights = {key: t.clone() for key, t in base.state_dict().items()}
    key = "model.layers.1.mlp.up_proj.weight"
    wrong = {
        "lacking": (
            {k: t for k, t in weights.items() if k != key},
            f"has no tensor {key}; give the original",
        ),
        "other": (
            weights | {key: torch.randn(48, 32)},
            r"the numbers differ by [1-9]\d\d\d?% of its norm, and its quantisation explains 45% at most; gi",
        ),
        "shape": (
            weights | {key: torch.randn(32, 32)},
            r"has the shape \[32, 32\], and the quantised one \[48, 32\]; give the original",
        ),
        "nan": (weights | {key: weights[key] * float("nan")}, "contains NaN or infinity"),
        "int8": (weights | {key: weights[key].to(torch.int8)}, r"in the files is quantised \(int8\)"),
    }
    for name, (tensors, message) in wrong.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        model = rounded(base, own=loftq())
        with pytest.raises(
            ValueError, match=rf"^adapter 'own': layer {key.removesuffix('.weight')}: .*{message}"
        ):
            mx.initialise_from_weights(model, "own", tmp_path / name)
        with pytest.raises(ValueError, match="needs the original weights"):
            model(input_ids=token_ids(1, 5))
    with pytest.raises(
        ValueError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"
    ):
        mx.initialise_from_weights(model, "own", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(ValueError, match=r"^folder: the weights in .* cannot be read"):
        mx.initialise_from_weights(model, "own", tmp_path)
