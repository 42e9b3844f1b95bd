"""The model of ``quantization`` in a run's config: the format of the base model's linear weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from mlora.config.aliases import nearest
from mlora.config.strict import Location, Strict, wrong_key, wrong_keys
from mlora.errors import first_fault, unknown_value

OPTIONS: dict[str, tuple[str, ...]] = {
    "bnb-nf4": ("double_quant", "compute_dtype"),
    "bnb-fp4": ("double_quant", "compute_dtype"),
    "bnb-int8": (),
    "torchao-int8": ("group_size",),
    "torchao-int4": ("group_size",),
    "torchao-float8": (),
}
"""The options of each method."""


METHODS = {"load_in_4bit": "bnb-nf4", "load_in_8bit": "bnb-int8"}
"""The methods that are keys of other tools."""


class QuantizationConfig(Strict):
    """The base model is quantised while it is read, with ``method``.

    ``double_quant``: the scales of 4-bit numbers are quantised, too (QLoRA). ``compute_dtype``: of the
    products with 4-bit weights; without it, that of the run. ``group_size``: the neighbouring numbers that
    share a scale; without it, a row (int8) or 32 (int4).
    """

    method: str = Field(
        description="Format of the weights, from bitsandbytes (`bnb-`) or torchao (`torchao-`)."
    )
    double_quant: bool = Field(
        default=False,
        description="Whether the scales of 4-bit numbers are quantised, too (QLoRA); for `bnb-nf4` and "
        "`bnb-fp4`.",
    )
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="Type in which products with 4-bit weights are computed; null: that of the run.",
    )
    group_size: int | None = Field(
        default=None,
        ge=1,
        description="Neighbouring numbers that share a scale; null: a row (`torchao-int8`) or 32 "
        "(`torchao-int4`).",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_other_tool(cls, value: Any) -> Any:
        for key in value if isinstance(value, dict) else ():
            if key in METHODS:
                hint = "remove it" if "method" in value else f"write `method: {METHODS[key]}` in its place"
                raise wrong_key(key, f"unknown key; {hint}")
        return value

    @field_validator("method")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in OPTIONS:
            raise ValueError(unknown_value(value, list(OPTIONS)))
        return value

    @model_validator(mode="after")
    def _options_fit(self) -> QuantizationConfig:
        given = {"double_quant": self.double_quant, "compute_dtype": self.compute_dtype}
        asked = [key for key, value in {**given, "group_size": self.group_size}.items() if value]
        faults: dict[Location, str] = {
            (key,): f"is not an option of {self.method}; remove it"
            for key in asked
            if key not in OPTIONS[self.method]
        }
        if faults:
            raise wrong_keys(faults)
        return self


def checked_quantization(given: QuantizationConfig | Mapping[str, Any] | None) -> QuantizationConfig | None:
    """Returns what a caller in Python gave as ``quantization``, checked. ValueError names the key."""
    if given is None or isinstance(given, QuantizationConfig):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(
            f"quantization: expected keys and values such as {{'method': 'bnb-nf4'}}, got {given!r}"
        )
    known = list(QuantizationConfig.model_fields)
    for key in given:
        if key not in known and key not in METHODS:
            raise ValueError(f"quantization.{key}: unknown key; {nearest(str(key), known)}")
    try:
        return QuantizationConfig.model_validate(given)
    except ValidationError as error:
        raise ValueError(f"quantization.{first_fault(error)}") from error
