"""Models whose memory a dry run foretells, and adapters for them."""

from typing import Any

import torch
from mlora.data.dataset import Sample
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

CPU = torch.device("cpu")
LORAS: dict[str, dict[str, Any]] = {
    "a": {"r": 4, "target_modules": "all-linear"},
    "b": {"r": 16, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1},
    "c": {"r": 6, "target_modules": ["o_proj", "lm_head"]},
    "dora": {"r": 4, "target_modules": ["q_proj", "up_proj"], "use_dora": True, "lora_dropout": 0.1},
    "bias": {"r": 4, "target_modules": ["q_proj", "down_proj"], "lora_bias": True},
}
OPTIM = OptimConfig(learning_rate=1e-3, total_steps=10)


def llama(**changes: Any) -> PreTrainedModel:
    """Blocks enough that a dry run leaves some out; a vocabulary whose logits outweigh them."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 8000,
    }
    shape |= changes
    if "sliding_window" in shape:
        return MistralForCausalLM(MistralConfig(**shape))
    return LlamaForCausalLM(LlamaConfig(**shape))


def loras(names: Any) -> dict[str, LoraConfig]:
    return {name: LoraConfig(**LORAS[name]) for name in names}


def of(lengths: Any) -> list[Sample]:
    """Samples of these lengths; equal tokens would have gradients of q and k that are rounding only."""
    ids = [tuple((5 + 7 * place * place) % 50 for place in range(n)) for n in lengths]
    return [Sample(each, each) for each in ids]
