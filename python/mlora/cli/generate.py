"""``mlora generate``, registered by `mlora.cli.app`: completes prompts with several adapters."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from mlora.cli.answers import (
    answers_of,
    by_answer,
    check_prompts,
    chosen_of,
    find_adapters,
    load,
    of_checkpoints,
    served,
    template_of,
    tokens_of,
)
from mlora.cli.common import begin, command, quantized_files
from mlora.errors import RunError


def generate(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="a run's output_dir or a PEFT adapter folder")
    ],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="a prompt; may be repeated")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="a jsonl file of objects with 'prompt' (or 'text'), or a text file, one prompt a line"
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter", "-a", help="an adapter of the run, or __base__; may be repeated; default: all"
        ),
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="the base model; default: the one that SOURCE names")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="the most new tokens per prompt")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token each time")] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="draw from the most likely tokens that together have this probability")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="draw from this number of the most likely tokens; 0: from all")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="the seed of the random draws")] = 0,
    chat: Annotated[
        bool, typer.Option(help="each prompt is a user's message, put into the chat template")
    ] = False,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="with --chat: a Jinja file; default: the template that the adapters were trained with",
        ),
    ] = None,
    bf16: Annotated[bool, typer.Option(help="load the base model in bf16")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:<index>")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="print JSON objects")] = False,
) -> None:
    """Complete each prompt with each adapter, all in one batch. A classifier predicts its label."""
    with command():
        if chat_template is not None and not chat:
            raise RunError("--chat-template is for --chat; add that, or remove it")
        texts = _read_prompts(prompt or [], prompts)
        named, folders, quantization = find_adapters(source)
        begin(quantized=quantization is not None or quantized_files(base_model or named))
        stack = context.with_resource(ExitStack())
        folders |= of_checkpoints(source, adapter or [], stack)
        import torch

        from mlora.model.base_info import BaseInfo, doubt_of_base
        from mlora.model.generation import sampling

        draw = sampling(temperature, top_p, top_k)
        chosen = chosen_of(source, list(folders), adapter or [])
        if not (base_model or named):
            raise RunError(f"{source}: names no base model; give it with --base-model")
        base = BaseInfo(base_model or named)
        template = template_of(source, chosen, chat_template) if chat else None
        tokens, read = (tokens_of(base.tokenizer(), texts, chat, template, end=end) for end in (False, True))
        wanted = {name: folders[name] for name in chosen if name != "__base__"}
        classifiers, unserved = by_answer(wanted)
        chosen = served(chosen, unserved, wanted, asked=adapter or [])
        wanted = {name: folder for name, folder in wanted.items() if name in chosen}
        for name, folder in wanted.items():
            if doubt := doubt_of_base(folder, base):
                print(f"warning: {name}: {doubt}", file=sys.stderr)
        completed = any(name not in classifiers for name in chosen)
        check_prompts(tokens if completed else [], base.max_positions, completed=True)
        check_prompts(read if classifiers else [], base.max_positions, completed=False)
        if base_model and (base.quantization or os.path.isfile(source / "config.yaml")):
            quantization = None
        elif quantization and not os.path.isfile(source / "config.yaml"):
            how = f"{quantization['method']}, as {source} was trained"
            print(f"base model: {base.name}, quantized with {how}", file=sys.stderr)
        with _enough_memory(f"loading {base.name}", "--bf16 takes half the memory"):
            engine = load(base, wanted, bf16, device, quantization)
        torch.manual_seed(seed)
        with _enough_memory("completing prompts", "give fewer prompts, or lower --max-new-tokens"):
            answers = answers_of(engine, base, chosen, classifiers, tokens, read, max_new_tokens, draw)
        for (name, index), (kind, answer) in answers.items():
            print(_line(name, texts[index], kind, answer, json_lines=json_lines, chat=chat))


def _line(name: str, prompt: str, kind: str, answer: Any, *, json_lines: bool, chat: bool) -> str:
    """Returns the line of an answer."""
    if json_lines:
        escaped = not re.fullmatch("utf-?8", sys.stdout.encoding or "", re.IGNORECASE)
        return json.dumps({"adapter": name, "prompt": prompt, kind: answer}, ensure_ascii=escaped)
    if kind == "label":
        return f"[{name}] {prompt} | label {answer}"
    return f"[{name}] {prompt}{' | ' if chat else ''}{answer}"


def _read_prompts(texts: Sequence[str], file: Path | None) -> list[str]:
    """Returns prompts given one by one, then those of a file: jsonl with ``prompt``, or one a line."""
    from mlora.data.dataset import read_prompt_lines

    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RunError(f"--prompt {text!r}: is not UTF-8 at character {error.start}") from error
    prompts = list(texts) + (read_prompt_lines(file) if file else [])
    if not prompts:
        raise RunError("no prompt: give --prompt TEXT or --prompts FILE")
    return prompts


@contextmanager
def _enough_memory(action: str, advice: str) -> Iterator[None]:
    """Turns running out of memory into a RunError."""
    from mlora_ext.out_of_memory import is_out_of_memory  # imports torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(f"out of memory while {action}; {advice}") from error
