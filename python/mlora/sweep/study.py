"""A sweep's trials as Optuna knows them: proposes trials, and decides which to prune.

Each trial has a sampler with its own seed. A proposal thus depends only on the earlier trials and its own
number, and a run that was killed goes on as if nothing had happened.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.study import StudyDirection
from optuna.trial import TrialState

from mlora.config.search_space import Choice, Leaf, grid_point
from mlora.config.sweep_config import SweepConfig
from mlora.data.sampler import task_seed
from mlora.errors import RunError, first_line

End = Literal["complete", "pruned", "fail"]

_SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "grid": "RandomSampler"}  # grid asks none
_PRUNERS = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "percentile": "PercentilePruner",
    "successive_halving": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
}


class Study:
    """Optuna's study, held in memory.

    `pruning` are the pruner's arguments; `trials` is what `state` returned, for a run that goes on. Raises
    RunError if Optuna refuses ``sampler_kwargs`` or ``pruner_kwargs``.
    """

    def __init__(
        self,
        sweep: SweepConfig,
        seed: int,
        pruning: Mapping[str, Any],
        trials: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._sweep, self._seed, self._space = sweep, seed, sweep.space
        self._distributions = {path: _distribution(leaf) for path, leaf in self._space.items()}
        direction = StudyDirection.MAXIMIZE if sweep.greater else StudyDirection.MINIMIZE
        self._study = optuna.create_study(
            direction=direction,
            sampler=self._sampler(0),
            pruner=_made(optuna.pruners, _PRUNERS[sweep.pruner], pruning, "pruner_kwargs"),
            study_name="sweep",
        )
        for trial in trials:
            self._add(trial)

    def __len__(self) -> int:
        """Returns the number of trials."""
        return len(self._study.get_trials(deepcopy=False))

    def propose(self) -> dict[str, Any]:
        """Begins the next trial; returns its ``number``, its ``params`` by path, and Optuna's attributes."""
        number = len(self)
        if self._sweep.sampler == "grid":
            trial = {"number": number, "params": grid_point(self._space, number), "attributes": {}}
            self.begin(trial)
            return trial
        self._study.sampler = self._sampler(number)
        with _refused("sampler_kwargs"):
            params = self._study.ask(self._distributions).params
        attributes = self._frozen(number).system_attrs
        return {"number": number, "params": dict(params), "attributes": dict(attributes)}

    def begin(self, trial: Mapping[str, Any]) -> None:
        """Begins a trial that an earlier part of the run proposed; leaves one that has begun as it is."""
        if trial["number"] == len(self):
            self._add({**trial, "state": "running", "value": None, "reports": {}})

    def report(self, number: int, step: int, value: float) -> bool:
        """Reports a trial's ``eval_loss`` after `step` steps; returns whether to prune the trial."""
        trial = optuna.trial.Trial(self._study, self._frozen(number)._trial_id)
        with _refused("pruner_kwargs"):
            trial.report(value, step)
            return trial.should_prune()

    def end(self, number: int, state: End, value: float | None = None) -> None:
        """Ends a trial; `value` is the metric of a complete one."""
        self._study.tell(number, value, state=TrialState[state.upper()])

    def state(self) -> list[dict[str, Any]]:
        """Returns all trials as plain values."""
        return [
            {
                "number": trial.number,
                "params": dict(trial.params),
                "attributes": dict(trial.system_attrs),
                "state": trial.state.name.lower(),
                "value": trial.value,
                "reports": [list(report) for report in trial.intermediate_values.items()],
            }
            for trial in self._study.get_trials(deepcopy=False)
        ]

    def _add(self, trial: Mapping[str, Any]) -> None:
        self._study.add_trial(
            optuna.trial.create_trial(
                state=TrialState[trial["state"].upper()],
                value=trial["value"],
                params=dict(trial["params"]),
                distributions=self._distributions,
                system_attrs=dict(trial["attributes"]),
                intermediate_values=dict(trial["reports"]),
            )
        )

    def _frozen(self, number: int) -> optuna.trial.FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    def _sampler(self, number: int) -> Any:
        kwargs = {"seed": task_seed(self._seed, f"trial {number}") % 2**32, **self._sweep.sampler_kwargs}
        return _made(optuna.samplers, _SAMPLERS[self._sweep.sampler], kwargs, "sampler_kwargs")


def _made(module: Any, name: str, kwargs: Mapping[str, Any], key: str) -> Any:
    with _refused(key):
        return getattr(module, name)(**kwargs)


@contextmanager
def _refused(key: str) -> Iterator[None]:
    """Names the config key that Optuna refuses; Optuna notices some only when it uses them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about experimental features
            yield
    except (TypeError, ValueError) as error:
        raise RunError(f"sweep.{key}: Optuna rejects these arguments: {first_line(error)}") from error


def check_arguments(sweep: SweepConfig, pruning: Mapping[str, Any]) -> None:
    """Tries Optuna's arguments on trials that nobody trains; Optuna checks some only when it uses them."""
    study = Study(sweep, 0, pruning)
    startup = sweep.sampler_kwargs.get("n_startup_trials", 10)
    for number in range(min(sweep.count, 50, startup + 2 if isinstance(startup, int) else 2)):
        study.propose()
        for step in (1, 2):
            study.report(number, step, float(number))
        study.end(number, "complete", float(number))


def _distribution(leaf: Leaf) -> BaseDistribution:
    if isinstance(leaf, Choice):
        return CategoricalDistribution(list(leaf.values))
    if leaf.whole:
        return IntDistribution(int(leaf.low), int(leaf.high), log=leaf.log, step=int(leaf.step or 1))
    return FloatDistribution(leaf.low, leaf.high, log=leaf.log, step=leaf.step)
