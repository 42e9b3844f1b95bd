"""Write the pages of docs/reference that are made from the code: the keys, the commands, the Python names.

Usage: python docs/make_reference.py

`tests/test_reference_pages.py` fails when a page is not what this script would write.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
MADE = "\n<!-- made by docs/make_reference.py; change the code that it reads -->\n"
FIRST = "0.1.0"
"""The version in which a key came that names none."""


def row(*cells: str) -> str:
    """Returns a row of a table in Markdown."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown."""
    head = list(head)
    return row(*head) + "|" + "---|" * len(head) + "\n" + "".join(row(*each) for each in rows) + "\n"


# The keys of a run's YAML

HEAD = """# Keys of a run's YAML

Every key of the file that `mlora train` and `mlora sweep` read. `mlora schema` prints the same as a JSON schema: [your editor can complete keys with it](../training.md#completion-in-an-editor).

- Names and defaults are those of Transformers' `TrainingArguments` and of PEFT's `LoraConfig`. `max_length` and `assistant_only_loss` are TRL's.
- A relative path starts at the YAML's folder. `--set` overrides a key: `--set adapters.sums-r8.lora.r=4`.
- A *size* is a number of bytes, or a text such as `8GiB` or `500MB`. *null* is YAML's word for no value.
- Every key works or is refused. An unknown key is refused with the nearest right name.

"""
PARTS = {
    "Top level": ("RunConfig", "The keys of the file itself."),
    "defaults": (
        "TrainingFields",
        "These *training keys* may stand under `defaults`, for all adapters, and in an entry of `adapters`, which goes "
        "first. `max_steps` goes before `num_train_epochs` where both stand in one place; an adapter's own "
        "`num_train_epochs` goes before `max_steps` of `defaults`.",
    ),
    "adapters": (
        "AdapterConfig",
        "A list. Each entry is a task: an adapter, its data, and any of the [training keys](#defaults). The file of "
        "`mlora submit` holds the same keys, and `datasets` that the run does not have.",
    ),
    "lora": ("Lora", "Fields of PEFT's `LoraConfig`, in an entry of `adapters`."),
    "objective": ("", ""),
    "datasets": (
        "DatasetConfig",
        "A list. [Datasets](../training.md#datasets) shows a row of each format, [Data](../data.md) where rows come from.",
    ),
    "path": ("DataFile", "An entry of a list under `path`, if it is not just a path. [Data](../data.md)."),
    "scheduler": ("SchedulerConfig", "[Tasks that come and go](../scheduler.md)."),
    "pipeline": ("PipelineConfig", "[Several devices, several machines](../pipeline.md)."),
    "offload": (
        "OffloadConfig",
        "[Models that do not fit in memory](../offload.md). No choice changes a result.",
    ),
    "quantization": ("QuantizationConfig", "[Quantised base models](../quantization.md)."),
    "sweep": ("SweepConfig", "[Sweeps](../sweep.md), in place of `adapters`."),
}
"""The sections of the page, in order: the part of the schema, and what stands above its table."""
OF_PART = {part: title for title, (part, _) in PARTS.items()} | {"TrainingFields": "defaults"}
COLUMNS = ("Key", "Meaning", "Type", "Default", "Since")


def keys_page() -> str:
    """Returns the page of all keys."""
    from mlora.config.schema import run_schema
    from mlora.config.training_fields import TrainingFields

    schema = run_schema()
    parts = {"RunConfig": schema, **schema["$defs"]}
    text = HEAD
    for title, (part, words) in PARTS.items():
        text += f"## {title}\n\n"
        if title == "objective":
            text += _objectives()
            continue
        found = parts[part]
        properties = found["properties"]
        if part == "AdapterConfig":
            properties = {
                key: each for key, each in properties.items() if key not in TrainingFields.model_fields
            }
        text += f"{words}\n\n" + table(COLUMNS, key_rows(_models()[part], properties))
        if part == "Lora":
            text += _unread()
    return text.rstrip("\n") + "\n" + MADE


def _models() -> Mapping[str, type[BaseModel]]:
    from mlora.config.dataset_config import DataFile
    from mlora.config.faults import MODELS
    from mlora.config.lora_fields import LoraFields
    from mlora.config.run_config import RunConfig

    return {
        **{model.__name__: model for model in MODELS.values()},
        "RunConfig": RunConfig,
        "DataFile": DataFile,
        "Lora": LoraFields,
    }


