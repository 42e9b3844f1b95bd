"""The plan and the tables of the GPU backends, against plain Python; the launches, as data."""

import random

import pytest
import torch
from backends import BACKENDS, serving
from cases import make
from plan_oracle import Row, plan_of

import mlora_ext as mx
from mlora_ext.backends.factors import factors_of
from mlora_ext.backends.gpu.launches import Launch, backward_launches, forward_launches
from mlora_ext.backends.gpu.plan import Plan, PlanCache, PlanSizes
from mlora_ext.backends.selection import gpu_operator

GPU_BACKENDS = [backend for backend in BACKENDS if backend != "cpu"]


@pytest.fixture(params=GPU_BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    with serving(request.param, monkeypatch) as name:
        yield name


def made_plan(backend: str, layout: mx.SegmentLayout, adapters: int, total_rows: int) -> Plan:
    device = torch.get_default_device()
    segments = layout.table(device)
    operator = gpu_operator(backend)
    return operator._kernels.plan(segments, PlanSizes(total_rows, len(segments), adapters))


def table(tensor: torch.Tensor) -> list[Row]:
    return [tuple(row) for row in tensor.tolist()]


def assert_planned(backend: str, layout: mx.SegmentLayout, adapters: int, total_rows: int) -> None:
    made = made_plan(backend, layout, adapters, total_rows)
    expected = plan_of(layout._rows(), total_rows, adapters)
    for name, unused in (("tiles", (0, 0, -1, 0)), ("splits", (0, 0, -1, -1)), ("groups", None)):
        rows, wanted = table(getattr(made, name)), getattr(expected, name)
        assert rows[: len(wanted)] == wanted, name
        assert all(row == unused for row in rows[len(wanted) :]), name
    slots = sum(group[3] for group in expected.groups)
    assert slots <= made.sizes.slots
    covered = [row for first, count, *_ in table(made.tiles) for row in range(first, first + count)]
    assert sorted(covered) == list(range(total_rows)), "each row lies in one tile"


def layout_of(count: int, adapters: int, longest: int) -> mx.SegmentLayout:
    lengths = [random.choice([0, 1, 63, 64, 65, random.randrange(longest)]) for _ in range(count)]
    owners = [random.randrange(-1, adapters) for _ in lengths]
    row0 = [random.choice([0, 7, 2**31 - 5, 2**32 - 3, 2**40 + 1]) for _ in lengths]
    return mx.SegmentLayout.from_lengths(lengths, owners, row0)


def test_plan_of_random_layouts(backend: str, fresh_seed: int, request: pytest.FixtureRequest) -> None:
    random.seed(fresh_seed)
    interpreted = request.node.callspec.params["backend"] == "triton"
    for _ in range(6 if interpreted else 60):
        adapters = random.choice([1, 2, 9, 40, 70])
        count = random.randrange(1, 12) if interpreted else random.choice([0, 1, 3, 9, 63, 70])
        layout = layout_of(count, adapters, 1500 if count < 20 else 90)
        assert_planned(backend, layout, adapters, layout.total_rows)


def test_plan_of_many_segments(
    backend: str, fresh_seed: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More segments and adapters than one block of the kernel holds, one block of segments without adapters.

    The interpreter's blocks are smaller.
    """
    random.seed(fresh_seed)
    count, adapters, block = 150, 67, 64
    if request.node.callspec.params["backend"] == "triton":
        count, adapters, block = 38, 19, 16
        monkeypatch.setattr("mlora_ext.backends.triton.launch._PLAN_BLOCK", block)
    layout = layout_of(count, adapters, 80)
    owners = [*layout.adapters[:block], *[-1] * block, *layout.adapters[2 * block :]]
    layout = mx.SegmentLayout.from_lengths(layout.lengths, owners, layout.row0)
    assert_planned(backend, layout, adapters, layout.total_rows)


def test_plan_of_rows_behind_the_last_segment(backend: str) -> None:
    """Rows that no segment describes belong to nobody."""
    assert_planned(backend, mx.SegmentLayout.from_lengths([70, 5], [1, 0]), 2, 300)
    assert_planned(backend, mx.SegmentLayout.from_lengths([]), 3, 200)
    assert_planned(backend, mx.SegmentLayout.from_lengths([0, 0]), 3, 0)


def test_plan_of_rows_in_no_segment(backend: str) -> None:
    """Rows beyond and between the segments, and an adapter that is not there."""
    segments = torch.tensor([[70, 90, 1, 7], [0, 0, -1, 0], [100, 300, 9, 0], [310, 311, 0, 4]])
    operator = gpu_operator(backend)
    made = operator._kernels.plan(segments.to(torch.get_default_device()), PlanSizes(400, 4, 2))
    expected = plan_of([(70, 90, 1, 7), (310, 311, 0, 4)], 400, 2)
    for name in ("tiles", "splits", "groups"):
        wanted = getattr(expected, name)
        assert table(getattr(made, name))[: len(wanted)] == wanted, name


def test_plan_of_one_long_adapter(backend: str) -> None:
    assert_planned(backend, mx.SegmentLayout.from_lengths([5000, 1024, 1025], [1, 0, 2]), 3, 7049)


def test_slots_are_enough() -> None:
    """Sizes that the host computes bound what any layout needs."""
    for rows in (0, 1, 64, 1024, 1025, 2049, 9000):
        for segments in (1, 3, 64):
            sizes = PlanSizes(rows, segments, 4)
            each, rest = divmod(rows, segments)
            lengths = [each + (i < rest) for i in range(segments)]
            layout = mx.SegmentLayout.from_lengths(lengths, [i % 4 for i in range(segments)])
            plan = plan_of(layout._rows(), rows, 4)
            assert sum(group[3] for group in plan.groups) <= sizes.slots
            assert len(plan.tiles) <= sizes.tiles
            assert len(plan.splits) <= sizes.splits


def test_a_batch_is_planned_once() -> None:
    calls = []
    cache = PlanCache(lambda segments, sizes: calls.append(sizes) or Plan.empty(sizes, segments.device))
    segments = mx.SegmentLayout.from_lengths([4, 5]).table()
    sizes = PlanSizes(9, len(segments), 2)
    first = cache.get(segments, sizes)
    assert cache.get(segments, sizes) is first
    assert len(calls) == 1
    assert cache.get(segments, PlanSizes(9, len(segments), 3)) is not first
    segments[0, 1] = 3
    assert cache.get(segments, sizes) is not first
    assert len(calls) == 3
    with torch.inference_mode():
        made = segments.clone()
        assert cache.get(made, sizes) is not cache.get(made, sizes)


def test_factors_of_a_bank_and_of_loose_matrices() -> None:
    bank = torch.arange(7 * 40.0).view(7, 40)
    a = factors_of([bank[:3], bank[3:]], transposed=False)
    assert a.table.tolist() == [[0, 40, 1, 3, 0, 40, 1, 0], [120, 40, 1, 4, 128, 40, 1, 0]]
    assert (a.width, a.max_rank, a.rows_dense, a.alignment) == (40, 4, True, 8)
    again = factors_of([bank[:3], bank[3:]], transposed=False)
    assert again.table is a.table, "made once"
    b = factors_of([bank[:3].t(), bank[3:].t()], transposed=True)
    assert b.table.tolist() == [[0, 40, 1, 3, 0, 40, 1, 0], [120, 40, 1, 4, 128, 40, 1, 0]]
    loose = torch.randn(40, 3)
    alone = factors_of([loose], transposed=True)
    assert alone.table.tolist() == [[0, 1, 3, 3, 0, 1, 3, 0]]
    assert not alone.rows_dense


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_have_the_layout_of_their_factors(transposed: bool) -> None:
    matrices = [torch.randn(5, 8), torch.randn(8, 6).t(), torch.randn(3, 16)[:, ::2]]
    if transposed:
        matrices = [m.t() for m in matrices]
    buffer, gradients = factors_of(matrices, transposed=transposed).gradients(True)
    buffer.zero_()
    for matrix, gradient in zip(matrices, gradients, strict=True):
        assert gradient.shape == matrix.shape
        fake = mx.ops.fake.gradient_of(matrix)
        assert gradient.stride() == fake.stride()
        gradient.fill_(1)
    assert buffer.sum() == sum(m.numel() for m in matrices), "every element belongs to one gradient"


def test_launches_do_not_grow_with_adapters(
    backend: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator runs the lists of `launches`: counted where a kernel is called, for 1 and 64 adapters; 16
    in the interpreter."""
    counts, operator = {}, gpu_operator(backend)
    kernels = operator._kernels
    many = 16 if request.node.callspec.params["backend"] == "triton" else 64
    for adapters in (1, many):
        counted = Counted(kernels)
        monkeypatch.setattr(operator, "_kernels", counted)
        rows, owners = [128 // adapters] * adapters, list(range(adapters))
        make([4] * adapters, rows, owners, d_in=16, d_out=16, dtype=torch.bfloat16).run()
        counts[adapters] = counted.names
    assert counts[1] == counts[many] == [
        "shrink", "expand", "read_dy", "reduce_gradients", "read_x", "reduce_gradients",
    ]  # fmt: skip


class Counted:
    """Kernels that write down the launches that go to others."""

    def __init__(self, kernels) -> None:
        self.kernels, self.names = kernels, []

    def __getattr__(self, name: str):
        def launch(*arguments):
            self.names.append(name)
            return getattr(self.kernels, name)(*arguments)

        return launch


def test_launches_as_data() -> None:
    def names(launches: tuple[Launch, ...]) -> list[tuple[str, int]]:
        return [tuple(launch) for launch in launches]

    assert names(forward_launches(2048)) == [("shrink", 0), ("expand", 0), ("base_gemm", 0)]
    assert names(forward_launches(4096, layers=2)) == [
        ("shrink", 0), ("reduce_s", 0), ("expand", 0), ("base_gemm", 0), ("expand", 1), ("base_gemm", 1),
    ]  # fmt: skip
    every = {"need_dx": True, "need_da": True, "need_db": True}
    assert names(backward_launches((4096,), **every, several=True)) == [
        ("read_dy", 0), ("reduce_ds", 0), ("reduce_db", 0), ("read_x", 0), ("base_gemm_dx", 0),
        ("reduce_da", 0),
    ]  # fmt: skip
    assert names(backward_launches((4096, 1024), **every, several=False)) == [
        ("read_dy", 0), ("reduce_ds", 0), ("read_dy", 1), ("read_x", 0), ("base_gemm_dx", 0),
        ("base_gemm_dx", 1),
    ]  # fmt: skip
    only_db = {"need_dx": False, "need_da": False, "need_db": True}
    assert names(backward_launches((4096,), **only_db, several=True)) == [("read_dy", 0), ("reduce_db", 0)]
    nothing = {"need_dx": False, "need_da": False, "need_db": False}
    assert backward_launches((4096,), **nothing, several=True) == ()
