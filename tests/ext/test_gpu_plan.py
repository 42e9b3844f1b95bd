"""The plan and the tables of the GPU backends, against plain Python; the number of launches."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from backends import BACKENDS, fixture_of
from plan_oracle import Row, plan_of

import mlora_ext as mx
from mlora_ext.backends.factors import factors_of, own_gradients
from mlora_ext.backends.plan import Plan, PlanCache, PlanSizes
from mlora_ext.backends.selection import gpu_operator
from mlora_ext.routing.route import RouteTensors
from mlora_ext.upload import once_per_stream, to_device

GPU_BACKENDS = [backend for backend in BACKENDS if backend != "cpu"]


backend = fixture_of(GPU_BACKENDS, autouse=False)


def made_plan(backend: str, layout: mx.SegmentLayout, adapters: int, total_rows: int) -> Plan:
    device = torch.get_default_device()
    segments = layout.table(device)
    return gpu_operator(backend).plan(segments, PlanSizes.bounds(total_rows, len(segments), adapters))


def table(tensor: torch.Tensor) -> list[Row]:
    return [tuple(row) for row in tensor.tolist()]


def assert_planned(backend: str, layout: mx.SegmentLayout, adapters: int, total_rows: int) -> None:
    made = made_plan(backend, layout, adapters, total_rows)
    expected = plan_of(layout._rows(), total_rows, adapters)
    unused_rows = {"tiles": (0, 0, -1, 0), "splits": (0, 0, -1, -1), "groups": None}
    for (name, unused), tensor in zip(unused_rows.items(), made.tables(), strict=True):
        rows, wanted = table(tensor), getattr(expected, name)
        assert rows[: len(wanted)] == wanted, name
        assert all(row == unused for row in rows[len(wanted) :]), name
    slots = sum(group[3] for group in expected.groups)
    assert slots <= made.sizes.slots
    covered = [row for first, count, *_ in table(made.tables()[0]) for row in range(first, first + count)]
    assert sorted(covered) == list(range(total_rows)), "each row lies in one tile"


def layout_of(count: int, adapters: int, longest: int) -> mx.SegmentLayout:
    lengths = [random.choice([0, 1, 63, 64, 65, random.randrange(longest)]) for _ in range(count)]
    owners = [random.randrange(-1, adapters) for _ in lengths]
    row0 = [random.choice([0, 7, 2**31 - 5, 2**32 - 3, 2**40 + 1]) for _ in lengths]
    return mx.SegmentLayout.from_lengths(lengths, owners, row0)


def test_plan_of_random_layouts(backend: str, fresh_seed: int) -> None:
    random.seed(fresh_seed)
    for _ in range(60):
        adapters = random.choice([1, 2, 9, 40, 70])
        count = random.choice([0, 1, 3, 9, 63, 70])
        layout = layout_of(count, adapters, 1500 if count < 20 else 90)
        assert_planned(backend, layout, adapters, layout.total_rows)


def test_plan_of_many_segments(backend: str, fresh_seed: int) -> None:
    """A run of segments without adapters between others."""
    random.seed(fresh_seed)
    count, adapters, block = 150, 67, 64
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
    segments = segments.to(torch.get_default_device())
    made = gpu_operator(backend).plan(segments, PlanSizes.bounds(400, 4, 2))
    expected = plan_of([(70, 90, 1, 7), (310, 311, 0, 4)], 400, 2)
    for name, tensor in zip(("tiles", "splits", "groups"), made.tables(), strict=True):
        wanted = getattr(expected, name)
        assert table(tensor)[: len(wanted)] == wanted, name


def test_plan_of_one_long_adapter(backend: str) -> None:
    assert_planned(backend, mx.SegmentLayout.from_lengths([5000, 1024, 1025], [1, 0, 2]), 3, 7049)


def test_slots_are_enough() -> None:
    """Sizes that the host computes bound what any layout needs."""
    for rows in (0, 1, 64, 1024, 1025, 2049, 9000):
        for segments in (1, 3, 64):
            sizes = PlanSizes.bounds(rows, segments, 4)
            each, rest = divmod(rows, segments)
            lengths = [each + (i < rest) for i in range(segments)]
            layout = mx.SegmentLayout.from_lengths(lengths, [i % 4 for i in range(segments)])
            plan = plan_of(layout._rows(), rows, 4)
            assert sum(group[3] for group in plan.groups) <= sizes.slots
            assert len(plan.tiles) <= sizes.tiles
            assert len(plan.splits) <= sizes.splits


def test_exact_sizes_of_a_layout(fresh_seed: int) -> None:
    """The table of a layout has exactly the rows that it needs, behind its segments too."""
    random.seed(fresh_seed)
    for _ in range(200):
        adapters = random.choice([1, 2, 9, 40])
        layout = layout_of(random.randrange(12), adapters, 1500)
        rows = layout.total_rows + random.choice([0, 1, 200])
        expected = plan_of(layout._rows(), rows, adapters)
        sizes = PlanSizes.of_segments(layout._rows(), rows, adapters)
        slots = sum(group[3] for group in expected.groups)
        assert (sizes.tiles, sizes.splits, sizes.slots) == (len(expected.tiles), len(expected.splits), slots)


class OnDevice(torch.Tensor):
    is_cuda = True


def table_on_device() -> torch.Tensor:
    return mx.SegmentLayout.from_lengths([4, 5]).table().as_subclass(OnDevice)


def recorded(capture: Callable[[torch.Tensor], int] = lambda _: 0) -> tuple[PlanCache, list[PlanSizes]]:
    """A cache whose plans hold nothing, and the sizes that it asked for."""
    calls: list[PlanSizes] = []

    def make(segments: torch.Tensor, sizes: PlanSizes) -> Plan:
        calls.append(sizes)
        return Plan(sizes, segments)

    return PlanCache(make, capture), calls


def test_a_batch_is_planned_once() -> None:
    cache, calls = recorded()
    segments = mx.SegmentLayout.from_lengths([4, 5]).table()
    first = cache.get(segments, 9, 2)
    assert cache.get(segments, 9, 2) is first
    assert calls == [PlanSizes(rows=9, adapters=2, tiles=2, splits=2, slots=0)], "exact"
    assert cache.get(segments, 9, 3) is not first
    segments[0, 1] = 3
    assert cache.get(segments, 9, 2) is not first
    assert len(calls) == 3
    assert calls[2] == PlanSizes.bounds(9, len(segments), 2), "the table holds another layout now"
    with torch.inference_mode():
        made = segments.clone()
        assert cache.get(made, 9, 2) is not cache.get(made, 9, 2)


def test_a_captured_graph_has_one_plan_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launch lies in the graph, and its size serves whatever layout the table holds later."""
    captures = iter([7, 7, 8])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    capturing = True
    segments, (cache, calls) = table_on_device(), recorded(lambda _: next(captures))
    first = cache.get(segments, 9, 2)
    assert cache.get(segments, 9, 2) is first
    assert cache.get(segments, 9, 2) is not first
    assert calls == [PlanSizes.bounds(9, len(segments), 2)] * 2
    with pytest.raises(RuntimeError, match="backend 'triton' makes plans on the host"):
        PlanCache(Plan).get(segments, 9, 2)
    capturing = False
    outside = cache.get(segments, 9, 2)
    assert outside is not first
    assert cache.get(segments, 9, 2) is outside
    assert len(calls) == 3


