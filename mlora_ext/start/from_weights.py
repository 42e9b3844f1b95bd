"""Initialises an adapter so that it makes up for the base's quantisation: initialise_from_weights.

Letters: D = d_in, O = d_out, R = rank, K = min(O, D).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.kind import LayerSpec
from ..adapters.lora import set_values
from ..adapters.lora_config import needs_weights
from ..errors import AdapterError, NamedError
from ..frozen.quantized.families import is_quantized
from ..layers.adapter_weights import adapter_layers
from ..layers.linear import MultiLoRALinear
from ..routing.router import router_of
from .statistics import signs_of

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SMALL, _PART = 512, 32
"""A matrix of a smaller K, or of fewer than so many K a vector, is decomposed whole: that is as fast."""
_ROWS = 64
"""Rows of W that are compared at once: the original needs no copy in fp32."""
ReadWeight = Callable[[str], Tensor]
"""Returns the weight that a layer had before it was quantised; ValueError if there is none."""


def initialise_from_weights(model: nn.Module, name: str, folder: str | os.PathLike[str]) -> None:
    """Gives an adapter of `init_lora_weights="loftq"` its initial values from the base's original weights.

    In each quantised layer, `scaling · B A` becomes the best approximation of rank R of `W - W_q`, where W is
    the original weight and W_q the dequantised one (LoftQ: Li et al., 2023, arXiv 2310.08659, section 3, for
    a W_q that is given). For a scaling of 1 it is what PEFT's `replace_lora_weights_loftq` computes, which
    takes no account of the scaling. Nothing else of the model changes. Layers that are not quantised begin
    as plain LoRA.

    Reads one layer's weight at a time.

    Args:
        model: converted, with a quantised base.
        name: of the adapter.
        folder: of the original model, with `model.safetensors`, or `model.safetensors.index.json` and its
            files; its tensors have the model's names, with or without the prefix of its base model.

    Raises:
        ValueError: the model has no such adapter, its config does not say `loftq`, the folder has no
            safetensors or lacks a layer's weight, or a weight is not the one that was quantised.

    Example:
        >>> config = LoraConfig(init_lora_weights="loftq", loftq_config=LoftQConfig())
        >>> model = convert_model(quantised_model, {"a": config})
        >>> initialise_from_weights(model, "a", "path/to/original")
    """
    router = router_of(model)
    router.check_names("name", [name])
    how = router.adapters[name].config.init_lora_weights
    if not needs_weights(router.adapters[name].config):
        raise AdapterError(name, f"init_lora_weights={how!r} needs no weights; expected 'loftq'")
    prefix = getattr(model, "base_model_prefix", "")
    start_from_weights(model, name, weights_in(Path(folder), prefix))


def start_from_weights(model: nn.Module, name: str, read: ReadWeight, only: str | None = None) -> int:
    """Writes the initial values of an adapter's quantised layers in this process; returns how many they are.

    `only`: the one layer that gets its values now; default: all.

    Raises ValueError, naming the layer, if its original weight is missing or is that of another model.
    """
    layers = {key: layer for key, layer in layers_of(model, name).items() if only in (None, key)}
    for key, layer in layers.items():
        try:
            set_values(layer.parameters_of(name), _nearest(read(key), layer, layer.specs[name]))
        except ValueError as error:
            raise AdapterError(name, f"layer {key}: {error}") from error
    router_of(model).adapters[name].awaits_start = False
    return len(layers)


def layers_of(model: nn.Module, name: str) -> dict[str, MultiLoRALinear]:
    """Returns the layers of an adapter that are quantised and in this process, by their names."""
    return {
        key: layer
        for key, layer in adapter_layers(model, name).items()
        if isinstance(layer, MultiLoRALinear) and is_quantized(layer)
        if not layer.parameters_of(name)["lora_A"].is_meta
    }


@torch.no_grad()
def _nearest(original: Tensor, layer: MultiLoRALinear, spec: LayerSpec) -> dict[str, Tensor]:
    """Returns `lora_A [R, D]` and `lora_B [O, R]` with `W_q + scaling · B A` nearest to the original W.

    Where a layer is too narrow for the rank, the other rows and columns are zeros. Where the quantisation
    changed nothing, A and B stay as they are.
    """
    residual_OD = _residual(original, layer)
    if not residual_OD.any():
        return {}
    u_OR, s_R, vh_RD = leading_svd(residual_OD, spec.rank)
    missing = max(0, spec.rank - len(s_R))
    root_R1 = (s_R / abs(spec.scaling)).sqrt().unsqueeze(1)
    signs_R1 = signs_of(vh_RD)  # of both halves of a pair: their product stays
    a_RD = vh_RD * root_R1 * signs_R1
    b_RO = u_OR.t() * root_R1 * signs_R1 * (1 if spec.scaling > 0 else -1)
    pad = (0, 0, 0, missing)
    return {"lora_A": nn.functional.pad(a_RD, pad), "lora_B": nn.functional.pad(b_RO, pad).t()}


def _residual(original: Tensor, layer: Any) -> Tensor:
    """Returns `W - W_q [O, D]` in fp32; ValueError if W_q is not a quantised form of the original.

    GPT-2's `Conv1D` keeps its weight as `[D, O]`, and a quantised layer no longer says so: the nearer of both
    ways counts.
    """
    if not original.is_floating_point() or original.dtype.itemsize < 2:
        dtype = str(original.dtype).removeprefix("torch.")
        raise ValueError(f"its weight in the files is quantised ({dtype}); give the original model's folder")
    shape = layer.frozen.shape
    ways = [way for way in (original, original.t()) if way.shape == shape]
    if not ways:
        raise ValueError(
            f"its weight in the files has the shape {list(original.shape)}, and the quantised one "
            f"{list(shape)}; give the original model's folder"
        )
    residual_OD = layer.frozen.dense().float()  # a tensor of its own, which becomes the residual in place
    size = residual_OD.norm()
    given = min(ways, key=lambda way: _distance(way, residual_OD)) if len(ways) > 1 else ways[0]
    for row in range(0, len(given), _ROWS):
        part = slice(row, row + _ROWS)
        residual_OD[part].sub_(given[part].to(residual_OD.device)).neg_()
    if not torch.stack(residual_OD.aminmax()).isfinite().all():
        raise ValueError("its weight in the files contains NaN or infinity; give the original model's folder")
    lost = float(residual_OD.norm() / size)
    if lost > layer.frozen.most_lost:
        raise ValueError(
            f"its weight in the files is not the one that was quantised: the numbers differ by {lost:.0%} "
            f"of its norm, and its quantisation explains {layer.frozen.most_lost:.0%} at most; give the "
            "original model's folder"
        )
    return residual_OD


def _distance(one: Tensor, other: Tensor) -> float:
    """Returns the norm of the difference of two matrices, of which some rows are computed at a time."""
    pairs = zip(one.split(_ROWS), other.split(_ROWS), strict=True)
    return float(torch.stack([(b - a.to(b.device)).norm() for a, b in pairs]).norm())


def leading_svd(matrix_OD: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the largest singular values and their vectors: `U [O, R]`, `s [R]` and `Vᵀ [R, D]`, fp32.

    R is `min(count, K)`. Of a large matrix and a small `count`, the implicitly restarted Lanczos iteration
    (Lehoucq, Sorensen and Yang 1998, "ARPACK Users' Guide") finds these vectors alone, in fp64 on the CPU, to
    the precision of fp64. There, singular values that lie close together leave the vectors of an fp32
    decomposition less exact. If the iteration does not converge, the whole matrix is decomposed.
    """
    least = min(matrix_OD.shape)
    if least >= _SMALL and count * _PART <= least:
        found = _searched(matrix_OD, count)
        if found is not None:
            return found
    u_OK, s_K, vh_KD = torch.linalg.svd(matrix_OD, full_matrices=False)
    return u_OK[:, :count], s_K[:count], vh_KD[:count]


