"""Memory of a micro-batch as a function of its sequences' lengths, fitted while it is measured.

Mem = β0 + β1·ΣLᵢ + β2·ΣLᵢ², from the mLoRA paper (memory model of its scheduler). There all sequences are
equally long, and it reads β0 + β1·B·L + β2·B·L².
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import lsq_linear

from mlora.memory.batch_shape import BatchShape

_SEED = 1e-3
"""Weight of a dry run's squared error. Small, so that seeds decide only what measurements leave open: with
ten measurements, a seed that is off by 2% moves the fit by less than 0.01%."""
_ROWS = 1024.0  # unit of lengths; it makes all features about equally large


class MemoryModel:
    """Fits `Mem = β0 + β1·ΣLᵢ + β2·ΣLᵢ²` with `β ≥ 0` to measurements, by least squares of relative errors.

    Keeps sums over the measurements: as many after thousands as after one. The fit depends only on the
    measurements and seeds in their order.

    Args:
        knee: fits a part `κ·min(Σ(Lᵢ-1), knee)`, `κ ≥ 0`, too: a loss that takes this many trained rows at a
            time. Default: no such part.
        pieces: fits a part `λ·ΣLᵢ`, `λ ≥ 0`, of batches with sequences of different lengths: attention is
            then called piece by piece, and its results are joined in other memory.
        mask: fits a part `μ·max Lᵢ²`, `μ ≥ 0`: a mask that all sequences and layers share.

    Attributes:
        count: measurements taken in.
        error: the largest relative error of a prediction made just before its measurement came. With a seed
            it counts from the first measurement on, else once there are as many as coefficients.

    Raises:
        ValueError: if `knee` is below 1.

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
        """Takes in the result of a dry run. It counts where measurements leave the fit open.

        Args:
            lengths: of the sequences of a micro-batch.
            bytes: what the dry run took.

        Raises:
            ValueError: as `observe`.
        """
        self._seeds.add(self._features(BatchShape.of(lengths)), _positive(bytes))
        self._found = self._by_seeds = None

    def observe(self, lengths: Sequence[int], bytes: int) -> None:
        """Takes in a measurement.

        Args:
            lengths: of the sequences of a micro-batch.
            bytes: what it took.

        Raises:
            ValueError: if there is no sequence, a length is below 1, or `bytes` is no finite number of at
                least 1.
        """
        features, size = self._features(BatchShape.of(lengths)), _positive(bytes)
        if self.seeded or self.count >= len(features):
            self.error = max(self.error, abs(self.predict(lengths) / size - 1.0))
        self._sums.add(features, size)
        self.count += 1
        self._found = self._whitening = None

    def predict(self, lengths: Sequence[int]) -> int:
        """Returns the bytes that a micro-batch will take.

        Args:
            lengths: of its sequences.

        Raises:
            ValueError: if there is no sequence, or a length is below 1.
            RuntimeError: if nothing has been observed and there is no seed.
        """
        return self.at(BatchShape.of(lengths))

    def at(self, shape: BatchShape) -> int:
        """Returns the bytes that a micro-batch of a shape will take; see `predict`.

        Args:
            shape: of a micro-batch.

        Raises:
            RuntimeError: if nothing has been observed and there is no seed.
        """
        return math.ceil(float(self._features(shape) @ self._fit()))

    def at_by_seeds(self, shape: BatchShape) -> int:
        """Returns what `at` returns, but from seeds alone.

        Measurements that say nothing about such a micro-batch may have bent the fit there.

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
        """Returns how far a micro-batch lies from the measured ones, as the fit sees it.

        This is its leverage (Hoaglin and Welsch, "The hat matrix in regression and ANOVA", 1978). The fit's
        error there is √leverage times that of a measurement.

        Args:
            shape: of the micro-batch.

        Returns:
            About the number of coefficients over the number of measurements for one like the measured ones;
            at most 1 for each of these; more than 1 where they say little; infinite without any.

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
        """Returns the mean absolute error of predictions, in percent of the measured bytes.

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
        """β0, β1 and β2 in bytes, bytes per row and bytes per squared row; without κ, λ and μ.

        Raises:
            RuntimeError: as `predict`.
        """
        found = self._fit()
        return float(found[0]), float(found[1] / _ROWS), float(found[2] / _ROWS**2)

    def state(self) -> dict[str, Any]:
        """Returns all that `from_state` needs to go on alike, as plain numbers and lists."""
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
        """Rebuilds a model from its `state`.

        Args:
            state: what `state` returned.
        """
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
        """Returns the coefficients in units of the features."""
        if self._found is not None:
            return self._found
        if not (self._sums.count or self._seeds.count):
            raise RuntimeError("nothing has been observed, and there is no seed: call observe or seed first")
        gram = self._sums.gram + _SEED * self._seeds.gram
        self._found = _solve(gram, self._sums.right + _SEED * self._seeds.right)
        return self._found


class PeakModel:
    """Predicts a micro-batch's peak: the largest of its phases, each with its own `MemoryModel`.

    The peak itself is no such sum: a short micro-batch peaks in the loss, whose workspace is bounded, and a
    long one in backward.

    Args:
        knees: of each phase's model; None = that phase has no knee.
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
        """Takes in the result of a dry run; see `MemoryModel.seed`.

        Args:
            lengths: of the sequences of a micro-batch.
            phases: the bytes of each phase; 0 = this stage does not have the phase.
        """
        for model, size in zip(self.models, phases, strict=True):
            if size:
                model.seed(lengths, size)

    def observe(self, lengths: Sequence[int], phases: Sequence[int]) -> None:
        """Takes in a measurement; see `MemoryModel.observe`.

        Args:
            lengths: of the sequences of a micro-batch.
            phases: the bytes of each phase; 0 = this stage does not have the phase.
        """
        for model, size in zip(self.models, phases, strict=True):
            if size:
                model.observe(lengths, size)

    def predict(self, lengths: Sequence[int]) -> int:
        """Returns the largest `MemoryModel.predict` of the phases."""
        return self.at(BatchShape.of(lengths))

    def at(self, shape: BatchShape) -> int:
        """Returns the largest `MemoryModel.at` of the phases."""
        known = [model for model in self.models if model.count or model.seeded]
        return max(model.at(shape) for model in known or self.models)

    def at_by_seeds(self, shape: BatchShape) -> int:
        """Returns the largest `MemoryModel.at_by_seeds` of the phases; 0 without seeds."""
        return max([0, *(model.at_by_seeds(shape) for model in self.models if model.seeded)])

    def leverage(self, shape: BatchShape) -> float:
        """Returns the largest `MemoryModel.leverage` of the measured phases; infinite without any."""
        return max((model.leverage(shape) for model in self.models if model.count), default=math.inf)

    def mape(self, samples: Sequence[tuple[Sequence[int], int]]) -> float:
        """Returns the mean absolute error of predicted peaks, in percent; see `MemoryModel.mape`."""
        if not samples:
            raise ValueError("samples: expected at least one, got none")
        errors = [abs(self.predict(lengths) / size - 1.0) for lengths, size in samples]
        return 100.0 * sum(errors) / len(errors)

    def state(self) -> list[dict[str, Any]]:
        """Returns the `MemoryModel.state` of each phase."""
        return [model.state() for model in self.models]

    @classmethod
    def from_state(cls, state: Sequence[Mapping[str, Any]]) -> PeakModel:
        """Rebuilds a model from its `state`."""
        model = cls()
        model.models = [MemoryModel.from_state(each) for each in state]
        return model


