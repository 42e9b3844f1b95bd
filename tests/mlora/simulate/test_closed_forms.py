"""Simulated pipelines reach the closed forms of their bubbles, and the bounds; sizes of public models."""

from dataclasses import replace
from itertools import product

import pytest
from closed_forms import flushed_bubble, lorapp_adapters, lorapp_bubble, slowest_stage_bubble
from mlora.pipeline.actions import ActionType, gpipe
from mlora.simulate.closed_form import is_reached, least_bubble
from mlora.simulate.measures import measure
from mlora.simulate.public_models import PUBLIC_MODELS
from mlora.simulate.simulator import simulate
from mlora.simulate.timeline import Timeline
from mlora.simulate.workload import SimulatedLink, StageTime, Stream, Workload
from small_pipeline import First, first_come, run_slowly

HALF_A_POINT = 0.005


def bubble(workload: Workload, kind: ActionType | None = None) -> float:
    """The steady bubble ratio under the workload's schedule, or under an order that prefers a kind."""
    ratio = measure(simulate(workload, (lambda _s, _d: First(kind)) if kind else None)).bubble_ratio
    assert ratio is not None
    return ratio


def equal(
    stages: int, adapters: int, *, backward: float = 1.0, latency: float = 0.0, **stream: int
) -> Workload:
    """Equal stages of forward 1 s; the latency is a part of T; `backward` is that of a forward."""
    link = SimulatedLink(latency * (1 + backward))
    return Workload(
        [StageTime(1, backward)] * stages,
        [Stream(**{"steps": 30, **stream})] * adapters,
        forward=link,
        backward=link,
    )