def _searched(matrix_OD: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns what `leading_svd` does, or None if the iteration does not converge; always the same bits."""
    import numpy
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, svds

    begin = numpy.random.default_rng(0).standard_normal(min(matrix_OD.shape))
    matrix: Any = matrix_OD.cpu().double().numpy()
    # of the matrix itself SciPy makes a transposed copy
    products = LinearOperator(
        matrix.shape,
        dtype=matrix.dtype,
        matvec=matrix.__matmul__,
        rmatvec=matrix.T.__matmul__,
        matmat=matrix.__matmul__,
        rmatmat=matrix.T.__matmul__,
    )
    try:
        u, s, vh = svds(products, k=count, v0=begin)
    except ArpackNoConvergence:
        return None
    order = numpy.argsort(-s)
    found = (u[:, order], s[order], vh[order])
    return tuple(torch.from_numpy(one).to(matrix_OD) for one in found)  # type: ignore[return-value]


def weights_in(folder: Path, prefix: str) -> Callable[[str], Tensor]:
    """Returns a function that reads a layer's weight; it raises ValueError if the folder lacks it.

    Args:
        folder: with one file or an index of several.
        prefix: of the base model inside a model with a head, such as `model`; the files may leave it out, or
            have it where the layer's name does not.

    Raises:
        ValueError: the folder has neither file, or one cannot be read.
    """
    files = _files(folder)

    def read(layer: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        plain = layer.removeprefix(f"{prefix}.")
        keys = [f"{name}.weight" for name in (layer, plain, f"{prefix}.{layer}")]
        key = next((key for key in keys if key in files), None)
        if key is None:
            raise ValueError(f"{folder} has no tensor {keys[0]}; give the original model's folder")
        try:
            with safe_open(folder / files[key], framework="pt") as file:
                tensor: Tensor = file.get_tensor(key)
                return tensor
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / files[key]} cannot be read: {error}") from error

    return read


def _files(folder: Path) -> dict[str, str]:
    """Returns the name of each tensor's file."""
    from safetensors import SafetensorError, safe_open

    try:
        if (folder / WHOLE).is_file():
            with safe_open(folder / WHOLE, framework="pt") as file:
                return dict.fromkeys(file.keys(), WHOLE)
        if (folder / INDEX).is_file():
            found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
            return found
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise NamedError("folder", f"the weights in {folder} cannot be read: {error}") from error
    raise NamedError(
        "folder",
        f"{folder} has neither {WHOLE} nor {INDEX}; save the original model there with save_pretrained",
    )
