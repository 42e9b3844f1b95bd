"""The CUDA kernels, on a CPU emulator or a GPU, beyond what tests/ext asks of every backend."""

import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import emulated
import pytest
import torch
from backends import BACKENDS, serving
from cases import Case, alone_of, assert_right, make
from torch.utils._pytree import tree_map_only

import mlora_ext as mx
from mlora_ext.backends import run
from mlora_ext.backends.interface import Layer
from mlora_ext.backends.plan import Plan, PlanCache
from mlora_ext.frozen.plain import PlainWeight
from mlora_ext.ops.dropout import philox_mask

OPS = torch.ops.mlora_ext
QUARTERS, UNIT = 4, 128
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXED = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]


@pytest.fixture(params=[one for one in BACKENDS if "cuda" in str(one)], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """All memory that PyTorch hands out is full of NaN."""
    torch.use_deterministic_algorithms(True)
    with serving(request.param, monkeypatch) as name:
        yield name


def without_base(case: Case) -> Case:
    """The low-rank part alone, whose bits depend on the adapter's own rows only."""
    case.weight, case.bias = torch.zeros_like(case.weight), None
    return case


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [[1], [15, 2], [17], [33, 64], [65], [128, 8], [129, 3], [200]], ids=str)
def test_any_rank(ranks: list[int], dtype: torch.dtype) -> None:
    assert_right(make(ranks, [19, 7][: len(ranks)], list(range(len(ranks))), dtype=dtype, d_in=72, p=0.3))


@pytest.mark.parametrize(("dtype", "adapter_dtype"), [*zip(DTYPES, DTYPES, strict=True), *MIXED], ids=str)
def test_several_quarters_of_the_columns(dtype: torch.dtype, adapter_dtype: torch.dtype) -> None:
    how = {"ranks": [8, 20], "lengths": [70, 9], "adapters": [1, 0], "p": 0.1}
    widths = QUARTERS * UNIT + 264, 2 * UNIT + 8  # four runs of 256, 256, 256 and 8; three, the last of 8
    for d_in, d_out in ((widths[0], 40), (40, widths[1])):
        assert_right(make(**how, dtype=dtype, adapter_dtype=adapter_dtype, d_in=d_in, d_out=d_out))


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [[8, 70], [5, 16, 40], [130]], ids=str)
def test_one_program_or_one_for_each_quarter(ranks: list[int], dtype: torch.dtype) -> None:
    """The bits are the same, whether few tiles leave much of the device idle or many fill it."""
    lengths = [70, 9, 3][: len(ranks)]
    case = make(ranks, lengths, list(range(len(ranks))), dtype=dtype, d_in=1100, d_out=776, p=0.1)
    programs = []
    results = []
    for count in (132, 1):
        with emulated.multiprocessors(count), emulated.watched() as launches:
            results.append(case.run())
        programs.append(next(launch.programs for launch in launches if launch.name == "shrink"))
    assert all(map(torch.equal, *results))
    assert programs[0] == 3 * programs[1]


@pytest.mark.parametrize(("dtype", "adapter_dtype"), [*zip(DTYPES, DTYPES, strict=True), *MIXED], ids=str)
def test_several_slots(dtype: torch.dtype, adapter_dtype: torch.dtype) -> None:
    """More than 1024 rows of an adapter: partial gradients, summed in their order."""
    lengths = [1100, 30, 40, 2100]
    assert_right(make([8, 6, 3], lengths, [1, 0, -1, 2], dtype=dtype, adapter_dtype=adapter_dtype, p=0.1))


@pytest.mark.parametrize("part", ["dx", "da", "db"])
def test_only_wanted_gradients(backend: str, part: str) -> None:
    case = without_base(make([5, 16], [37, 61], [0, 1], p=0.2))
    expected = dict(zip(("dx", "da", "db"), gradients(backend, case, (True, True, True)), strict=True))
    wanted = tuple(part == name for name in expected)
    for name, found in zip(expected, gradients(backend, case, wanted), strict=True):
        if name == part:
            assert all(torch.equal(one, other) for one, other in zip(found, expected[name], strict=True))
        else:
            assert not found, f"{name} was not asked for"


