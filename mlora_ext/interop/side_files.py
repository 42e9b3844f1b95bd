"""Files beside PEFT's in an adapter's folder: `labels.json` and `quantization.json`.

The first says what the labels of the adapter's head are called, and which loss they have. The second says how
the base was quantised over which the adapter was trained.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..adapters.trained_parts import labels_of
from ..errors import NamedError
from ..frozen.quantized.families import is_quantized
from ..warn_caller import warn_caller

if TYPE_CHECKING:
    from peft import LoraConfig

LABELS = "labels.json"
PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
"""Transformers' values of `problem_type`."""
QUANTIZATION = "quantization.json"
PLAIN = "plain"
_SKIPPED = ("llm_int8_skip_modules", "modules_to_not_convert")
"""Transformers' fields that name layers of the base that stay plain; a run's `quantization` has none."""


def label_file(config: LoraConfig) -> str | None:
    """Returns the content of `labels.json` for a config; None if it says nothing of its labels.

    The keys are those of a Transformers config: `problem_type` and `id2label`.
    """
    known = labels_of(config)
    found: dict[str, Any] = {key: known[key] for key in ("problem_type",) if key in known}
    if "label_names" in known:
        found["id2label"] = {str(place): name for place, name in enumerate(known["label_names"])}
    return json.dumps(found, ensure_ascii=False, indent=2) + "\n" if found else None


def read_label_file(folder: Path, labels: int) -> dict[str, Any]:
    """Returns the fields of a config that `labels.json` holds; nothing if there is no such file.

    Args:
        labels: the number of labels of the head.

    Raises:
        ValueError: the file is not as `label_file` writes it, or has another number of names.
    """
    path = folder / LABELS
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise NamedError("folder", f"{path} is not valid JSON: {error}") from error
    if not isinstance(stored, dict):
        raise NamedError("folder", f"{path} must hold a JSON object with problem_type or id2label")
    found: dict[str, Any] = {}
    if stored.get("problem_type") is not None:
        if stored["problem_type"] not in PROBLEMS:
            raise NamedError("folder", f"{path}: problem_type must be one of {', '.join(PROBLEMS)}")
        found["problem_type"] = stored["problem_type"]
    if stored.get("id2label") is not None:
        found["label_names"] = _names(path, stored["id2label"], labels)
    return found


def _names(path: Path, stored: Any, labels: int) -> list[str]:
    """Returns the labels' names in the order of their ids."""
    ids = [str(place) for place in range(labels)]
    if not isinstance(stored, dict) or set(stored) != set(ids):
        raise NamedError("folder", f"{path}: id2label must name the labels 0 to {labels - 1} of the head")
    names = [stored[place] for place in ids]
    if not all(isinstance(name, str) for name in names) or len(set(names)) < labels:
        raise NamedError("folder", f"{path}: id2label must hold names that differ, got {names}")
    return names


def quantization_file(model: nn.Module) -> str | None:
    """Returns the content of `quantization.json` for a model; None if it needs no file, or none can hold it.

    The keys are those of a run's `quantization`. A plain base and a checkpoint that is stored quantised need
    no file: the name of the base says all.
    """
    said = _said_of(model)
    fields = None if said is None or _unsaid(said) else _fields(said)
    return None if fields is None else json.dumps(fields) + "\n"


def warn_of_unsaid(model: nn.Module) -> None:
    """Warns of fields of a base's quantisation for which `quantization.json` has no keys."""
    said = _said_of(model)
    if said is not None and quantization_file(model) is None:
        fields = ", ".join(f"{key}={value!r}" for key, value in _unsaid(said).items())
        how = f"{method_of(said)} with {fields}" if fields else method_of(said)
        warn_caller(
            f"{QUANTIZATION} cannot say how this base is quantised: {how}; load the base with this yourself"
        )