def key_rows(model: type[BaseModel], properties: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns a row for each key: those of a model that a schema's properties name."""
    fields = model.model_fields
    return [
        (
            f"`{key}`",
            fields[key].description or "",
            kind(_untitled(schema)),
            _default(fields[key]),
            since(fields[key]),
        )
        for key, schema in properties.items()
    ]


def since(field: FieldInfo) -> str:
    """Returns the version in which a key came: its ``json_schema_extra={"since": ...}``, or the first."""
    extra = field.json_schema_extra
    return str(extra.get("since", FIRST)) if isinstance(extra, dict) else FIRST


def _untitled(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "title"}


def kind(schema: Mapping[str, Any]) -> str:
    """Returns in words which values a schema accepts."""
    if "title" in schema:
        return str(schema["title"])
    if "anyOf" in schema:
        words = [kind(each) for each in schema["anyOf"]]
        return ", ".join(dict.fromkeys(word for word in words if word))
    if "$ref" in schema:
        part = schema["$ref"].split("/")[2]
        return f"[keys](#{OF_PART[part].lower().replace(' ', '-')})" if part in OF_PART else "keys"
    if "enum" in schema:
        return ", ".join("null" if each is None else f"`{each}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    return _of_type(schema)


def _of_type(schema: Mapping[str, Any]) -> str:
    types = schema.get("type", "")
    if isinstance(types, list):
        return ", ".join(_of_type({"type": each}) for each in types)
    if types == "array":
        item = kind(schema.get("items", {}))
        return f"list of {item}{'s' if item.endswith('number') else ''}" if item else "list"
    words = {"integer": "whole number", "number": "number", "boolean": "true, false", "string": "text"}
    words |= {"object": "keys and values", "null": "null"}
    return words.get(types, "") + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    # larger bounds only catch typing mistakes
    words = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if abs(schema.get(key, 1e9)) < 1e6]
    return f" {' and '.join(words)}" if words else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "" if isinstance(default, BaseModel) else value(default)


def value(default: Any) -> str:
    """Returns a default as YAML writes it."""
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    if isinstance(default, float):
        text = f"{default:g}"
        number, e, power = text.partition("e")
        return f"{number if '.' in number else number + '.0'}e{int(power)}" if e else text
    return f"`{default}`" if isinstance(default, str | list | dict) else str(default)


def plain(text: str) -> str:
    """Returns text whose angle brackets Markdown does not take for HTML, except in code."""
    parts = text.split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))


def _unread() -> str:
    from mlora.config.lora_fields import NOT_SERVED, PeftNotes

    names = ", ".join(f"`{name}`" for name in sorted([*PeftNotes.model_fields, *NOT_SERVED]))
    return f"PEFT's other fields may stand in the block with PEFT's default only: {names}.\n\n"


def _objectives() -> str:
    from mlora.objectives.registry import objective_options

    text = (
        "What `objective` of the [training keys](#defaults) may be: a name, such as `dpo`; `{name: dpo, beta: 0.2}` "
        "with the options below; or `module:function`, [a loss of your own](../preferences.md#your-own-loss). "
        "`cross_entropy` has no options. Names and defaults are TRL's.\n\n"
    )
    for name, options in objective_options().items():
        properties = options.model_json_schema().get("properties")
        if properties:
            text += f"### {name}\n\n" + table(COLUMNS, key_rows(options, properties))
    return text


# The command line

COMMANDS = """# Command line

Every command of `mlora`, as `mlora COMMAND --help` prints it.

- `--set KEY=VALUE` overrides a key of the config: `--set adapters.sums-r8.learning_rate=1e-3`. The value is read as YAML. With `resume`, only keys that change no result may be set, and a larger `max_steps` ([decision 17](../decisions/17-config-and-resume.md)).
- An error is one line on standard error that begins with `error:`, without a traceback.

| Exit code | When |
|---|---|
| 0 | done; of a run: finished, or only paused tasks remain |
| 1 | an error; of a run: also when only one adapter was refused or stopped |
| 2 | the command line itself is wrong, such as an unknown option |
| 128 + the signal | a signal ended the run; 130 after Ctrl-C |

"""


def commands_page() -> str:
    """Returns the page of all commands."""
    commands = list(_commands())
    rows = [
        (f"[`{name}`](#{name.replace(' ', '-')})", plain(_help(command).split("\n")[0]))
        for name, command in commands
    ]
    text = COMMANDS + table(("Command", "What it does"), rows)
    text += "".join(_command(name, command) for name, command in commands)
    return text.rstrip("\n") + "\n" + MADE


def _commands() -> Iterable[tuple[str, Any]]:
    """Yields each command with its whole name."""
    import typer
    from mlora.cli.app import app

    for name, command in typer.main.get_command(app).commands.items():
        yield f"mlora {name}", command
        for inner, each in getattr(command, "commands", {}).items():
            yield f"mlora {name} {inner}", each


def _help(command: Any) -> str:
    return inspect.cleandoc(command.help or "")


