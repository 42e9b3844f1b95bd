"""Checks once, at load, that packed rows give a model's own logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mlora.model.attention import PackedSequences
from mlora.model.base_model import BaseModel

_LENGTHS = (13, 22)
_LONGEST_WINDOW = 64


def check_packing(base: BaseModel) -> None:
    """Compares packed rows with the model on one sequence after the other, before it is converted.

    Uses two random sequences, longer than a sliding window of up to 64 tokens; longer windows are compared
    with the config. Relative tolerance: 1e-4 in fp32, else 32 rounding errors of the dtype. A stage is
    compared on its own part: from ids or random hidden states to hidden states or logits.

    Raises:
        ValueError: names the model and what differs: the head, the attention layers' windows, the packed
            rows, or a stage's blocks that read more than the hidden state.
    """
    name = type(base.model).__name__
    config = base.model.config.get_text_config()
    _check_layer_types(name, config)
    training = base.model.training
    base.model.eval()
    try:
        with torch.no_grad():
            _compare(base, name, config)
    finally:
        base.model.train(training)


def _compare(base: BaseModel, name: str, config: Any) -> None:
    device = next(p.device for p in base.model.parameters() if base.cut is None or not p.is_meta)
    window = getattr(config, "sliding_window", None) or 0
    extra = window if window <= _LONGEST_WINDOW else 0
    lengths = tuple(length + extra for length in _LENGTHS)
    ids, states = _inputs(base, lengths, device)
    if states is not None:
        _check_cut(base, states[0])
    try:
        own = _alone(base, name, ids, states)
    except (TypeError, RuntimeError, IndexError) as error:
        raise ValueError(f"base_model: {name} does not run: {_line(error)}") from error
    sequences = PackedSequences.of(lengths, device)
    positions = torch.cat([torch.arange(n, device="cpu") for n in lengths]).unsqueeze(0).to(device)
    received = None if states is None else torch.cat(states)
    try:
        with base.packed():
            packed = base.hidden(torch.cat(ids, dim=1), positions, sequences, received)
    except (TypeError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        raise ValueError(f"base_model: {name} cannot run packed rows: {_line(error)}") from error
    except ValueError as error:
        raise ValueError(f"base_model: {name} cannot be packed: {error}") from error
    if not sequences.windows:
        raise ValueError(f"base_model: {name} does not use Transformers' AttentionInterface")
    _check_windows(name, config, sequences)
    if base.is_last:
        step = "packed and unpacked sequences give different logits"
        _require_close(base.logits(packed), own, name, step)
    else:
        # By row: some models have a few huge values in the first row of a sequence.
        size = own.abs().amax(-1, keepdim=True)
        step = "packed and unpacked sequences give different hidden states"
        _require_close(packed / size, own / size, name, step)


def _inputs(
    base: BaseModel, lengths: tuple[int, ...], device: torch.device
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Returns random ids `[1, L]`, and hidden states `[L, D]` for a stage that is not the first.

    The hidden states are small, as embeddings are, so that what the blocks add to them counts.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    ids = [
        torch.randint(base.vocab_size, (1, n), generator=generator, device="cpu").to(device) for n in lengths
    ]
    if base.span is None or base.span.is_first:
        return ids, None
    dtype = next(p.dtype for p in base.model.parameters() if not p.is_meta)
    states = [0.1 * torch.randn(n, base.hidden_size, generator=generator, device="cpu") for n in lengths]
    return ids, [state.to(device, dtype) for state in states]


def _alone(base: BaseModel, name: str, ids: list[Tensor], states: list[Tensor] | None) -> Tensor:
    """Returns the result of the model or stage, one sequence after the other, with its usual attention."""
    received: Sequence[Tensor | None] = states or [None] * len(ids)
    parts = list(zip(ids, received, strict=True))
    bodies = torch.cat([_hidden(base, base.run(base.body, *part, use_cache=False)[0]) for part in parts])
    if not base.is_last:
        if not torch.isfinite(bodies).all():
            raise ValueError(
                f"base_model: {name}: its hidden states contain NaN or infinity; check its weights"
            )
        return bodies
    own = torch.cat([base.run(base.model, *part, use_cache=False).logits[0] for part in parts])
    if not torch.isfinite(own).all():
        raise ValueError(f"base_model: {name}: its own logits contain NaN or infinity; check its weights")
    step = "its logits are not head(body(x)): unknown step after the head"
    _require_close(base.logits(bodies), own, name, step)
    return own


def _hidden(base: BaseModel, output: Tensor) -> Tensor:
    """Returns `[L, D]` from the output of the body (`[1, L, D]`) or of a stage (`[L, D]`)."""
    if not base.is_last and output.shape[1:] != (base.hidden_size,):
        raise ValueError(
            f"base_model: {type(base.model).__name__} cannot be cut into stages: expected its blocks to "
            f"return {base.hidden_size} values per token, got hidden states of shape {list(output.shape)}"
        )
    return output.flatten(0, -2)


def _check_cut(base: BaseModel, state: Tensor) -> None:
    """Checks that the stage's blocks read the hidden state only, not the embedding or earlier blocks."""
    assert base.cut is not None
    noise = torch.Generator("cpu").manual_seed(1)
    try:
        zeros = base.cut.call(base.body, None, state, use_cache=False)[0]
        other = base.cut.call(base.body, None, state, noise=noise, use_cache=False)[0]
    except (TypeError, AttributeError, LookupError, ValueError, RuntimeError, StopIteration) as error:
        raise _not_sound(base, f" ({type(error).__name__}: {_line(error)})") from error
    if not torch.allclose(zeros, other, rtol=0, atol=0, equal_nan=True):
        raise _not_sound(base)


def _not_sound(base: BaseModel, reason: str = "") -> ValueError:
    assert base.cut is not None
    return ValueError(
        f"base_model: {type(base.model).__name__} cannot be cut into stages: block {base.cut.span.first} or "
        f"a later one uses more than the hidden state of the block before{reason}"
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _require_close(got: Tensor, expected: Tensor, name: str, step: str) -> None:
    tolerance = (
        1e-4 if expected.dtype in (torch.float32, torch.float64) else 32 * torch.finfo(expected.dtype).eps
    )
    error = (got.double() - expected.double()).abs().max() / expected.double().abs().max()
    if not float(error) <= tolerance:
        raise ValueError(
            f"base_model: {name} cannot be trained here: {step} (relative error {float(error):.1e})"
        )


def _check_layer_types(name: str, config: Any) -> None:
    for kind in sorted(set(getattr(config, "layer_types", None) or ())):
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"base_model: {name} has layers of type {kind}; mlora trains models of full and "
                "sliding-window attention only"
            )


def _check_windows(name: str, config: Any, sequences: PackedSequences) -> None:
    """Checks that every layer asked attention for the window that the config gives it."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return
    for layer, asked in sequences.windows.items():
        expected = window if not kinds or layer is None or kinds[layer] == "sliding_attention" else None
        if asked != expected:
            raise ValueError(
                f"base_model: {name}, layer {layer}: the config says sliding window {expected}, the layer "
                f"asked attention for {asked}"
            )
