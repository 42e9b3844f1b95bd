"""Completes prompts with several adapters in one batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt for one adapter, or for ``__base__``."""

    adapter: str
    input_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: 0 = always the most likely token.
        top_p: draw from the most likely tokens that together reach this probability.
        top_k: draw from this many most likely tokens; 0 = all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature: must be at least 0 and finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k: must be at least 0, got {self.top_k}")


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the id of a tokenizer's end token; ValueError if it has none."""
    found = tokenizer.eos_token_id
    if not isinstance(found, int):
        raise ValueError("the base model's tokenizer has no end token (eos_token)")
    return found


def text_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], *, special: bool = False) -> str:
    """Returns the text of tokens with spaces as they are; `special` keeps special tokens (end token)."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


@torch.no_grad()
def complete(
    model: nn.Module,
    requests: Sequence[GenerationRequest],
    *,
    end_token: int,
    rows: int = 64,
    sampling: Sampling | None = None,
) -> list[tuple[int, ...]]:
    """Completes prompts; prompts of equal length share batches of up to `rows`, whatever their adapters.

    Nothing is padded, so a prompt never meets another row's padding. Its completion is the same alone and in
    a batch, up to the rounding of matrix products with another number of rows. The model, converted by
    ``mlora_ext.convert_model``, is in evaluation mode meanwhile. Without `sampling`, the most likely token is
    taken. ValueError if a prompt has no tokens.

    Returns:
        Each request's new tokens: up to and with the end token, or ``max_new_tokens`` of them.
    """
    results: list[tuple[int, ...]] = [()] * len(requests)
    training = model.training
    model.eval()
    try:
        for batch in _batches(requests, rows):
            for index, tokens in zip(
                batch, _generate(model, [requests[i] for i in batch], end_token, sampling), strict=True
            ):
                results[index] = tokens
    finally:
        model.train(training)
    return results


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
    model: Any, requests: Sequence[GenerationRequest], end_token: int, sampling: Sampling | None
) -> list[tuple[int, ...]]:
    device = next(model.parameters()).device
    ids = torch.tensor([request.input_ids for request in requests], device=device)
    draw: dict[str, Any] = {"do_sample": False}
    if sampling is not None and sampling.temperature > 0:
        draw = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        adapter_names=[request.adapter for request in requests],
        max_new_tokens=max(request.max_new_tokens for request in requests),
        eos_token_id=end_token,
        pad_token_id=end_token,
        **draw,
    )
    new = output[:, ids.shape[1] :].tolist()
    return [
        _cut(row[: request.max_new_tokens], end_token) for row, request in zip(new, requests, strict=True)
    ]


def _cut(tokens: Sequence[int], end_token: int) -> tuple[int, ...]:
    length = tokens.index(end_token) + 1 if end_token in tokens else len(tokens)
    return tuple(tokens[:length])
