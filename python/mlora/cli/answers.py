"""What ``mlora generate`` prints: completions and labels of several adapters, in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlora.errors import RunError, RustTold, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mlora.engine.engine import Engine
    from mlora.model.base_info import BaseInfo

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
    from mlora.config.quantization_config import QuantizationConfig
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
