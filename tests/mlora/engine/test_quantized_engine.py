"""Training over a quantised base, alone and in a mixed batch, against PEFT over the same quantised base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.config.quantization_config import QuantizationConfig
from mlora.engine.dry_run import dry_stages
from mlora.engine.engine import Engine
from mlora.engine.stage_group import StageOptions
from mlora.model.quantization import transformers_config
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.mlora.peft_alone import save_initial, train
from tests.mlora.tiny_models import samples
from tests.mlora.tiny_run import save_base
from tests.tolerances import STEADY_EPSILON, assert_same_up_to_rounding

pytestmark = pytest.mark.peers
STEPS, TOLERANCE = 25, 1e-4
METHODS = {
    "bnb-nf4": {"double_quant": True},
    "bnb-fp4": {},
    "bnb-int8": {},
    "torchao-int8": {},
    "torchao-int4": {"group_size": 32},
    "torchao-float8": {},
}
FIRST = ("bnb-nf4", "bnb-int8", "torchao-int8")
LORA: dict[str, Any] = {
    "a": {"r": 4, "target_modules": "all-linear"},
    "b": {"r": 7, "lora_alpha": 14, "target_modules": ["q_proj", "down_proj"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that bitsandbytes' blocks of 64 divide, and numbers large enough for adapters to matter."""
    return save_base(tmp_path_factory.mktemp("wide"), hidden=64, intermediate_size=128, initializer_range=0.2)


def quantization(method: str) -> QuantizationConfig:
    return QuantizationConfig(method=method, **METHODS[method])


def theirs(base: Path, method: str) -> PreTrainedModel:
    config = transformers_config(quantization(method), torch.float32)
    return AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.float32)


def optim() -> OptimConfig:
    return OptimConfig(2e-3, total_steps=STEPS, max_grad_norm=1.0, adam_epsilon=STEADY_EPSILON)


def batch(name: str, step: int) -> list[Any]:
    return samples(2, 9, seed=100 * step + (name == "b"))


def trained(base: Path, method: str, folders: dict[str, Path]) -> dict[str, tuple[list[float], dict]]:
    """Returns losses and weights of adapters that train together."""
    losses: dict[str, list[float]] = {name: [] for name in folders}
    with Engine(base, device=torch.get_default_device(), quantization=quantization(method)) as engine:
        for name, folder in folders.items():
            engine.load(name, folder, optim())
        for step in range(STEPS):
            found = engine.forward_backward({name: batch(name, step) for name in folders})
            for name in folders:
                losses[name].append(found[name].loss_sum / found[name].tokens)
                engine.optim_step(name)
        for name, folder in folders.items():
            engine.save(name, folder / "ours")
    return {name: (losses[name], read(folder / "ours")) for name, folder in folders.items()}


def read(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    "method", [m if m in FIRST else pytest.param(m, marks=pytest.mark.nightly) for m in METHODS]
)
def test_losses_and_weights_are_those_of_peft(base: Path, tmp_path: Path, method: str) -> None:
    if method == "bnb-int8" and torch.get_default_device().type == "cuda":
        pytest.skip("bitsandbytes' own layer quantises x there")
    folders = {name: tmp_path / name for name in LORA}
    for name, lora in LORA.items():
        torch.manual_seed(5)
        save_initial(theirs(base, method), LoraConfig(**lora, init_lora_weights=False), folders[name])
    together = trained(base, method, folders)
    alone = trained(base, method, {"a": folders["a"]})
    for name, folder in folders.items():
        model = PeftModel.from_pretrained(theirs(base, method), folder, is_trainable=True)
        expected = train(model, optim(), [[batch(name, step)] for step in range(STEPS)])
        model.save_pretrained(folder / "theirs")
        start, end = read(folder), read(folder / "theirs")
        for losses, weights in [together[name], *([alone[name]] if name in alone else [])]:
            assert losses == pytest.approx(expected, rel=TOLERANCE)
            for key, weight in weights.items():
                changes = weight - start[key], end[key] - start[key]
                assert_same_up_to_rounding(*changes, f"{name}: {key}", TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
def test_a_dry_run_knows_the_bytes(base: Path, method: str) -> None:
    """Without reading a weight; also from a model that is loaded."""
    engine = Engine(base, quantization=quantization(method))
    (held,) = engine.base_bytes()
    plain = dry_stages(base, StageOptions(torch.device("cpu"), torch.float32))[0].base.memory
    options = StageOptions(torch.device("cpu"), torch.float32, quantization=quantization(method))
    linear = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    assert held.memory < plain - 2.5 * linear
    for source, asked in ((base, options), (engine.model, StageOptions(torch.device("cpu"), torch.float32))):
        assert dry_stages(source, asked)[0].base.memory == pytest.approx(held.memory, rel=0.01)


@pytest.mark.parametrize("method", ["bnb-nf4", "torchao-int8"])
def test_a_dry_run_knows_the_peak_of_a_step(base: Path, method: str) -> None:
    """No more than the same model in plain weights, and one layer's dequantised copy."""
    lora, shape = {"a": LoraConfig(**LORA["a"])}, [{"a": [40]}]
    device = torch.device("cpu")
    plain, quantised = (
        dry_stages(base, StageOptions(device, torch.float32, quantization=one))[0].activations(lora, shape)[0]
        for one in (None, quantization(method))
    )
    assert sum(quantised) - sum(plain) <= 2 * 4 * 64 * 128
