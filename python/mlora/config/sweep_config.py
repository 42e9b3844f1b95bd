"""The model of ``sweep`` in a run's config, which takes the place of ``adapters``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from mlora.config.adapter_config import (
    NEEDS_CLASSIFIER,
    OF_REGRESSION,
    greater_is_better,
    metric_key,
    unknown_metric,
)
from mlora.config.dataset_config import OF_TASKS
from mlora.config.search_space import Choice, Space, corners, grid_size, read_space, with_params
from mlora.config.strict import Strict, resolve_path, wrong_key
from mlora.config.tracking import placed_callback
from mlora.config.training_fields import inherited
from mlora.objectives.options import ObjectiveError
from mlora.objectives.registry import CROSS_ENTROPY, name_of, with_place

MOST_TRIALS = 10_000
NAMED = "the run names its trials by their numbers; remove this key"


def is_trial(name: str) -> bool:
    """Whether an adapter's name has the form of a sweep's trial."""
    return re.fullmatch(r"trial-\d+", name) is not None


def _found(key: str, value: Any, info: ValidationInfo) -> Any:
    """Returns a field of an adapter with absolute paths; relative ones start at the config's folder."""
    if key == "init_from" and isinstance(value, str):
        return resolve_path(value, info)
    if key == "objective":
        return with_place(value, (info.context or {}).get("folder", "."))
    if key == "callbacks" and isinstance(value, list):
        return [placed_callback(one, (info.context or {}).get("folder", ".")) for one in value]
    return value


def _found_choices(key: str, leaf: Any, info: ValidationInfo) -> Any:
    """Returns a field of the search space with absolute paths in its choices."""
    if not isinstance(leaf, dict):
        return leaf
    if isinstance(leaf.get("choice"), list):
        return {**leaf, "choice": [_found(key, value, info) for value in leaf["choice"]]}
    if key == "objective" and "name" in leaf:
        return {**leaf, "name": _found_choices(key, leaf["name"], info)}
    return leaf


def _no_accuracy(sample: Mapping[str, Any]) -> str | None:
    """Returns why an adapter of cross-entropy measures no accuracy; None: it may, or its folder says."""
    lora = sample.get("lora")
    if sample.get("init_from"):
        return None
    if not isinstance(lora, Mapping) or lora.get("task_type") not in tuple(OF_TASKS):
        return NEEDS_CLASSIFIER
    return OF_REGRESSION if sample.get("problem_type") == "regression" else None