@pytest.mark.parametrize("backward", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_closed_forms(stages: int, micro_batches: int, backward: int) -> None:
    for adapters in range(1, 9):
        simulated = bubble(equal(stages, adapters, backward=backward, micro_batches=micro_batches))
        assert simulated == pytest.approx(lorapp_bubble(stages, adapters, micro_batches), abs=HALF_A_POINT), (
            adapters
        )
    for schedule in ("gpipe", "1f1b"):
        streams = [Stream(steps=4, micro_batches=micro_batches)]
        simulated = bubble(Workload([StageTime(1, backward)] * stages, streams, schedule))
        assert simulated == pytest.approx(flushed_bubble(stages, micro_batches), abs=1e-9), schedule


def test_closed_forms_agree_with_each_other() -> None:
    assert lorapp_bubble(8, 3) == pytest.approx(5 / 8)
    assert lorapp_bubble(8, 2, 4) == pytest.approx((8 - 1 + 4 - 2 * 4) / (8 + 4 - 1))
    assert lorapp_bubble(4, 1, 8) == pytest.approx(flushed_bubble(4, 8))
    assert lorapp_bubble(4, 4, latency=0.05) == pytest.approx(1 - 4 / (4 + 2 * 3 * 0.05))
    assert [lorapp_adapters(8, c) for c in (0, 0.1, 0.5, 0.6)] == [8, 15, 15, 22]
    assert slowest_stage_bubble([1, 1, 2]) == pytest.approx(1 / 3)


def test_where_the_lower_bound_is_reached() -> None:
    """Wherever `is_reached` says so a long run comes to the bound; elsewhere some stay far from it."""
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for stages, adapters, size, latency, backward in product(
        (1, 3, 8), (1, 3, 8, 11), (1, 3), (0.0, 0.25), (0.5, 2.0)
    ):
        plain = equal(stages, adapters, backward=backward, latency=latency, micro_batches=size, steps=40)
        for in_flight in {adapters * size, max(adapters * size // 2, 1)}:
            workload = replace(plain, in_flight=in_flight)
            hops = [2 * latency * (1 + backward)] * (stages - 1)
            least = least_bubble([1 + backward] * stages, hops, adapters, size, in_flight=in_flight)
            gaps[is_reached(workload)].append(bubble(workload) - least)
    assert -1e-9 < min(gaps[True]) <= max(gaps[True]) < HALF_A_POINT
    assert len(gaps[True]) > 50
    assert max(gaps[False]) > 0.1


def test_the_lower_bound_is_not_always_reached() -> None:
    stage, stream, late = StageTime(1, 1), Stream(9), SimulatedLink(0.1)
    fits = Workload([stage] * 4, [stream] * 4, in_flight=4)
    assert is_reached(fits)
    assert is_reached(replace(fits, streams=[stream] * 9, in_flight=None))
    assert is_reached(replace(fits, forward=late, backward=late))
    assert is_reached(replace(fits, streams=[Stream(9, 8)], schedule="1f1b", in_flight=None))
    for changed in (
        {"stages": [stage] * 3 + [StageTime(1, 2)]},
        {"stages": [replace(stage, optimizer=0.1)] * 4},
        {"streams": [stream] * 3 + [Stream(9, 2)]},
        {"streams": [Stream(9, rows=(1, 2))] * 4},
        {"in_flight": 3},
        {"forward": late},
        {"forward": late, "backward": late, "in_flight": None},
        {"forward": late, "backward": late, "streams": [stream] * 5, "in_flight": 5},
        {"forward": late, "backward": late, "streams": [stream], "schedule": "1f1b"},
        {"schedule": "gpipe"},
        {"streams": [Stream(9, 8)], "schedule": gpipe(4, 8)},
    ):
        assert not is_reached(replace(fits, **changed)), changed


@pytest.mark.parametrize("weights", [[1, 1, 2, 1], [3, 1, 1, 1], [1, 2, 3, 4]])
def test_the_slowest_stage_sets_the_pace(weights: list[int]) -> None:
    workload = Workload([StageTime(w, w) for w in weights], [Stream(30)] * 9)
    assert bubble(workload) == pytest.approx(slowest_stage_bubble(weights), abs=HALF_A_POINT)
    assert measure(simulate(workload)).throughput == pytest.approx(1 / (2 * max(weights)), rel=0.01)


@pytest.mark.parametrize("backward", [1.0, 1.15, 2.0])
@pytest.mark.parametrize("latency", [0.01, 0.05, 0.25, 0.5])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_latency(stages: int, latency: float, backward: float) -> None:
    """The closed form to D adapters, and no bubble from `lorapp_adapters` on."""
    for adapters in range(1, stages + 1):
        workload = equal(stages, adapters, backward=backward, latency=latency)
        simulated = bubble(replace(workload, in_flight=adapters))
        assert simulated == pytest.approx(lorapp_bubble(stages, adapters, latency=latency), abs=1e-9)
    enough = lorapp_adapters(stages, latency)
    workload = equal(stages, enough, backward=backward, latency=latency)
    for in_flight in (None, enough):
        assert bubble(replace(workload, in_flight=in_flight)) == pytest.approx(0, abs=HALF_A_POINT)


def test_the_bound_with_latency_is_one() -> None:
    for adapters in range(1, 20, 3):
        for micro_batches in (1, 2):
            workload = equal(8, adapters, backward=1.15, latency=0.1, micro_batches=micro_batches)
            assert bubble(workload) > lorapp_bubble(8, adapters, micro_batches, 0.1) - 1e-9


def test_forwards_at_the_start_get_in_the_way_without_a_limit() -> None:
    workload = equal(8, 8, backward=1.15, latency=0.05)
    assert bubble(workload) - bubble(replace(workload, in_flight=8)) == pytest.approx(0.16, abs=0.01)


def test_other_orders_are_worse() -> None:
    """Backward first locks into a fifth of idle time where links have any latency."""
    for stages in (4, 8):
        late = equal(stages, stages, latency=0.01, steps=120)
        least = lorapp_bubble(stages, stages, latency=0.01)
        assert bubble(late) - least < HALF_A_POINT
        assert bubble(late, ActionType.BACKWARD) - least == pytest.approx(0.19, abs=0.01)
        assert bubble(late, ActionType.FORWARD) - least > 0.1
    split = equal(8, 5, micro_batches=2)
    assert bubble(split) < HALF_A_POINT
    assert bubble(split, ActionType.FORWARD) == pytest.approx(0.2, abs=0.01)
    split = equal(8, 3, micro_batches=4, backward=2)
    assert bubble(split) < HALF_A_POINT
    first = measure(Timeline.of(run_slowly(split, lambda _stage: first_come))).bubble_ratio
    assert first == pytest.approx(0.19, abs=0.01)


def test_a_limit_in_flight_is_as_few_adapters() -> None:
    for limit in (1, 2, 3, 5):
        limited = Workload([StageTime(1, 1)] * 4, [Stream(10)] * 8, in_flight=limit)
        assert bubble(limited) == pytest.approx(lorapp_bubble(4, limit), abs=HALF_A_POINT)


PUBLISHED = {
    "llama-2-7b": (6.738e9, 6.738e9),
    "llama-2-13b": (13.016e9, 13.016e9),
    "llama-3-70b": (70.554e9, 70.554e9),
    "qwen3-235b-a22b": (235.09e9, 22.19e9),
}
"""Billions of parameters, and those that a token uses, of the hub's model cards."""


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_parameters_are_the_published_ones(name: str) -> None:
    model = PUBLIC_MODELS[name]
    total, active = PUBLISHED[name]
    assert model.parameters == pytest.approx(total, rel=1e-3)
    used = model.layers * model.block_parameters(active=True) + 2 * model.vocabulary * model.hidden
    assert used == pytest.approx(active, rel=1e-3)


def test_a_workload_has_all_experts_to_stream_and_the_active_ones_to_compute() -> None:
    model = PUBLIC_MODELS["qwen3-235b-a22b"]
    work = model.workload(1000, bytes_per_parameter=0.5)
    block, head = work.blocks[0], work.blocks[-1]
    assert len(work.blocks) == 94 + 1
    assert block.weight_bytes == 0.5 * model.block_parameters()
    assert block.flops == 1000 * (2 * model.block_parameters(active=True) + 2 * 64 * 128 * 1024)
    assert block.inner_bytes == 1000 * 2 * (4 * 4096 + 2 * 128 * 68 + 8 * (4 * 1536 + 4096))
    assert (head.weight_bytes, head.inner_bytes) == (0, 0)
    assert head.flops == 1000 * 2 * 151936 * 4096


def test_what_is_trained() -> None:
    model = PUBLIC_MODELS["llama-2-7b"]
    assert model.adapter_parameters == 16 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    lora, full = (model.workload(64, method=method, adapters=3) for method in ("lora", "full"))
    assert lora.blocks[0].trainable == 3 * model.adapter_parameters
    assert full.blocks[0].trainable == model.block_parameters()
    assert full.blocks[0].state_bytes == 12 * model.block_parameters()
    assert lora.resident_bytes > full.resident_bytes
    assert (lora.full, full.full) == (False, True)
