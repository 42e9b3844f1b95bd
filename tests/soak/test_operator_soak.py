"""Long randomised runs of the operator: random layouts, ranks, dtypes and strides against the fp64 oracle.

Run by `make soak`; `MINUTES` of work, the seeds printed so that a failure can be repeated.
"""

import math
import os
import random
import time

import pytest
import torch

import mlora_ext as mx
from tests.tolerances import assert_as_exact, in_other_orders

MINUTES = 5.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_case(rng: random.Random) -> dict:
    """One random call of the operator, as plain data."""
    adapters = rng.randint(0, 9)
    segments = rng.randint(1, 12)
    return {
        "lengths": [rng.choice([0, 1, 2, 3, 17, 64, 129, rng.randint(0, 300)]) for _ in range(segments)],
        "owners": [rng.randint(-1, adapters - 1) for _ in range(segments)],
        "ranks": [rng.choice([1, 2, 3, 4, 7, 8, 13, 16, 31, 64, 65]) for _ in range(adapters)],
        # from 8 on: the gradients of narrower layers are few numbers that may cancel; unit tests have those
        "d_in": rng.choice([8, 9, 16, 33, 64, 100, 256]),
        "d_out": rng.choice([8, 11, 16, 47, 64, 128, 300]),
        "dtype": rng.choice(DTYPES),
        "fp32_adapters": rng.random() < 0.5,
        "bias": rng.random() < 0.5,
        "dropout": rng.random() < 0.6,
        "strided": rng.random() < 0.3,
        "seed": rng.randint(0, 2**31),
    }


def build(case: dict) -> tuple:
    """Tensors, layout and dropout of a case."""
    torch.manual_seed(case["seed"])
    rows = sum(case["lengths"])
    dtype, adapter_dtype = case["dtype"], torch.float32 if case["fp32_adapters"] else case["dtype"]
    width = case["d_in"] + (8 if case["strided"] else 0)
    x = torch.randn(rows, width).to(dtype)[:, : case["d_in"]]
    weight = (torch.randn(case["d_out"], case["d_in"]) / case["d_in"] ** 0.5).to(dtype)
    bias = torch.randn(case["d_out"]).to(dtype) if case["bias"] else None
    a = [(torch.randn(r, case["d_in"]) / case["d_in"] ** 0.5).to(adapter_dtype) for r in case["ranks"]]
    b = [torch.randn(case["d_out"], r).to(adapter_dtype) for r in case["ranks"]]
    scaling = [0.25 + i for i in range(len(case["ranks"]))]
    layout = mx.SegmentLayout.from_lengths(case["lengths"], adapters=case["owners"])
    dropout = None
    if case["dropout"] and case["ranks"]:
        n = len(case["ranks"])
        dropout = mx.LoRADropout(p=[(i % 3) * 0.2 for i in range(n)], seeds=list(range(n)), step=3, layer=2)
    return x, weight, bias, a, b, scaling, layout, dropout


def gradients(backend: str, inputs: tuple, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Output and gradients of one call, all inputs in `dtype` where it is given."""
    x, weight, bias, a, b, scaling, layout, dropout = inputs

    def cast(t: torch.Tensor) -> torch.Tensor:
        return t.detach().to(dtype) if dtype is not None else t.detach()

    x = cast(x).requires_grad_()
    a = [cast(t).requires_grad_() for t in a]
    b = [cast(t).requires_grad_() for t in b]
    with mx.use_backend(backend):
        y = mx.multi_lora_linear(
            x, cast(weight), None if bias is None else cast(bias), a, b, scaling, layout, dropout
        )
    torch.manual_seed(1)
    dy = torch.randn(y.shape, dtype=torch.float64).to(inputs[0].dtype).to(y.dtype)
    y.backward(dy)
    return [y.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in (x, *a, *b))]


def units_of(oracle: list[torch.Tensor]) -> list[float]:
    """A power of two near the size of each tensor; dividing by it rounds nothing."""
    rms = [t.double().square().mean().sqrt().item() if t.numel() else 1.0 for t in oracle]
    return [2.0 ** round(math.log2(value)) if value else 1.0 for value in rms]


def vector(tensors: list[torch.Tensor], units: list[float]) -> torch.Tensor:
    """Tensors, divided by their units, as one vector.

    The policy compares root mean squares, which mean little for the two or three elements of an odd shape.
    """
    return torch.cat([(t.double() / unit).flatten() for t, unit in zip(tensors, units, strict=True)])


class Pool:
    """Calls and their results, until they have enough rows to be compared.

    One row and rank 1 is one sum, and all elements of a gradient may share it. Plain PyTorch may have rounded
    it to the right number by chance, so fp32 results are drawn in several orders.
    """

    ROWS = 512

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.cases: list[dict] = []
        self.calls: list[tuple[tuple, list[float]]] = []
        self.results: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, case: dict, inputs: tuple, ours: list[torch.Tensor]) -> None:
        """Take a case's results, and compare all if that is enough."""
        oracle = gradients("reference", inputs, torch.float64)
        units = units_of(oracle)
        self.cases.append(case)
        self.calls.append((inputs, units))
        self.results.append((vector(ours, units), vector(oracle, units)))
        if sum(sum(case["lengths"]) for case in self.cases) >= self.ROWS:
            self.check()

    def check(self) -> None:
        """Compare and forget."""
        if self.cases:
            ours, oracle = (torch.cat(parts) for parts in zip(*self.results, strict=True))
            assert_as_exact(ours, in_other_orders(self._plain)[0], oracle, what=str(self.cases))
        self.cases, self.calls, self.results = [], [], []

    def _plain(self) -> list[torch.Tensor]:
        every = [
            vector(gradients("reference", inputs, self.dtype), units).to(self.dtype)
            for inputs, units in self.calls
        ]
        return [torch.cat(every)]


@pytest.mark.soak
@pytest.mark.timeout(int(MINUTES * 60) + 120)
def test_random_calls_against_the_oracle() -> None:
    start, cases = time.monotonic(), 0
    seed = int(os.environ.get("MLORA_SOAK_SEED", time.time()))
    rng = random.Random(seed)
    pools: dict[torch.dtype, Pool] = {dtype: Pool(dtype) for dtype in DTYPES}
    while time.monotonic() - start < MINUTES * 60:
        case = random_case(rng)
        inputs = build(case)
        ours = gradients("cpu", inputs, None)
        pools[case["dtype"]].add(case, inputs, ours)
        again = gradients("cpu", inputs, None)
        assert all(torch.equal(p, q) for p, q in zip(ours, again, strict=True)), case
        cases += 1
    for pool in pools.values():
        pool.check()
    print(f"operator soak: seed {seed}, {cases} random cases in {MINUTES:g} minutes")
