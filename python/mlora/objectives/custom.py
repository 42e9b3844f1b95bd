"""A loss given as a Python function of log-probabilities."""

from __future__ import annotations

import inspect
import traceback
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from mlora.errors import spelt_alike, unknown_option
from mlora.objectives.loss_folder import said_by
from mlora.objectives.objective import LogProbs, LossOfOwner, Metric, Objective
from mlora.objectives.options import OWN, ObjectiveError, Takes, own_options
from mlora.objectives.own_code import TorchSettings, is_own_failure
from mlora_ext.out_of_memory import is_out_of_memory

LossFunction = Callable[..., Tensor | tuple[Tensor, dict[str, Tensor]]]


class LossError(RuntimeError):
    """A loss of one's own failed; the message names it."""


class FailuresOfLoss:
    """Raises whatever an objective raises, or changes of torch's settings, as a LossError that names it.

    Errors of memory in mlora's own objectives pass as they are: they concern the whole run. A loss of one's
    own has small tensors, so its errors of memory are its own. Its random numbers of torch depend on nothing
    but `rows`, so neither batch-mates nor a resume change them.
    """

    def __init__(self, objective: Objective, rows: LogProbs | None = None) -> None:
        self._name, self._place = type(objective).__name__, None
        self._own, self._rows = not type(objective).__module__.startswith("mlora."), rows
        if isinstance(objective, CustomLoss):
            self._name, self._place, self._own = objective.name, objective.place, True
        elif not self._own:
            self._name = getattr(objective, "name", self._name)

    def __enter__(self) -> None:
        self._settings, self._random = TorchSettings() if self._own else None, ExitStack()
        if self._own and self._rows is not None and not isinstance(self._rows.log_p, FakeTensor):
            log_p = self._rows.log_p.detach()
            self._random.enter_context(torch.random.fork_rng([log_p.device] if log_p.is_cuda else []))
            torch.manual_seed(zlib.crc32(log_p.cpu().numpy().tobytes()))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._random.close()
        changed = self._settings.put_back() if self._settings else ""
        if error is None and changed:
            raise LossError(f"objective: {self._name} failed: {changed}{_where(None, self._place)}")
        if error is None or isinstance(error, LossError) or not is_own_failure(error):
            return
        if is_out_of_memory(error) and not self._own:
            return
        reason = f"{type(error).__name__}: {said_by(error)}{_meant(error)}{_where(error, self._place)}"
        raise LossError(f"objective: {self._name} failed: {reason}") from error


def _place_of(function: Any) -> tuple[str, int] | None:
    """Returns the file and line of a function's or an object's code; None where Python has none."""
    found = inspect.unwrap(function)
    code = getattr(found, "__code__", None) or getattr(type(found).__call__, "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def _meant(error: BaseException) -> str:
    """Returns which attribute of an object is spelt most like the one that it lacks, to end a message."""
    if not isinstance(error, AttributeError) or error.name is None:
        return ""
    near = spelt_alike(error.name, [name for name in dir(error.obj) if not name.startswith("_")])
    return f"; did you mean {near!r}?" if near else ""


def _where(error: BaseException | None, place: tuple[str, int] | None) -> str:
    """Returns where in a loss's file an error was raised, else where the loss is, to end a message."""
    if place is None:
        return ""
    file, line = place
    for frame, number in traceback.walk_tb(error.__traceback__ if error else None):
        if frame.f_code.co_filename == file:
            line = number
    return f", in {file}:{line}"


class Unmade(Objective):
    """Stands for a loss that this process cannot make, and stops its adapter with the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def loss_of(self, rows: LogProbs) -> LossOfOwner:
        """Raises LossError."""
        raise LossError(self._reason)


def not_run(rows: LogProbs, **options: Any) -> Tensor:
    """Stands for a loss of one's own where its code must not run, as in ``mlora validate``."""
    raise LossError("objective: was not run")


NOT_RUN = f"{__name__}:{not_run.__name__}"


class CustomLoss(Objective):
    """A loss by a function of `LogProbs` that returns the loss of each sample, `[N]`; their mean is trained.

    The function may also return metrics: a tuple of the losses and a dict of `[N]` values by name, whose
    means are reported. With `judged` samples, N is the number of completions.

    Args:
        function: called with `LogProbs` and the options.
        takes: the kind of its samples; see `Objective.takes`.
        reference: whose log-probabilities of the same sequences are in `LogProbs.silent`; None = nobody's.
        trains_prompts: whether the prompts of chosen sequences are trained, too.
        options: more keyword arguments of the function.

    Raises:
        ObjectiveError: `function` cannot be called, lacks an argument or takes no such one; `takes` is
            unknown.

    Example:
        >>> def simple(rows, beta=0.1):
        ...     chosen, rejected = rows.sums()[0::2], rows.sums()[1::2]
        ...     return -torch.nn.functional.logsigmoid(beta * (chosen - rejected))
        >>> engine.create_adapter("a", lora, optim, objective=CustomLoss(simple, takes="pairs"))
    """

    def __init__(
        self,
        function: LossFunction,
        *,
        takes: Takes = "sequences",
        reference: str | None = None,
        trains_prompts: bool = False,
        **options: Any,
    ) -> None:
        if not callable(function):
            raise ObjectiveError(f"expected a name, an Objective or a function, got {function!r}")
        own_options(takes, reference, trains_prompts)
        self.function, self.takes, self.reference = function, takes, reference
        self.trains_prompts = trains_prompts
        self.name = getattr(function, "__name__", type(function).__name__)
        self.place = _place_of(function)
        self._options = options
        self._check()

    @property
    def told(self) -> str:
        """Its name and where it is, for messages."""
        return f"{self.name}{_where(None, self.place)}"

    def options(self) -> dict[str, Any]:
        """Returns all that was given beside the function."""
        return {**{key: getattr(self, key) for key in OWN}, **self._options}

    def units(self, samples: Sequence[Any], trained: int) -> int:
        """Returns the number of samples."""
        return sum(sample.units for sample in samples)

    def loss_of(self, rows: LogProbs) -> LossOfOwner:
        """Returns the sum over samples of what the function returns."""
        with FailuresOfLoss(self):
            found = self.function(rows, **self._options)
        losses, metrics = found if isinstance(found, tuple) else (found, {})
        count = len(rows.lengths) // (2 if self.takes == "pairs" else 1)
        self._check_shape("the losses", losses, count)
        sums: dict[str, Metric] = {}
        for name, values in metrics.items():
            self._check_shape(f"the metric {name!r}", values, count)
            sums[name] = values.detach().sum()
        return LossOfOwner(losses.sum(), sums)

    def _check_shape(self, what: str, values: Any, count: int) -> None:
        shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        if shape != [count]:
            raise LossError(
                f"objective: {self.name} must return {what} of each of {count} samples, a tensor "
                f"[{count}], got {shape}{_where(None, self.place)}"
            )

    def _check(self) -> None:
        """Raises ObjectiveError for an option that the function lacks or does not take."""
        accepted = list(inspect.signature(self.function).parameters.values())
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        for each in accepted[1:]:
            if each.kind in by_name and each.default is each.empty and each.name not in self._options:
                raise ObjectiveError(
                    f"{self.name} lacks the argument {each.name}; add `{each.name}:` to objective"
                )
        if any(each.kind is each.VAR_KEYWORD for each in accepted):
            return
        known = [each.name for each in accepted][1:]
        for key in self._options:
            if key not in known:
                hint = unknown_option(key, [*known, *OWN])
                raise ObjectiveError(f"unknown option of {self.name}; {hint}", (key,))