class _Sums:
    """Sums AᵀA and Aᵀ1; A's rows are features over bytes."""

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
    """Minimises |A β - 1|² with β >= 0, given only AᵀA and Aᵀ1; a root of AᵀA takes A's place."""
    scale = np.sqrt(np.maximum(np.diag(gram), np.finfo(float).tiny))  # a feature may always be 0
    values, vectors = np.linalg.eigh(gram / np.outer(scale, scale))
    kept = values > values[-1] * 1e-13
    roots = np.sqrt(values[kept])
    matrix = roots[:, None] * vectors[:, kept].T
    target = (vectors[:, kept].T @ (right / scale)) / roots
    found: np.ndarray[Any, Any] = lsq_linear(matrix, target, bounds=(0.0, np.inf), method="bvls").x / scale
    return found


def _whitening(gram: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns W with |W x|² = xᵀ(AᵀA)⁻¹x for x in the span of A's rows, and much more for other x."""
    scale = np.sqrt(np.diag(gram))
    scale = np.maximum(scale, 1e-6 * scale.max())  # a feature may always be 0
    values, vectors = np.linalg.eigh(gram / np.outer(scale, scale))
    found: np.ndarray[Any, Any] = (vectors / np.sqrt(np.maximum(values, 1e-12 * values[-1]))).T / scale
    return found


def _positive(size: int) -> int:
    if not (math.isfinite(size) and size >= 1):
        raise ValueError(f"bytes: expected a finite number of at least 1, got {size}")
    return size
