"""Training over a quantised base, alone and in a mixed batch, against PEFT over the same quantised base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mlora.config.sections import QuantizationConfig
from mlora.engine.dry_run import dry_stages
from mlora.engine.engine import Engine
from mlora.engine.stage_group import StageOptions
from mlora.model.quantization import transformers_config
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.mlora.quantized_training import LORA, check_as_peft
from tests.mlora.tiny_run import save_base

pytestmark = pytest.mark.peers
METHODS = {
    "bnb-nf4": {"double_quant": True},
    "bnb-fp4": {},
    "bnb-int8": {},
    "torchao-int8": {},
    "torchao-int4": {"group_size": 32},
    "torchao-float8": {},
}
FIRST = ("bnb-nf4", "bnb-int8", "torchao-int8")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that bitsandbytes' blocks of 64 divide, and numbers large enough for adapters to matter."""
    return save_base(tmp_path_factory.mktemp("wide"), hidden=64, intermediate_size=128, initializer_range=0.2)


def quantization(method: str) -> QuantizationConfig:
    return QuantizationConfig(method=method, **METHODS[method])


def theirs(base: Path, method: str) -> PreTrainedModel:
    config = transformers_config(quantization(method), torch.float32)
    return AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.float32)


@pytest.mark.parametrize(
    "method", [m if m in FIRST else pytest.param(m, marks=pytest.mark.nightly) for m in METHODS]
)
def test_losses_and_weights_are_those_of_peft(base: Path, tmp_path: Path, method: str) -> None:
    if method == "bnb-int8" and torch.get_default_device().type == "cuda":
        pytest.skip("bitsandbytes' own layer quantises x there")
    check_as_peft(
        lambda: theirs(base, method),
        lambda stages: Engine(
            base, stages=stages, device=torch.get_default_device(), quantization=quantization(method)
        ),
        tmp_path,
    )


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
