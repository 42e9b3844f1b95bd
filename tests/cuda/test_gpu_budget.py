"""The computed bytes of the CUDA launches are those that the kernels read and write."""

import sys
from pathlib import Path

import emulated
import pytest
import torch

import mlora_ext as mx
from mlora_ext.backends.factors import factors_of
from mlora_ext.backends.gpu_base_gemm import GpuBaseGemm
from mlora_ext.backends.interface import Adapters, Layer
from mlora_ext.backends.selection import gpu_operator
from mlora_ext.frozen.plain import PlainWeight

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

CALLS = {
    "one layer, several slots": {"rows": (1100, 300), "ranks": (16, 8), "d_in": 1152, "d_outs": (256,)},
    "three layers, masks saved": {
        "rows": (200, 130),
        "ranks": (8, 24),
        "d_in": 640,
        "d_outs": (256, 128, 64),
        "saves_masks": True,
    },
    "no dropout, several quarters of dy": {
        "rows": (128, 65, 64),
        "ranks": (16, 64, 32),
        "d_in": 256,
        "d_outs": (1088,),
        "dropout": False,
    },
    "several clusters of columns of dy": {
        "rows": (1090, 65),
        "ranks": (16, 48),
        "d_in": 256,
        "d_outs": (2312, 64),
    },
}


@pytest.fixture(autouse=True)
def emulator(monkeypatch: pytest.MonkeyPatch):
    if emulated.missing():
        pytest.skip(emulated.missing())
    emulated.load()
    monkeypatch.setattr(GpuBaseGemm, "reads_dy_once", True)


def launches_of(call) -> dict[str, emulated.Launch]:
    """What a call of these sizes does, with adapters that keep their gradients."""
    dtype = torch.bfloat16
    total, layout = call.total_rows, mx.SegmentLayout.from_lengths(call.rows)
    x = torch.randn(total, call.d_in, dtype=dtype)
    dys = [torch.randn(total, d_out, dtype=dtype) for d_out in call.d_outs]
    weights = [torch.zeros(d_out, call.d_in, dtype=dtype) for d_out in call.d_outs]

    def table(sizes: list[tuple[int, int]], transposed: bool):
        matrices, gradients = ([torch.randn(r, d) for r, d in sizes] for _ in range(2))
        if transposed:
            matrices, gradients = ([one.t() for one in some] for some in (matrices, gradients))
        return factors_of(matrices, transposed=transposed, gradients=gradients)

    a = table([(rank, call.d_in) for _ in call.d_outs for rank in call.ranks], False)
    b = table([(rank, d_out) for d_out in call.d_outs for rank in call.ranks], True)
    drop = (None, None, None)
    if call.dropout:
        one = mx.LoRADropout([0.1] * len(call.ranks), list(range(len(call.ranks)))).tensors("cpu")
        drop = (one[0], one[1], torch.arange(call.layers))
    plan = (layout.table(), torch.ones(len(call.ranks)), *drop)
    layers = [Layer(PlainWeight.of(weight), weight) for weight in weights]
    operator = gpu_operator("cuda")
    with torch.no_grad(), emulated.watched() as launches:
        _, saved = operator.forward(x, layers, Adapters(a, b), plan)
        operator.backward(dys, x, layers, Adapters(a, b), saved, plan, (True, True, True))
    return {launch.name: launch for launch in launches}


