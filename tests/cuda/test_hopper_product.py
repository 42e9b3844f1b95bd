"""The frozen product with the low-rank part inside, in the emulator, against sums in fp64.

Letters: T rows, D = d_in, O = d_out, R the largest rank, d the columns of the result.
"""

import ctypes
from dataclasses import dataclass, field

import emulated
import pytest
import torch

from mlora_ext.ops.dropout import philox_mask

pytestmark = [
    pytest.mark.skipif(bool(emulated.missing()), reason=emulated.missing() or "-"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="of the emulator"),
]
NOT_SUPPORTED = 801
TILE_ROWS = 128
LOADS, MULTIPLIES = range(0, 128), range(128, 384)


class Rows(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64), ("aligned", ctypes.c_bool))


class Arguments(ctypes.Structure):
    """`ProductArguments` of csrc/cuda/hopper_product.h."""

    _fields_ = (
        ("type", ctypes.c_int8), ("forward", ctypes.c_bool), ("add", ctypes.c_bool), ("rows", Rows),
        ("weight", Rows), ("out", Rows), ("bias", ctypes.c_void_p), ("starts", ctypes.c_void_p),
        ("parts", ctypes.c_void_p), ("s", Rows), ("factor", Rows), ("factors", ctypes.c_void_p),
        ("adapters", ctypes.c_int32), ("pitch", ctypes.c_int32), ("dropout_p", ctypes.c_void_p),
        ("dropout_rng", ctypes.c_void_p), ("layers", ctypes.c_void_p), ("keep", ctypes.c_void_p),
        ("rows_total", ctypes.c_int64), ("d_in", ctypes.c_int), ("d_out", ctypes.c_int),
        ("ranks", ctypes.c_int), ("cluster", ctypes.c_int), ("group", ctypes.c_int),
        ("left", ctypes.c_int),
    )  # fmt: skip


def rows_of(matrix: torch.Tensor) -> Rows:
    aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0
    return Rows(matrix.data_ptr(), matrix.stride(0), aligned)


