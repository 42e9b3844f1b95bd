"""The memory model: what it fits, what seeds count, what it keeps."""

import json
import math
import random

import pytest
from mlora.memory.model import BatchShape, PeakModel
from mlora.scheduler import MemoryModel

TRUE = (8.4e6, 43_500.0, 3.25)


def size_of(lengths: list[int], true: tuple[float, ...] = TRUE) -> float:
    return true[0] + true[1] * sum(lengths) + true[2] * sum(n * n for n in lengths)


def draw(
    seed: int, count: int, noise: float = 0.0, true: tuple[float, ...] = TRUE
) -> list[tuple[list[int], int]]:
    source = random.Random(seed)
    found = []
    for _ in range(count):
        lengths = [source.randint(16, 700) for _ in range(source.randint(1, 6))]
        size = size_of(lengths, true)
        found.append((lengths, round(size * (1.0 + noise * source.uniform(-1.0, 1.0)))))
    return found


def fitted(samples: list[tuple[list[int], int]], model: MemoryModel | None = None) -> MemoryModel:
    model = model or MemoryModel()
    for lengths, size in samples:
        model.observe(lengths, size)
    return model


def test_ten_measurements_give_the_coefficients_back() -> None:
    model = fitted(draw(0, 10))
    assert model.coefficients == pytest.approx(TRUE, rel=1e-5)
    assert model.mape(draw(1, 30)) < 1e-3


def test_coefficients_are_never_negative() -> None:
    """Memory that grows slower than linearly would need a negative β2."""
    model = fitted([([n], round(1e6 * n**0.7)) for n in (20, 50, 100, 200, 400, 800)])
    assert min(model.coefficients) >= 0.0
    assert model.coefficients[2] == 0.0


def test_errors_are_relative() -> None:
    """A small batch's misfit counts as much as a large one's, which else would decide alone."""
    model = fitted([([10], 1_000), ([10], 1_100), ([20], 2_000), ([1000], 100_000), ([1000], 110_000)])
    assert 0.9 < model.predict([10]) / 1_050 < 1.1


@pytest.mark.parametrize("bias", [0.98, 1.02])
def test_seeds_count_only_where_measurements_say_nothing(bias: float) -> None:
    model, unseen = MemoryModel(), draw(1, 30)
    for lengths, size in draw(2, 6):
        model.seed(lengths, round(bias * size))
    assert model.mape(unseen) == pytest.approx(2.0, abs=1e-3)
    exact = draw(3, 1)[0][0]
    model.observe([512], round(TRUE[0] + TRUE[1] * 512 + TRUE[2] * 512**2))
    assert model.predict(exact) > 0
    assert model.mape(unseen) < 2.0
    fitted(draw(0, 10), model)
    assert model.mape(unseen) < 0.02


def test_one_shape_alone_leaves_the_others_to_the_seeds() -> None:
    model, unseen = MemoryModel(), draw(1, 30)
    for lengths, size in draw(2, 6):
        model.seed(lengths, size)
    size = round(TRUE[0] + TRUE[1] * 512 + TRUE[2] * 512**2)
    for _ in range(50):
        model.observe([512], size)
    assert model.mape(unseen) < 0.1
    without = fitted([([512], size)] * 50)
    assert without.predict([512]) == pytest.approx(size, rel=1e-6)
    assert without.mape(unseen) > 5.0


def test_a_knee_is_fitted() -> None:
    knee = 131

    def with_loss(lengths: list[int], size: float) -> tuple[list[int], int]:
        return lengths, round(size + 64_000 * min(sum(lengths) - len(lengths), knee))

    samples = [with_loss(*sample) for sample in draw(0, 40)]
    samples += [with_loss([n], TRUE[0] + TRUE[1] * n + TRUE[2] * n * n) for n in (5, 30, 60, 100)]
    assert fitted(samples, MemoryModel(knee)).mape(samples) < 1e-3
    assert fitted(samples).mape(samples) > 1.0


def test_sequences_of_several_lengths_are_joined() -> None:
    samples = [
        (lengths, round(size + 2_000 * sum(lengths) * (len(set(lengths)) > 1)))
        for lengths, size in draw(0, 40)
    ]
    assert {len(set(lengths)) > 1 for lengths, _ in samples} == {False, True}
    assert fitted(samples, MemoryModel(pieces=True)).mape(samples) < 1e-3
    assert fitted(samples).mape(samples) > 0.3
    equal = [([n], 1_000_000 + 9_000 * n) for n in (50, 100, 200)]
    assert fitted(equal, MemoryModel(pieces=True)).mape(equal) < 1e-3


def test_a_mask_of_the_longest_sequence_is_shared() -> None:
    samples = [(lengths, size + 400 * max(lengths) ** 2) for lengths, size in draw(0, 40)]
    assert fitted(samples, MemoryModel(mask=True)).mape(samples) < 1e-3
    assert fitted(samples).mape(samples) > 0.3


