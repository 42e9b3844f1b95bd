"""Random models of four blocks, and their stages."""

import copy

import torch
from mlora.model.base_model import BaseModel
from mlora.model.cut import BlockSpan
from mlora.model.load import load_base
from tiny_models import FAMILIES, VOCABULARY, make
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

BLOCKS = 4
CPU = torch.device("cpu")
DEEP = [*FAMILIES, "opt", "mixtral"]
_SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": BLOCKS, "num_attention_heads": 4}


def deep(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model of four blocks: equal for equal seeds."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if family == "opt":  # the embedding is narrower than the blocks: project_in and project_out
            shape = {"ffn_dim": 48, "word_embed_proj_dim": 16, "max_position_embeddings": 64}
            return OPTForCausalLM(OPTConfig(**_SHAPE, **shape, init_std=0.2))
        if family == "mixtral":
            shape = {"num_key_value_heads": 2, "intermediate_size": 48, "num_local_experts": 4}
            return MixtralForCausalLM(MixtralConfig(**_SHAPE, **shape, initializer_range=0.2))
        model = make(family)
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = BLOCKS
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types * 2
        return type(model)(config)


def spans(stages: int) -> list[BlockSpan]:
    """The blocks over some stages; the first stages have more where they do not divide evenly."""
    ends = [-(-BLOCKS * (stage + 1) // stages) for stage in range(stages)]
    return [
        BlockSpan(i, stages, first, last)
        for i, (first, last) in enumerate(zip([0, *ends], ends, strict=False))
    ]


def cut(model: PreTrainedModel, stages: int) -> list[BaseModel]:
    """The stages of a model that is given, each in a copy of its own."""
    return [load_base(copy.deepcopy(model), CPU, torch.float32, span) for span in spans(stages)]
