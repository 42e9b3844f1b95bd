"""Evaluation keeps to what memory holds, and gives the same."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from mlora.model.generation import GenerationRequest
from mlora.objectives.objective import CrossEntropy
from mlora.optim.optim_config import OptimConfig
from mlora.run.evaluation import _rows_that_fit, evaluate_losses
from peft import LoraConfig
from tiny_models import FAMILIES, VOCABULARY


def task(name: str, lengths: Sequence[int], batch: int) -> Any:
    samples = [Sample(ids := [(7 * i + n) % VOCABULARY for i in range(n)], ids) for n in lengths]
    return SimpleNamespace(
        name=name,
        config=SimpleNamespace(per_device_eval_batch_size=batch),
        eval_data=SimpleNamespace(samples=samples),
        objective=CrossEntropy(),
    )


@pytest.mark.parametrize("most", [12, 25, 60])
def test_batches_are_cut_until_they_fit(most: int) -> None:
    seen: list[int] = []

    def fits(lengths: Mapping[str, Sequence[int]]) -> bool:
        return sum(map(sum, lengths.values())) <= most

    tasks = [task("a", [5, 9, 12, 3, 7], 4), task("b", [11, 2, 10], 2)]
    with Engine(FAMILIES["llama"]()) as engine:
        for name in "ab":
            engine.create_adapter(name, LoraConfig(r=4), OptimConfig(learning_rate=1e-3, total_steps=1))
        whole = evaluate_losses(engine, tasks, lambda lengths: True)
        plain = engine.evaluate_each

        def evaluate_each(batches: Any, **options: Any) -> Any:
            kept = list(batches)
            seen.extend(sum(len(s.input_ids) for rows in batch.values() for s in rows) for batch in kept)
            return plain(kept)

        engine.evaluate_each = evaluate_each  # type: ignore[method-assign]
        parts = evaluate_losses(engine, tasks, fits)
    assert max(seen) <= most
    assert sum(seen) == sum(len(s.input_ids) for one in tasks for s in one.eval_data.samples)
    for name in "ab":
        assert parts[name].tokens == whole[name].tokens
        assert parts[name].loss_sum == pytest.approx(whole[name].loss_sum, rel=1e-5)


def test_a_single_sample_that_does_not_fit_is_tried_all_the_same() -> None:
    with Engine(FAMILIES["llama"]()) as engine:
        engine.create_adapter("a", LoraConfig(r=4), OptimConfig(learning_rate=1e-3, total_steps=1))
        assert evaluate_losses(engine, [task("a", [9, 9], 2)], lambda lengths: False)["a"].tokens == 16


@pytest.mark.parametrize(("most", "rows"), [(64 * 20, 64), (64 * 20 - 1, 32), (25, 1), (1, 1)])
def test_prompts_are_completed_as_many_together_as_fit(most: int, rows: int) -> None:
    requests = [GenerationRequest(name, (1,) * length, 8) for name in "ab" for length in (3, 12)]
    found = _rows_that_fit(requests, lambda lengths: sum(map(sum, lengths.values())) <= most)
    assert found == rows
