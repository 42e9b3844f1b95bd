"""Training over GPTQ and AWQ bases, alone and in a mixed batch, against PEFT over the same base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.engine.dry_run import dry_stages
from mlora.engine.engine import Engine
from mlora.engine.stage_group import StageOptions
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AwqConfig, GPTQConfig, PreTrainedModel

pytest.importorskip("gptqmodel", reason="`make gptq` makes an environment with gptqmodel")

from tests.mlora.peft_alone import save_initial, train
from tests.mlora.tiny_models import samples
from tests.mlora.tiny_run import save_base
from tests.packed_checkpoints import save_packed
from tests.tolerances import STEADY_EPSILON, assert_same_up_to_rounding

pytestmark = pytest.mark.peers
STEPS, TOLERANCE = 12, 1e-4
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA: dict[str, Any] = {
    "a": {"r": 4, "target_modules": EVERY},
    "b": {"r": 7, "lora_alpha": 14, "target_modules": ["q_proj", "down_proj"]},
}
KINDS: dict[str, tuple[Any, ...]] = {
    "gptq": ("gptq", 4, 32, False),
    "gptq, act-order": ("gptq", 8, 32, True),
    "awq": ("awq", 4, 32),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = save_base(tmp_path_factory.mktemp("wide"), hidden=64, intermediate_size=128, initializer_range=0.1)
    return {kind: save_packed(base, tmp_path_factory.mktemp("packed"), *how) for kind, how in KINDS.items()}


def theirs(base: Path, kind: str) -> PreTrainedModel:
    method, bits = KINDS[kind][:2]
    backend = "auto_trainable"
    config: Any = AwqConfig(backend=backend) if method == "awq" else GPTQConfig(bits=bits, backend=backend)
    return AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.float32)


def optim() -> OptimConfig:
    return OptimConfig(2e-3, total_steps=STEPS, max_grad_norm=1.0, adam_epsilon=STEADY_EPSILON)


def batch(name: str, step: int) -> list[Any]:
    return samples(2, 9, seed=100 * step + (name == "b"))


def trained(base: Path, folders: dict[str, Path], stages: int) -> dict[str, tuple[list[float], dict]]:
    """Returns losses and weights of adapters that train together."""
    losses: dict[str, list[float]] = {name: [] for name in folders}
    with Engine(base, stages=stages) as engine:
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


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_losses_and_weights_are_those_of_peft(bases: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Together, alone, and with two stages."""
    base, folders = bases[kind], {name: tmp_path / name for name in LORA}
    for name, lora in LORA.items():
        torch.manual_seed(5)
        save_initial(theirs(base, kind), LoraConfig(**lora, init_lora_weights=False), folders[name])
    runs = [
        trained(base, folders, 1),
        trained(base, {"a": folders["a"]}, 1),
        trained(base, folders, 2),
    ]
    for name, folder in folders.items():
        model = PeftModel.from_pretrained(theirs(base, kind), folder, is_trainable=True)
        expected = train(model, optim(), [[batch(name, step)] for step in range(STEPS)])
        model.save_pretrained(folder / "theirs")
        start, end = read(folder), read(folder / "theirs")
        for losses, weights in [run[name] for run in runs if name in run]:
            assert losses == pytest.approx(expected, rel=TOLERANCE)
            for key, weight in weights.items():
                changes = weight - start[key], end[key] - start[key]
                assert_same_up_to_rounding(*changes, f"{name}: {key}", TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_dry_run_knows_the_bytes(bases: dict[str, Path], kind: str, stages: int) -> None:
    """Without reading a weight; also from a model that is loaded."""
    options = StageOptions(torch.device("cpu"), torch.float32)
    with Engine(bases[kind], stages=stages) as engine:
        held = engine.base_bytes()
        for source in (bases[kind], engine.model) if stages == 1 else (bases[kind],):
            for stage, base in zip(dry_stages(source, options, stages), held, strict=True):
                assert stage.base.memory == pytest.approx(base.memory, rel=0.01)
    plain = 4 * 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    assert sum(one.memory for one in held) < plain + stages * 4 * 260 * 64 * 2


def test_a_dry_run_knows_the_peak_of_a_step(bases: dict[str, Path], tmp_path: Path) -> None:
    """No more than the same model in plain weights, and one layer's dequantised copy."""
    lora, shape = {"a": LoraConfig(**LORA["a"])}, [{"a": [40]}]
    plain = save_base(tmp_path, hidden=64, intermediate_size=128)
    options = StageOptions(torch.device("cpu"), torch.float32)
    more, less = (dry_stages(one, options)[0].activations(lora, shape)[0] for one in (bases["gptq"], plain))
    assert 0 <= sum(more) - sum(less) <= 2 * 4 * 64 * 128