def test_a_capture_on_another_device_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch tells of the current device only."""
    current = [1]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] is None)

    @contextmanager
    def on_device(device: int | None) -> Iterator[None]:
        current[0] = device
        yield
        current[0] = 1

    monkeypatch.setattr(torch.cuda, "device", on_device)
    segments = table_on_device()  # device None
    asked: list[torch.Tensor] = []

    def capture(tensor: torch.Tensor) -> int:
        asked.append(tensor)
        return 5

    cache, _ = recorded(capture)
    assert cache.get(segments, 9, 2).sizes == PlanSizes.bounds(9, len(segments), 2)
    assert len(asked) == 1
    with pytest.raises(RuntimeError, match="backend 'triton' makes plans on the host"):
        PlanCache(Plan).get(segments, 9, 2)


def test_each_stream_has_a_plan_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream would not wait for the launch that makes it."""
    streams = iter([1, 2, 2, 1])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: next(streams), raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    cache, calls = recorded()
    segments = table_on_device()
    first, second, again, back = (cache.get(segments, 9, 2) for _ in range(4))
    assert first is back
    assert second is again
    assert len(calls) == 2


def test_a_freed_table_is_not_mistaken_for_another() -> None:
    cache, calls = recorded()
    for lengths in ([4, 5], [2, 7], [9, 0], [1, 8]):
        cache.get(mx.SegmentLayout.from_lengths(lengths).table().clone(), 9, 2)  # often the same address
    assert len(calls) == 4


def test_no_table_is_copied_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph would hold the copy; what another stream has serves."""
    device, kept = torch.device("cuda"), {}
    streams = iter([1, 2, 2, 3])
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": next(streams)})
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert [once_per_stream(kept, "key", device, lambda made=made: made) for made in "abc"] == ["a", "b", "b"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert once_per_stream(kept, "key", device, lambda: "d") == "a"
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured; run a step before"):
        to_device(torch.zeros(1), device)


def test_no_masks_are_drawn_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay would draw the same. Nothing is refused where nothing is dropped."""
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    device = torch.device("cuda")
    table = SimpleNamespace(device=device)
    route = RouteTensors((), 9, table, False, table, "scaling", "p", "rng", None)
    with pytest.raises(RuntimeError, match="would draw the same masks at every replay; capture with p = 0"):
        route.plan("layer")
    with pytest.raises(RuntimeError, match="would draw the same masks"):
        mx.LoRADropout([0.0, 0.1], [1, 2]).tensors(device)
    assert replace(route, dropout_p=None).plan("layer")[2] is None
    assert route.plan(None)[2] is None
    capturing = False
    assert route.plan("layer") == (table, "scaling", "p", "rng", "layer")


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
    described, gradients = factors_of(matrices, transposed=transposed).new_gradients()
    buffer = described.into[0].zero_()
    for matrix, gradient in zip(matrices, gradients, strict=True):
        assert gradient.shape == matrix.shape
        fake = mx.ops.registration.gradient_of(matrix)
        assert gradient.stride() == fake.stride()
        gradient.fill_(1)
    assert buffer.sum() == sum(m.numel() for m in matrices), "every element belongs to one gradient"


def test_gradients_do_not_share_memory() -> None:
    """One adapter's gradient would keep the others' alive."""
    matrices = [torch.randn(3, 8), torch.randn(2, 8).bfloat16()]
    _, views = factors_of([matrix.float() for matrix in matrices], transposed=False).new_gradients()
    for view in views:
        view.copy_(torch.randn_like(view))
    own = own_gradients(matrices, views)
    assert [one.dtype for one in own] == [torch.float32, torch.bfloat16]
    assert len({one.untyped_storage().data_ptr() for one in own}) == 2
    for one, view in zip(own, views, strict=True):
        assert torch.equal(one, view.to(one.dtype))