def _command(name: str, command: Any) -> str:
    parameters = [each for each in command.params if each.name != "help"]
    arguments = [each for each in parameters if not each.opts[0].startswith("-")]
    options = [each for each in parameters if each.opts[0].startswith("-")]
    usage = " ".join([name, *(["[OPTIONS]"] if options else []), *(str(each.metavar) for each in arguments)])
    text = f"## {name}\n\n{plain(_help(command))}\n\n```\n{usage}\n```\n\n"
    if name == "mlora bench":
        return text + "Its words are those of the suite: [bench.md](../dev/bench.md).\n\n"
    rows = [
        (f"`{each.metavar}`", plain(each.help or ""), "required" if each.required else "")
        for each in arguments
    ]
    rows += [(_option(each), plain(each.help or ""), _option_default(each)) for each in options]
    if not rows:
        return text
    return text + table(("Argument or option", "Meaning", "Default"), rows)


def _option(option: Any) -> str:
    word = "" if _is_flag(option) else f" {option.metavar or option.name.upper()}"
    return ", ".join(f"`{name}{word}`" for name in option.opts)


def _is_flag(option: Any) -> bool:
    return bool(getattr(option, "is_flag", False))


def _option_default(option: Any) -> str:
    default = getattr(option.default, "value", option.default)
    if option.required:
        return "required"
    if _is_flag(option) or default is None or "default:" in (option.help or ""):
        return ""
    return value(default)


# The names in Python

NAMES = """# Python names

What you can rely on from Python. Other modules may move. On the documentation's site, the docstrings follow below; here, the links lead to them in the source.

"""
PACKAGES = {
    "mlora_ext": ("Adapters in a model of your own ([own-loop.md](../own-loop.md)).", "*"),
    "mlora": (
        "Runs and the engine ([training.md](../training.md), [own-loop.md](../own-loop.md#the-engine)).",
        "*",
    ),
    "mlora.run.run": (
        "A run goes on, with callbacks from Python ([runs.md](../runs.md#resumes)).",
        "resume",
    ),
    "mlora.offload": (
        "Models that do not fit in memory ([offload.md](../offload.md#from-python)).",
        "OffloadOptions offloaded",
    ),
    "mlora.pipeline": (
        "Your own modules as a pipeline ([pipeline.md](../pipeline.md#with-your-own-modules)).",
        "Pipeline StageProcess connect_neighbours PipelineError",
    ),
    "mlora.scheduler": (
        "The memory model of the scheduler ([scheduler.md](../scheduler.md)).",
        "MemoryModel",
    ),
    "mlora.objectives.objective": (
        "What a loss of your own gets, and what a new objective subclasses "
        "([preferences.md](../preferences.md#your-own-loss)).",
        "LogProbs Objective",
    ),
    "mlora.objectives.custom": (
        "A loss of your own in Python ([preferences.md](../preferences.md#in-python)).",
        "CustomLoss",
    ),
    "mlora.data.preference": ("Its samples.", "Pair Judged"),
    "mlora.objectives.registry": ("", "register_objective"),
    "mlora.optim.optimizer": (
        "What a new optimizer subclasses ([extending.md](../extending.md)).",
        "Optimizer",
    ),
    "mlora.optim.registry": ("", "register_optimizer"),
    "mlora_ext.adapters.kind": ("What a new kind of adapters subclasses.", "AdapterKind"),
    "mlora_ext.adapters.registry": ("", "register_adapter_kind"),
    "mlora_ext.frozen.weight": ("What a new kind of frozen weights subclasses.", "FrozenWeight"),
    "mlora_ext.frozen.registry": ("", "register_frozen_weight"),
}
"""The public packages: what each is for, and its public names; ``*``: all of ``__all__``."""


def public_names() -> list[tuple[str, str]]:
    """Returns each public name with its package, in the order of the page."""
    found = []
    for package, (_, names) in PACKAGES.items():
        listed = import_module(package).__all__ if names == "*" else names.split()
        found += [(package, name) for name in listed]
    return found


def names_page() -> str:
    """Returns the page of all public names in Python."""
    text, last, rows = NAMES, "", list[tuple[str, str]]()
    for package, name in [*public_names(), ("", "")]:
        if package != last and rows:
            text += _package(last, rows)
            rows = []
        last = package
        if package:
            rows.append((f"[`{name}`]({_source(package, name)})", _first_line(package, name)))
    return text.rstrip("\n") + "\n" + MADE


def _package(package: str, rows: list[tuple[str, str]]) -> str:
    words = PACKAGES[package][0]
    return (
        f"## {package}\n\n" + (f"{words}\n\n" if words else "") + table(("Name", "What it is or does"), rows)
    )


def _object(package: str, name: str) -> Any:
    return getattr(import_module(package), name)


def _source(package: str, name: str) -> str:
    file = Path(inspect.getsourcefile(inspect.unwrap(_object(package, name))) or "").resolve()
    return f"../../{file.relative_to(ROOT)}"


def _first_line(package: str, name: str) -> str:
    text = inspect.getdoc(_object(package, name)) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`")


PAGES = {"run-yaml.md": keys_page, "command-line.md": commands_page, "python.md": names_page}


def main() -> None:
    """Write all pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
