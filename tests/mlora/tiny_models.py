"""Small random models of several families, and samples for them."""

import random

import torch
from mlora.data.dataset import Sample
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 61
WINDOW = 5
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": VOCABULARY}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=8)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=WINDOW)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**_SHAPE, sliding_window=WINDOW)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(**_GPT2, bos_token_id=1, eos_token_id=2, initializer_range=0.2)
    ),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **_SHAPE,
            head_dim=8,
            sliding_window=WINDOW,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=3.0,
            # Transformers 5.17's SDPA leaves out the soft cap
            attn_implementation="eager",
        )
    ),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**_SHAPE, logit_scale=0.3)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**_SHAPE, logits_scaling=4.0)),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **_SHAPE,
            head_dim=8,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_SHAPE,
            head_dim=8,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
}


def make(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model: equal for equal seeds."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return FAMILIES[family]()


def samples(count: int, longest: int, *, seed: int, untrained: float = 0.2) -> list[Sample]:
    """Random samples of 2 to `longest` tokens, some labels -100, at least one trained."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        ids = [draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(2, longest + 1))]
        labels = [-100 if draw.random() < untrained else token for token in ids[:-1]] + ids[-1:]
        made.append(Sample(tuple(ids), tuple(labels)))
    return made
