"""Completes prompts with several adapters in one batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from mlora.errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt for one adapter, or for ``__base__``."""

    adapter: str
    input_ids: tuple[int, ...]
    max_new_tokens: int


def sampling(temperature: float, top_p: float, top_k: int) -> dict[str, Any]:
    """Returns how to draw tokens, as arguments of Transformers' ``generate``; RunError for a wrong number.

    Args:
        temperature: 0 = always the most likely token.
        top_p: draw from the most likely tokens that together reach this probability.
        top_k: draw from this many most likely tokens; 0 = all.
    """
    if not 0 <= temperature < math.inf:
        raise RunError(f"temperature: must be at least 0 and finite, got {temperature}")
    if not 0 < top_p <= 1:
        raise RunError(f"top_p: must be above 0 and at most 1, got {top_p}")
    if not temperature:
        return {}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}


def text_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], *, special: bool = False) -> str:
    """Returns the text of tokens with spaces as they are; `special` keeps special tokens (end token)."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def without_end(tokens: Sequence[int], ends: Sequence[int]) -> Sequence[int]:
    """Returns an answer without the end token that it may end with."""
    return tokens[:-1] if tokens and tokens[-1] in ends else tokens


@torch.no_grad()
def complete(
    model: Any,
    requests: Sequence[GenerationRequest],
    *,
    ends: Sequence[int],
    rows: int = 64,
    draw: Mapping[str, Any] | None = None,
    check: Callable[[], None] | None = None,
) -> list[tuple[int, ...]]:
    """Completes prompts; prompts of equal length share batches of up to `rows`, whatever their adapters.

    Nothing is padded, so a prompt never meets another row's padding. Its completion is the same alone and in
    a batch, up to the rounding of matrix products with another number of rows. The model, converted by
    ``mlora_ext.convert_model``, is in evaluation mode meanwhile, and its `generation_config` says nothing: a
    base's repetition penalty would change which token is the most likely. `draw` is from `sampling`; without
    it, the most likely token is taken. `check` is called after each token; what it raises ends the work.
    ValueError if a prompt has no tokens.

    Returns:
        Each request's new tokens: up to and with the first of `ends`, or ``max_new_tokens`` of them.
    """
    results: list[tuple[int, ...]] = [()] * len(requests)
    stopping = None if check is None else [_Checking(check)]
    training, own = model.training, model.generation_config
    model.eval()
    model.generation_config = GenerationConfig()
    try:
        for batch in _batches(requests, rows):
            chosen = [requests[index] for index in batch]
            answers = _generate(model, chosen, ends, draw or {}, stopping)
            for index, tokens in zip(batch, answers, strict=True):
                results[index] = tokens
    finally:
        model.train(training)
        model.generation_config = own
    return results


class _Checking:
    """Calls a function after each token of Transformers' ``generate``, and never stops a row itself."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self._check()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _batches(requests: Sequence[GenerationRequest], rows: int) -> Iterator[list[int]]:
    groups: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        if not request.input_ids:
            raise ValueError("a prompt has no tokens; give at least one")
        groups.setdefault(len(request.input_ids), []).append(index)
    for length in sorted(groups):
        # similar budgets share a batch, so that it ends soon after its shortest completion
        group = sorted(groups[length], key=lambda index: requests[index].max_new_tokens)
        yield from (group[start : start + rows] for start in range(0, len(group), rows))


def _generate(
    model: Any,
    requests: Sequence[GenerationRequest],
    ends: Sequence[int],
    draw: Mapping[str, Any],
    stopping: list[_Checking] | None,
) -> list[tuple[int, ...]]:
    device = next(model.parameters()).device
    ids = torch.tensor([request.input_ids for request in requests], device=device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        adapter_names=[request.adapter for request in requests],
        generation_config=GenerationConfig(
            max_new_tokens=max(request.max_new_tokens for request in requests),
            eos_token_id=list(ends),
            pad_token_id=ends[0],
            **{"do_sample": False, **draw},
        ),
        stopping_criteria=stopping,
    )
    new = output[:, ids.shape[1] :].tolist()
    rows = (row[: request.max_new_tokens] for row, request in zip(new, requests, strict=True))
    return [tuple(_ended(row, ends)) for row in rows]


def _ended(row: list[int], ends: Sequence[int]) -> list[int]:
    """Returns a row up to and with the first end token; what follows pads it."""
    return next((row[: place + 1] for place, token in enumerate(row) if token in ends), row)
