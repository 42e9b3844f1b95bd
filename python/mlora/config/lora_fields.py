"""Checks of an adapter's ``lora`` block, fields of PEFT's ``LoraConfig``, and warnings about it."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    StrictBool,
    ValidationInfo,
    WithJsonSchema,
)

from mlora.config.aliases import nearest
from mlora.config.strict import shown
from mlora.errors import spelt_alike

if TYPE_CHECKING:
    from collections.abc import Mapping

    from peft import LoraConfig
    from torch import nn

    from mlora_ext.adapters.kind import LayerSpec


def _or_null(*kinds: dict[str, Any]) -> WithJsonSchema:
    """Returns the JSON schema of a field that PEFT checks: one of these kinds, or null."""
    return WithJsonSchema({"anyOf": [*kinds, {"type": "null"}]})


def _note(value: Any, info: ValidationInfo) -> Any:
    if value != PeftNotes.model_fields[str(info.field_name)].default:
        raise ValueError("is not a setting of a run; remove this key")
    return value


def _not_zero(alpha: float) -> float:
    if alpha == 0:
        raise ValueError("must not be 0: the adapter would have no effect and could not learn")
    return alpha


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{shown(value)} is not a regular expression: {error}") from error
    return value


def _modules(value: Any, info: ValidationInfo) -> Any:
    names = value if isinstance(value, list) else [value]
    if value is not None and not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"must be a name, a pattern or a list of names, got {shown(value)}")
    if value == [] and info.field_name != "target_modules":
        raise ValueError("must not be empty")
    if value == [] and not info.data.get("target_parameters"):
        raise ValueError("must not be empty without target_parameters")
    if isinstance(value, str):
        words = re.split(r"[\s,]+", value.strip())
        if len(words) > 1 and all(re.fullmatch(r"[\w.]+", word) for word in words):
            raise ValueError(f"{shown(value)} is one pattern; did you mean [{', '.join(words)}]?")
        _pattern(value)
    return value


def _names(value: Any) -> Any:
    listed = isinstance(value, list) and value and all(isinstance(name, str) and name for name in value)
    if value is not None and not listed:
        raise ValueError(f"must be a list of names of parameters, got {shown(value)}")
    return value


def _spelt(value: Any, info: ValidationInfo) -> Any:
    """Refuses a misspelt value. PEFT and `mlora_ext` refuse other unknown ones, with their reasons."""
    known, found = _VALUES[str(info.field_name)], None
    if isinstance(value, str) and value not in known and not value.lower().startswith("pissa_niter_"):
        found = spelt_alike(value, known)
    if found is None or (info.field_name == "init_lora_weights" and str(value).lower() == found):
        return value  # PEFT ignores case there
    raise ValueError(f"{value!r} is unknown; did you mean {found!r}?")


_VALUES = {
    "bias": ("none", "all", "lora_only"),
    "init_lora_weights": (
        *("gaussian", "orthogonal", "eva", "pissa", "pissa_niter_16", "olora", "corda", "lora_ga"),
        *("loftq", "mica"),
    ),
    "task_type": ("CAUSAL_LM", "SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION"),
}
"""PEFT's values of the fields that hold a name, supported or not."""
_TEXT, _NUMBER, _FLAG, _CONFIG = ({"type": kind} for kind in ("string", "integer", "boolean", "object"))
_TEXTS, _NUMBERS = ({"type": "array", "items": items} for items in (_TEXT, _NUMBER))
Rank = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
Alpha = Annotated[float, Field(strict=True, allow_inf_nan=False), AfterValidator(_not_zero)]
Pattern = Annotated[str, AfterValidator(_pattern)]
Modules = Annotated[Any, AfterValidator(_modules), _or_null(_TEXT, _TEXTS)]
Names = Annotated[Any, AfterValidator(_names), _or_null(_TEXTS)]
Spelt = Annotated[Any, AfterValidator(_spelt)]
Note = Annotated[Any, AfterValidator(_note)]
Config = Annotated[Any, _or_null(_CONFIG)]
Unserved = Annotated[Any, Field(description="Not supported.")]