class SweepConfig(Strict):
    """A search for the best values of an adapter's fields. Each trial is an adapter of the run.

    ``adapter`` holds the fields that all trials share: an entry of ``adapters`` without a name. Trials take
    the run's ``seed`` unless it sets one. ``search`` is nested in the same way and holds the fields that
    differ, see `mlora.config.search_space`. ``places`` trials train at once. When a trial ends or is pruned,
    the next one starts.

    ``sampler`` proposes values: Optuna's ``tpe`` or ``random``, or ``grid``, which tries all combinations in
    turn. ``pruner``, one of Optuna's, judges a trial after each evaluation and ends it if its ``eval_loss``
    falls behind. ``sampler_kwargs`` and ``pruner_kwargs`` are the arguments of Optuna's classes. Trials are
    ranked by the ``metric`` of the weights with which they end: any that their evaluations measure. As in
    Transformers, greater is better unless its name ends in ``loss`` or ``greater_is_better`` says otherwise.
    """

    trials: int | None = Field(
        default=None,
        ge=1,
        le=MOST_TRIALS,
        description="Number of trials; null: all combinations, with `sampler: grid` only.",
    )
    places: int = Field(default=4, ge=1, le=MOST_TRIALS, description="Trials that train at once.")
    metric: str = Field(
        default="eval_loss",
        min_length=1,
        description="Metric by which trials are ranked, with or without `eval_`.",
    )
    greater_is_better: bool | None = Field(
        default=None,
        description="Whether a greater metric is better; null: yes, unless its name ends in `loss`.",
    )
    sampler: Literal["tpe", "random", "grid"] = Field(
        default="tpe",
        description="Who proposes values: Optuna's `tpe` or `random`, or `grid`, all combinations in turn.",
    )
    sampler_kwargs: dict[str, Any] = Field(default_factory=dict, description="Arguments of Optuna's sampler.")
    pruner: Literal["none", "median", "percentile", "successive_halving", "hyperband"] = Field(
        default="none", description="Pruner of Optuna that ends trials whose `eval_loss` falls behind."
    )
    pruner_kwargs: dict[str, Any] = Field(default_factory=dict, description="Arguments of Optuna's pruner.")
    adapter: dict[str, Any] = Field(
        description="Keys that all trials share: an entry of `adapters` without `name`."
    )
    search: dict[str, Any] = Field(
        description="Keys that differ between trials, nested as in an adapter: each a `choice`, or `low` "
        "and `high`."
    )

    @property
    def space(self) -> Space:
        """The leaves of ``search`` by path."""
        return read_space(self.search)

    @property
    def greater(self) -> bool:
        """Whether a greater value of the metric is better."""
        return greater_is_better(self.metric, self.greater_is_better)

    @property
    def count(self) -> int:
        """The number of trials."""
        found = self.trials or grid_size(self.space)
        assert found is not None
        return found

    @property
    def folders(self) -> list[str]:
        """The adapter folders from which trials start (``init_from``)."""
        leaf = self.space.get("init_from")
        chosen = leaf.values.values() if isinstance(leaf, Choice) else []
        return [str(path) for path in (self.adapter.get("init_from"), *chosen) if path]

    def over(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of `defaults`, over them those of all trials, over these what is searched."""
        own = {**self.adapter, **self.search}
        return {**inherited(defaults, own), **own}

    def trial_name(self, number: int) -> str:
        """Returns the adapter name of trial `number`, counted from 0; names sort as numbers do."""
        return f"trial-{number:0{len(str(self.count - 1))}d}"

    def samples(self) -> list[dict[str, Any]]:
        """Returns adapters that together hold each bound and each choice of the search space."""
        points = enumerate(corners(self.space))
        return [
            {**with_params(self.adapter, self.space, point), "name": f"sample-{number}"}
            for number, point in points
        ]

    def pruner_arguments(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of Optuna's pruner, including the resources that it would infer itself.

        Optuna would infer them from the first trials that end, and forget them when the run resumes. Here
        they come from the config: a trial is first judged after ``eval_steps`` and has at most
        ``max_steps``. If these differ between trials, a ValidationError asks the user for the arguments.
        `defaults` are fields that ``adapter`` leaves out.
        """
        kwargs = dict(self.pruner_kwargs)
        given = self.over(defaults)
        every, most = given.get("eval_steps"), given.get("max_steps")
        if type(every) is float and every < 1 and type(most) is int and most > 0:
            every = math.ceil(every * most)
        known = {"min_resource": every, "max_resource": most}
        wanted = {"successive_halving": ["min_resource"], "hyperband": ["min_resource", "max_resource"]}
        for key in wanted.get(self.pruner, ()):
            value: Any = known[key]
            if kwargs.get(key, "auto") == "auto":
                if type(value) not in (int, float) or value < 1:
                    reason = f"is missing; {self.pruner} needs it because the trials differ in their steps"
                    raise wrong_key(f"sweep.pruner_kwargs.{key}", reason)
                kwargs[key] = int(value)
        return kwargs

    def check_evaluations(self, defaults: dict[str, Any]) -> None:
        """Raises ValidationError if trials are not evaluated as the metric and the pruner need it.

        Its locations start at the run's config.
        """
        given = self.over(defaults)
        if given.get("eval_dataset") is None:
            raise wrong_key("sweep.adapter.eval_dataset", "is missing; trials are ranked by it")
        if self.metric == "eval_exact_match" and given.get("eval_exact_match") is not True:
            raise wrong_key("sweep.adapter.eval_exact_match", "must be true; trials are ranked by it")
        for sample in self.samples():
            with suppress(ObjectiveError):  # what is wrong with the objective itself is told with its trials
                objective = sample.get("objective", defaults["objective"])
                reason = unknown_metric(self.metric, objective)
                if reason is None and self.metric == "eval_accuracy" and name_of(objective) == CROSS_ENTROPY:
                    reason = _no_accuracy(sample)
                if reason:
                    raise wrong_key("sweep.metric", reason)
        if self.pruner != "none" and given.get("eval_steps") is None:
            raise wrong_key("sweep.adapter.eval_steps", "is missing; the pruner acts after each evaluation")
        self.pruner_arguments(defaults)

    @field_validator("metric")
    @classmethod
    def _metric(cls, value: str) -> str:
        return metric_key(value)

    @field_validator("adapter")
    @classmethod
    def _adapter(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "name" in value:
            raise wrong_key("name", NAMED)
        return {key: _found(key, field, info) for key, field in value.items()}

    @field_validator("search")
    @classmethod
    def _search(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        space = read_space(value)
        if "name" in space:
            raise wrong_key("name", NAMED)
        return {key: _found_choices(key, leaf, info) for key, leaf in value.items()}

    @model_validator(mode="after")
    def _consistent(self) -> SweepConfig:
        size = grid_size(self.space)
        if self.sampler == "grid" and size is None:
            raise wrong_key("sampler", "grid needs choices, whole numbers without log, or ranges with a step")
        if self.trials is None and self.sampler != "grid":
            raise wrong_key("trials", "is missing")
        if self.sampler == "grid" and self.trials and size and self.trials > size:
            raise wrong_key("trials", f"must be at most {size}, the size of the grid, got {self.trials}")
        if self.trials is None and size and size > MOST_TRIALS:
            raise wrong_key("search", f"the grid must have at most {MOST_TRIALS} combinations, got {size}")
        if self.pruner != "none" and self.metric != "eval_loss":
            raise wrong_key("pruner", f"needs the metric eval_loss, got {self.metric}; set pruner to none")
        if "seed" in self.sampler_kwargs:
            raise wrong_key("sampler_kwargs.seed", "the sampler takes the run's seed; remove this key")
        if self.sampler_kwargs and self.sampler == "grid":
            raise wrong_key("sampler_kwargs", "grid takes no arguments; remove this key")
        if self.pruner_kwargs and self.pruner == "none":
            raise wrong_key("pruner_kwargs", "pruner is none; set a pruner or remove this key")
        return self
