"""Shapes, layouts, and the arithmetic of bytes, FLOPs and limits, against numbers worked out by hand."""

import pytest


def test_seven_linears_of_each_model() -> None:
    from shared.shapes import MODELS

    for name, shape in MODELS.items():
        assert sum(linear.count for linear in shape.linears) == 7, name
        assert len({(linear.d_in, linear.d_out) for linear in shape.linears}) == len(shape.linears), name
    seven_b = {linear.names: (linear.d_in, linear.d_out) for linear in MODELS["llama-2-7b"].linears}
    assert seven_b == {
        ("q_proj", "k_proj", "v_proj", "o_proj"): (4096, 4096),
        ("gate_proj", "up_proj"): (4096, 11008),
        ("down_proj",): (11008, 4096),
    }
    widths = {name: shape.kv_width for name, shape in MODELS.items()}
    assert widths["llama-3-8b"] == widths["llama-3-70b"] == 1024
    assert widths["tinyllama"] == 256


def test_layouts_use_every_row() -> None:
    from linear.layouts import LAYOUTS, balanced, mixed_ranks, skewed

    assert balanced(10, 4) == [3, 3, 2, 2]
    assert skewed(11, 2) == [7, 4]  # one each, then 9 as 2 : 1
    for layout in LAYOUTS.values():
        for rows, adapters in ((8192, 1), (8192, 7), (64, 64), (100, 64)):
            lengths = layout(rows, adapters)
            assert sum(lengths) == rows
            assert len(lengths) == adapters
            assert min(lengths) >= 1
            assert lengths == sorted(lengths, reverse=True)
        with pytest.raises(ValueError, match="at least one for each of 5 adapters, got 4"):
            layout(4, 5)
    assert mixed_ranks(6) == [8, 16, 32, 64, 8, 16]


def test_work_by_hand() -> None:
    from linear.limits import frozen, frozen_forward, low_rank_backward, low_rank_forward

    # 6 rows, 2 -> 3, 2 bytes: x 12, W 6, y 18 elements; 2 * 6 * 2 * 3 FLOPs
    assert (frozen_forward(6, 2, 3, 2).flops, frozen_forward(6, 2, 3, 2).bytes) == (72, 72)
    assert (frozen(6, 2, 3, 2).flops, frozen(6, 2, 3, 2).bytes) == (144, 144)
    # adapters of 4 and 2 rows, ranks 1 and 5: s has 4 * 1 + 2 * 5 = 14 elements, A and B have 6 * 5 = 30
    forward = low_rank_forward([4, 2], [1, 5], 2, 3, 2)
    assert forward.flops == 2 * 14 * 5
    # x 12, y 18, s twice 28, A and B 30
    assert forward.bytes == 2 * (12 + 18 + 28 + 30)
    backward = low_rank_backward([4, 2], [1, 5], 2, 3, 2)
    assert backward.flops == 4 * 14 * 5
    # dy 18, x 12, dx 12, s 14, ds twice 28, A and B 30, dA and dB 30
    assert backward.bytes == 2 * (18 + 12 + 12 + 14 + 28 + 30 + 30)


def test_limit_is_the_longer_of_both() -> None:
    from linear.limits import Ceilings, Work

    ceilings = Ceilings(bytes_per_second=10.0, flops_per_second=100.0)
    assert ceilings.seconds(Work(flops=1000, bytes=50)) == 10
    assert ceilings.seconds(Work(flops=100, bytes=50)) == 5
    assert (Work(1, 2) + Work(3, 4).times(2)) == Work(7, 10)


@pytest.mark.parametrize(
    ("model", "rank", "milliseconds", "ratio", "flop_floor"),
    [
        ("llama-2-7b", 16, 8.4, 1.087, 1.009),
        ("llama-2-7b", 64, 8.4, 1.089, 1.037),
        ("llama-2-13b", 16, 13.2, 1.070, 1.007),
        ("llama-3-8b", 16, 9.0, 1.086, 1.009),
        ("llama-3-70b", 16, 35.5, 1.043, 1.005),
    ],
)
def test_a_decoder_layer_of_real_models(
    model: str, rank: int, milliseconds: float, ratio: float, flop_floor: float
) -> None:
    """8192 rows of one adapter in bf16 at 790 TFLOP/s and 4.3 TB/s: kernels beside the base GEMM.

    The expected numbers were worked out independently of limits.py, to three decimals.
    """
    from linear.limits import Ceilings, Work, frozen, low_rank
    from shared.shapes import MODELS

    ceilings = Ceilings(bytes_per_second=4.3e12, flops_per_second=790e12)
    base, extra, flops = 0.0, 0.0, Work()
    for linear in MODELS[model].linears:
        sizes = (linear.d_in, linear.d_out, 2)
        base += linear.count * ceilings.seconds(frozen(8192, *sizes))
        extra += linear.count * ceilings.seconds(low_rank([8192], [rank], *sizes))
        flops += low_rank([8192], [rank], *sizes).times(linear.count)
    assert 1e3 * base == pytest.approx(milliseconds, abs=0.06)
    assert 1 + extra / base == pytest.approx(ratio, abs=1.1e-3)
    assert 1 + flops.flops / ceilings.flops_per_second / base == pytest.approx(flop_floor, abs=6e-4)


def test_launches_and_memory_of_a_trace() -> None:
    from shared.counting import launches_in, peak_in

    events = [
        {"cat": "kernel", "ts": 1, "dur": 2.0},
        {"cat": "gpu_memset", "ts": 4, "dur": 1.0},
        {"cat": "cpu_op", "ts": 0, "dur": 50.0},
        {"name": "[memory]", "ts": 3, "args": {"Bytes": -60}},
        {"name": "[memory]", "ts": 1, "args": {"Bytes": 100}},
        {"name": "[memory]", "ts": 2, "args": {"Bytes": 20}},
        {"name": "[memory]", "ts": 5, "args": {"Bytes": 50}},
    ]
    assert launches_in(events) == (2, pytest.approx(3e-6))
    assert peak_in(events) == 120


def test_counts_on_a_cpu() -> None:
    import torch
    from shared.counting import count

    def run() -> torch.Tensor:
        return torch.empty(1000, dtype=torch.float64).fill_(1.0).add(1.0)

    found = count(run, "cpu")
    assert found.operator_calls == 3
    assert 16_000 <= found.peak_bytes < 17_000
    assert found.launches is None


def test_spread_of_times() -> None:
    from shared.timing import spread, take_turns

    assert spread([3.0]) is None
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((4 - 2) / 3)
    calls: list[str] = []
    cases = {name: lambda name=name: calls.append(name) for name in "abc"}
    found = take_turns(cases, lambda: calls.append("new data"), rounds=3, warm_up=1)  # type: ignore[arg-type]
    assert set(found) == set("abc")
    turns = "".join(calls).split("new data")
    assert turns == ["", "aabbcc", "bbccaa", "ccaabb", "aabbcc"]


def test_time_limit_is_shared() -> None:
    from microbench.settings import Deadline

    assert Deadline(None).share(1.0) is None
    half = Deadline(100.0).share(0.5)
    assert half is not None
    assert 50 <= half < 51
    spent = Deadline(0.0).share(1.0)
    assert spent is not None
    assert spent < 1
