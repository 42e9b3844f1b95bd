"""Images that a batch holds as one list of patches, as in Qwen2-VL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
"""The argument with the patches, and that with the size of each image in patches, `[images, 3]`."""


def patches_of(kwargs: Mapping[str, Any], tokens: Tensor, placeholders: Tensor) -> dict[str, Tensor]:
    """Returns the arguments in which each sample has equally many rows, in the order of the samples.

    Images come in the order of their placeholder tokens. So their rows are known by sample if all images have
    one size and all samples have equally many placeholders. Otherwise the result is empty.

    Args:
        kwargs: of the forward pass.
        tokens: `[B, S]`, with the placeholders.
        placeholders: `[n]` int64 tokens that stand for parts of images and videos.
    """
    if tokens.dim() != 2 or tokens.is_floating_point() or not placeholders.numel():
        return {}
    batch = tokens.shape[0]
    found: dict[str, Tensor] = {}
    for name, grid in _GRIDS.items():
        patches, sizes = kwargs.get(name), kwargs.get(grid)
        if not isinstance(patches, Tensor) or not isinstance(sizes, Tensor) or not sizes.numel():
            continue
        even = sizes.dim() == 2 and len(sizes) % batch == 0 and bool((sizes == sizes[:1]).all())
        if not even or len(patches) != int(sizes.prod(1).sum()):
            return {}
        found |= {name: patches, grid: sizes}
    counts = torch.stack([(tokens == token).sum(1) for token in placeholders.tolist()])
    return found if bool((counts == counts[:, :1]).all()) else {}
