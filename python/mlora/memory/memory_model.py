"""Memory of a micro-batch as a function of its sequences' lengths, fitted while it is measured.

Mem = β0 + β1·ΣLᵢ + β2·ΣLᵢ², of the mLoRA paper (memory model of its scheduler), where all sequences are
equally long and it reads β0 + β1·B·L + β2·B·L².
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import lsq_linear

from mlora.memory.batch_shape import BatchShape

_SEED = 1e-3
"""Weight of a dry run's square error. Small, so that it decides only about what measurements have not shown:
with ten of them, a seed that is off by 2% moves the fit by less than 0.01%."""
_ROWS = 1024.0  # unit of lengths, so that all features are about as large


class MemoryModel:
    """Fits `Mem = β0 + β1·ΣLᵢ + β2·ΣLᵢ²` with `β ≥ 0` to measurements, least squares of relative errors.

    Kept are sums over the measurements, as many after thousands as after one. The fit is a function of the
    measurements and seeds in their order, and of nothing else.

    Args:
        knee: where memory has a part `κ·min(Σ(Lᵢ-1), knee)`, as of a loss that takes so many trained rows at
            a time, `κ ≥ 0` is fitted, too. Default: there is none.
        pieces: whether memory has a part `λ·ΣLᵢ` where not all sequences are equally long, `λ ≥ 0`: attention
            is then called piece by piece, and what it gives is joined in other memory.
        mask: whether memory has a part `μ·max Lᵢ²`, `μ ≥ 0`: a mask that all sequences and layers share.

    Attributes:
        count: measurements taken in.
        error: the largest relative error of a prediction of a measurement that was then taken in; predictions
            count from the first one if there was a seed, else from the fourth.

    Example:
        >>> model = MemoryModel()
        >>> model.seed([512, 512], bytes=90_000_000)
        >>> model.observe([300, 200, 80], bytes=61_000_000)
        >>> model.predict([1024])
    """

    def __init__(self, knee: int | None = None, pieces: bool = False, mask: bool = False) -> None:
        if knee is not None and knee < 1:
            raise ValueError(f"knee: expected at least 1 row, got {knee}")
        self.knee, self.pieces, self.mask = knee, pieces, mask
        self.count = 0
        self.error = 0.0
        size = 3 + (knee is not None) + pieces + mask
        self._sums, self._seeds = _Sums(size), _Sums(size)
        self._found: np.ndarray[Any, Any] | None = None
        self._by_seeds: np.ndarray[Any, Any] | None = None
        self._whitening: np.ndarray[Any, Any] | None = None

    @property
    def seeded(self) -> bool:
        """Whether there is a seed."""
        return self._seeds.count > 0

    def seed(self, lengths: Sequence[int], bytes: int) -> None:
        """Take in what a dry run says. It counts where measurements leave the fit open.

        Args:
            lengths: of the sequences of a micro-batch.
            bytes: that it is said to take.

        Raises:
            ValueError: as `observe`.
        """
        self._seeds.add(self._features(BatchShape.of(lengths)), _positive(bytes))
        self._found = self._by_seeds = None

    def observe(self, lengths: Sequence[int], bytes: int) -> None:
        """Take in a measurement.

        Args:
            lengths: of the sequences of a micro-batch.
            bytes: that it took.

        Raises:
            ValueError: if there is no sequence, a length is below 1, or `bytes` is no number of at least 1.
        """
        features, size = self._features(BatchShape.of(lengths)), _positive(bytes)
        if self.seeded or self.count >= len(features):
            self.error = max(self.error, abs(self.predict(lengths) / size - 1.0))
        self._sums.add(features, size)
        self.count += 1
        self._found = self._whitening = None

    def predict(self, lengths: Sequence[int]) -> int:
        """Return the bytes that a micro-batch will take.

        Args:
            lengths: of its sequences.

        Raises:
            ValueError: if there is no sequence, or a length is below 1.
            RuntimeError: if nothing has been observed and there is no seed.
        """
        return self.at(BatchShape.of(lengths))

    def at(self, shape: BatchShape) -> int:
        """As `predict`, of what is known of the lengths.

        Args:
            shape: of a micro-batch.

        Raises:
            RuntimeError: if nothing has been observed and there is no seed.
        """
        return math.ceil(float(self._features(shape) @ self._fit()))

    def at_by_seeds(self, shape: BatchShape) -> int:
        """As `at`, from seeds alone: measurements that say nothing about such a micro-batch may have bent the
        fit there.

        Args:
            shape: of a micro-batch.

        Raises:
            RuntimeError: if there is no seed.
        """
        if not self.seeded:
            raise RuntimeError("there is no seed: call seed first")
        if self._by_seeds is None:
            self._by_seeds = _solve(self._seeds.gram, self._seeds.right)
        return math.ceil(float(self._features(shape) @ self._by_seeds))

    def leverage(self, shape: BatchShape) -> float:
        """Return how far a micro-batch lies from those that were measured, as the fit sees it: its leverage
        (Hoaglin and Welsch, "The hat matrix in regression and ANOVA", 1978).

        Args:
            shape: of the micro-batch.

        Returns:
            About the number of coefficients over the number of measurements for one like them, at most 1 for
            each of them, and more than 1 where they say little: the fit's error there is its square root
            times that of a measurement. Infinite where there is none.

        Raises:
            RuntimeError: as `at`.
        """
        if not self.count:
            return math.inf
        if self._whitening is None:
            self._whitening = _whitening(self._sums.gram)
        parts = self._whitening @ (self._features(shape) / self.at(shape))
        return float(parts @ parts)

    def mape(self, samples: Sequence[tuple[Sequence[int], int]]) -> float:
        """Return the mean absolute error of predictions, in percent of what was measured.

        Args:
            samples: pairs of lengths and bytes; at least one.

        Raises:
            ValueError: if there is none.
            RuntimeError: as `predict`.
        """
        if not samples:
            raise ValueError("samples: expected at least one, got none")
        errors = [abs(self.predict(lengths) / size - 1.0) for lengths, size in samples]
        return 100.0 * sum(errors) / len(errors)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """β0, β1 and β2, in bytes, bytes per row and bytes per square of rows; without κ, λ and μ.

        Raises:
            RuntimeError: as `predict`.
        """
        found = self._fit()
        return float(found[0]), float(found[1] / _ROWS), float(found[2] / _ROWS**2)

    def state(self) -> dict[str, Any]:
        """Everything that `from_state` needs to go on alike, as plain numbers and lists."""
        return {
            "knee": self.knee,
            "pieces": self.pieces,
            "mask": self.mask,
            "count": self.count,
            "error": self.error,
            "sums": self._sums.state(),
            "seeds": self._seeds.state(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> MemoryModel:
        """Make a model again from its `state`."""
        model = cls(state["knee"], state["pieces"], state["mask"])
        model.count, model.error = state["count"], state["error"]
        model._sums, model._seeds = _Sums.from_state(state["sums"]), _Sums.from_state(state["seeds"])
        return model

    def _features(self, shape: BatchShape) -> np.ndarray[Any, Any]:
        found = [1.0, shape.rows / _ROWS, shape.squares / _ROWS**2]
        if self.knee is not None:
            found.append(min(shape.trained, self.knee) / _ROWS)
        if self.pieces:
            found.append(shape.uneven / _ROWS)
        if self.mask:
            found.append(shape.longest**2 / _ROWS**2)
        return np.array(found)

    def _fit(self) -> np.ndarray[Any, Any]:
        """The coefficients in units of the features."""
        if self._found is not None:
            return self._found
        if not (self._sums.count or self._seeds.count):
            raise RuntimeError("nothing has been observed, and there is no seed: call observe or seed first")
        gram = self._sums.gram + _SEED * self._seeds.gram
        self._found = _solve(gram, self._sums.right + _SEED * self._seeds.right)
        return self._found


class PeakModel:
    """A micro-batch's peak, the largest of what its phases take, with a `MemoryModel` for each.

    The peak itself is no such sum: a short micro-batch's lies in the loss, whose workspace is bounded, a long
    one's in backward.

    Args:
        knees: of each phase's model, or None where it has none.
        pieces: see `MemoryModel`.
        mask: see `MemoryModel`.
    """

    def __init__(self, knees: Sequence[int | None] = (None,), pieces: bool = True, mask: bool = True) -> None:
        self.models = [MemoryModel(knee, pieces, mask) for knee in knees]

    @property
    def count(self) -> int:
        """Measurements taken in."""
        return max(model.count for model in self.models)

    @property
    def known(self) -> bool:
        """Whether anything can be predicted."""
        return any(model.count or model.seeded for model in self.models)

    @property
    def error(self) -> float:
        """The largest `MemoryModel.error` of the phases."""
        return max(model.error for model in self.models)

    def seed(self, lengths: Sequence[int], phases: Sequence[int]) -> None:
        """As `MemoryModel.seed`; a phase of 0 bytes is one that this stage does not have."""
        for model, size in zip(self.models, phases, strict=True):
            if size:
                model.seed(lengths, size)

    def observe(self, lengths: Sequence[int], phases: Sequence[int]) -> None:
        """As `MemoryModel.observe`, of each phase."""
        for model, size in zip(self.models, phases, strict=True):
            if size:
                model.observe(lengths, size)

    def predict(self, lengths: Sequence[int]) -> int:
        """As `MemoryModel.predict`: the largest of the phases."""
        return self.at(BatchShape.of(lengths))

    def at(self, shape: BatchShape) -> int:
        """As `MemoryModel.at`: the largest of the phases."""
        known = [model for model in self.models if model.count or model.seeded]
        return max(model.at(shape) for model in known or self.models)

    def at_by_seeds(self, shape: BatchShape) -> int:
        """As `MemoryModel.at_by_seeds`: the largest of the phases; 0 where there are no seeds."""
        return max([0, *(model.at_by_seeds(shape) for model in self.models if model.seeded)])

    def leverage(self, shape: BatchShape) -> float:
        """As `MemoryModel.leverage`: the largest of the phases that were measured."""
        return max((model.leverage(shape) for model in self.models if model.count), default=math.inf)

    def mape(self, samples: Sequence[tuple[Sequence[int], int]]) -> float:
        """As `MemoryModel.mape`, of the peaks."""
        if not samples:
            raise ValueError("samples: expected at least one, got none")
        errors = [abs(self.predict(lengths) / size - 1.0) for lengths, size in samples]
        return 100.0 * sum(errors) / len(errors)

    def state(self) -> list[dict[str, Any]]:
        """As `MemoryModel.state`."""
        return [model.state() for model in self.models]

    @classmethod
    def from_state(cls, state: Sequence[Mapping[str, Any]]) -> PeakModel:
        """Make a model again from its `state`."""
        model = cls()
        model.models = [MemoryModel.from_state(each) for each in state]
        return model


class _Sums:
    """AᵀA and Aᵀ1, where A's rows are features over bytes."""

    def __init__(self, size: int) -> None:
        self.count = 0
        self.gram, self.right = np.zeros((size, size)), np.zeros(size)

    def add(self, features: np.ndarray[Any, Any], size: int) -> None:
        row = features / size
        self.gram += np.outer(row, row)
        self.right += row
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "gram": self.gram.tolist(), "right": self.right.tolist()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> _Sums:
        sums = cls(len(state["right"]))
        sums.count = state["count"]
        sums.gram, sums.right = np.array(state["gram"]), np.array(state["right"])
        return sums