class PeftNotes(BaseModel):
    """PEFT's notes about an adapter's origin. A config may repeat them with these values only."""

    auto_mapping: Note = None
    base_model_name_or_path: Note = None
    inference_mode: Note = False
    megatron_core: Note = "megatron.core"
    peft_type: Note = "LORA"
    peft_version: Note = None
    qalora_group_size: Note = 16
    revision: Note = None
    runtime_config: Note = None


class LoraFields(PeftNotes, extra="forbid"):
    """The fields of PEFT's ``LoraConfig``; those before ``modules_to_save`` are checked without a model.

    They are written down because importing PEFT takes seconds; a test compares them.
    """

    r: Rank = Field(default=8, description="Rank of the low-rank parts.")
    target_parameters: Names = Field(  # before target_modules, which may be empty beside it
        default=None, description="Names of parameters to adapt, such as the stacked experts of a mixture."
    )
    target_modules: Modules = Field(
        default=None,
        description="Modules to adapt: `all-linear`, a list of names, or one regular expression; null: "
        "PEFT's choice for the model.",
    )
    exclude_modules: Modules = Field(
        default=None, description="Modules to leave out: a list of names, or one regular expression."
    )
    lora_alpha: Alpha = Field(
        default=8,
        description="Alpha: the low-rank parts are scaled by alpha / r, with `use_rslora` by alpha / √r.",
    )
    lora_dropout: Annotated[float, Field(strict=True, ge=0, lt=1)] = Field(
        default=0.0, description="Probability with which an input of the low-rank parts is dropped."
    )
    fan_in_fan_out: StrictBool = Field(
        default=False, description="Whether layers store their weight as (inputs, outputs), as in GPT-2."
    )
    use_rslora: StrictBool = Field(
        default=False, description="Whether alpha is divided by the root of the rank (rsLoRA)."
    )
    rank_pattern: dict[Pattern, Rank] | None = Field(
        default=None, description="Ranks other than `r`, by names or regular expressions of modules."
    )
    alpha_pattern: dict[Pattern, Alpha] | None = Field(
        default=None,
        description="Alphas other than `lora_alpha`, by names or regular expressions of modules.",
    )
    use_dora: StrictBool = Field(default=False, description="Whether to train magnitudes, too (DoRA).")
    bias: Spelt = Field(default=None, description="`none` only; a bias per adapter is `lora_bias`.")
    init_lora_weights: Spelt = Field(
        default=None,
        description="How the adapter begins: true, false, `gaussian`, `orthogonal`, `eva`, `pissa`, "
        "`pissa_niter_<n>`, `olora`, `corda`, `lora_ga` or `loftq`; null: true.",
    )
    task_type: Spelt = Field(
        default=None,
        description="What the adapter is for: it decides its head and its loss; null: CAUSAL_LM.",
    )
    modules_to_save: Annotated[Any, _or_null(_TEXTS)] = Field(
        default=None,
        description="Names of modules of which the adapter trains a copy of its own, such as `lm_head`.",
    )
    layers_to_transform: Annotated[Any, _or_null(_NUMBER, _NUMBERS)] = Field(
        default=None, description="Indices of the blocks to adapt; null: all."
    )
    layers_pattern: Annotated[Any, _or_null(_TEXT, _TEXTS)] = Field(
        default=None,
        description="Name of the list of blocks, for `layers_to_transform`; null: PEFT's usual names.",
    )
    trainable_token_indices: Annotated[Any, _or_null(_NUMBERS, _CONFIG)] = Field(
        default=None,
        description="Ids of the tokens whose embedding rows are trained, or a list of ids for each "
        "embedding.",
    )
    ensure_weight_tying: Annotated[Any, _or_null(_FLAG)] = Field(
        default=None,
        description="Whether `modules_to_save` of a tied embedding or head trains one copy for both.",
    )
    lora_bias: Annotated[Any, _or_null(_FLAG)] = Field(
        default=None, description="Whether each low-rank part has a trained bias."
    )
    loftq_config: Config = Field(
        default=None, description="Settings of `init_lora_weights: loftq`, PEFT's `LoftQConfig`."
    )
    eva_config: Config = Field(
        default=None, description="Settings of `init_lora_weights: eva`, PEFT's `EvaConfig`."
    )
    corda_config: Config = Field(
        default=None, description="Settings of `init_lora_weights: corda`, PEFT's `CordaConfig`."
    )
    lora_ga_config: Config = Field(
        default=None, description="Settings of `init_lora_weights: lora_ga`, PEFT's `LoraGAConfig`."
    )
    # fields of PEFT that may stand in a config with their defaults only
    alora_invocation_tokens: Unserved = None
    arrow_config: Unserved = None
    kasa_config: Unserved = None
    layer_replication: Unserved = None
    megatron_config: Unserved = None
    monteclora_config: Unserved = None
    use_bdlora: Unserved = None
    use_qalora: Unserved = None
    velora_config: Unserved = None


