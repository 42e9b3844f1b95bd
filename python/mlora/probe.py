"""Whether packed rows give a model's own logits: asked once, at load, before anything is trained on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mlora.attention import PackedSequences

if TYPE_CHECKING:
    from mlora.model import BaseModel

_LENGTHS = (13, 22)
_LONGEST_WINDOW = 64


def check_packing(base: BaseModel) -> None:
    """Compare packed rows with the unmodified model, one sequence after the other.

    Two random sequences, longer than a sliding window of up to 64 tokens. Relative tolerance 1e-4 in fp32,
    32 rounding errors of the dtype otherwise. The windows of longer-sighted layers are compared with the
    config.

    Args:
        base: not converted yet.

    Raises:
        ValueError: naming the model and the step that differs: the head, the attention layers' windows, or
            the packed rows.
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
    device = next(base.model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    window = getattr(config, "sliding_window", None) or 0
    extra = window if window <= _LONGEST_WINDOW else 0
    lengths = tuple(length + extra for length in _LENGTHS)
    ids = [torch.randint(base.vocab_size, (1, n), generator=generator).to(device) for n in lengths]
    try:
        own = torch.cat([base.model(input_ids=row, use_cache=False).logits[0] for row in ids])
        bodies = [base.body(input_ids=row, use_cache=False)[0][0] for row in ids]
    except (TypeError, RuntimeError, IndexError) as error:
        raise ValueError(f"base_model: {name} does not run: {_line(error)}") from error
    if not torch.isfinite(own).all():
        raise ValueError(f"base_model: {name}: its own logits are not all numbers; are its weights?")
    alone = base.logits(torch.cat(bodies))
    _require_close(alone, own, name, "its logits are not head(body(x)): unknown step after the head")
    sequences = PackedSequences.of(lengths, device)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0).to(device)
    try:
        with base.packed():
            packed = base.hidden(torch.cat(ids, dim=1), positions, sequences)
    except (TypeError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        raise ValueError(f"base_model: {name} cannot run packed rows: {_line(error)}") from error
    except ValueError as error:
        raise ValueError(f"base_model: {name} cannot be packed: {error}") from error
    if not sequences.windows:
        raise ValueError(f"base_model: {name} does not use Transformers' AttentionInterface")
    _check_windows(name, config, sequences)
    _require_close(base.logits(packed), own, name, "packed sequences give other logits than unpacked ones")


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
            raise ValueError(f"base_model: {name} has layers of type {kind}, which cannot be packed")


def _check_windows(name: str, config: Any, sequences: PackedSequences) -> None:
    """Every layer that the config gives a window must have asked attention for it."""
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
