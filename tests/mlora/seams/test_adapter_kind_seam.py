"""A kind of adapter in one file: LoRA whose rows' outputs are multiplied by a trained scale per output.

`y = m (W x + s B A x) + b`. For these tests it takes the place of DoRA.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.engine.dry_run import DryStage
from mlora.engine.stage_group import StageOptions
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

import mlora_ext as mx
from mlora_ext.adapters import registry
from mlora_ext.adapters.kind import LayerSpec, ParameterSpec
from mlora_ext.adapters.lora import Lora
from mlora_ext.adapters.registry import register_adapter_kind
from mlora_ext.frozen.weight import FrozenWeight
from tests.mlora.seam_runs import STAGES, data_of, train_and_resume


class Scaled(Lora):
    name = "scaled"
    parameter_names = ("lora_A", "lora_B", "lora_scale")

    def serves(self, config: Any) -> bool:
        return type(config) is LoraConfig and config.use_dora

    def check(self, name: str, config: Any) -> None:
        plain = copy.copy(config)
        plain.use_dora = False
        super().check(name, plain)

    def parameters(self, rank: int, d_in: int, d_out: int) -> dict[str, ParameterSpec]:
        return {**super().parameters(rank, d_in, d_out), "lora_scale": ParameterSpec(1, d_out)}

    def initialise(
        self, own: Mapping[str, nn.Parameter], config: Any, spec: LayerSpec, seed: int, frozen: FrozenWeight
    ) -> None:
        super().initialise(own, config, spec, seed, frozen)
        nn.init.ones_(own["lora_scale"])

    def output_scale(self, own: Mapping[str, Tensor], spec: LayerSpec) -> Tensor | None:
        return own["lora_scale"][0]


@pytest.fixture(autouse=True)
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """For these tests only."""
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))
    register_adapter_kind(Scaled())


def lora(**fields: Any) -> LoraConfig:
    return LoraConfig(r=3, use_dora=True, target_modules=["0", "2"], init_lora_weights=False, **fields)


def model_of(configs: Mapping[str, LoraConfig]) -> nn.Module:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8, bias=False))
    return mx.convert_model(model, configs, seed=2)


@pytest.mark.parametrize("stages", STAGES)
def test_a_run_trains_and_resumes(tiny_base: Path, tmp_path: Path, stages: int) -> None:
    """In one batch with a plain LoRA adapter."""
    block = {"r": 4, "use_dora": True, "lora_dropout": 0.2, "target_modules": "all-linear"}
    run = train_and_resume(data_of(tiny_base, tmp_path, stages, lora=block), tmp_path)
    tensors = load_file(run / "adapters" / "first" / "adapter_model.safetensors")
    scales = [t for key, t in tensors.items() if key.endswith("lora_scale.weight")]
    assert len(scales) * 3 == len(tensors)
    assert all((scale != 1).all() for scale in scales)
    assert not any(
        "lora_scale" in key for key in load_file(run / "adapters/second/adapter_model.safetensors")
    )


def test_values_and_gradients_in_a_mixed_batch() -> None:
    plain = LoraConfig(r=5, target_modules=["0"], init_lora_weights=False)
    model = model_of({"a": lora(), "b": plain, "c": lora(lora_alpha=3)})
    with torch.no_grad():
        for name in ("a", "c"):
            for key, parameter in mx.adapter_parameters(model, name).items():
                if "lora_scale" in key:
                    parameter.uniform_(0.5, 2.0)
    x, names = torch.randn(19, 12), ["c", "a", "b"]
    layout = mx.SegmentLayout.from_lengths([4, 6, 0, 3, 6], adapters=[0, 2, 1, -1, 1])
    owner = ["c"] * 4 + ["b"] * 6 + [None] * 3 + ["a"] * 6
    with mx.route(model, layout, names=names):
        y = model(x)
    y.square().sum().backward()
    found = {n: {k: p.grad.clone() for k, p in mx.adapter_parameters(model, n).items()} for n in names}
    for name in names:
        for parameter in mx.adapter_parameters(model, name).values():
            parameter.grad = None
    expected = []
    for row, name in zip(x, owner, strict=True):
        hidden = row
        for layer in model:
            hidden = by_hand(layer, hidden, name) if isinstance(layer, mx.MultiLoRALinear) else layer(hidden)
        expected.append(hidden)
    torch.testing.assert_close(y, torch.stack(expected), rtol=1e-5, atol=1e-5)
    torch.stack(expected).square().sum().backward()
    for name in names:
        for key, parameter in mx.adapter_parameters(model, name).items():
            torch.testing.assert_close(
                found[name][key], parameter.grad, rtol=1e-4, atol=1e-4, msg=f"{name} {key}"
            )


def by_hand(layer: mx.MultiLoRALinear, x: Tensor, name: str | None) -> Tensor:
    y = layer.weight @ x
    if name in layer.specs:
        own, spec = layer.parameters_of(name), layer.specs[name]
        y = y + spec.scaling * own["lora_B"] @ (own["lora_A"] @ x)
        y = y * own["lora_scale"][0] if spec.kind == "scaled" else y
    return y if layer.bias is None else y + layer.bias


def test_folders_and_copies(tmp_path: Path) -> None:
    model = model_of({"a": lora()})
    mx.save_adapter(model, "a", tmp_path / "a")
    other = model_of({})
    mx.load_adapter(other, "a", tmp_path / "a")
    loaded = mx.adapter_parameters(other, "a")
    assert len(loaded) == 6
    for key, parameter in mx.adapter_parameters(model, "a").items():
        assert torch.equal(loaded[key], parameter), key
    mx.remove_adapter(other, "a")
    assert not any("lora_scale" in key and ".a." in key for key in other.state_dict())
    x = torch.randn(2, 12)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    with pytest.raises(ValueError, match="adapter 'a': layer 0: only plain LoRA, lora_bias and DoRA can be"):
        mx.merge_and_unload(model)
    plain = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert plain["base_model.model.0.lora_scale.weight"].shape == (1, 16)


def test_its_parameters_count_in_the_memory_that_a_task_needs(tiny_base: Path) -> None:
    stage = DryStage(str(tiny_base), StageOptions(torch.device("cpu"), torch.float32))
    block: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"]}
    own, plain = (stage.states(LoraConfig(**block, use_dora=dora), OptimConfig()) for dora in (True, False))
    more = 2 * 4 * 32  # two layers of 32 outputs, fp32
    assert own.gradients - plain.gradients == more
    assert own.moments - plain.moments == 2 * more


def test_a_name_is_one_kinds() -> None:
    class Other(Lora):
        name = "scaled"

    with pytest.raises(ValueError, match="adapter kind 'scaled': this name is taken; choose another one"):
        register_adapter_kind(Other())
    with pytest.raises(
        ValueError,
        match="adapter kind: expected one of lora, lora_bias, dora, lora_less_start, scaled, got 'other'",
    ):
        registry.adapter_kind("other")


def test_from_peft_takes_a_kind_with_a_config_of_its_own() -> None:
    class OwnConfig(LoraConfig):
        pass

    class Own(Lora):
        name = "own"

        def serves(self, config: Any) -> bool:
            return type(config) is OwnConfig

    def made() -> nn.Module:
        base = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
        return get_peft_model(base, OwnConfig(r=2, target_modules=["0"]), "a")

    with pytest.raises(ValueError, match=r"adapter 'a': expected a peft\.LoraConfig, got OwnConfig"):
        mx.from_peft(made())
    register_adapter_kind(Own())
    assert mx.from_peft(made())[0].specs["a"].kind == "own"
