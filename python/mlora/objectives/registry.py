"""Objectives by their names in a config. Imports no torch, so that a config can be read without it.

To add an objective, subclass `mlora.objectives.objective.Objective` and register the class, or write a
function and name it as ``module:function``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ValidationError

from mlora.errors import literals, unknown_option, unknown_value
from mlora.objectives.function_file import changed_source, function_of, placed, sources_of
from mlora.objectives.options import (
    OWN,
    CpoOptions,
    DpoOptions,
    KtoOptions,
    ObjectiveError,
    Options,
    OrpoOptions,
    SimpoOptions,
    Takes,
    own_options,
)

if TYPE_CHECKING:
    from mlora.objectives.objective import Objective

CROSS_ENTROPY = "cross_entropy"
_DIGESTS = "digests of files"  # no option can have this name
Style = Literal["dpo", "cpo"]
"""How preference data is tokenised: as TRL's ``DPOTrainer``, or as its ``CPOTrainer``."""


@dataclass(frozen=True)
class _Entry:
    """What is known of an objective before its code, which needs torch, is imported.

    Attributes:
        kind: a class that is made with the options; or where in `mlora.objectives` such a class lies, or a
            function for `preferences.PreferenceLoss`.
        options: the model of its options.
        takes: as `Objective.takes`.
        metrics: names of those that it reports; None: they are not known before it is used.
        style: how its preference data is tokenised.
        trains_prompts: as `Objective.trains_prompts`, of a function.
    """

    kind: str | type[Objective]
    options: type[BaseModel] = Options
    takes: Takes = "sequences"
    metrics: tuple[str, ...] | None = None
    style: Style = "dpo"
    trains_prompts: bool = False


_REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")
_PAIRS = ("rewards/accuracies", *_REWARDS)
_NLL = (*_PAIRS, "nll_loss")
_ODDS = (*_NLL, "log_odds_ratio", "log_odds_chosen")
_OBJECTIVES: dict[str, _Entry] = {
    CROSS_ENTROPY: _Entry("objective:CrossEntropy", metrics=()),
    "dpo": _Entry("preferences:dpo", DpoOptions, "pairs", _PAIRS),
    "cpo": _Entry("preferences:cpo", CpoOptions, "pairs", _NLL, "cpo"),
    "simpo": _Entry("preferences:simpo", SimpoOptions, "pairs", _NLL, "cpo"),
    "orpo": _Entry("preferences:orpo", OrpoOptions, "pairs", _ODDS, "cpo", trains_prompts=True),
    "kto": _Entry("preferences:kto", KtoOptions, "judged", (*_REWARDS, "kl")),
}
_GENERATES = (
    *("grpo", "ppo", "rloo", "reinforce", "remax", "gspo", "dapo", "dr_grpo", "online_dpo", "xpo"),
    *("nash_md", "gkd", "gold", "minillm"),
)
"""Methods of TRL and of papers that train on what the model generates meanwhile."""
_OPTION_HINTS = {"reference_free": "cpo, simpo and orpo have no reference"}
"""Hints for options of TRL that no objective has."""
_OF_LABELS = {
    "single_label_classification": "label_losses:SingleLabel",
    "multi_label_classification": "label_losses:MultiLabel",
    "regression": "label_losses:Regression",
    "question_answering": "label_losses:Answer",
}
"""The losses of heads that predict labels. No config names them: an adapter's `task_type` does."""


def register_objective(name: str, kind: type[Objective], options: type[BaseModel] | None = None) -> None:
    """Registers an objective under a name for the key `objective`.

    Args:
        name: a name that is not taken.
        kind: the class; it is made with its options as keyword arguments.
        options: a pydantic model of its options; None = it has none.

    Raises:
        ValueError: another objective has this name, also one of a head of labels.
    """
    if name in _OF_LABELS or _OBJECTIVES.get(name, _Entry(kind)).kind is not kind:
        raise ValueError(f"objective: the name {name!r} is taken; choose another one")
    _OBJECTIVES[name] = _Entry(kind, options or Options, kind.takes)


