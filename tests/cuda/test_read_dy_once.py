"""read_dy in one pass over dy, in the emulator: ds, as dA and dx show it, and dB.

Letters: O columns of dy.
"""

from collections.abc import Callable
from contextlib import nullcontext

import emulated
import pytest
import torch
from backends import load_emulator
from cases import Case, alone_of, assert_right, make

import mlora_ext as mx
from mlora_ext.backends.gpu_base_gemm import GpuBaseGemm

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of the emulator")
SIXTEEN = [torch.bfloat16, torch.float16]
BLOCK, CLUSTER, SPLIT = 256, 8, 1024


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch):
    load_emulator()
    monkeypatch.setattr(GpuBaseGemm, "reads_dy_once", True)
    with mx.use_backend("cuda"):
        yield


def low_rank(*arguments, **named) -> Case:
    """The low-rank part alone, whose bits depend on the adapter's own rows only."""
    case = make(*arguments, **named)
    case.weight, case.bias = torch.zeros_like(case.weight), None
    return case


def programs(case: Case) -> int:
    """Of read_dy; the results are right."""
    with emulated.watched() as launches:
        results = case.run()
    assert_right(case, results)
    return next(launch.programs for launch in launches if launch.name == "read_dy")


def expected_programs(lengths: list[int], columns: int, ranks: int) -> int:
    """Clusters of each split, for each 2048 columns and each 64 ranks."""
    splits = sum(max(1, -(-rows // SPLIT)) for rows in lengths)
    return CLUSTER * splits * -(-columns // (BLOCK * CLUSTER)) * -(-ranks // 64)


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
@pytest.mark.parametrize("ranks", [[1], [8, 16], [17, 32], [33, 5], [48, 64], [65, 2], [130, 64]], ids=str)
def test_ranks(ranks: list[int], dtype: torch.dtype) -> None:
    lengths = [131, 65][: len(ranks)]
    case = make(ranks, lengths, list(range(len(ranks))), dtype=dtype, d_out=264, p=0.2)
    assert programs(case) == expected_programs(lengths, 264, max(ranks))


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
@pytest.mark.parametrize("columns", [8, 256, 2040, 2048, 2056, 4104])
def test_columns(columns: int, dtype: torch.dtype) -> None:
    case = make([16, 40], [67, 130], [0, 1], dtype=dtype, adapter_dtype=torch.float32, d_out=columns)
    assert programs(case) == expected_programs([67, 130], columns, 40)


@pytest.mark.parametrize("columns", [72, 2056])
def test_several_splits(columns: int) -> None:
    """Of 16 tiles, beside rows without an adapter and adapters without rows."""
    lengths, adapters = [1100, 30, 9, 2100], [1, 0, -1, 3]
    case = make([8, 6, 4, 24], lengths, adapters, dtype=torch.bfloat16, d_out=columns, p=0.1)
    assert programs(case) == expected_programs([30, 1100, 0, 2100, 9], columns, 24)


@pytest.mark.parametrize("aligned", [True, False])
def test_factors_of_any_layout(aligned: bool) -> None:
    """B as PEFT holds it [O, r], and s whose rows begin anywhere."""
    case = make([16, 8 if aligned else 9], [70, 67], [0, 1], dtype=torch.bfloat16, d_out=520)
    if not aligned:
        case.lora_b = [b.detach().contiguous().requires_grad_() for b in case.lora_b]
    assert programs(case) == expected_programs([70, 67], 520, 16)


def test_rows_without_an_adapter_have_no_part() -> None:
    case = low_rank([16, 4], [70, 9, 3], [0, -1, 1], dtype=torch.bfloat16, d_out=2056)
    assert (case.run()[1][70:79] == 0).all()


@pytest.mark.parametrize(
    ("dtype", "columns", "device"),
    [
        (torch.float32, 520, nullcontext),
        (torch.bfloat16, 523, nullcontext),
        (torch.bfloat16, 520, emulated.no_hopper),
        (torch.float16, 520, emulated.no_hopper),
    ],
    ids=["fp32", "misaligned", "before sm_90", "before sm_90, fp16"],
)
def test_the_other_way_serves_the_rest(dtype: torch.dtype, columns: int, device: Callable) -> None:
    """By programs of 16 tiles in three quarters, and of blocks of 64 columns."""
    case = make([16, 40, 6], [70, 1100, 9], [0, 1, 2], dtype=dtype, d_out=columns)
    with device():
        assert programs(case) == 4 * (16 * 3 + 9)


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
@pytest.mark.parametrize("widest", [33, 64, 130])
@pytest.mark.parametrize("columns", [136, 2056])
def test_batch_mates_change_no_bit(columns: int, widest: int, dtype: torch.dtype) -> None:
    """Nor do the place in the batch, or the number of layers, adapters and multiprocessors."""
    lengths, adapters = [37, 53, 1100, 9], [0, 1, 0, 2]
    together = low_rank([16, widest, 8], lengths, adapters, dtype=dtype, d_out=columns, p=0.1)
    keep = torch.cat([torch.arange(37), torch.arange(90, 1190)])
    alone = alone_of(together, keep, [37, 1100])
    y, dx, da, _, _, db, _, _ = together.run()
    with emulated.multiprocessors(1):
        found = alone.run()
    for one, other in zip(found, (y[keep], dx[keep], da, db), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("where", ["rows", "weights"])
def test_nan_stays_with_its_adapter(where: str) -> None:
    case = low_rank([5, 16, 8], [37, 60, 21], [0, 1, 2], dtype=torch.bfloat16, d_out=2056)
    clean = case.run()
    with torch.no_grad():
        for tensor in [case.dy[37:97]] if where == "rows" else [case.lora_b[1]]:
            tensor.fill_(torch.nan)
    dirty = case.run()
    assert dirty[1][37:97].isnan().all()
    for rows in [slice(0, 37), slice(97, 118)]:
        assert torch.equal(clean[1][rows], dirty[1][rows])
    for index in (2, 4, 5, 7):
        assert torch.equal(clean[index], dirty[index]), case.labels()[index]


ALL, FIRST, SECOND = range(256), range(128), range(128, 256)
FAULTS = [
    ("wait_copies", ALL, -1, "multiplies before a tile is there"),
    ("show_to_copies", ALL, -1, "multiplies what its instructions do not see"),
    ("synchronize", ALL, 2, "multiplies before all threads have copied"),
    ("synchronize_cluster", ALL, -1, "sends before the others' barriers have begun"),
    ("barriers_have_begun", ALL, -1, "uses barriers before they are seen"),
    ("barrier_expect", ALL, -1, "does not say what must come"),
    ("barrier_wait", FIRST, -1, "adds up parts that have not come"),
    ("barrier_wait", FIRST, 2, "does so once"),
    ("begin_products", FIRST, -1, "has no fence before products of ds"),
    ("begin_products", SECOND, -1, "has none before those of dB"),
    ("wait_products<0>", FIRST, -1, "sends sums that are not there"),
    ("wait_products<0>", SECOND, -1, "writes sums that are not there"),
]


@pytest.mark.parametrize(("operation", "threads", "call", "fault"), FAULTS, ids=lambda v: str(v)[:20])
def test_the_emulator_sees_what_is_left_out(operation: str, threads: range, call: int, fault: str) -> None:
    case = low_rank([16, 24], [200, 400], [0, 1], dtype=torch.bfloat16, d_out=2056)
    expected = case.run()
    for _ in range(10):
        with emulated.broken(operation, threads, call, "read_dy") as noticed:
            try:
                right = all(map(torch.equal, case.run(), expected))
            except RuntimeError:
                right = False
            if noticed() or not right:
                break
    else:
        pytest.fail(f"nobody noticed that a block {fault}")
    assert all(map(torch.equal, case.run(), expected))
