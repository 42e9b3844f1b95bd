"""The oracle itself: gradcheck, its two ways to the gradient, and Philox's published answers."""

import pytest
import torch
from cases import CASES, make

from mlora_ext.ops import reference
from mlora_ext.ops.dropout import dropout_threshold, philox, philox_mask


@pytest.mark.parametrize("p", [None, 0.3])
def test_gradcheck(p: float | None) -> None:
    case = make([2, 3], [3, 0, 1, 2], [0, 1, -1, 1], d_in=5, d_out=4, p=p).to(torch.float64)
    x, weight, bias, _, _, *plan = case.operator_arguments()

    def function(x: torch.Tensor, *adapters: torch.Tensor) -> torch.Tensor:
        return reference.lora_linear(x, weight, bias, adapters[:2], adapters[2:], *plan)[0]

    assert torch.autograd.gradcheck(function, (x, *case.lora_a, *case.lora_b))


@pytest.mark.parametrize("name", CASES)
def test_explicit_backward_is_autograd(name: str) -> None:
    case = CASES[name](p=0.25).to(torch.float64)
    arguments = case.operator_arguments()
    with torch.no_grad():
        _, s = reference.lora_linear(*arguments)
        x, weight, _, lora_a, lora_b, *plan = arguments
        dx, da, db = reference.lora_linear_backward(
            case.dy.reshape(-1, weight.shape[0]), x, weight, lora_a, lora_b, s, *plan
        )
    expected = case.reference()[1:]
    for got, want in zip([dx.view_as(case.x), *da, *db], expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    """Random123's known-answer file, philox4x32-7."""
    assert tuple(int(word) for word in philox(counter, key)) == answer


def test_mask_frequency_and_independence() -> None:
    """Every seed, step, layer and row draws its own mask, each dropping about p."""
    rows, columns, p = 64, 1003, 0.1
    where = {"seed": 2**40 + 5, "step": 2, "layer": 1, "row0": 0}
    masks = [philox_mask(rows, columns, p=p, **where)]
    masks += [philox_mask(rows, columns, p=p, **{**where, key: value + 64}) for key, value in where.items()]
    for mask in masks:
        assert abs(1 - mask.double().mean() - p) < 5 * (p * (1 - p) / mask.numel()) ** 0.5
    for i, one in enumerate(masks):
        for other in masks[:i]:
            agreement = (one == other).double().mean()
            assert abs(agreement - (p**2 + (1 - p) ** 2)) < 0.01


def test_mask_follows_row0() -> None:
    whole = philox_mask(10, 33, p=0.5, seed=9, step=1, layer=0)
    tail = philox_mask(4, 33, p=0.5, seed=9, step=1, layer=0, row0=6)
    assert torch.equal(whole[6:], tail)
    assert dropout_threshold(0.5) == 32768
