"""Memory of a micro-batch as a function of its sequences' lengths, fitted while it is measured.

Mem = β0 + β1·ΣLᵢ + β2·ΣLᵢ², from the mLoRA paper (memory model of its scheduler). There all sequences are
equally long, and it reads β0 + β1·B·L + β2·B·L².
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import lsq_linear

_SEED = 1e-3
"""Weight of a dry run's squared error. Small, so that seeds decide only what measurements leave open: with
ten measurements, a seed that is off by 2% moves the fit by less than 0.01%."""
_ROWS = 1024.0  # unit of lengths; it makes all features about equally large

SEEDED_MARGIN = 0.04  # of a fit from samples alone, which are within 2%
LEAST_MARGIN = 0.01
PER_DOUBLING = 0.005
"""For each doubling beyond the largest micro-batch seen: x^1.007 outgrows a linear fit by this much."""
_WORST_TIMES = 3.0  # the margin is this many times the worst error seen
_FADES = 0.9  # what each further measurement multiplies the worst error by


class SilentRows(int):
    """Rows of a sequence that is run without gradient, such as a reference: nothing of it is kept."""

    def __repr__(self) -> str:
        return f"SilentRows({int(self)})"


class BatchShape(NamedTuple):
    """The size of micro-batches, in rows.

    Attributes:
        rows: of all sequences.
        squares: squared rows of each sequence, summed.
        longest: rows of the longest sequence.
        even: rows if all sequences are equally long, else 0.
        uneven: rows if they are not, else 0.
        trained: rows with a token after them, which the loss takes.
        silent: rows of the sequences that are run without gradient; the others leave them out.
    """

    rows: int = 0
    squares: int = 0
    longest: int = 0
    even: int = 0
    uneven: int = 0
    trained: int = 0
    silent: int = 0

    @classmethod
    def of(cls, lengths: Sequence[int]) -> BatchShape:
        """Returns the shape of one micro-batch with sequences of these lengths, some perhaps `SilentRows`."""
        silent = sum([int(length) for length in lengths if isinstance(length, SilentRows)])
        lengths = [length for length in lengths if not isinstance(length, SilentRows)]
        if not len(lengths) or not (shortest := min(lengths)) >= 1:
            raise ValueError(f"lengths: expected at least one, each of at least 1, got {list(lengths)}")
        rows, longest = sum(lengths), max(lengths)
        even = rows if shortest == longest else 0
        squares = sum([length * length for length in lengths])
        return cls(rows, squares, longest, even, rows - even, rows - len(lengths), silent)

    def with_(self, other: BatchShape) -> BatchShape:
        """Returns the larger of both in each respect."""
        return BatchShape(*map(max, self, other))

    def doublings(self, of: BatchShape) -> float:
        """Returns how often `of` must be doubled to hold this shape; zeros count as 1."""
        return math.log2(max(1.0, *[own / (other or 1) for own, other in zip(self, of, strict=True)]))


NOTHING = BatchShape()


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
        silent: fits a part `σ·ΣSᵢ`, `σ ≥ 0`, of the rows that are run without gradient (`SilentRows`);
            without it they count as nothing.

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

    def __init__(
        self, knee: int | None = None, pieces: bool = False, mask: bool = False, silent: bool = False
    ) -> None:
        if knee is not None and knee < 1:
            raise ValueError(f"knee: expected at least 1 row, got {knee}")
        self.knee, self.pieces, self.mask, self.silent = knee, pieces, mask, silent
        self.error = 0.0
        size = 4 + (knee is not None) + pieces + mask + silent
        # sums of rrᵀ, where r holds the features over the bytes, and 1
        self._sums, self._seeds = np.zeros((size, size)), np.zeros((size, size))
        self._cache: dict[str, np.ndarray[Any, Any]] = {}

    @property
    def count(self) -> int:
        """Measurements taken in."""
        return int(self._sums[-1, -1])

    @property
    def seeded(self) -> bool:
        """Whether there is a seed."""
        return bool(self._seeds[-1, -1])

    def seed(self, lengths: Sequence[int], bytes: int) -> None:
        """Takes in the result of a dry run. It counts where measurements leave the fit open.

        Args:
            lengths: of the sequences of a micro-batch.
            bytes: what the dry run took.

        Raises:
            ValueError: as `observe`.
        """
        row = self._row(lengths, bytes)
        self._seeds += np.outer(row, row)
        self._cache.clear()

    def observe(self, lengths: Sequence[int], bytes: int) -> None:
        """Takes in a measurement.

        Args:
            lengths: of the sequences of a micro-batch.
            bytes: what it took.

        Raises:
            ValueError: if there is no sequence, a length is below 1, or `bytes` is no finite number of at
                least 1.
        """
        row = self._row(lengths, bytes)
        if self.seeded or self.count >= len(row) - 1:
            self.error = max(self.error, abs(self.predict(lengths) / bytes - 1.0))
        self._sums += np.outer(row, row)
        self._cache.clear()

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
        """Returns the bytes that a micro-batch of a shape will take; raises as `predict`."""
        return math.ceil(float(self._features(shape) @ self._fit()))

    def at_by_seeds(self, shape: BatchShape) -> int:
        """Returns what `at` returns, but from seeds alone.

        Measurements that say nothing about such a micro-batch may have bent the fit there.

        Raises:
            RuntimeError: if there is no seed.
        """
        if not self.seeded:
            raise RuntimeError("there is no seed: call seed first")
        if "seeds" not in self._cache:
            self._cache["seeds"] = _solve(self._seeds)
        return math.ceil(float(self._features(shape) @ self._cache["seeds"]))

    def leverage(self, shape: BatchShape) -> float:
        """Returns how far a micro-batch lies from the measured ones, as the fit sees it.

        This is its leverage (Hoaglin and Welsch, "The hat matrix in regression and ANOVA", 1978). The fit's
        error there is √leverage times that of a measurement.

        Returns:
            About the number of coefficients over the number of measurements for one like the measured ones;
            at most 1 for each of these; more than 1 where they say little; infinite without any.
        """
        if not self.count:
            return math.inf
        if "whitening" not in self._cache:
            self._cache["whitening"] = _whitening(self._sums[:-1, :-1])
        parts = self._cache["whitening"] @ (self._features(shape) / self.at(shape))
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
            "silent": self.silent,
            "error": self.error,
            "sums": self._sums.tolist(),
            "seeds": self._seeds.tolist(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> MemoryModel:
        """Rebuilds a model from its `state`.

        Args:
            state: what `state` returned.
        """
        model = cls(state["knee"], state["pieces"], state["mask"], state.get("silent", False))
        model.error = state["error"]
        model._sums, model._seeds = np.array(state["sums"]), np.array(state["seeds"])
        return model

    def _row(self, lengths: Sequence[int], size: int) -> np.ndarray[Any, Any]:
        features = self._features(BatchShape.of(lengths))
        if not (math.isfinite(size) and size >= 1):
            raise ValueError(f"bytes: expected a finite number of at least 1, got {size}")
        return np.append(features / size, 1.0)

    def _features(self, shape: BatchShape) -> np.ndarray[Any, Any]:
        found = [1.0, shape.rows / _ROWS, shape.squares / _ROWS**2]
        if self.knee is not None:
            found.append(min(shape.trained, self.knee) / _ROWS)
        if self.pieces:
            found.append(shape.uneven / _ROWS)
        if self.mask:
            found.append(shape.longest**2 / _ROWS**2)
        if self.silent:
            found.append(shape.silent / _ROWS)
        return np.array(found)

    def _fit(self) -> np.ndarray[Any, Any]:
        """Returns the coefficients in units of the features."""
        if "all" not in self._cache:
            if not (self.count or self.seeded):
                raise RuntimeError(
                    "nothing has been observed, and there is no seed: call observe or seed first"
                )
            self._cache["all"] = _solve(self._sums + _SEED * self._seeds)
        return self._cache["all"]


class PeakModel:
    """Predicts a micro-batch's peak on a stage and bounds it by a margin.

    The peak is the largest of the phases, each with its own `MemoryModel` (with pieces, a mask and silent
    rows). The peak itself is no such sum: a short micro-batch peaks in the loss, whose workspace is bounded,
    and a long one in backward.

    Args:
        knees: of each phase's model; None = that phase has no knee.

    Attributes:
        worst: the worst recent relative error of a prediction, too small or too large.
        seeds: the shape that seeds reach.
        measured: the shape that measurements reach.
    """

    def __init__(self, knees: Sequence[int | None] = (None,)) -> None:
        self.models = [MemoryModel(knee, pieces=True, mask=True, silent=True) for knee in knees]
        self.worst = SEEDED_MARGIN / _WORST_TIMES
        self.seeds = self.measured = NOTHING

    @property
    def known(self) -> bool:
        """Whether anything can be predicted."""
        return any(model.count or model.seeded for model in self.models)

    def seed(self, lengths: Sequence[int], phases: Sequence[int]) -> None:
        """Takes in the bytes of a sample's phases; 0 = this stage does not have the phase."""
        for model, size in zip(self.models, phases, strict=True):
            if size:
                model.seed(lengths, size)
        self.seeds = self.seeds.with_(BatchShape.of(lengths))

    def observe(self, lengths: Sequence[int], phases: Sequence[int]) -> None:
        """Takes in the bytes of a measured micro-batch's phases, as `seed` does."""
        error = abs(self.predict(lengths) / max(phases) - 1)
        self.worst = max(error, _FADES * self.worst)
        for model, size in zip(self.models, phases, strict=True):
            if size:
                model.observe(lengths, size)
        self.measured = self.measured.with_(BatchShape.of(lengths))

    def predict(self, lengths: Sequence[int]) -> int:
        """Returns the bytes that a micro-batch needs; 0 if nothing is known."""
        return self._at(BatchShape.of(lengths)) if self.known else 0

    def over(self, lengths: Sequence[int]) -> float:
        """Returns the most bytes that a micro-batch needs; infinite if nothing is known.

        Within the measurements the margin follows the errors seen. From twice as far on it is at least that
        of seeds, and the bound is no less than what seeds alone say. The margin grows further where there are
        no seeds either.
        """
        if not self.known:
            return math.inf
        shape = BatchShape.of(lengths)
        size, beyond = self._at(shape), self.beyond(shape)
        margin = max(LEAST_MARGIN, _WORST_TIMES * self.worst)
        if beyond:
            size = max(size, self._at_by_seeds(shape))
            margin = max(margin, SEEDED_MARGIN * min(1.0, beyond))
            margin += PER_DOUBLING * shape.doublings(self.seeds.with_(self.measured))
        return (1 + margin) * size

    def by_samples(self, lengths: Sequence[int]) -> float:
        """Returns the most bytes that a micro-batch needs by seeds alone, whatever was measured since."""
        shape = BatchShape.of(lengths)
        margin = SEEDED_MARGIN + PER_DOUBLING * shape.doublings(self.seeds)
        return (1 + margin) * self._at_by_seeds(shape)

    def beyond(self, shape: BatchShape) -> float:
        """Returns how far a micro-batch lies beyond the measurements, in doublings; 0 within them.

        It may be larger than any of them, or of another form, such as many short sequences where few long
        ones were measured. Only its leverage shows the latter.
        """
        leverage = max((model.leverage(shape) for model in self.models if model.count), default=math.inf)
        return max(shape.doublings(self.measured), math.log2(max(1.0, leverage)) / 2)

    def _at(self, shape: BatchShape) -> int:
        return max(model.at(shape) for model in self.models if model.count or model.seeded)

    def _at_by_seeds(self, shape: BatchShape) -> int:
        return max([0, *(model.at_by_seeds(shape) for model in self.models if model.seeded)])

    def state(self) -> dict[str, Any]:
        """Returns plain values."""
        models, shapes = [model.state() for model in self.models], [list(self.seeds), list(self.measured)]
        return {"models": models, "worst": self.worst, "seeds": shapes[0], "measured": shapes[1]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PeakModel:
        """Rebuilds a model from its `state`."""
        model = cls()
        model.models = [MemoryModel.from_state(each) for each in state["models"]]
        model.worst = state["worst"]
        model.seeds, model.measured = BatchShape(*state["seeds"]), BatchShape(*state["measured"])
        return model


def _solve(sums: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Minimises |A β - 1|² with β >= 0, given only AᵀA and Aᵀ1; a root of AᵀA takes A's place."""
    gram, right = sums[:-1, :-1], sums[:-1, -1]
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
