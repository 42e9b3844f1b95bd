"""JSON schemas (draft 2020-12) of a run's YAML and of a task's file, by which editors complete keys.

They are made from the config models. A schema knows no rules between keys. Of the ways to write one value it
takes the usual one: numbers are not text, names are spelt as PEFT writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlora.config.lora_fields import NOT_SERVED, LoraFields, PeftNotes
from mlora.config.run_config import RunConfig
from mlora.config.sections import QUANTIZATIONS
from mlora.config.tracking import TRACKERS
from mlora.objectives.registry import objective_options
from mlora.optim.registry import optimizer_names

Schema = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
FUNCTION = {"title": "`module:function`", "type": "string", "pattern": ":"}


def run_schema() -> Schema:
    """Returns the schema of a run's YAML, the file of `mlora train` and `mlora sweep`."""
    schema = RunConfig.model_json_schema()
    parts = schema["$defs"]
    parts["Lora"] = _lora()
    for model in (schema, *parts.values()):
        _tidy(model)
    properties, adapter = schema["properties"], parts["AdapterConfig"]["properties"]
    for fields in (adapter, parts["TrainingFields"]["properties"]):
        fields["optim"]["enum"] = optimizer_names()
        fields["objective"]["anyOf"] = _objectives()
    adapter["name"]["pattern"] = "^[A-Za-z0-9_][A-Za-z0-9_+-]{0,99}$"
    adapter["lora"]["anyOf"] = [_ref("Lora"), {"type": "null"}]
    trackers: Schema = {"title": "name", "enum": [*TRACKERS, "all", "none"]}
    for key in ("type", "items"):
        del properties["report_to"][key]
    properties["report_to"]["anyOf"] = [trackers, {"type": "array", "items": trackers}]
    properties["device"]["anyOf"] = [{"type": "string", "pattern": r"^(cpu|cuda(:\d+)?)$"}, {"type": "null"}]
    parts["QuantizationConfig"]["properties"]["method"]["enum"] = list(QUANTIZATIONS)
    path = parts["DatasetConfig"]["properties"]["path"]
    files = path | {"items": {"anyOf": [{"type": "string"}, path["items"]]}}
    parts["DatasetConfig"]["properties"]["path"] = {
        "description": files.pop("description"),
        "anyOf": [{"type": "string"}, files],
    }
    sweep = parts["SweepConfig"]["properties"]
    sweep["adapter"] |= _object({key: _ref("AdapterConfig", key) for key in adapter if key != "name"})
    sweep["search"] |= _search(adapter, parts["Lora"]["properties"])
    schema["required"].remove("adapters")
    either: Schema = {"anyOf": [{"required": ["adapters"]}, {"required": ["sweep"]}]}
    return {"$schema": DIALECT, "title": "A run of mlora", **schema, **either}


def submission_schema() -> Schema:
    """Returns the schema of a task's file, as `mlora submit` takes it."""
    parts = run_schema()["$defs"]
    task = parts["AdapterConfig"]
    datasets = {
        "description": "Datasets that the run does not have.",
        "type": "array",
        "items": _ref("DatasetConfig"),
    }
    properties = {**task["properties"], "datasets": datasets}
    return {
        "$schema": DIALECT,
        "title": "A task for mlora submit",
        "$defs": parts,
        **task,
        "properties": properties,
    }


def _ref(part: str, key: str | None = None) -> Schema:
    return {"$ref": f"#/$defs/{part}" + (f"/properties/{key}" if key else "")}


def _object(properties: Mapping[str, Any], required: Iterable[str] = ()) -> Schema:
    found: Schema = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    return found | ({"required": list(required)} if required else {})


def _tidy(model: Schema) -> None:
    """Leaves out titles, docstrings, and what only the reference page shows of a key."""
    for unread in ("title", "description"):
        model.pop(unread, None)
    for field in model.get("properties", {}).values():
        for unread in ("title", "since"):
            field.pop(unread, None)
        if isinstance(field.get("default"), dict):  # a whole part with all of its defaults
            del field["default"]


def _lora() -> Schema:
    """Returns the schema of a ``lora`` block; an editor does not propose keys that choose nothing."""
    schema = LoraFields.model_json_schema()
    unread = [*PeftNotes.model_fields, *NOT_SERVED]
    for key in unread:
        del schema["properties"][key]
    schema["patternProperties"] = {f"^({'|'.join(unread)})$": {}}
    fields = schema["properties"]
    names = ["gaussian", "orthogonal", "eva", "pissa", "olora", "corda", "lora_ga", "loftq"]
    fields["init_lora_weights"]["anyOf"] = [
        {"type": ["boolean", "null"]},
        {"enum": names},
        {"title": "`pissa_niter_<n>`", "type": "string", "pattern": "^pissa_niter_[0-9]+$"},
    ]
    fields["task_type"]["enum"] = ["CAUSAL_LM", "SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", None]
    fields["bias"]["enum"] = ["none", None]
    return schema


def _objectives() -> list[Schema]:
    """Returns what ``objective`` may be: a name, or a mapping with options."""
    known = objective_options()
    mappings = []
    for name, options in known.items():
        schema = {"properties": {}} | options.model_json_schema()
        _tidy(schema)
        mappings.append(_object({"name": {"const": name}, **schema["properties"]}, ["name"]))
    own = {"name": FUNCTION, "takes": {"enum": ["sequences", "pairs", "judged"]}}
    of_function: Schema = {"type": "object", "properties": own, "required": ["name"]}
    return [{"enum": list(known)}, FUNCTION, *mappings, of_function]


def _search(adapter: Mapping[str, Schema], lora: Mapping[str, Schema]) -> Schema:
    """Returns the schema of a sweep's ``search``: leaves in the places of an adapter's values."""
    below = _object({key: _searched("Lora", key, field) for key, field in lora.items()})
    found = {key: _searched("AdapterConfig", key, adapter[key]) for key in adapter if key != "name"}
    found["lora"]["anyOf"] = [_choice("AdapterConfig", "lora"), below]
    return _object(found) | {"minProperties": 1}


def _choice(part: str, key: str) -> Schema:
    values = {"type": "array", "minItems": 1, "items": _ref(part, key)}
    return _object({"choice": values}, ["choice"])


def _searched(part: str, key: str, field: Schema) -> Schema:
    """Returns what stands in the place of a field: choices, bounds of a number, or leaves below it."""
    number = {"type": "number"}
    bounds = {"low": number, "high": number, "step": number, "log": {"type": "boolean"}}
    kinds = {str(kind.get("type", "object")) for kind in field.get("anyOf", [field])}
    leaves = [_choice(part, key)]
    leaves += [_object(bounds, ["low", "high"])] if kinds & {"integer", "number"} else []
    leaves += [{"type": "object"}] if "object" in kinds else []
    return {"description": field["description"], "anyOf": leaves}