def resolved(spec: Any, folder: Path | str | None = None) -> str | dict[str, Any]:
    """Returns an objective's name with all of its options; the name alone if it has none.

    Args:
        spec: a name, or a mapping with the key `name` and options.
        folder: where a function's file may be, beside Python's path.

    Raises:
        ObjectiveError: the objective or an option is unknown, or a value is wrong. Code of a loss of one's
            own is not run here: `objective_of` refuses a function that is missing, and its unknown options.
    """
    name, options = _split(spec)
    if ":" in name:
        name = name if folder is None else placed(name, folder)
        own = own_options(**{key: options[key] for key in OWN if key in options})
        return {"name": name, **own, **options}
    model = _entry(name).options
    for key in options:
        if key not in model.model_fields:
            hint = _OPTION_HINTS.get(key) or unknown_option(key, list(model.model_fields))
            raise ObjectiveError(f"unknown option of {name}; {hint}", (key,))
    try:
        found = model.model_validate(options).model_dump()
    except ValidationError as error:
        fault = error.errors()[0]
        message = str(fault["ctx"]["error"]) if fault["type"] == "value_error" else _text(fault)
        raise ObjectiveError(message, tuple(map(str, fault["loc"]))) from error
    return {"name": name, **found} if found else name


def with_place(spec: Any, folder: Path | str) -> Any:
    """Returns an objective that is not resolved yet, with the absolute path of its file; see `placed`."""
    if isinstance(spec, str) and ":" in spec:
        return placed(spec, folder)
    if isinstance(spec, Mapping) and isinstance(name := spec.get("name"), str):
        return {**spec, "name": with_place(name, folder)}
    return spec


def takes(spec: Any) -> Takes:
    """Returns what samples an objective takes; `spec` is what `resolved` returned."""
    name, options = _split(spec)
    return options.get("takes", "sequences") if ":" in name else _entry(name).takes


def objective_options() -> dict[str, type[BaseModel]]:
    """Returns the names of all objectives, each with the model of its options."""
    return {name: entry.options for name, entry in _OBJECTIVES.items()}


def objectives_taking(kind: str) -> list[str]:
    """Returns the names of the objectives that take this kind of samples."""
    return [name for name, entry in _OBJECTIVES.items() if entry.takes == kind]


def objectives_with(option: str) -> list[str]:
    """Returns the names of the objectives that have an option."""
    return [name for name, entry in _OBJECTIVES.items() if option in entry.options.model_fields]


def metrics_of(spec: Any) -> Sequence[str] | None:
    """Returns the names of the metrics that an objective reports; None: not known before it is used."""
    name, _ = _split(spec)
    return None if ":" in name else _entry(name).metrics


def built_in_metrics() -> set[str]:
    """Returns the names of all metrics that objectives report whose metrics are known."""
    return {name for entry in _OBJECTIVES.values() for name in entry.metrics or ()}


def name_of(spec: Any) -> str:
    """Returns an objective's name."""
    return _split(spec)[0]


def reference_of(spec: Any) -> str | None:
    """Returns whose log-probabilities an objective compares with; `spec` is what `resolved` returned."""
    return _split(spec)[1].get("reference")


def reads_mismatched(spec: Any) -> bool:
    """Whether an objective reads prompts with completions of other samples of the batch."""
    name, options = _split(spec)
    return name == "kto" and options.get("loss_type") == "kto"


def digests_of(spec: Any) -> list[str]:
    """Returns the SHA-256 of each file of an own loss's code, as this process has read it."""
    return list(sources_of_loss(spec).values())


def sources_of_loss(spec: Any) -> Mapping[str, str]:
    """Returns the same by the files' paths."""
    return sources_of(name_of(spec))


