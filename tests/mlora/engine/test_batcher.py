"""Batches on their way through an engine's stages: cut into micro-batches, dropped, evaluated."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mlora.data.dataset import Sample
from mlora.engine.batches import cut_batch
from mlora.engine.engine import Engine
from mlora.simulate.trace_file import TraceFiles
from tiny_models import VOCABULARY, samples

from tests.mlora.four_adapters import NAMES, TOLERANCE, batch, create, llama


@pytest.mark.parametrize(("schedule", "first"), [("gpipe", "FFFBBB"), ("1f1b", "FFBFBB")])
def test_a_batch_is_a_round_of_the_schedule(schedule: str, first: str) -> None:
    engine = Engine(llama(), stages=2, schedule=schedule, micro_batches=3, trace=100)
    create(engine, "d")
    engine.forward_backward({"d": samples(6, 9, seed=1)})
    spans = engine.trace()[0][0]
    assert "".join(span[1][0].upper() for span in spans if span[0] == "compute") == first
    engine.close()


def test_what_an_error_left_behind_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of three micro-batches fails on one stage; neither other one may add to a later gradient."""
    engine, other = (Engine(llama(), micro_batches=3) for _ in range(2))
    for each in (engine, other):
        create(each, "d")
    plain, calls = engine._part.forward, []

    def first_fails(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return plain(*arguments, **named)

    monkeypatch.setattr(engine._part, "forward", first_fails)
    with pytest.raises(torch.OutOfMemoryError):
        engine.forward_backward({"d": samples(6, 9, seed=1)})
    again = {"d": samples(3, 9, seed=2)}
    assert len({e.forward_backward(again)["d"].loss_sum for e in (engine, other)}) == 1
    assert engine.optim_step("d") == other.optim_step("d")
    assert len(calls) == 1 + 3
    engine.start({"d": samples(6, 9, seed=1)})
    engine.close()  # computes nothing more
    assert len(calls) == 1 + 3


@pytest.mark.parametrize("count", [1, 3])
def test_the_error_of_an_evaluation_is_the_one_that_is_raised(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    engine = Engine(llama())
    create(engine, "a")
    batches = [batch("a", 0, place) for place in range(count)]
    expected = [each["a"] for each in engine.evaluate_each(batches)]

    def no_memory(*arguments: object, **named: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine._part, "forward", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            list(engine.evaluate_each(batches))
    assert [each["a"] for each in engine.evaluate_each(batches)] == expected
    engine.remove_adapter("a")  # nothing of it is under way


def test_an_error_in_backward_leaves_no_gradient() -> None:
    """The blocks behind the one that fails have added to the gradients, which held a batch before."""
    engine, other = Engine(llama()), Engine(llama())
    for each in (engine, other):
        create(each, "a")
    engine.forward_backward(batch("a", 0, 0))

    def no_memory(module: object, gradients: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    handle = engine.model.get_decoder().layers[1].register_full_backward_pre_hook(no_memory)
    futures = [engine.start(batch("a", 0, place)) for place in (1, 0)]
    with pytest.raises(torch.OutOfMemoryError):
        engine.finish(futures[0])
    handle.remove()
    for lost in (engine.finish, lambda future: engine.first_done([future])):
        with pytest.raises(ValueError, match=r"micro-batch \d is not under way; an error ends all of them"):
            lost(futures[1])
    with pytest.raises(ValueError, match="has no gradient"):
        engine.optim_step("a")
    results = [each.forward_backward(batch("a", 0, 1)) for each in (engine, other)]
    assert results[0] == results[1]
    assert engine.optim_step("a") == other.optim_step("a")


def test_pieces_of_a_batch_are_one_stream() -> None:
    """Wherever samples end, a trace tells a stream's steps apart, and a window of them is measured."""
    engine = Engine(llama(), stages=2, schedule="1f1b", micro_batches=3, trace=1000)
    create(engine, "a")
    create(engine, "b")
    for step in range(3):
        engine.forward_backward({"a": samples(2 + step, 9, seed=1), "b": samples(3, 5 + step, seed=2)})
    trace, entries = engine.trace()
    assert {entry.stream for entry in entries} == {"a+b"}
    timeline = TraceFiles(trace, entries).timeline()
    assert sorted(set(timeline.events["step"])) == [0, 1, 2]
    engine.close()


@pytest.mark.parametrize(
    ("counts", "pieces", "expected"),
    [
        ({name: 1 for name in "abcdefgh"}, 4, ["a:1 b:1", "c:1 d:1", "e:1 f:1", "g:1 h:1"]),
        ({"a": 6}, 3, ["a:2", "a:2", "a:2"]),
        ({"a": 1, "b": 5}, 2, ["a:1 b:2", "b:3"]),
        ({"a": 2}, 10**9, ["a:1", "a:1"]),
        ({"a": 2, "b": 1}, 1, ["a:2 b:1"]),
    ],
)
def test_micro_batches_have_about_as_many_tokens(
    counts: dict[str, int], pieces: int, expected: list[str]
) -> None:
    batches = {name: samples(count, 6, seed=1) for name, count in counts.items()}
    cut = cut_batch(batches, pieces)
    lengths = [" ".join(f"{name}:{len(found)}" for name, found in piece.items()) for piece in cut]
    tokens = [sum(len(s.input_ids) for found in piece.values() for s in found) for piece in cut]
    assert sum(tokens) == sum(len(s.input_ids) for n, c in counts.items() for s in samples(c, 6, seed=1))
    assert lengths == expected


def test_adapters_that_share_no_micro_batch_train_as_in_one() -> None:
    """Small batches of a group: an adapter's accumulation ends in another micro-batch than its last rows."""
    found = []
    for options in ({}, {"stages": 3, "micro_batches": 4}):
        engine = Engine(llama(), **options)
        for name in NAMES:
            create(engine, name)
        norms = []
        for step in range(2):
            whole = {name: batch(name, step, 0)[name][:1] for name in NAMES}
            results = engine.forward_backward(whole, ends=NAMES)
            assert list(results) == list(NAMES)
            norms += [engine.optim_step(name).grad_norm for name in NAMES]
        found.append(norms)
        engine.close()
    assert found[1] == pytest.approx(found[0], rel=TOLERANCE)


def test_evaluations_are_under_way_at_once() -> None:
    engine = Engine(llama(), stages=2, trace=100)
    create(engine, "b")
    whole = [{"b": samples(2, 6, seed=seed)} for seed in range(6)]
    expected = [engine.evaluate(part)["b"].loss_sum for part in whole]
    before = len(engine.trace()[0][0])
    taken = []

    def batches() -> Iterator[dict[str | None, list[Sample]]]:
        for place, part in enumerate(whole):
            taken.append(place)
            yield dict(part)

    results = engine.evaluate_each(batches())
    assert next(results)["b"].loss_sum == expected[0]
    assert taken == [0, 1, 2, 3]  # twice as many as stages
    assert [found["b"].loss_sum for found in results] == expected[1:]
    assert len(engine.trace()[0][0]) > before
    with pytest.raises(ValueError, match="adapter 'b', sample 0"):
        list(engine.evaluate_each([whole[0], {"b": [Sample((3, VOCABULARY), (3, 4))]}]))
    assert engine.evaluate(whole[0])["b"].loss_sum == expected[0]
    engine.close()