def test_leverage_tells_what_measurements_do_not_reach() -> None:
    dice, model = random.Random(3), MemoryModel()
    model.seed([100], bytes=round(size_of([100])))
    assert model.leverage(BatchShape.of([100])) == math.inf
    seen = [[dice.randint(90, 110) for _ in range(dice.randint(4, 12))] for _ in range(20)]
    for lengths in seen:
        model.observe(lengths, bytes=round(size_of(lengths)))
    assert all(model.leverage(BatchShape.of(lengths)) <= 1.0 for lengths in seen)
    mean = sum(model.leverage(BatchShape.of(lengths)) for lengths in seen) / len(seen)
    assert mean == pytest.approx(3 / 20, rel=1e-2)  # a hat matrix's trace is the number of coefficients
    assert model.leverage(BatchShape.of([10] * 60)) > 20  # no more rows, in other sequences
    model.observe([10] * 60, bytes=round(size_of([10] * 60)))
    assert model.leverage(BatchShape.of([10] * 60)) == pytest.approx(1.0, abs=0.05)


def test_leverage_of_a_feature_that_was_never_there_is_large() -> None:
    model = MemoryModel(pieces=True)
    for rows in (10, 20, 30, 40, 50):
        model.observe([rows] * 3, bytes=round(size_of([rows] * 3)))
    assert model.leverage(BatchShape.of([25] * 3)) < 1.0
    assert model.leverage(BatchShape.of([24, 25, 26])) > 1e3


def test_the_error_is_that_of_predictions_made_before() -> None:
    model = MemoryModel()
    model.seed([100], 1_000_000)
    model.observe([100], 1_100_000)
    assert model.error == pytest.approx(1 - 1 / 1.1, rel=1e-3)
    model.observe([100], 1_100_000)
    assert model.error == pytest.approx(1 - 1 / 1.1, rel=1e-3)
    alone = fitted(draw(0, 3))
    assert alone.error == 0.0
    assert fitted(draw(1, 20, noise=0.01), alone).error > 0.001


def test_a_state_goes_on_alike_and_does_not_grow() -> None:
    samples = draw(0, 2000, noise=0.01)
    model = fitted(samples[:50])
    model.seed([64], 9_000_000)
    size = len(json.dumps(model.state()))
    again = MemoryModel.from_state(json.loads(json.dumps(model.state())))
    for each in (model, again):
        fitted(samples[50:], each)
    assert again.state() == model.state()
    assert again.coefficients == model.coefficients
    assert len(json.dumps(model.state())) < 1.2 * size
    assert model.count == 2000


def test_what_makes_no_sense_is_refused() -> None:
    model = MemoryModel()
    for ask in (lambda: model.predict([5]), lambda: model.coefficients):
        with pytest.raises(RuntimeError, match="nothing has been observed"):
            ask()
    for lengths in ([], [3, 0]):
        with pytest.raises(ValueError, match="lengths: expected"):
            model.observe(lengths, 5)
    with pytest.raises(ValueError, match="bytes: expected"):
        model.seed([5], 0)
    with pytest.raises(ValueError, match="samples: expected"):
        model.mape([])
    with pytest.raises(ValueError, match="knee: expected"):
        MemoryModel(0)


def test_a_peak_is_that_of_the_largest_phase() -> None:
    model = PeakModel([None, None, None])
    for rows in (100, 200, 400, 800, 1600):
        model.observe([rows], (500 * rows, 8_000_000 + 1_000 * rows, 9_000 * rows))
    assert model.predict([300]) == pytest.approx(8_300_000, rel=1e-5)
    assert model.predict([3000]) == pytest.approx(27_000_000, rel=1e-5)
    again = PeakModel.from_state(json.loads(json.dumps(model.state())))
    assert again.predict([300]) == model.predict([300])


def test_a_stage_without_a_loss_has_no_such_phase() -> None:
    model = PeakModel([None, 131, None])
    model.seed([100], (100, 0, 300))
    assert model.predict([100]) in (300, 301)
    assert PeakModel([None]).predict([100]) == 0


@pytest.mark.parametrize("size", [math.nan, math.inf, -math.inf, 0.5, 0])
@pytest.mark.parametrize("take", ["observe", "seed"])
def test_what_is_no_size_is_refused(size: float, take: str) -> None:
    model, peak = MemoryModel(), PeakModel()
    expected = f"bytes: expected a finite number of at least 1, got {size}$"
    with pytest.raises(ValueError, match=expected):
        getattr(model, take)([4], size)
    if size:
        with pytest.raises(ValueError, match=expected):
            getattr(peak, take)([4], [size])
    assert not model.count
    assert not peak.known
