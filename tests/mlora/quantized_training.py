"""Adapters over a quantised base, alone and beside three of other kinds, against PEFT over the same base."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from mlora.engine.engine import Engine
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tests.mlora.peft_alone import save_initial, train
from tests.mlora.tiny_models import samples
from tests.tolerances import STEADY_EPSILON, assert_same_up_to_rounding

STEPS = 25
MOST_OF_LOSS, MOST_OF_CHANGE = 1e-5, 1e-4
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA: dict[str, Any] = {
    "a": {"r": 4, "target_modules": EVERY},
    "b": {"r": 7, "lora_alpha": 14, "target_modules": ["q_proj", "down_proj"]},
}
OTHERS: dict[str, Any] = {
    "dora": {"r": 3, "target_modules": EVERY, "use_dora": True, "lora_dropout": 0.3},
    "head": {"r": 2, "target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"r": 2, "target_modules": ["o_proj"], "trainable_token_indices": [3, 7, 11]},
}
"""Adapters of other kinds in the same batches."""
OPTIM = OptimConfig(2e-3, total_steps=STEPS, max_grad_norm=1.0, adam_epsilon=STEADY_EPSILON)


def check_as_peft(
    theirs: Callable[[], PreTrainedModel],
    ours: Callable[[int], Engine],
    folder: Path,
    stages: Sequence[int] = (1,),
) -> None:
    """Compares the losses of each step and the change of each weight, of `LORA`'s adapters.

    Args:
        theirs: loads the base.
        ours: makes an engine over the same base with as many stages.
        folder: for adapters.
        stages: of the mixed runs.
    """
    for name, lora in LORA.items():
        torch.manual_seed(5)
        save_initial(theirs(), LoraConfig(**lora, init_lora_weights=False), folder / name)
    runs = [trained(ours(count), folder, [*LORA, *OTHERS]) for count in stages]
    runs.append(trained(ours(1), folder, ["a"]))
    for name in LORA:
        model = PeftModel.from_pretrained(theirs(), folder / name, is_trainable=True)
        expected = train(model, OPTIM, [[batch(name, step)] for step in range(STEPS)])
        assert abs(expected[0] - expected[-1]) > 1e-2
        model.save_pretrained(folder / name / "theirs")
        start, end = read(folder / name), read(folder / name / "theirs")
        for losses, weights in [run[name] for run in runs if name in run]:
            assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= MOST_OF_LOSS
            assert weights.keys() == start.keys()
            for key, weight in weights.items():
                changes = weight - start[key], end[key] - start[key]
                assert_same_up_to_rounding(*changes, f"{name}: {key}", MOST_OF_CHANGE)


def batch(name: str, step: int) -> list[Any]:
    return samples(2, 9, seed=100 * step + [*LORA, *OTHERS].index(name))


def trained(
    engine: Engine, folder: Path, names: Collection[str]
) -> dict[str, tuple[list[float], dict[str, torch.Tensor]]]:
    """Returns losses and weights of adapters that train together."""
    losses: dict[str, list[float]] = {name: [] for name in names}
    with engine:
        for name in names:
            if name in LORA:
                engine.load(name, folder / name, OPTIM)
            else:
                engine.create_adapter(name, LoraConfig(**OTHERS[name], init_lora_weights=False), OPTIM)
        for step in range(STEPS):
            found = engine.forward_backward({name: batch(name, step) for name in names})
            for name in names:
                losses[name].append(found[name].loss_sum / found[name].tokens)
                engine.optim_step(name)
        for name in names:
            engine.save(name, folder / name / "ours")
    return {name: (losses[name], read(folder / name / "ours")) for name in names}


def read(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")
