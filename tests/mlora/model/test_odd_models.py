"""Models with habits of their own: noise that ties a batch together, rules that look at the whole batch."""

from pathlib import Path

import pytest
import torch
from mlora.engine.engine import Engine
from mlora.model.base_info import BaseInfo
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from tiny_models import VOCABULARY, samples
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    MptConfig,
    MptForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    PreTrainedModel,
)

SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def jittering() -> PreTrainedModel:
    """Its router multiplies the whole batch by random numbers in training."""
    config = MixtralConfig(
        **SHAPE,
        num_key_value_heads=2,
        intermediate_size=48,
        num_local_experts=4,
        router_jitter_noise=0.3,
        initializer_range=0.2,
    )
    return MixtralForCausalLM(config)


def skipping() -> PreTrainedModel:
    """It leaves out whole layers at random in training."""
    return OPTForCausalLM(
        OPTConfig(**SHAPE, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64, layerdrop=0.9)
    )


@pytest.mark.parametrize("make", [jittering, skipping])
def test_noise_for_a_whole_batch_is_off(make) -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="layerdrop or router jitter of the base model was set to 0"):
        engine = Engine(make())
    engine.create_adapter(
        "a", LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), OptimConfig(total_steps=9)
    )
    batch = {"a": samples(3, 9, seed=1)}
    losses = {engine.forward_backward(batch)["a"].loss_sum for _ in range(4)}
    assert losses == {engine.evaluate(batch)["a"].loss_sum}


def test_a_model_that_breaks_on_packed_rows_is_refused_in_one_line() -> None:
    model = MptForCausalLM(
        MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=VOCABULARY, max_seq_len=64)
    )
    with pytest.raises(ValueError, match=r"^base_model: MptForCausalLM cannot run packed rows: .*$"):
        Engine(model)


def test_weights_that_are_no_numbers_are_named() -> None:
    model = skipping()
    next(model.parameters()).data.fill_(float("nan"))
    with pytest.raises(
        ValueError, match="OPTForCausalLM: its own logits contain NaN or infinity; check its weights"
    ):
        Engine(model)


def test_long_rope_is_trained_below_its_extension(tmp_path: Path) -> None:
    """Past the original length, one long sample would turn the rows of every adapter by other angles."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 32,
    }
    config = Phi3Config(
        **SHAPE,
        pad_token_id=0,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_parameters=rope,
    )
    config.save_pretrained(tmp_path)
    assert BaseInfo(str(tmp_path)).max_positions == 32


def test_a_copy_that_needs_whole_samples_is_refused_in_one_line() -> None:
    model = OPTForCausalLM(OPTConfig(**SHAPE, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64))
    model.model.decoder.layers[0].add_module("smooth", torch.nn.Conv1d(4, 4, 3))
    engine = Engine(model)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["smooth"])
    with pytest.raises(ValueError, match=r"layers\.0\.smooth has convolutions or batch norm.*packs the rows"):
        engine.create_adapter("a", config, OptimConfig(total_steps=9))
    engine.create_adapter("a", LoraConfig(r=2, target_modules=["q_proj"]), OptimConfig(total_steps=9))
