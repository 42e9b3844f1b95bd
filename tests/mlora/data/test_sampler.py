"""Micro-batches: every sample once an epoch, steps as Transformers' Trainer counts them, wrapping in file
order."""

import math
import random

import pytest
import torch
from mlora.data.sampler import BatchPlan, epoch_order, task_seed


def plan(
    samples: int = 11, batch: int = 3, accumulation: int = 2, shuffle: bool = True, seed: int = 5
) -> BatchPlan:
    return BatchPlan(samples, batch, accumulation, shuffle, seed)


def steps_taken(of: BatchPlan, batches: int) -> int:
    return sum(of.ends_step(index) for index in range(batches))


@pytest.mark.parametrize("case", range(20))
def test_shuffled_epochs_hold_every_sample_once(case: int) -> None:
    draw = random.Random(case)
    samples, batch, accumulation = draw.randrange(1, 40), draw.randrange(1, 9), draw.randrange(1, 5)
    of = plan(samples, batch, accumulation, seed=case)
    for epoch in range(3):
        indices = range(epoch * of.batches_per_epoch, (epoch + 1) * of.batches_per_epoch)
        rows = [row for index in indices for row in of.batch(index)]
        assert sorted(rows) == list(range(samples))
        assert of.ends_step(indices[-1])
    # Trainer: steps of an epoch = ceil(micro-batches / accumulation), the last step being smaller
    per_epoch = math.ceil(math.ceil(samples / batch) / accumulation)
    assert steps_taken(of, 3 * of.batches_per_epoch) == 3 * per_epoch == of.steps_of(3)
    assert of.steps_of(0.5) == math.ceil(0.5 * per_epoch)


def test_epochs_and_seeds_have_their_own_orders() -> None:
    orders = [tuple(epoch_order(30, seed, epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert tuple(epoch_order(30, 0, 1).tolist()) == orders[1]


def test_an_order_is_drawn_once_an_epoch_for_any_number_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def counted(samples: int, seed: int, epoch: int) -> torch.Tensor:
        drawn.append((seed, epoch))
        return epoch_order(samples, seed, epoch)

    monkeypatch.setattr("mlora.data.sampler.epoch_order", counted)
    plans = [plan(seed=seed) for seed in range(100)]
    per_epoch = plans[0].batches_per_epoch
    rows = [[of.batch(index) for of in plans] for index in range(3 * per_epoch)]
    assert len(drawn) == len(set(drawn)) == 300
    anew = plan(seed=7)  # as a resumed run asks: from the middle, and back
    assert [anew.batch(index) for index in (per_epoch + 1, 0)] == [rows[per_epoch + 1][7], rows[0][7]]


def test_a_hundred_thousand_million_epochs_take_no_more_than_one() -> None:
    of = plan(samples=1000, batch=8)
    epochs = 10**11
    assert of.steps_of(float(epochs)) == epochs * math.ceil(125 / 2)
    last = epochs * of.batches_per_epoch - 1
    assert len(of.batch(last)) == 8
    assert of.ends_step(last)
    assert sorted(plan(batch=10**30).batch(1)) == list(range(11))


def test_file_order_wraps_around_the_end() -> None:
    of = plan(samples=5, batch=3, accumulation=2, shuffle=False)
    assert [of.batch(index) for index in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
    assert [of.ends_step(index) for index in range(4)] == [False, True, False, True]
    assert of.steps_of(3) == math.ceil(15 / 6)
    steps = [
        plan(samples=10, batch=4, accumulation=1, shuffle=shuffle).steps_of(2) for shuffle in (False, True)
    ]
    assert steps == [5, 6]  # as the key's description says


def test_a_batch_larger_than_the_file_repeats_it_in_file_order() -> None:
    assert plan(samples=2, batch=5, shuffle=False).batch(1) == [1, 0, 1, 0, 1]


def test_seeds_depend_on_seed_and_name_only() -> None:
    seeds = {task_seed(seed, name) for seed in range(20) for name in ("a", "b", "1:a")}
    assert len(seeds) == 60
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert task_seed(3, "x") == task_seed(3, "x")
