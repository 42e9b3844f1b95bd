"""Small random mixtures of experts, as Transformers 5 has them."""

from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 61
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}


def _deepseek(**changes: Any) -> PreTrainedModel:
    """A dense block and a block with a mixture, whose experts are chosen in groups."""
    attention = {"kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8}
    attention |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
    shape = {"n_routed_experts": 4, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 2}
    shape |= {"topk_group": 1, "first_k_dense_replace": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**_SHAPE | attention | shape | changes))


def _gpt_oss(**changes: Any) -> PreTrainedModel:
    shape = {"num_local_experts": 4, "head_dim": 8, "sliding_window": 8}
    shape["layer_types"] = ["sliding_attention", "full_attention"]
    shape["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    return GptOssForCausalLM(GptOssConfig(**_SHAPE | shape | changes))


def _llama4(**changes: Any) -> PreTrainedModel:
    """A dense block and a block with a mixture, each of whose experts gets all rows."""
    shape = {"num_local_experts": 4, "intermediate_size_mlp": 48, "head_dim": 8, "moe_layers": [1]}
    return Llama4ForCausalLM(Llama4TextConfig(**_SHAPE | shape | changes))


def _mixtral(**changes: Any) -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**_SHAPE | {"num_local_experts": 4} | changes))


def _qwen3_moe(**changes: Any) -> PreTrainedModel:
    shape = {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SHAPE | shape | changes))


MIXTURES = {
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}
QUERIES = {"deepseek_v3": "q_b_proj"}
"""The layer that makes queries, where it is not `q_proj`."""


def mixture(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model: equal for equal seeds. `changes` are fields of its config."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MIXTURES[family](**changes)
        for name, parameter in model.named_parameters():
            if name.endswith("_bias"):  # of experts; Transformers makes zeros
                torch.nn.init.normal_(parameter, std=0.1)
        return model.eval()