@pytest.mark.parametrize("multiprocessors", [132, 2])
@pytest.mark.parametrize("which", CALLS)
def test_bytes_are_those_that_kernels_move(
    which: str, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte that the kernels need counts once; what is left are the plan's tables. With few tiles for the
    device, and with many.
    """
    from gpu import budget

    call = budget.Call(**CALLS[which])
    monkeypatch.setattr(gpu_operator("cuda"), "saves_masks", call.saves_masks)
    monkeypatch.setattr(budget, "MULTIPROCESSORS", multiprocessors)
    with emulated.multiprocessors(multiprocessors):
        launches = launches_of(call)
    for name, computed in budget.traffic(call).items():
        seen = launches[name]
        assert seen.read_once == pytest.approx(computed.read + computed.again, rel=0.01, abs=2048), name
        assert seen.written_once == pytest.approx(computed.written, rel=0.01, abs=64), name


def test_peers_and_limit_as_published() -> None:
    """Of Llama-2-7B with 8192 rows: what the passes of each layout add up to."""
    from gpu import budget

    calls = budget.calls_of("Llama-2-7B", 8192, [16] * 4, dropout=True, saves_masks=False)
    assert sum(call.frozen for call in calls) == pytest.approx(8.4e-3, rel=0.01)
    found = budget.peers(calls)
    assert found["PEFT"] == pytest.approx(1.371, abs=0.001)
    assert found["LoRAFusion"] == pytest.approx(1.10, abs=0.003)


def test_own_products_by_hand() -> None:
    """Of 1000 rows, two layers 512 -> 1024 that share x, and adapters whose ranks are padded to 48 and 32."""
    from gpu import budget

    call = budget.Call([600, 400], [40, 20], 512, [1024, 1024])
    ours, own = (
        {cost.name: cost for cost in costs(call, lambda *arguments: 0.0)}
        for costs in (budget.costs, budget.own_costs)
    )
    assert [*own] == ["shrink", "page of B", "read_dy", "page of A", "read_x, dA"]
    assert own["page of B"].bytes == 2 * 1024 * (60 * 4 + 80 * 2)
    assert own["page of A"].bytes == 2 * 512 * (60 * 4 + 80 * 2)
    assert ours["read_x"].bytes - own["read_x, dA"].bytes == 1000 * 512 * 2, "dx"
    assert own["shrink"] == ours["shrink"]
    loops = {"read_dy": 0.1, "read_x": 0.5}
    (*_, read_x) = budget.own_costs(call, lambda name, *how: loops.get(name, 0.0) + (how[1][1:2] == (1,)))
    assert read_x.instructions == pytest.approx(2 * 0.1 + 1), "of both layers; masks are drawn at once"


def test_instructions_follow_the_way_that_a_launch_takes() -> None:
    """A loop with a way around a slow part, an inner product and a way that loads."""
    from gpu.instructions import Template, per_element

    loop = [
        "DEPBAR.LE SB0, 0x1",
        "BAR.SYNC.DEFER_BLOCKING 0x0",
        "@!P0 BRA 0x50",  # around the slow part
        "LDG.E.U16 R1, desc[UR4][R2.64]",
        "LDG.E.U16 R1, desc[UR4][R2.64]",
        "@!P1 BRA 0x80",  # around the copy, which a launch needs
        "IADD3 R1, R1, 0x1, RZ",
        "LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]",
        "LDSM.16.MT88.4 R1, [R2]",
        "LDSM.16.M88.4 R1, [R2]",
        "HMMA.16816.F32.BF16 R1, R1, R1, R1",
        "@!P2 BRA 0x80",  # the product, which turns four times
        "STG.E.128 desc[UR4][R2.64], R1",
        "@!P3 BRA 0x0",
    ]
    code = [(16 * index, text) for index, text in enumerate(loop)]
    expected = 3 + 3 + 4 * 4 + 2
    found = per_element(code, Template("read_x", 16, (1, 0, 1)), gradient=True)
    assert found == expected * 8 / (64 * 64)


def test_instructions_of_a_loop_that_jumps_behind_the_end_where_threads_diverge() -> None:
    """The compiler puts such code behind EXIT, from where it jumps back: that makes no loop."""
    from gpu.instructions import Template, per_element

    body = [
        "BAR.SYNC.DEFER_BLOCKING 0x0",
        "BRA.DIV UR4, 0x80",
        "LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]",
        "LDSM.16.M88.4 R1, [R2]",
        "HMMA.16816.F32.BF16 R1, R1, R1, R1",
        "@!P3 BRA 0x0",
        "STG.E.128 desc[UR4][R2.64], R1",
        "EXIT ",
        *["WARPSYNC.COLLECTIVE R102, 0x90"] * 8,
        "BRA 0x20",
    ]
    code = [(16 * index, text) for index, text in enumerate(body)]
    assert per_element(code, Template("shrink", 64, (1, 1)), gradient=False) == 6 * 8 / (64 * 128)


@pytest.mark.parametrize(("rows", "layers", "rounds"), [(64 * 132, 1, 1), (64 * 132 + 1, 1, 2), (8192, 3, 3)])
def test_equal_programs_take_whole_rounds(rows: int, layers: int, rounds: int) -> None:
    from gpu import budget

    call = budget.Call([rows], [16], 4096, [64] * layers)
    shrink = budget.costs(call, lambda kernel, *_: float(kernel == "shrink"))[0]
    assert shrink.seconds == pytest.approx(rounds * 64 * 4096 * 132 / budget.ISSUE + budget.GAP)


def test_a_launch_ends_with_its_slowest_program() -> None:
    """Of 128 tiles on 132 multiprocessors each has one of its own."""
    from gpu import budget

    call = budget.Call([2048] * 4, [8, 16, 32, 64], 4096, [64])
    shrink = budget.costs(call, lambda kernel, width, *_: (kernel == "shrink") * float(width))[0]
    assert shrink.instructions == (16 + 16 + 32 + 64) / 4
    assert shrink.seconds == pytest.approx(64 * 64 * 4096 * 132 / budget.ISSUE + budget.GAP)
