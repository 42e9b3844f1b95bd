"""What ``mlora generate`` answers with: the adapters of a run or of a PEFT folder."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mlora.errors import RunError, file_line, first_line
from mlora.regular_files import read_regular

CLASSES = {"TOKEN_CLS": "TokenClassification", "QUESTION_ANS": "QuestionAnswering"}


def find_adapters(source: Path) -> tuple[str, dict[str, Path], Mapping[str, Any] | None]:
    """Returns a run's base model, its adapter folders by name, and how it quantises the base.

    A PEFT folder is one adapter, and its `quantization.json` says the last; None: the base stays as it is.
    """
    from mlora.config.yaml_file import read_yaml

    if os.path.isfile(source / "config.yaml"):
        folders = sorted(path for path in (source / "adapters").glob("*/adapter_config.json"))
        found = {path.parent.name: path.parent for path in folders if not path.parent.name.startswith(".")}
        config = read_yaml(source / "config.yaml")
        return str(config.get("base_model", "")), found, config.get("quantization")
    if os.path.isfile(source / "adapter_config.json"):
        try:
            saved = json.loads(read_regular(source / "adapter_config.json"))
            if not isinstance(saved, dict):
                raise ValueError("is not a JSON object")
        except OSError as error:
            raise RunError(file_line(error)) from error
        except (ValueError, RecursionError) as error:
            raise RunError(
                f"{source / 'adapter_config.json'}: cannot be read: {first_line(error)}"
            ) from error
        from mlora.model.stored_quantization import read_quantization

        try:
            quantization = read_quantization(source)
        except ValueError as error:
            raise RunError(first_line(error)) from error
        named = str(saved.get("base_model_name_or_path") or "")
        return named, {_plain_name(source): source}, quantization
    raise RunError(f"{source}: is neither a run's output_dir nor a PEFT adapter folder")


def _plain_name(folder: Path) -> str:
    """Returns the folder's name without dots, which separate modules in a state dict's keys."""
    return re.sub(r"[^A-Za-z0-9_+-]", "-", folder.resolve().name) or "adapter"


def of_checkpoints(source: Path, asked: Sequence[str], stack: ExitStack) -> dict[str, Path]:
    """Returns folders with the newest weights of a run's adapters that have not ended, and says which.

    `asked` are the adapters to answer with (empty = all). RunError if one of these has no weights yet.
    `stack` removes the folders.
    """
    if not os.path.isfile(source / "config.yaml"):
        return {}
    from mlora.run.handoff.adapters import find_weights, open_run
    from mlora.run.handoff.peft_folders import peft_folder_of
    from mlora.store.run_folder import RunFolder

    summary = RunFolder(source.resolve()).read_summary()
    states = {name: entry["state"] for name, entry in summary["adapters"].items()} if summary else {}
    left = [name for name, state in states.items() if state in ("running", "paused")]
    left = [name for name in left if not asked or name in asked]
    if not left:
        return {}
    folder, config, adapters = open_run(source)
    found: dict[str, Path] = {}
    for name in left:
        try:
            weights = find_weights(folder, name)
            found[name] = stack.enter_context(peft_folder_of(config, adapters[name], weights))
        except RunError as error:
            if asked:
                raise
            print(f"warning: left out: {error}", file=sys.stderr)
            continue
        print(f"{name}: weights of {weights.told}", file=sys.stderr)
    return found


def chosen_of(source: Path, found: Sequence[str], asked: Sequence[str]) -> list[str]:
    """Returns the names of the adapters to answer with: those asked for, else all of `source`."""
    for name in asked:
        if name not in found and name != "__base__":
            raise RunError(f"{source}: has no trained adapter {name!r}; it has {', '.join(found) or 'none'}")
    if not asked and not found:
        raise RunError(f"{source}: has no trained adapter yet; `mlora status {source}` shows its progress")
    return list(asked or found)


def by_answer(
    folders: Mapping[str, Path],
) -> tuple[dict[str, list[str] | None], dict[str, tuple[str, str]]]:
    """Returns the adapters that predict one label, and those that predict neither one label nor text.

    The former with the labels' names, if they have any; the latter with why not, and the end of the name of
    the class `AutoModelFor...` that serves them.
    """
    from mlora.model.labels import label_objective
    from mlora_ext.adapters.trained_parts import labels_of, task_of
    from mlora_ext.interop.read_folder import read_config

    classifiers: dict[str, list[str] | None] = {}
    unserved: dict[str, tuple[str, str]] = {}
    for name, folder in folders.items():
        try:
            config = read_config(folder)
        except ValueError as error:
            raise RunError(first_line(error)) from error
        objective = label_objective(config)
        if objective is None:
            continue
        task, problem = task_of(config), objective["name"]
        if task != "SEQ_CLS":
            unserved[name] = f"task_type {task} predicts no text", CLASSES[task]
        elif problem in ("regression", "multi_label_classification"):
            unserved[name] = f"problem_type {problem} predicts no single label", "SequenceClassification"
        else:
            classifiers[name] = labels_of(config).get("label_names")
    return classifiers, unserved


def served(
    chosen: Sequence[str],
    unserved: Mapping[str, tuple[str, str]],
    folders: Mapping[str, Path],
    *,
    asked: Sequence[str],
) -> list[str]:
    """Returns the chosen adapters without those that are not served, and says which these are.

    RunError if one of these was asked for by its name, or if none is left.
    """
    left = [name for name in chosen if name not in unserved]
    for name, (what, of_task) in unserved.items():
        if name in asked or not left:
            others = "" if not asked and not left else "name other adapters with --adapter, and "
            raise RunError(
                f"{name}: {what}; {others}load {folders[name]} with PEFT over AutoModelFor{of_task}"
            )
    for reason in dict.fromkeys(unserved.values()):
        names = ", ".join(name for name, one in unserved.items() if one == reason)
        what, of_task = reason
        print(f"warning: {names}: left out: {what}; use PEFT over AutoModelFor{of_task}", file=sys.stderr)
    return left


def template_of(source: Path, chosen: Sequence[str], given: Path | None) -> str | None:
    """Returns the file of the chat template for some adapters; None: the base model's own."""
    if given is not None:
        return str(given)
    if not os.path.isfile(source / "config.yaml"):
        beside = source / "chat_template.jinja"  # as `mlora export` writes it
        return str(beside) if beside.is_file() else None
    from mlora.run.handoff.adapters import open_run

    _, config, adapters = open_run(source)
    found = {adapters[name].chat_template(config) for name in chosen if name in adapters}
    if len(found) > 1:
        raise RunError(
            "--chat: these adapters were trained with different chat templates; name those of one template "
            "with --adapter, or give --chat-template"
        )
    return next(iter(found), None)