CHOICES = [key for key in LoraFields.model_fields if key not in PeftNotes.model_fields]
NOT_SERVED = CHOICES[CHOICES.index("alora_invocation_tokens") :]


def _check_lora(values: dict[str, Any]) -> dict[str, Any]:
    LoraFields.model_validate(values)
    return values


LoraBlock = Annotated[dict[str, Any], AfterValidator(_check_lora)]
"""A ``lora`` block, checked without a model and kept as it is written."""


def build_lora(values: dict[str, Any]) -> LoraConfig:
    """Returns PEFT's config for a ``lora`` block, by default for a causal language model.

    ValueError carries PEFT's reason if PEFT refuses the values.
    """
    from peft import LoraConfig

    try:
        return LoraConfig(**{"task_type": "CAUSAL_LM", **values, **_settings(values)})
    except (TypeError, ValueError, ImportError) as error:
        raise ValueError(str(error)) from error


def _settings(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of an initialisation, as PEFT's objects; default: PEFT's.

    ValueError for an unknown setting, which PEFT would ignore.
    """
    from peft.tuners.lora import config

    kinds = {
        "eva": config.EvaConfig,
        "corda": config.CordaConfig,
        "lora_ga": config.LoraGAConfig,
        "loftq": config.LoftQConfig,
    }
    found: dict[str, Any] = {}
    for how, kind in kinds.items():
        key = f"{how}_config"
        given = values.get(key, {} if values.get("init_lora_weights") == how else None)
        if not isinstance(given, dict):
            continue
        known = [field.name for field in dataclasses.fields(kind)]
        for name in given:
            if name not in known:
                raise ValueError(f"{key}: no setting is named {name!r}; {nearest(name, known, 'settings')}")
        found[key] = kind(**given)
    return found


def lora_warnings(model: nn.Module, name: str, lora: LoraConfig) -> list[str]:
    """Returns warnings about entries that match no layer, and one if a rank exceeds what a layer can use.
    PEFT accepts them, but they are probably mistakes."""
    from mlora_ext.targets.entries import idle_lines
    from mlora_ext.targets.find import low_rank, target_layers

    modules = {key: module for key, module in model.named_modules() if ".lora_" not in key}
    plain = copy.deepcopy(lora)  # without its task: a causal model has no head for it
    plain.task_type, plain.modules_to_save, plain.trainable_token_indices = None, None, None
    layers = target_layers(model, name, plain)
    lines = [f"{name}: lora.{line}" for line in idle_lines(model, plain, layers)]
    whole = () if lora.target_modules == "all-linear" else lora.modules_to_save or ()
    lines += [
        f"{name}: lora.modules_to_save: {one!r} covers modules of target_modules; they are trained whole and "
        "get no low-rank parts, as in PEFT"
        for one in whole
        if any(f".{one}." in f".{key}." for key in low_rank(layers))
    ]
    return lines + _too_high(name, modules, layers)


def _too_high(name: str, modules: Mapping[str, nn.Module], layers: Mapping[str, LayerSpec]) -> list[str]:
    """Returns a warning about the first rank that exceeds what its layer can use."""
    from mlora_ext.adapters.kind import LayerSpec, ParameterSpec
    from mlora_ext.layers.layer_kinds import layer_kind
    from mlora_ext.targets.find import low_rank

    for key, spec in low_rank(layers).items():
        own = [LayerSpec.of_parameters({part: each}) for part, each in spec.parameters] or [spec]
        for one in own:
            shapes = layer_kind(modules[key]).shapes(modules[key], one)
            width = min(shape.width for shape in shapes.values() if isinstance(shape, ParameterSpec))
            if one.rank > width:
                return [f"{name}: lora.r: {one.rank} is too high; {key} can use {width} at most"]
    return []