def padded(matrix: torch.Tensor) -> torch.Tensor:
    """The same numbers in rows that begin at multiples of 16 bytes, NaN between them."""
    wide = torch.full((max(len(matrix), 1), -(-matrix.shape[1] // 8) * 8 + 8), torch.nan, dtype=matrix.dtype)
    return wide[: len(matrix), : matrix.shape[1]].copy_(matrix)


def parts_of(segments: torch.Tensor, adapters: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As the kernel makes them: `starts`, and `(row, rows, adapter, philox_row)` of each part."""
    tiles = -(-rows // TILE_ROWS)
    starts = torch.full((tiles + 1,), -1, dtype=torch.int32)
    parts = torch.full((tiles + len(segments), 4), -1, dtype=torch.int32)
    error = ctypes.CDLL(str(emulated.build())).mlora_emulator_parts(
        ctypes.c_void_p(segments.data_ptr()), len(segments), adapters, ctypes.c_int64(rows),
        ctypes.c_void_p(starts.data_ptr()), ctypes.c_void_p(parts.data_ptr()), len(parts),
    )  # fmt: skip
    assert error == 0
    return starts, parts


@dataclass
class Case:
    """One product; `segments` are (rows, adapter) one after the other, -1 for no adapter."""

    T: int
    D: int
    O: int  # noqa: E741
    ranks: list[int]
    segments: list[tuple[int, int]]
    forward: bool = True
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    p: float | None = None
    stored: bool = False
    add: bool = False
    cluster: int = 2
    group: int = 8
    multiprocessors: int = 4
    table: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        def random(*shape: int) -> torch.Tensor:
            return padded(torch.randn(*shape).to(self.dtype))

        self.depth, self.columns = (self.D, self.O) if self.forward else (self.O, self.D)
        self.rows, self.weight = random(self.T, self.depth), random(self.O, self.D)
        self.bias_vector = torch.randn(self.columns).to(self.dtype) if self.bias else None
        self.factors = [torch.randn(rank, self.columns).to(self.dtype) for rank in self.ranks]
        self.owner = torch.full((self.T,), -1)
        self.s = padded(torch.zeros(self.T, max(self.ranks, default=0)).to(self.dtype))
        rows, at = [], 0
        for index, (count, adapter) in enumerate(self.segments):
            self.owner[at : at + count] = adapter
            if adapter >= 0:
                self.s[at : at + count, : self.ranks[adapter]] = torch.randn(count, self.ranks[adapter])
            rows.append([at, at + count, adapter, 1000 * index + 7])
            at += count
        self.table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)
        n = len(self.ranks)
        self.drop_p = torch.tensor([self.p or 0.0, 0.0, 0.5, 1.0][:n] + [self.p or 0.0] * (n - 4))
        self.rng = torch.stack([torch.arange(n) * 2**33 + 5, torch.arange(n) + 11], 1)
        self.layer = torch.tensor([21])
        self.before = torch.randn(self.T, self.columns).to(self.dtype)

    def kept(self) -> torch.Tensor:
        """Which elements are kept: `[T, d]` bool."""
        mask = torch.ones(self.T, self.columns, dtype=torch.bool)
        for begin, end, adapter, row0 in self.table.tolist() if self.p is not None else ():
            if adapter >= 0:
                seed, step = self.rng[adapter].tolist()
                mask[begin:end] = philox_mask(
                    end - begin, self.columns, p=float(self.drop_p[adapter]), seed=seed, step=step,
                    layer=int(self.layer), row0=row0,
                )  # fmt: skip
        return mask

    def words(self) -> torch.Tensor:
        """Keep bits `[T, d / 32, rounded up]`: bit i for column 2i, bit 16 + i for column 2i + 1."""
        bits = torch.nn.functional.pad(self.kept(), (0, -self.columns % 32)).reshape(self.T, -1, 16, 2).long()
        words = (bits << torch.stack([torch.arange(16), torch.arange(16) + 16], 1)).sum((2, 3))
        words = torch.where(words < 2**31, words, words - 2**32).int()
        # `shrink` stores nothing where nothing is dropped
        silent = torch.cat([self.drop_p == 0, torch.tensor([True])])[self.owner]
        return torch.where(silent[:, None], torch.randint_like(words, 2**31 - 1), words)

    def page(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors and, behind each, zeros up to 16 rows and NaN; a table with their ranks."""
        page = torch.full((len(self.ranks), self.pitch, self.columns), torch.nan, dtype=self.dtype)
        table = torch.full((len(self.ranks), 8), -1, dtype=torch.int64)
        for adapter, factor in enumerate(self.factors):
            page[adapter, : -(-len(factor) // 16) * 16] = 0.0
            page[adapter, : len(factor)] = factor
            table[adapter, 3] = len(factor)
        return padded(page.reshape(-1, self.columns)), table

    @property
    def pitch(self) -> int:
        return -(-max(self.ranks, default=0) // 16) * 16

    def run(self, expected_error: int = 0) -> torch.Tensor:
        """The kernel's result; what lies around it is left as it was."""
        around = torch.full((self.T + 2, self.columns + -self.columns % 8 + 8), 77.0, dtype=self.dtype)
        out = around[1:-1, : self.columns]
        if self.add:
            out.copy_(self.before)
        held = [*self.page(), *parts_of(self.table, len(self.ranks), self.T), self.words()]
        page, factors, starts, parts, keep = held
        alone = not self.ranks
        drops = self.p is not None
        arguments = Arguments(
            {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[self.dtype], self.forward, self.add,
            rows_of(self.rows), rows_of(self.weight), rows_of(out),
            None if self.bias_vector is None else self.bias_vector.data_ptr(),
            None if alone else starts.data_ptr(), None if alone else parts.data_ptr(), rows_of(self.s),
            rows_of(page), factors.data_ptr(), len(self.ranks), self.pitch,
            self.drop_p.data_ptr() if drops else None, self.rng.data_ptr(), self.layer.data_ptr(),
            keep.data_ptr() if self.stored else None, self.T, self.D, self.O, self.s.shape[1], self.cluster,
            self.group, 132 - self.multiprocessors,
        )  # fmt: skip
        run = ctypes.CDLL(str(emulated.build())).mlora_emulator_product
        assert run(ctypes.byref(arguments), ctypes.c_size_t(ctypes.sizeof(arguments))) == expected_error
        outside = torch.ones_like(around, dtype=torch.bool)
        outside[1:-1, : self.columns] = False
        assert (around[outside] == 77.0).all(), "written beyond the result"
        return out.clone()

    def low_rank(self) -> torch.Tensor:
        """keep(s F) in fp64."""
        added = torch.zeros(self.T, self.columns, dtype=torch.float64)
        for adapter, factor in enumerate(self.factors):
            own = self.owner == adapter
            added[own] = self.s[own, : len(factor)].double() @ factor.double()
        return added.where(self.kept(), 0.0)

    def expected(self) -> torch.Tensor:
        """In fp64."""
        weight = self.weight.double().t() if self.forward else self.weight.double()
        result = self.rows.double() @ weight + self.low_rank()
        return result if self.bias_vector is None else result + self.bias_vector.double()


def assert_right(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Not farther from the exact result than its rounding, but for 5%, over all and in every number."""
    rounding = (expected.to(found.dtype).double() - expected).norm()
    error = found.double() - expected
    assert error.norm() <= 1.05 * rounding, f"{error.norm() / rounding} of rounding alone"
    scale = expected.abs() + 1e-3 * expected.abs().max()
    assert (error.abs() <= torch.finfo(found.dtype).eps * scale).all()


def mixed(rows: int) -> list[tuple[int, int]]:
    """Segments that begin and end anywhere; rows without an adapter, an absent adapter's too."""
    lengths = [70, 1, 59, 9, 3, 130, 90]
    adapters = [1, 0, 0, -1, 2, 0, 1]
    segments, at = [], 0
    while at < rows:
        for length, adapter in zip(lengths, adapters, strict=True):
            length = min(length, rows - at)
            if length:
                segments.append((length, adapter))
            at += length
    return segments


def alone(forward: bool, **how) -> Case:
    return Case(300, 200, 328, [], [], forward=forward, **how)


KINDS = [
    pytest.param({}, id="forward"),
    pytest.param({"bias": True}, id="bias"),
    pytest.param({"forward": False}, id="backward"),
    pytest.param({"forward": False, "p": 0.3, "stored": True}, id="stored"),
    pytest.param({"forward": False, "p": 0.3}, id="drawn"),
]


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind: dict, cluster: int) -> None:
    case = Case(300, 200, 328, [8, 40, 96], mixed(300), cluster=cluster, **kind)
    assert_right(case.run(), case.expected())


@pytest.mark.parametrize("kind", KINDS)
def test_fp16(kind: dict) -> None:
    case = Case(140, 136, 72, [8, 24, 3], mixed(140), dtype=torch.float16, **kind)
    assert_right(case.run(), case.expected())


@pytest.mark.parametrize(
    "sizes",
    [(1, 8, 8), (1, 64, 256), (3, 8, 264), (129, 40, 10), (257, 72, 33), (128, 520, 300), (65, 1, 513)],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_odd_shapes(kind: dict, sizes: tuple[int, int, int]) -> None:
    case = Case(*sizes, [5, 17, 2], mixed(sizes[0]), **kind)
    assert_right(case.run(), case.expected())


@pytest.mark.parametrize("ranks", [[1], [15, 16], [17, 64], [65, 3], [128, 8], [130, 48], [320, 1]], ids=str)
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[4]])
def test_ranks(kind: dict, ranks: list[int]) -> None:
    segments = [(31, 0), (50, -1), (120, len(ranks) - 1)]
    case = Case(201, 80, 96, ranks, segments, **kind)
    assert_right(case.run(), case.expected())


@pytest.mark.parametrize("forward", [True, False])
def test_the_frozen_product_alone(forward: bool) -> None:
    case = alone(forward, bias=forward)
    assert_right(case.run(), case.expected())


@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize(("cluster", "multiprocessors"), [(1, 1), (1, 3), (2, 2), (2, 132)])
def test_groups_and_blocks_change_no_bit(group: int, cluster: int, multiprocessors: int) -> None:
    torch.manual_seed(1)
    how = {"forward": False, "p": 0.2, "cluster": cluster, "multiprocessors": multiprocessors, "group": group}
    case = Case(700, 270, 72, [8, 40], [(260, 0), (440, 1)], **how)
    found = case.run()
    case.cluster, case.group, case.multiprocessors = 2, 8, 4
    assert torch.equal(found, case.run())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_drawn_masks_are_the_stored_ones(dtype: torch.dtype) -> None:
    """Deep enough that all rows are drawn beside products, and so shallow that none is."""
    for depth in (1100, 40):
        case = Case(200, 300, depth, [8, 40, 6, 4], [(70, 1), (60, 0), (9, 2), (61, 3)], forward=False,
                    dtype=dtype, p=0.3)  # fmt: skip
        found = case.run()
        case.stored = True
        assert torch.equal(found, case.run())


@pytest.mark.parametrize("kind", KINDS)
def test_many_short_segments(kind: dict) -> None:
    segments = [(1 + i % 3, i % 5 - 1) for i in range(130)]
    case = Case(sum(rows for rows, _ in segments), 72, 80, [4, 17, 2, 70], segments, **kind)
    assert_right(case.run(), case.expected())


def test_stages_without_ranks() -> None:
    """One block turns through many stages in which only its neighbour has ranks: no thread is overtaken."""
    segments = [(11, 1), (131, -1), (44, 3), (7, 2), (23, -1), (1, 1), (1, 0), (1, 2), (1, 2)]
    case = Case(220, 8, 345, [75, 155, 179, 120], segments)
    for _ in range(10):
        assert_right(case.run(), case.expected())


@pytest.mark.parametrize("where", ["rows", "s", "factor"])
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]])
def test_nan_stays_with_its_adapter(kind: dict, where: str) -> None:
    """Adapters that border on each other in the page; dropped elements have none of s and F either."""
    case = Case(300, 72, 328, [8, 40, 24], [(70, 0), (95, 1), (135, 2)], **kind)
    clean, sick = case.run(), case.owner == 1
    if where == "factor":
        case.factors[1].fill_(torch.nan)
    else:
        getattr(case, where)[sick] = torch.nan
    dirty = case.run()
    assert torch.equal(dirty[~sick], clean[~sick])
    reached = torch.ones_like(case.kept()) if where == "rows" else case.kept()
    assert torch.equal(dirty[sick].isnan(), reached[sick])


@pytest.mark.parametrize("kind", KINDS)
def test_batch_mates_change_no_bit(kind: dict) -> None:
    """Nor does the place in the batch: a row's bits are those of its adapter alone."""
    case = Case(420, 136, 136, [8, 40, 130], [(37, 0), (70, 2), (213, 1), (100, 0)], **kind)
    found = case.run()
    keep = torch.cat([torch.arange(37), torch.arange(320, 420)])
    mates = Case(137, 136, 136, [8], [(37, 0), (100, 0)], **kind)
    mates.rows, mates.s, mates.weight = padded(case.rows[keep]), padded(case.s[keep, :8]), case.weight
    mates.factors, mates.bias_vector, mates.rng = case.factors[:1], case.bias_vector, case.rng[:1]
    mates.table[:, 3] = case.table[[0, 3], 3]
    assert torch.equal(mates.run(), found[keep])


def test_parts_are_the_rows_of_a_segment_in_a_row_tile() -> None:
    table = torch.tensor(
        [[5, 130, 1, 2**32 - 3], [130, 131, 0, 4], [131, 140, -1, 0], [140, 150, 7, 0], [256, 700, 0, 9]]
    )
    starts, parts = parts_of(table, 2, 650)
    expected = []
    for tile in range(-(-650 // TILE_ROWS)):
        assert starts[tile] == len(expected)
        for begin, end, adapter, row0 in table.tolist():
            first = max(begin, tile * TILE_ROWS)
            rows = min(end, (tile + 1) * TILE_ROWS, 650) - first
            if rows > 0 and 0 <= adapter < 2:
                philox_row = (row0 + first - begin + 2**31) % 2**32 - 2**31
                expected.append([first, rows, adapter, philox_row])
    assert starts[-1] == len(expected)
    assert parts[: len(expected)].tolist() == expected
    assert (parts[len(expected) :] == -1).all()


def test_parts_of_nothing() -> None:
    starts, _ = parts_of(torch.zeros(0, 4, dtype=torch.int64), 1, 200)
    assert starts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", KINDS[2:])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_adding_is_the_sum_of_two_rounded_numbers(kind: dict, dtype: torch.dtype) -> None:
    case = Case(300, 200, 328, [8, 40, 96], mixed(300), dtype=dtype, **kind)
    expected = case.before + case.run()
    case.add = True
    assert torch.equal(case.run(), expected)


def test_what_it_does_not_serve_is_refused_and_not_written() -> None:
    def refused(case: Case) -> None:
        assert (case.run(NOT_SUPPORTED) == 77.0).all()

    refused(alone(True, dtype=torch.float32))
    for name in ("rows", "weight"):
        case = alone(True)
        matrix = getattr(case, name)
        wide = torch.zeros(len(matrix), matrix.shape[1] + 1, dtype=case.dtype)[:, :-1]
        setattr(case, name, wide)
        refused(case)
    for change in ({"cluster": 3}, {"group": 0}):
        refused(alone(False, **change))


FAULTS = [
    ("barrier_wait", LOADS, -1, "loads before a stage is free"),
    ("barrier_wait", MULTIPLIES, -1, "multiplies before a stage is there"),
    ("barrier_arrive", MULTIPLIES, -1, "never tells that a stage is free"),
    ("barrier_arrive", MULTIPLIES, 3, "forgets once"),
    ("barriers_have_begun", LOADS, -1, "barriers are used before they are seen"),
    ("begin_products", MULTIPLIES, -1, "no fence before products"),
    ("wait_products<1>", MULTIPLIES, -1, "frees a stage that products read"),
    ("wait_products<0>", MULTIPLIES, -1, "takes sums that are not there"),
    ("wait_copies", MULTIPLIES, -1, "takes keep bits that are not there"),
    ("show_to_copies", MULTIPLIES, -1, "sends what copies do not see"),
    ("synchronize_warp", MULTIPLIES, -1, "sends before all lanes have written"),
    ("wait_stored_boxes<0>", MULTIPLIES, -1, "writes over a box, or leaves before it is read"),
    ("wait_stored_boxes<1>", MULTIPLIES, -1, "writes over a box that is not read"),
    ("synchronize_cluster", range(384), 1, "leaves while the other block may write"),
]


@pytest.mark.parametrize(("operation", "threads", "call", "fault"), FAULTS, ids=lambda v: str(v)[:20])
def test_the_emulator_sees_what_is_left_out(operation: str, threads: range, call: int, fault: str) -> None:
    """Each operation that orders the kernel's work is needed, and a test notices where it is missing."""
    case = Case(600, 264, 200, [8, 40], [(200, 0), (400, 1)], forward=False, p=0.3, stored=True,
                multiprocessors=2)  # fmt: skip
    expected = case.run()
    for _ in range(20):
        with emulated.broken(operation, threads, call) as noticed:
            try:
                right = torch.equal(case.run(), expected)
            except AssertionError:
                right = False
            if noticed() or not right:
                break
    else:
        pytest.fail(f"nobody noticed that a block {fault}")
    assert torch.equal(case.run(), expected)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_random_cases(kind: dict, cluster: int, dtype: torch.dtype) -> None:
    for _ in range(12):
        T, D, O = (int(torch.randint(1, most, ())) for most in (500, 400, 600))  # noqa: E741
        ranks = torch.randint(1, 200, (4,)).tolist()
        segments, left = [], T
        while left:
            rows = int(torch.randint(1, left + 1, ()))
            segments.append((rows, int(torch.randint(-1, 4, ()))))
            left -= rows
        group, blocks = (int(torch.randint(1, 9, ())) for _ in range(2))
        case = Case(T, D, O, ranks, segments, dtype=dtype, cluster=cluster, group=group,
                    multiprocessors=blocks, **kind)  # fmt: skip
        assert_right(case.run(), case.expected())
