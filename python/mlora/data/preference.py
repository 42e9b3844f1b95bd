"""Samples of preference data, and what an objective makes of those of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlora.data.record import NOT_TRAINED, Sample
from mlora.objectives.objective import Objective
from mlora.objectives.options import owner_of
from mlora_ext.errors import AdapterError


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt with a chosen and a rejected completion; the completions' tokens have labels."""

    chosen: Sample
    rejected: Sample

    @property
    def parts(self) -> tuple[Sample, ...]:
        """Both sequences."""
        return self.chosen, self.rejected

    @property
    def rows(self) -> int:
        """Rows of both sequences."""
        return self.chosen.rows + self.rejected.rows

    def cut(self, max_length: int) -> Pair:
        """Returns it with sequences of at most ``max_length`` tokens."""
        return Pair(self.chosen.cut(max_length), self.rejected.cut(max_length))


@dataclass(frozen=True, slots=True)
class Judged:
    """A prompt with a completion, as token ids, and whether the completion is desirable.

    The completion is whole, because it may follow another prompt; `limit` is the most tokens of a sequence.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    desirable: bool
    limit: int | None = None

    def followed_by(self, completion: tuple[int, ...]) -> Sample:
        """Returns the prompt with a completion, cut to the limit."""
        sample = Sample(self.prompt + completion, (NOT_TRAINED,) * len(self.prompt) + completion)
        return sample if self.limit is None else sample.cut(self.limit)

    @property
    def sample(self) -> Sample:
        """Its sequence."""
        return self.followed_by(self.completion)

    @property
    def parts(self) -> tuple[Sample, ...]:
        """Its sequence."""
        return (self.sample,)

    @property
    def rows(self) -> int:
        """Rows of its sequence."""
        rows = len(self.prompt) + len(self.completion)
        return rows if self.limit is None else min(rows, self.limit)

    def cut(self, max_length: int) -> Judged:
        """Returns it with sequences of at most ``max_length`` tokens, its own and mismatched ones."""
        return replace(self, limit=max_length)


@dataclass(frozen=True, slots=True)
class JointSample:
    """Sequences whose loss is computed together, so that they stay in one micro-batch.

    Attributes:
        sequences: the adapter's, with gradient.
        silent: owners and sequences without gradient: the base model's, another adapter's, or its own.
        facts: plain numbers for the objective.
        units: samples that it stands for.
    """

    sequences: tuple[Sample, ...]
    silent: tuple[tuple[str, Sample], ...]
    facts: tuple[float, ...]
    units: int = 1

    @property
    def rows(self) -> int:
        """Rows of all sequences, with and without gradient."""
        return sum(s.rows for s in self.sequences) + sum(s.rows for _, s in self.silent)

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that enter the loss."""
        return sum(sequence.trained_tokens for sequence in self.sequences)


def joined(name: str, samples: Sequence[Any], objective: Objective) -> list[Any]:
    """Returns what an adapter's samples of one batch become for its objective.

    Args:
        name: the adapter's.
        samples: of the whole batch, before it is cut into micro-batches. Joint samples stay as they are.

    Raises:
        ValueError: samples are of a kind that the objective does not take.
    """
    if all(isinstance(sample, JointSample) for sample in samples):
        return list(samples)
    kind, make = _KINDS[objective.takes]
    for sample in samples:
        if isinstance(sample, kind):
            continue
        if objective.takes == "sequences" and isinstance(sample, Pair | Judged):
            raise AdapterError(name, "its objective takes single sequences, got a preference sample")
        raise AdapterError(name, f"its objective takes {kind.__name__} samples, got {type(sample).__name__}")
    return make(name, samples, objective)


def _sequences(name: str, samples: Sequence[Any], objective: Objective) -> list[Any]:
    owner = owner_of(objective.reference, name)
    if owner is None:
        return list(samples)
    return [JointSample(s.sequences, tuple((owner, part) for part in s.sequences), s.facts) for s in samples]


def _pairs(name: str, samples: Sequence[Pair], objective: Objective) -> list[Any]:
    trained = [_with_prompt(pair.chosen) if objective.trains_prompts else pair.chosen for pair in samples]
    share = len(samples) / max(1, sum(chosen.trained_tokens for chosen in trained))
    found = []
    for pair, chosen in zip(samples, trained, strict=True):
        owner = owner_of(objective.reference, name)
        silent = () if owner is None else ((owner, chosen), (owner, pair.rejected))
        facts = (float(pair.chosen.trained_tokens), float(pair.rejected.trained_tokens), share)
        found.append(JointSample((chosen, pair.rejected), silent, facts))
    return found


def _judged(name: str, samples: Sequence[Judged], objective: Objective) -> list[Any]:
    if not samples:
        return []
    own = [each.sample for each in samples]
    silent: list[tuple[str, Sample]] = []
    owner = owner_of(objective.reference, name)
    if owner is not None:
        silent += [(owner, sample) for sample in own]
    if objective.mismatched:
        # TRL's batches are rotated by one: the completion of the sample before, the last one for the first
        before = [samples[-1], *samples[:-1]]
        others = [one.followed_by(other.completion) for one, other in zip(samples, before, strict=True)]
        silent += [(name, other) for other in others]
        silent += [(str(owner), other) for other in others]
    labels = tuple(float(each.desirable) for each in samples)
    return [JointSample(tuple(own), tuple(silent), labels, len(own))]


def _with_prompt(sample: Sample) -> Sample:
    return replace(sample, labels=sample.input_ids)


_KINDS: dict[str, tuple[Any, Callable[..., list[Any]]]] = {
    "sequences": (Sample, _sequences),
    "pairs": (Pair, _pairs),
    "judged": (Judged, _judged),
}
