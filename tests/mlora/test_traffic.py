"""Batches on their way through an engine's stages: cut into micro-batches, dropped, evaluated."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mlora.data import Sample
from mlora.engine import Engine
from mlora.traffic import _cut
from tiny_models import VOCABULARY, samples

from tests.mlora.test_engine_stages import NAMES, TOLERANCE, batch, create, llama


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
    plain, calls = engine._part.module.forward, []

    def first_fails(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return plain(*arguments, **named)

    monkeypatch.setattr(engine._part.module, "forward", first_fails)
    with pytest.raises(torch.OutOfMemoryError):
        engine.forward_backward({"d": samples(6, 9, seed=1)})
    again = {"d": samples(3, 9, seed=2)}
    assert len({e.forward_backward(again)["d"].loss_sum for e in (engine, other)}) == 1
    assert engine.optim_step("d") == other.optim_step("d")
    assert len(calls) == 1 + 3
    engine.start({"d": samples(6, 9, seed=1)})
    engine.close()  # computes nothing more
    assert len(calls) == 1 + 3


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
    cut = _cut({name: samples(count, 6, seed=1) for name, count in counts.items()}, pieces)
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
