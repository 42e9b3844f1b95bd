"""An engine over a base that stays on disk trains exactly as over one in memory."""

from pathlib import Path

import pytest
import torch
from mlora.engine.engine import Engine
from mlora.offload.options import OffloadOptions
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import mlora_ext
from tests.mlora.equal_states import assert_equal
from tests.mlora.tiny_models import samples

BLOCKS, STEPS = 5, 20
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE)),
    "qwen3, tied head": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=8, tie_word_embeddings=True)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            n_embd=32, n_layer=BLOCKS, n_head=4, n_positions=64, vocab_size=61, bos_token_id=1, eos_token_id=2
        )
    ),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**_SHAPE)),
}
SOME = {
    "llama": ["q_proj", "down_proj"],
    "qwen3, tied head": ["k_proj"],
    "gpt2": ["c_attn"],
    "phi3": ["qkv_proj", "gate_up_proj"],
}
ON_DISK = OffloadOptions(base="disk", slots=3, poison=True)


def saved(family: str, folder: Path, dtype: torch.dtype) -> Path:
    torch.manual_seed(3)
    model: PreTrainedModel = FAMILIES[family]()
    model.to(dtype).save_pretrained(folder)
    return folder


def train(family: str, base: Path, offload: OffloadOptions, **how) -> list:
    """Losses of 20 steps of two adapters, the last gradients, and the states at the end."""
    with Engine(base, seed=1, offload=offload, **how) as engine:
        loras = {
            "a": LoraConfig(r=3, target_modules="all-linear", lora_dropout=0.1),
            "b": LoraConfig(r=5, target_modules=SOME[family]),
        }
        for name, lora in loras.items():
            engine.create_adapter(name, lora, OptimConfig(learning_rate=1e-2, total_steps=STEPS))
        found = []
        for step in range(STEPS):
            batch = {"a": samples(2, 9, seed=step), "b": samples(1, 14, seed=100 + step)}
            results = engine.forward_backward(batch)
            found.append([results[name].loss_sum for name in loras])
            if step == STEPS - 1:
                parameters = [mlora_ext.adapter_parameters(engine.model, name) for name in loras]
                found.append(
                    [None if p.grad is None else p.grad.clone() for own in parameters for p in own.values()]
                )
            for name in loras:
                engine.optim_step(name)
        return [*found, [engine.state_dict(name) for name in loras]]


@pytest.mark.pairwise
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("saved_as", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_gradients_and_states_are_equal_to_the_bit(
    tmp_path: Path, family: str, dtype: torch.dtype, saved_as: torch.dtype, checkpointing: bool, stages: int
) -> None:
    """Weights of another dtype in the files are converted into a scratch file."""
    base = saved(family, tmp_path / "base", saved_as)
    how = {"dtype": dtype, "gradient_checkpointing": checkpointing, "stages": stages}
    in_memory, on_disk = (train(family, base, offload, **how) for offload in (OffloadOptions(), ON_DISK))
    assert_equal(on_disk, in_memory)
