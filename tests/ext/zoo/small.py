"""Small random configurations: a family's defaults with every size made small, by the names of its fields."""

import dataclasses
import re
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

VOCABULARY = 61
IMAGE = 16
PATCH = 4

# The first pattern that matches the whole name of a field decides. Only integers are replaced.
SIZES = [
    (r".*(token_id|token_index|_token)$", None),
    (r"(.*_)?(vocab_size|d_vocab)(_or_.*)?", VOCABULARY),
    (r"qk_head_dim", 16),
    (r"(.*_)?head_dim(ension)?|d_kv|attention_head_size|v_head_dim|qk_nope_head_dim", 8),
    (r"qk_rope_head_dim|rotary_dim|.*rope_dim", 8),
    (r"(.*_)?lora_rank|.*low_rank_dim", 8),
    (r"(.*_)?(num|n)_(key_value|kv)_heads?|multi_query_group_num|n_kv_head|num_kv_heads", 2),
    (r"(.*_)?(attention_heads?|num_heads?|n_heads?|nhead|num_attention_heads_.*)", 4),
    (r"(.*_)?n_?groups?|num_key_value_groups", None),
    (r"(.*_)?mlp_ratio|expand|.*_ratio|.*factor", None),
    (r"(.*_)?(num_experts_per_tok(en)?|moe_topk|top_k|num_selected_experts|moe_top_?k|moe_k)", 2),
    (r"(num|n)_?(local|routed)?_?experts|moe_num_experts|num_local_experts", 4),
    (r".*first_k_dense.*|moe_layer_start_index", 1),
    (r"(.*_)?((num|n|encoder|decoder)_?)+(hidden_)?(layers?|blocks?)|depth|num_.*layers", 2),
    (r"(.*_)?(intermediate_(size|dim)|ffn_dim|d_ff|n_inner|ffn_hidden_size|ff_dim|dim_feedforward)", 48),
    (r"(.*_)?(feed_?forward_(size|dim|proj.*)|inner_dim|moe_intermediate.*|mlp_dim|d_inner|fc_dim)", 48),
    (r"(.*_)?(max_position_embeddings|n_positions|max_(source|target)_positions|max_seq_len(gth)?)", 64),
    (r"(.*_)?(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|dim|n_embed)", 32),
    (r"d_embed|embd_dim", 32),
    (r"(.*_)?(hidden_channels|projection_dim|proj_dim|hidden_state_size|output_dim|width)", 32),
    (r"(.*_)?(image_size|img_size|crop_size)", IMAGE),
    (r"(.*_)?(patch_size|patch_stride|tubelet_size)", PATCH),
]
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
FIXED: dict[str, Any] = {
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "use_cache": False,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "router_jitter_noise": 0.0,
}
OFF = re.compile(r".*(dropout|drop_path|drop_rate|layerdrop|layer_drop|pdrop|dropout_prob|drop_prob).*")
LISTS = {
    r"conv_dim|tdnn_dim": 16,
    r"(.*_)?(hidden_sizes|embed_dims|encoder_hidden_sizes|channels|layer_dims|embed_dim)": 16,
    r"(.*_)?(depths|num_blocks|num_layers|layers)": 1,
    r"(.*_)?(num_attention_heads|num_heads|n_heads)": 2,
    r"(.*_)?(image_size|img_size)": IMAGE,
    r"(.*_)?(patch_size)": PATCH,
}


def small_config(model_type: str, changes: dict[str, Any] | None = None) -> PreTrainedConfig:
    """A configuration of this model type; `changes` are given to it as they are, by field or `part.field`."""
    return _small(type(AutoConfig.for_model(model_type)), changes or {})


def _small(kind: type[PreTrainedConfig], changes: dict[str, Any]) -> PreTrainedConfig:
    fields = {f.name: _default(f) for f in dataclasses.fields(kind) if f.init and not f.name.startswith("_")}
    values = {name: value for name, value in FIXED.items() if name in fields}
    for name, default in fields.items():
        value = _value(name, default)
        if value != default:
            values[name] = value
    for name, part in dict(kind.sub_configs or {}).items():
        inner = {k.partition(".")[2]: v for k, v in changes.items() if k.startswith(f"{name}.")}
        built = _part(part, inner)
        if built is not None:
            values[name] = built
    values |= {key: value for key, value in changes.items() if "." not in key}
    return kind(**values)


def _part(part: Any, changes: dict[str, Any]) -> PreTrainedConfig | None:
    model_type = changes.pop("model_type", None)
    if model_type is not None:
        return small_config(model_type, changes)
    return _small(part, changes) if dataclasses.is_dataclass(part) and part is not AutoConfig else None


def _default(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _value(name: str, default: Any) -> Any:
    if name in TOKENS and default is not None:
        return TOKENS[name]
    if OFF.fullmatch(name) and isinstance(default, float):
        return 0.0
    if isinstance(default, list | tuple) and OFF.fullmatch(name):
        return type(default)([0.0] * len(default))
    if isinstance(default, list | tuple) and default and all(type(item) is int for item in default):
        size = next((size for pattern, size in LISTS.items() if re.fullmatch(pattern, name)), None)
        return default if size is None else type(default)([size] * len(default))
    if type(default) is not int:
        return default
    size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
    return default if size is None else min(size, default)
