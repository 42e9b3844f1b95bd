"""What ``mlora generate`` answers with, the adapters of a run or of a PEFT folder, and what they answer."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlora.errors import RunError, RustTold, file_line, first_line
from mlora.regular_files import read_regular

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mlora.engine.engine import Engine
    from mlora.model.base_info import BaseInfo


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


ROWS = 64  # prompts that a classifier reads at once
_FAILS = "the base model's tokenizer fails"


def load(
    base: BaseInfo,
    folders: dict[str, Path],
    bf16: bool,
    device: str | None,
    quantization: Mapping[str, Any] | None,
) -> Engine:
    """Returns an engine over a base model with the adapters of some folders; raises RunError."""
    import torch
    from safetensors import SafetensorError

    from mlora.cluster.device import choose_device
    from mlora.config.sections import QuantizationConfig
    from mlora.engine.engine import Engine
    from mlora.optim.optim_config import OptimConfig

    dtype = torch.bfloat16 if bf16 else torch.float32
    where = choose_device(device, dtype)
    try:
        how = None if quantization is None else QuantizationConfig.model_validate(quantization)
        engine = Engine(base.name, device=where, dtype=dtype, quantization=how)
        for name, folder in folders.items():
            engine.load(name, folder, OptimConfig(lr_scheduler_type="constant"))
    except (ValueError, OSError, SafetensorError) as error:
        raise RunError(first_line(error)) from error
    return engine


def tokens_of(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    chat: bool,
    template_file: str | None,
    *,
    end: bool = False,
) -> list[tuple[int, ...]]:
    """Returns the token ids of prompts, with `chat` as users' messages in a chat template.

    `end`: with the end token that some tokenizers append to a text, as classifiers are trained.
    """
    from mlora.data.chat import ChatTemplate, with_template
    from mlora.data.record import FormatError, text_ids

    if not chat:
        with RustTold(_FAILS):
            return [text_ids(tokenizer, prompt, end=end) for prompt in prompts]
    own = with_template(tokenizer, template_file, assistant_only_loss=False)
    if not own.chat_template:
        raise RunError(
            "--chat: the base model's tokenizer has no chat template; give one with --chat-template, or "
            "leave --chat out"
        )
    try:
        template = ChatTemplate(own)
        with RustTold(_FAILS):
            return [template.question(prompt) for prompt in prompts]
    except FormatError as error:
        raise RunError(f"--chat: {error}") from None


def check_prompts(prompts: Sequence[Sequence[int]], positions: int | None, *, completed: bool) -> None:
    """Raises RunError for prompts that are empty, or too long for the base model.

    `completed`: an adapter continues them; else all adapters only read them.
    """
    answer = " with the answer" if completed else ""
    for prompt in prompts:
        if not prompt:
            raise RunError("a prompt has no tokens; give at least one")
        if positions is not None and len(prompt) + completed > positions:
            raise RunError(
                f"a prompt has {len(prompt)} tokens, but the base model takes at most {positions}{answer}"
            )


def answers_of(
    engine: Engine,
    base: BaseInfo,
    chosen: Sequence[str],
    classifiers: Mapping[str, Sequence[str] | None],
    prompts: Sequence[tuple[int, ...]],
    read: Sequence[tuple[int, ...]],
    max_new_tokens: int,
    draw: dict[str, Any],
) -> dict[tuple[str, int], tuple[str, Any]]:
    """Returns what each adapter answers to each prompt, by its name and the prompt's index.

    An answer is its kind, `completion` or `label`, and what it says. Prompts come in their order, the
    adapters of each as they were chosen. `read` are the prompts as classifiers read them.
    """
    from mlora.model.generation import GenerationRequest, complete, text_of, without_end

    pairs = [(name, index) for index in range(len(prompts)) for name in chosen]
    completed = [pair for pair in pairs if pair[0] not in classifiers]
    requests = [
        GenerationRequest(name, prompts[index], _budget(prompts[index], max_new_tokens, base.max_positions))
        for name, index in completed
    ]
    tokenizer, outputs, ends = base.tokenizer(), list[tuple[int, ...]](), list[int]()
    try:
        if requests:
            ends = [*base.end_tokens()]
            outputs = complete(engine.model, requests, ends=ends, draw=draw)
        labels = _labels(engine, classifiers, read)
    except ValueError as error:
        raise RunError(str(error)) from error
    found: dict[tuple[str, int], tuple[str, Any]] = {
        pair: ("completion", text_of(tokenizer, without_end(output, ends)))
        for pair, output in zip(completed, outputs, strict=True)
    }
    found |= {pair: ("label", label) for pair, label in labels.items()}
    return {pair: found[pair] for pair in pairs}


def _labels(
    engine: Engine, classifiers: Mapping[str, Sequence[str] | None], prompts: Sequence[Sequence[int]]
) -> dict[tuple[str, int], int | str]:
    """Returns the label that each classifier predicts for each prompt, by its name and the prompt's index."""
    found: dict[tuple[str, int], int | str] = {}
    for start in range(0, len(prompts), ROWS) if classifiers else ():
        part = prompts[start : start + ROWS]
        for name, labels in engine.next_tokens(dict.fromkeys(classifiers, part)).items():
            called = classifiers[name]
            for place, label in enumerate(labels):
                found[name, start + place] = label if called is None else called[label]
    return found


def _budget(prompt: Sequence[int], wanted: int, positions: int | None) -> int:
    return wanted if positions is None else min(wanted, positions - len(prompt))
