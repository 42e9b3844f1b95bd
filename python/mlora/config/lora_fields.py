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
    create_model,
)

from mlora.config.aliases import nearest
from mlora.config.strict import shown
from mlora.errors import spelt_alike

if TYPE_CHECKING:
    from collections.abc import Mapping

    from peft import LoraConfig
    from torch import nn

    from mlora_ext.adapters.kind import LayerSpec


def _schema(kind: str, items: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": kind, "items": items} if items else {"type": kind}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [*schema.get("anyOf", [schema]), {"type": "null"}]}


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
Rank = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
Alpha = Annotated[float, Field(strict=True, allow_inf_nan=False), AfterValidator(_not_zero)]
Pattern = Annotated[str, AfterValidator(_pattern)]
Modules = Annotated[
    Any,
    AfterValidator(_modules),
    WithJsonSchema(_or_null({"anyOf": [{"type": "string"}, _schema("array", {"type": "string"})]})),
]
Names = Annotated[
    Any,
    AfterValidator(_names),
    WithJsonSchema(_or_null(_schema("array", {"type": "string"}))),
]
Spelt = Annotated[Any, AfterValidator(_spelt)]
Note = Annotated[Any, AfterValidator(_note)]


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


class _Checked(PeftNotes, extra="forbid"):
    """The fields of PEFT's ``LoraConfig`` that can be checked without a model."""

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


_CONFIG = _schema("object")
_OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "modules_to_save": (
        _schema("array", {"type": "string"}),
        "Names of modules of which the adapter trains a copy of its own, such as `lm_head`.",
    ),
    "layers_to_transform": (
        {"anyOf": [{"type": "integer"}, _schema("array", {"type": "integer"})]},
        "Indices of the blocks to adapt; null: all.",
    ),
    "layers_pattern": (
        {"anyOf": [{"type": "string"}, _schema("array", {"type": "string"})]},
        "Name of the list of blocks, for `layers_to_transform`; null: PEFT's usual names.",
    ),
    "trainable_token_indices": (
        {"anyOf": [_schema("array", {"type": "integer"}), _CONFIG]},
        "Ids of the tokens whose embedding rows are trained, or a list of ids for each embedding.",
    ),
    "ensure_weight_tying": (
        {"type": "boolean"},
        "Whether `modules_to_save` of a tied embedding or head trains one copy for both.",
    ),
    "lora_bias": ({"type": "boolean"}, "Whether each low-rank part has a trained bias."),
    "loftq_config": (_CONFIG, "Settings of `init_lora_weights: loftq`, PEFT's `LoftQConfig`."),
    "eva_config": (_CONFIG, "Settings of `init_lora_weights: eva`, PEFT's `EvaConfig`."),
    "corda_config": (_CONFIG, "Settings of `init_lora_weights: corda`, PEFT's `CordaConfig`."),
    "lora_ga_config": (_CONFIG, "Settings of `init_lora_weights: lora_ga`, PEFT's `LoraGAConfig`."),
}
"""Fields that need a model to be checked: their JSON schema, and what they mean."""
NOT_SERVED = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "megatron_config"),
    *("monteclora_config", "use_bdlora", "use_qalora", "velora_config"),
)
"""Fields of PEFT that may stand in a config with their defaults only."""
_fields: Any = {
    **{
        key: (Annotated[Any, WithJsonSchema(_or_null(schema))], Field(default=None, description=text))
        for key, (schema, text) in _OTHERS.items()
    },
    **{key: (Any, Field(default=None, description="Not supported.")) for key in NOT_SERVED},
}
# written down because importing PEFT takes seconds; a test compares them
LoraFields = create_model("LoraFields", __base__=_Checked, **_fields)
CHOICES = [key for key in LoraFields.model_fields if key not in PeftNotes.model_fields]


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
    from mlora_ext.targets.find import low_rank, target_layers
    from mlora_ext.targets.idle_targets import idle_lines

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
