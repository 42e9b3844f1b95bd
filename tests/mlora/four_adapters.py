"""Four adapters of different kinds and lengths of training on a small Llama, and their batches."""

from typing import Any

import torch
from mlora.engine.engine import Engine
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.mlora.tiny_models import VOCABULARY, samples
from tests.tolerances import STEADY_EPSILON

TOLERANCE = 1e-5
NAMES = ("a", "b", "c", "d")
LORA: dict[str, dict[str, Any]] = {
    "a": {"r": 2, "target_modules": ["q_proj", "down_proj"]},
    "b": {"r": 5, "target_modules": "all-linear", "lora_dropout": 0.2},
    "c": {"r": 8, "target_modules": ["v_proj"], "use_rslora": True, "layers_to_transform": [3]},
    "d": {"r": 3, "target_modules": ["o_proj", "lm_head"], "lora_dropout": 0.1},
}
STEPS = {"a": 5, "b": 3, "c": 6, "d": 2}
OPTIM = {"a": {}, "b": {"optim": "sgd"}, "c": {"optim": "adamw_torch_fused", "weight_decay": 0.1}, "d": {}}


def llama(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes}))


def create(engine: Engine, name: str) -> None:
    shared: dict[str, Any] = {"max_grad_norm": 0.3, "warmup_steps": 1, "adam_epsilon": STEADY_EPSILON}
    config = OptimConfig(2e-3, total_steps=STEPS[name], **shared, **OPTIM[name])
    engine.create_adapter(name, LoraConfig(**LORA[name]), config, seed=7)


def batch(name: str, step: int, half: int) -> dict[str, Any]:
    index = NAMES.index(name)
    return {name: samples(2 + index, 7 + 3 * index, seed=1000 * index + 10 * step + half)}