def _solve(gram: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Minimise |A β - 1|² with β >= 0, where only AᵀA and Aᵀ1 are known; a root of AᵀA takes A's place."""
    scale = np.sqrt(np.maximum(np.diag(gram), np.finfo(float).tiny))  # a feature may be 0 throughout
    values, vectors = np.linalg.eigh(gram / np.outer(scale, scale))
    kept = values > values[-1] * 1e-13
    roots = np.sqrt(values[kept])
    matrix = roots[:, None] * vectors[:, kept].T
    target = (vectors[:, kept].T @ (right / scale)) / roots
    found: np.ndarray[Any, Any] = lsq_linear(matrix, target, bounds=(0.0, np.inf), method="bvls").x / scale
    return found


def _whitening(gram: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """W with |W x|² = xᵀ(AᵀA)⁻¹x, where x lies among A's rows, and much more where it does not."""
    scale = np.sqrt(np.diag(gram))
    scale = np.maximum(scale, 1e-6 * scale.max())  # a feature may be 0 throughout
    values, vectors = np.linalg.eigh(gram / np.outer(scale, scale))
    found: np.ndarray[Any, Any] = (vectors / np.sqrt(np.maximum(values, 1e-12 * values[-1]))).T / scale
    return found


def _positive(size: int) -> int:
    if not (math.isfinite(size) and size >= 1):
        raise ValueError(f"bytes: expected a finite number of at least 1, got {size}")
    return size