def doubt_of(folder: str | os.PathLike[str], method: str | None) -> str | None:
    """Returns a warning if an adapter's folder was written over a base of another method; None if not.

    Folders without the file say nothing of their base: PEFT writes none.

    Args:
        folder: of the adapter.
        method: of the base, as `method_of` names it; `"plain"`; None = unknown.

    Raises:
        ValueError: the file is not a JSON object with `method`.
    """
    path = Path(folder) / QUANTIZATION
    if method is None or not path.is_file():
        return None
    try:
        there = json.loads(path.read_text(encoding="utf-8"))["method"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NamedError("folder", f"{path} must hold a JSON object with method") from error
    return None if there == method else f"{Path(folder)} was trained over {there}, but this base is {method}"


def warn_of_base(model: nn.Module, name: str, folder: str | os.PathLike[str]) -> None:
    """Warns of an adapter's folder that was written over a base of another method; see `doubt_of`."""
    doubt = doubt_of(folder, method_in(model))
    if doubt:
        warn_caller(f"adapter {name!r}: {doubt}")


def method_in(model: nn.Module) -> str | None:
    """Returns the method of a model's base: `"plain"`; None if its layers were quantised by hand."""
    quantizer = _quantizer_of(model)
    if quantizer is not None:
        return method_of(quantizer.quantization_config.to_dict())
    return None if any(is_quantized(module) for module in model.modules()) else PLAIN


def method_of(said: Mapping[str, Any]) -> str:
    """Returns the name of what Transformers' `quantization_config` says: `bnb-nf4`, `gptq`, ..."""
    kind = str(getattr(said["quant_method"], "value", said["quant_method"]))
    if kind == "bitsandbytes":
        return f"bnb-{said.get('bnb_4bit_quant_type', 'fp4')}" if said.get("load_in_4bit") else "bnb-int8"
    if kind != "torchao":
        return kind
    name, values = _of_torchao(said)
    intx = f"int{str(values.get('weight_dtype')).rpartition('int')[2]}"
    known = {"Int8WeightOnlyConfig": "int8", "Float8WeightOnlyConfig": "float8", "IntxWeightOnlyConfig": intx}
    return f"torchao-{known.get(name, name)}"


def _said_of(model: nn.Module) -> dict[str, Any] | None:
    """Returns Transformers' config of a base that was quantised while it was loaded; None for others."""
    quantizer = _quantizer_of(model)
    if quantizer is None or quantizer.pre_quantized:
        return None
    said: dict[str, Any] = quantizer.quantization_config.to_dict()
    return said


def _unsaid(said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields of Transformers' config, but for the method, that a run's `quantization` cannot hold."""
    fields = said if _fields(said) is None else {key: said.get(key) for key in _SKIPPED}
    return {key: value for key, value in fields.items() if value and key != "quant_method"}


def _fields(said: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what a run's `quantization` holds for Transformers' config, but for layers that stay plain.

    None if it has no words for it.
    """
    method = method_of(said)
    if method == "bnb-int8":
        return {"method": method}
    if method in ("bnb-nf4", "bnb-fp4"):
        twice = {"double_quant": True} if said.get("bnb_4bit_use_double_quant") else {}
        return {"method": method, **twice, "compute_dtype": said["bnb_4bit_compute_dtype"]}
    values = _of_torchao(said)[1] if method.startswith("torchao-") else {}
    shape = values.get("granularity") or {}
    size = (shape.get("_data") or {}).get("group_size") or values.get("group_size")
    if method == "torchao-float8" and values.get("weight_dtype", "float8_e4m3fn") == "float8_e4m3fn":
        return {"method": method}
    symmetric = values.get("mapping_type", "SYMMETRIC") == "SYMMETRIC"
    if (method == "torchao-int8" and "mapping_type" not in values) or (method == "torchao-int4" and size):
        return {"method": method, **({"group_size": size} if size else {})} if symmetric else None
    return None


def _of_torchao(said: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the name of torchao's config and its values; enums and dtypes by their names."""
    kind = said.get("quant_type")
    kind = kind.get("default", kind) if isinstance(kind, Mapping) else kind
    if not isinstance(kind, Mapping):
        return str(kind), {}
    data = dict(kind.get("_data") or {})
    for key in ("weight_dtype", "mapping_type"):
        if isinstance(data.get(key), Mapping):
            data[key] = data[key].get("_data")
    return str(kind.get("_type")), data


def _quantizer_of(model: nn.Module) -> Any:
    """Returns Transformers' quantizer of a model, which may be inside another module; None if it has none."""
    found = (vars(module).get("hf_quantizer") for module in model.modules())
    return next((quantizer for quantizer in found if quantizer is not None), None)