def gradients(backend: str, case: Case, wanted: tuple[bool, bool, bool]) -> list[list[torch.Tensor]]:
    x, weight, bias, lora_a, lora_b, *plan = case.operator_arguments()
    layers = [Layer(PlainWeight.of(weight), weight, bias)]
    with torch.no_grad():
        _, saved = run.forward(backend, x, layers, lora_a, lora_b, tuple(plan))
        dx, da, db = run.backward(backend, [case.dy], x, layers, lora_a, lora_b, saved, tuple(plan), wanted)
    return [[] if dx is None else [dx], da, db]


@pytest.mark.parametrize("widest", [33, 130])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_mates_change_no_bit(dtype: torch.dtype, widest: int) -> None:
    """An adapter alone, and with others of larger ranks beside it and between its segments."""
    lengths, adapters = [37, 53, 1100, 9], [0, 1, 0, 2]
    together = without_base(make([16, widest, 8], lengths, adapters, dtype=dtype, d_in=192, d_out=136, p=0.1))
    keep = torch.cat([torch.arange(37), torch.arange(90, 1190)])
    alone = alone_of(together, keep, [37, 1100])
    y, dx, da, _, _, db, _, _ = together.run()
    for one, other in zip(alone.run(), (y[keep], dx[keep], da, db), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_input_same_bits(dtype: torch.dtype) -> None:
    """The emulator runs blocks and threads in another order each time."""
    case = make([5, 16, 70], [37, 1150, 61], [0, 1, 2], dtype=dtype, p=0.1)
    for one, other in zip(case.run(), case.run(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("where", ["rows", "weights"])
def test_nan_stays_with_its_adapter(where: str, dtype: torch.dtype) -> None:
    """Adapters, and rows, that border on each other in memory."""
    case = make([5, 16, 8], [37, 60, 21], [0, 1, 2], p=0.2, dtype=dtype)
    case.lora_a = list(torch.randn(29, 40).to(dtype).split([5, 16, 8]))
    case.lora_b = [b.t() for b in torch.randn(29, 24).to(dtype).split([5, 16, 8])]
    case.require_grad()
    clean = case.run()
    with torch.no_grad():
        for tensor in (
            [case.x[37:97], case.dy[37:97]] if where == "rows" else [case.lora_a[1], case.lora_b[1]]
        ):
            tensor.fill_(torch.nan)
    dirty = case.run()
    assert dirty[0][37:97].isnan().any(), "the NaN never arrived"
    for rows in [slice(0, 37), slice(97, 118)]:
        assert torch.equal(clean[0][rows], dirty[0][rows])
        assert torch.equal(clean[1][rows], dirty[1][rows])
    for index in (2, 4, 5, 7):
        assert torch.equal(clean[index], dirty[index]), case.labels()[index]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropped_elements_are_selected_not_multiplied(backend: str, dtype: torch.dtype) -> None:
    case = without_base(make([4], [8], [0], p=0.5, dtype=dtype))
    mask = philox_mask(
        8, 40, p=0.5, seed=case.dropout.seeds[0], step=case.dropout.step[0], layer=case.dropout.layer
    ).to(case.x.device)
    with torch.no_grad():
        case.x[~mask] = torch.inf
    (dx,), (da,), (db,) = gradients(backend, case, (True, True, True))
    assert da.isfinite().all()
    assert db.isfinite().all(), "which s is a factor of"
    assert ((dx != 0) == mask).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_beyond_a_tensor_is_written_or_used(dtype: torch.dtype) -> None:
    """Rows and columns around x, dy and the factors are NaN."""
    case = without_base(make([5, 16], [37, 60], [0, 1], p=0.2, dtype=dtype, d_in=72, d_out=88))

    def inside_nan(tensor: torch.Tensor, shift: int) -> torch.Tensor:
        wide = torch.full((tensor.shape[0] + 2, tensor.shape[1] + 24), torch.nan, dtype=tensor.dtype)
        view = wide[1:-1, shift : shift + tensor.shape[1]]
        return view.copy_(tensor.detach())

    expected = case.run()
    for shift in (8, 5):
        case.x, case.dy = inside_nan(case.x, shift), inside_nan(case.dy, shift)
        case.lora_a = [inside_nan(a, shift) for a in case.lora_a]
        case.lora_b = [inside_nan(b.t(), shift).t() for b in case.lora_b]
        case.require_grad()
        for one, other in zip(case.run(), expected, strict=True):
            assert torch.equal(one, other), f"shift {shift}"


ALL, NO_DA = (True, True, True), (True, False, True)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("ranks", "widths", "p", "wanted"),
    [
        *product([[5, 16], [3, 100], [130, 3]], [(40, 24)], [None, 0.2], [ALL, NO_DA]),
        ([5, 16], (2056, 56), 0.2, ALL),
        ([3, 100], (2056, 56), None, ALL),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_layers_that_share_x(
    backend: str,
    dtype: torch.dtype,
    ranks: list[int],
    widths: tuple[int, int],
    p: float | None,
    wanted: tuple[bool, bool, bool],
) -> None:
    """The bits of each layer alone; dx, which they add to in turn. An adapter without rows, rows of the
    base, several slots or quarters of columns.
    """
    last = 1061 if widths[0] < 1000 else 161  # several slots, or several quarters of columns
    how = {"lengths": [37, 9, last], "adapters": [0, -1, 1], "dtype": dtype, "d_in": widths[0], "p": p}
    cases = [
        without_base(make([*sizes, 6], **how, d_out=d_out))
        for sizes, d_out in ((ranks, 24), ([4, 40], widths[1]), (ranks[::-1], 8))
    ]
    one = cases[0]
    for index, case in enumerate(cases):
        case.x, case.layout, case.scaling = one.x, one.layout, one.scaling
        if p is not None:
            drop = one.dropout
            case.dropout = mx.LoRADropout(drop.p, drop.seeds, drop.step, layer=drop.layer + index)
    x, _, _, _, _, segments, scaling, p_table, rng, layer = one.operator_arguments()
    indices = None if layer is None else layer + torch.arange(len(cases), device=layer.device)
    plan = (segments, scaling, p_table, rng, indices)
    layers, n = [Layer(PlainWeight.of(case.weight), case.weight) for case in cases], len(one.lora_a)
    lora_a, lora_b = [a for case in cases for a in case.lora_a], [b for case in cases for b in case.lora_b]
    with torch.no_grad():
        y, saved = run.forward(backend, x, layers, lora_a, lora_b, plan)
        dx, da, db = run.backward(
            backend, [c.dy for c in cases], x, layers, lora_a, lora_b, saved, plan, wanted
        )
    alone = [case.run() for case in cases]
    for index, (expected_y, _, *expected) in enumerate(alone):
        own = slice(n * index, n * index + n)
        assert torch.equal(y[index], expected_y), f"y of layer {index}"
        found = [*(da[own] if wanted[1] else expected[:n]), *db[own]]
        assert all(map(torch.equal, found, expected)), f"gradients of layer {index}"
    # later layers' parts join before they are rounded; panels of ranks after, which may cancel each other
    eps = torch.finfo(dtype).eps
    added = sum(results[1].double() for results in alone)
    scale = sum(results[1].double().abs() for results in alone)
    if max(ranks) > (64 if dtype == torch.float32 else 128):
        scale = 2 * scale.amax(1, keepdim=True)
    assert ((dx.double() - added).abs() <= 3 * eps * scale).all()
    assert (dx[37:46] == 0).all(), "rows of the base"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": torch.zeros(9, 3, dtype=torch.int32)}, "plan: expected 4 columns"),
        ({"plan": torch.zeros(4, 4, dtype=torch.int32)}, r"plan: expected 1 \+ 1 \+ 1 rows, got 4"),
        ({"a": torch.zeros(3).half()}, "a_table: expected matrices of dtype Float .that of x. or Float"),
        ({"a_table": torch.zeros(2, 8, dtype=torch.int64)}, "a_table: expected 1 rows, got 2"),
        ({"scaling": torch.ones(1).double()}, "scaling: expected a contiguous Float tensor"),
        ({"dropout_p": torch.zeros(1)}, "give all three or none"),
        ({"weights": [torch.zeros(3, 4)]}, r"weights: expected Float of shape \[3, 5\]"),
        ({"biases": [torch.zeros(2)]}, "bias: expected 3 numbers, got 2"),
        ({"weights": [torch.zeros(3, 5)] * 2}, "a_table: expected 2 rows, got 1"),
        ({"weights": [torch.zeros(3, 5)] * 5}, "expected 1 to 4 layers, got 5"),
        ({"b_table": torch.zeros(2, 8, dtype=torch.int64)}, "b_table: expected 1 rows, got 2"),
        ({"b": torch.zeros(3, 2).half()}, "b_table: expected matrices of dtype Float .that of x. or Float"),
        ({"x": torch.zeros(5, 4).t()}, "x: expected Float rows"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_checks_name_the_argument(change: dict, message: str) -> None:
    table = torch.tensor([[0, 5, 1, 2, 0, 5, 1, 0]])
    arguments: dict = {
        "x": torch.zeros(4, 5),
        "weights": [torch.zeros(3, 5)],
        "biases": [],
        "products": [],
        "a": torch.zeros(2, 5),
        "a_table": table,
        "b": torch.zeros(3, 2),
        "b_table": torch.tensor([[0, 1, 2, 2, 0, 1, 2, 0]]),
        "a_aligned": False,
        "b_aligned": False,
        "max_rank": 2,
        "plan": torch.tensor([[0, 4, 0, 0], [0, 1, 0, -1], [0, 1, 0, 0]], dtype=torch.int32),
        "tiles": 1,
        "splits": 1,
        "scaling": torch.ones(1),
        "dropout_p": None,
        "dropout_rng": None,
        "layers": None,
        "save_masks": False,
        "group": 0,
    }
    OPS.cuda_forward(**arguments)
    here = tree_map_only(torch.Tensor, lambda tensor: tensor.to(torch.get_default_device()), change)
    with pytest.raises(RuntimeError, match=message):
        OPS.cuda_forward(**(arguments | here))


def test_layers_that_share_x_as_the_sanitizer_watches_them() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
    from gpu import sanitize

    together, alone = sanitize.shared_results(torch.bfloat16, str(torch.get_default_device()))
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_launches_do_not_grow_with_adapters() -> None:
    """Nor with layers that share x, rows or columns."""
    names = {}
    for adapters, rows, width in ((1, 70, 40), (64, 70, 40), (3, 2200, 2200)):
        lengths = [rows // adapters + (i < rows % adapters) for i in range(adapters)]
        case = make(
            [4] * adapters, lengths, list(range(adapters)), d_in=width, d_out=width, dtype=torch.bfloat16
        )
        with emulated.watched() as launches:
            case.run()
        names[adapters] = [launch.name for launch in launches]
    assert names[1] == names[64] == names[3] == ["plan", "shrink", "expand", "read_dy", "read_x"]


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_a_wide_adapter_makes_no_work_for_narrow_ones() -> None:
    """Programs of bf16 take the width of their own rank: their busiest warp does what it does alone."""

    def work(ranks: list[int]) -> dict[str, int]:
        lengths = [128] * len(ranks)
        case = make(ranks, lengths, list(range(len(ranks))), d_in=640, d_out=640, dtype=torch.bfloat16, p=0.1)
        with emulated.watched() as launches:
            case.run()
        return {launch.name: launch.busiest for launch in launches if launch.busiest > 0}

    alone = [work([rank]) for rank in (16, 32, 64, 128)]
    expected = sum(map(Counter, alone), start=Counter())
    assert min(expected.values()) > 0
    assert work([16, 32, 64, 128]) == expected


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "rank"),
    [
        (torch.bfloat16, 16),
        (torch.bfloat16, 64),
        (torch.bfloat16, 128),
        (torch.float32, 8),
        (torch.float32, 64),
    ],
)
def test_devices_with_less_shared_memory(backend: str, dtype: torch.dtype, rank: int) -> None:
    """Of 99 KiB, as on sm_86, sm_89 and sm_120: fewer layers at once."""
    case = make([rank, 8], [70, 61], [0, 1], dtype=dtype, d_in=136, d_out=1104, p=0.3)
    x, weight, _, lora_a, lora_b, *plan, _ = case.operator_arguments()
    plan, layers = (*plan, torch.arange(3)), [Layer(PlainWeight.of(weight), weight)] * 3

    def results() -> list[torch.Tensor]:
        with torch.no_grad():
            ys, saved = run.forward(backend, x, layers, lora_a * 3, lora_b * 3, plan)
            dx, da, db = run.backward(
                backend, [case.dy] * 3, x, layers, lora_a * 3, lora_b * 3, saved, plan, (True, True, True)
            )
        return [*ys, *da, *db, dx]

    with emulated.no_hopper():
        expected = results()
        with emulated.shared_memory(99):
            found = results()
    assert all(map(torch.equal, found[:-1], expected[:-1]))
    eps = torch.finfo(dtype).eps
    assert (found[-1] - expected[-1]).abs().max() <= 4 * eps * expected[-1].abs().max(), (
        "dx is rounded more often"
    )


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@pytest.mark.parametrize("launch", ["shrink", "read_dy", "read_x"])
def test_sums_after_a_failed_launch(launch: str) -> None:
    """Half of its programs have taken their tickets."""
    case = make([8, 6], [1100, 130], [0, 1], d_in=1100, d_out=1100, dtype=torch.bfloat16)
    expected = case.run()
    emulated.fail_next(launch)
    with pytest.raises(RuntimeError, match=f"{launch}: CUDA error 719"):
        case.run()
    for _ in range(2):
        assert all(map(torch.equal, case.run(), expected))


def test_gradients_without_memory_for_their_sums_are_nan(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of another layout, with fewer slots: nothing of it goes unnoticed."""
    case = without_base(make([8, 6, 3], [1100, 30, 2100], [0, 1, 2], p=0.1))
    expected = gradients(backend, case, ALL)
    planned = PlanCache.get

    def short(*arguments: Any) -> Plan:
        plan = planned(*arguments)
        return replace(plan, sizes=replace(plan.sizes, slots=2))

    monkeypatch.setattr(PlanCache, "get", short)
    (dx,), da, db = gradients(backend, case, ALL)
    monkeypatch.undo()
    assert torch.equal(dx[:1130], expected[0][0][:1130])
    assert dx[1130:].isnan().all()
    for found, wanted in ((da, expected[1]), (db, expected[2])):
        assert all(map(torch.equal, found[:2], wanted[:2]))
        assert found[2].isnan().all()
    assert all(map(torch.equal, gradients(backend, case, ALL)[1], expected[1])), "tickets are as before"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [[8, 16], [5, 16], [100, 3]], ids=str)
def test_saved_masks_change_no_bit(
    ranks: list[int], dtype: torch.dtype, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One adapter does not drop. Ranks that are no multiples of 8 take the way of unaligned data."""
    case = make(ranks, [130, 61], [1, 0], dtype=dtype, d_in=1096, p=0.3)
    with torch.no_grad():
        case.dropout.p[0] = 0.0
    expected = case.run()
    request.getfixturevalue("saved_masks")
    saved, backward = [], OPS.cuda_backward.default
    monkeypatch.setattr(OPS.cuda_backward, "default", lambda *a: saved.append(a[14].shape) or backward(*a))
    for one, other in zip(case.run(), expected, strict=True):
        assert torch.equal(one, other)
    assert saved == [(1, 191, 35)]


def test_saved_masks_of_layers_that_share_x(backend: str, request: pytest.FixtureRequest) -> None:
    """Three layers at once; they draw masks of their own."""
    case = make([8, 16, 24], [130, 61, 9], [1, 0, 2], dtype=torch.bfloat16, d_in=136, d_out=64, p=0.3)
    x, weight, _, lora_a, lora_b, *plan, _ = case.operator_arguments()
    layers = [Layer(PlainWeight.of(weight), weight)] * 3
    plan = (*plan, torch.tensor([4, 9, 5], device=x.device))
    results = []
    for _ in range(2):
        with torch.no_grad():
            ys, saved = run.forward(backend, x, layers, lora_a * 3, lora_b * 3, plan)
            dx, da, db = run.backward(
                backend, [case.dy] * 3, x, layers, lora_a * 3, lora_b * 3, saved, plan, (True, True, True)
            )
        results.append([*ys, dx, *da, *db])
        request.getfixturevalue("saved_masks")
    assert saved[1].shape == (3, 200, 5)
    assert all(map(torch.equal, *results))
