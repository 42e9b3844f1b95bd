"""Checks the samples of a batch against what its adapters are trained for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlora.data.micro_batch import BASE
from mlora.data.preference import joined
from mlora.engine.adapter_state import AdapterStates
from mlora.engine.batch_admission import Batch
from mlora.errors import check_kind
from mlora.objectives.label_losses import LabelObjective
from mlora.objectives.objective import CrossEntropy, Objective
from mlora.objectives.options import START
from mlora_ext.errors import AdapterError

_CROSS_ENTROPY = CrossEntropy()


def checked_samples(states: AdapterStates, batches: Batch) -> dict[Any, Sequence[Any]]:
    """Returns what the adapters' samples become for their objectives.

    Raises ValueError for an unknown adapter, samples of the wrong kind, labels that the adapter does not
    predict, or a reference that is not beside it.
    """
    check_batches(batches, "samples")
    found: dict[Any, Sequence[Any]] = {}
    for name, samples in batches.items():
        objective = _CROSS_ENTROPY if name in (None, BASE) else states.of(name).objective
        found[name] = joined(name or BASE, samples, objective)
        _check_reference(states, name, objective)
        _check_labels(name, objective, found[name])
    return found


def check_batches(batches: Any, what: str) -> None:
    """Raises ValueError unless batches are lists by adapter name, of what the message calls `what`."""
    check_kind("batches", batches, f"a dict of lists of {what} by adapter name", Mapping)
    for name, rows in batches.items():
        check_kind(f"adapter {name!r}", rows, f"a list of {what}", Sequence)


def _check_labels(name: str | None, objective: Objective, samples: Sequence[Any]) -> None:
    """Raises ValueError for samples whose labels are not what the adapter predicts."""
    for part in (part for sample in samples for part in sample.sequences):
        if not isinstance(objective, LabelObjective):
            if part.is_labelled:
                raise AdapterError(name, "expected labels that are tokens, got a LabelledSample")
        elif not part.is_labelled:
            raise AdapterError(name, f"expected a LabelledSample, got a {type(part).__name__}")
        elif fault := objective.fault(part.labels, part.facts):
            raise AdapterError(name, f"{fault}")


def _check_reference(states: AdapterStates, name: str, objective: Objective) -> None:
    """Raises ValueError if the adapter that an objective compares with is not beside this one."""
    owner = objective.reference
    if owner in (None, BASE, START):
        return
    known = states.get(str(owner))
    if known is None or known.replica != states[name].replica:
        raise AdapterError(
            name,
            f"objective.reference: no adapter {objective.reference!r} on this engine"
            f"{'' if known is None else ' and in its replica'}; create it first",
        )
    if isinstance(known.objective, LabelObjective):
        raise AdapterError(
            name,
            f"objective.reference: {objective.reference!r} is a classifier, which has "
            "no log-probabilities of tokens",
        )
