"""GPTQ and AWQ weights without gptqmodel: integers that are packed here, and a formula for what they mean.

Letters: D = d_in, O = d_out, G groups of inputs, n integers in a word.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mlora_ext.frozen.quantized import gptqmodel
from mlora_ext.frozen.quantized.awq import AwqWeight
from mlora_ext.frozen.quantized.gptq import GptqWeight

_PLACES_OF_AWQ = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}
KINDS = {
    **{f"GPTQ of {bits} bits{how}": ("gptq", bits, how) for bits in (2, 4, 8) for how in ("", ", act-order")},
    "AWQ of 4 bits": ("awq", 4, ""),
}
SHAPES = {"several groups": (160, 96, 32), "one group": (160, 64, 160), "a last word in part": (100, 64, 50)}


def words(numbers: Tensor, bits: int, dim: int, places: dict[int, int] | None = None) -> Tensor:
    """Packs integers along a dimension; the missing ones of the last word are 0.

    `places`: of each integer in its word; default: its own number, from the lowest bits on.
    """
    lines = numbers.movedim(dim, -1)
    per_word = 32 // bits
    packed = torch.zeros(*lines.shape[:-1], -(-lines.shape[-1] // per_word), dtype=torch.int64)
    for index in range(lines.shape[-1]):
        place = index % per_word
        packed[..., index // per_word] += lines[..., index] << bits * (places[place] if places else place)
    return torch.where(packed < 2**31, packed, packed - 2**32).int().movedim(-1, dim).contiguous()


def layer_and_weight(kind: str, shape: tuple[int, int, int]) -> tuple[nn.Module, Tensor]:
    """Returns a layer as gptqmodel makes one, of random integers, and its weight `[O, D]` in fp16."""
    (method, bits, how), (d_in, d_out, size) = KINDS[kind], shape
    group_D = torch.arange(d_in) // size
    if how:
        group_D = group_D[torch.randperm(d_in)]
    groups = int(group_D.max()) + 1
    numbers_DO, zeros_GO = (torch.randint(2**bits, (rows, d_out)) for rows in (d_in, groups))
    scales_GO = (0.1 + torch.rand(groups, d_out)).half()
    layer = nn.Module()
    layer.in_features, layer.out_features, layer.bits = d_in, d_out, bits
    places = _PLACES_OF_AWQ if method == "awq" else None
    layer.register_buffer("qweight", words(numbers_DO, bits, 1 if method == "awq" else 0, places))
    layer.register_buffer("qzeros", words(zeros_GO, bits, 1, places))
    layer.register_buffer("scales", scales_GO)
    if method == "gptq":
        layer.register_buffer("g_idx", group_D.int())
    return layer, (scales_GO[group_D] * (numbers_DO - zeros_GO[group_D])).t()


@pytest.mark.parametrize("at_once", [1, 7 * 32, 64 * 64, gptqmodel._AT_ONCE])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_those_of_the_formula(
    shape: str, kind: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`scale (q - zero)` bit for bit, in one part or in many, for all rows and for some."""
    monkeypatch.setattr(gptqmodel, "_AT_ONCE", at_once)
    monkeypatch.setattr(gptqmodel, "_AT_ONCE_ELSEWHERE", at_once)
    source, expected = layer_and_weight(kind, SHAPES[shape])
    rows, layer = len(expected), nn.Module()
    layer.register_parameter("weight", None)
    frozen = (AwqWeight if kind.startswith("AWQ") else GptqWeight)(layer, source, torch.float32)
    for begin, end in ((0, rows), (32, 64), (frozen.row_step, rows)):
        for dtype in (torch.float16, torch.float32):
            assert torch.equal(frozen.rows(begin, end, dtype), expected[begin:end].to(dtype))