def check_unchanged(spec: Any) -> None:
    """Raises ObjectiveError if a file of an own loss has other code now than this process has read."""
    if path := changed_source(name_of(spec)):
        loss = next(iter(sources_of_loss(spec)))
        which, new = "", "the new loss a file name of its own"
        if path != loss:
            which = f", which {loss} imports,"
            new = "both files new names, so that a new loss imports the new file"
        raise ObjectiveError(
            f"{path}{which} has changed or is gone since this process read it; put it back, or give {new}; "
            "in a notebook, you can also restart Python, which then reads it again",
            ("name",),
        )


def pinned(spec: Any) -> Any:
    """Returns what `resolved` returns, with the digests of an own loss, which `objective_of` compares."""
    spec, digests = resolved(spec), digests_of(spec)
    return {**spec, _DIGESTS: digests} if digests and isinstance(spec, dict) else spec


def style_of(spec: Any) -> Style:
    """Returns which of TRL's trainers tokenises an objective's preference data."""
    name = name_of(spec)
    return "dpo" if ":" in name else _entry(name).style


def objective_of(spec: Any) -> Objective:
    """Makes an objective.

    Args:
        spec: a name, a mapping with the key `name` and options, an `Objective`, or a function for
            `mlora.objectives.custom.CustomLoss`; or what `pinned` or `mlora.model.labels.label_objective`
            returns.

    Raises:
        ObjectiveError: as `resolved`, or the digests of `pinned` are other ones here.
    """
    if not isinstance(spec, str | Mapping):
        from mlora.objectives.custom import CustomLoss
        from mlora.objectives.objective import Objective

        return spec if isinstance(spec, Objective) else CustomLoss(spec)
    name, options = _split(spec)
    digests = options.pop(_DIGESTS, None)
    if digests is not None and digests != digests_of(name):
        raise ObjectiveError(
            f"{name}: this process read other code than the first stage; do not edit it while a run starts",
            ("name",),
        )
    if name in _OF_LABELS and options:
        found: Objective = _resolved_kind(_OF_LABELS[name])(**options)
        return found
    name, options = _split(resolved({"name": name, **options}))
    if ":" in name:
        from mlora.objectives.custom import CustomLoss  # imports torch, as the function's module will

        return CustomLoss(function_of(name), **options)
    entry = _entry(name)
    kind = _resolved_kind(entry.kind)
    if isinstance(kind, type):
        return kind(**options)
    from mlora.objectives.preferences import PreferenceLoss

    chosen = entry.options.model_validate(options)
    return PreferenceLoss(kind, chosen, takes=entry.takes, trains_prompts=entry.trains_prompts)


def _split(spec: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, str):
        return spec, {}
    if not isinstance(spec, Mapping) or not all(isinstance(key, str) for key in spec):
        raise ObjectiveError(f"must be a name, or keys and values with the key name, got {spec!r}")
    options = dict(spec)
    if not isinstance(name := options.pop("name", None), str):
        raise ObjectiveError(f"must be one of {', '.join(_OBJECTIVES)} or module:function", ("name",))
    return name, options


def _entry(name: str) -> _Entry:
    if name not in _OBJECTIVES:
        if name.lower().replace("-", "_") in _GENERATES:
            others = ", ".join([*objectives_taking("pairs"), *objectives_taking("judged")])
            raise ObjectiveError(
                f"{name!r} is not supported: it trains on what the model generates meanwhile; objectives of "
                f"preferences are {others}"
            )
        elsewhere = {"sft": CROSS_ENTROPY, "ipo": "dpo"}  # ipo is a loss_type of dpo
        raise ObjectiveError(unknown_value(name, [*_OBJECTIVES, "module:function"], elsewhere))
    return _OBJECTIVES[name]


def _resolved_kind(kind: Any) -> Any:
    return resolve_name(f"mlora.objectives.{kind}") if isinstance(kind, str) else kind


def _text(fault: Any) -> str:
    """Returns what was expected and what came, from an error of pydantic."""
    if fault["type"] == "literal_error" and isinstance(fault["input"], str):
        return unknown_value(fault["input"], literals(fault))
    message = str(fault["msg"]).replace("Input should be", "must be")
    return f"{message}, got {fault['input']!r}"
