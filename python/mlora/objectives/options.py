"""Options of the preference objectives, with TRL's names and defaults. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mlora.errors import unknown_value

BASE_ROWS = "__base__"  # the owner of rows without an adapter
START = "init_from"  # as a reference: the weights that an adapter starts from


Takes = Literal["sequences", "pairs", "judged"]
"""What samples an objective takes: single sequences, preference pairs, or completions judged good or bad."""


OWN = ("takes", "reference", "trains_prompts")
"""Options that every loss of one's own has."""


def owner_of(reference: str | None, name: str) -> str | None:
    """Returns whose rows an adapter compares with; ``init_from`` has an owner for each adapter.

    No task can have its name, which has a space. An engine puts the name of weights that adapters share in
    its place.
    """
    return f"{name} {START}" if reference == START else reference


class ObjectiveError(ValueError):
    """An objective is unknown, or an option of it is wrong; `loc` is the option's path from the objective."""

    def __init__(self, message: str, loc: tuple[str, ...] = ()) -> None:
        super().__init__(f"{'.'.join(('objective', *loc))}: {message}")
        self.loc, self.message = loc, message


def own_options(
    takes: Any = "sequences", reference: Any = None, trains_prompts: Any = False
) -> dict[str, Any]:
    """Returns the options in `OWN`; ObjectiveError if one is wrong."""
    if takes not in get_args(Takes):
        raise ObjectiveError(unknown_value(str(takes), get_args(Takes)), ("takes",))
    if reference is not None and not isinstance(reference, str):
        raise ObjectiveError(f"must be __base__ or an adapter's name, got {reference!r}", ("reference",))
    if type(trains_prompts) is not bool:
        raise ObjectiveError(f"must be true or false, got {trains_prompts!r}", ("trains_prompts",))
    return {"takes": takes, "reference": reference, "trains_prompts": trains_prompts}


class Options(BaseModel):
    """Options of an objective: a frozen model that refuses unknown keys, and true and false as numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def _only_with(self, key: str, *loss_types: str) -> None:
        """Raises ValueError if an option is set that the chosen ``loss_type`` does not read."""
        chosen = getattr(self, "loss_type", "")
        if getattr(self, key) != type(self).model_fields[key].default and chosen not in loss_types:
            raise ValueError(f"{key} is read by loss_type {' and '.join(loss_types)} only, got {chosen}")


class DpoOptions(Options):
    """``DPOConfig``; ``reference``: whose log-probabilities are compared with, see `Objective`."""

    beta: float = Field(
        default=0.1,
        gt=0,
        allow_inf_nan=False,
        description="How strongly deviation from the reference is penalised.",
    )
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust"] = Field(
        default="sigmoid", description="Form of the loss."
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="Share of labels assumed to be wrong; for `loss_type: robust`."
    )
    reference: str = Field(
        default=BASE_ROWS,
        min_length=1,
        description="What log-probabilities are compared with: `__base__`, the base model, or `init_from`, "
        "the adapter's starting weights.",
    )

    @model_validator(mode="after")
    def _reads(self) -> DpoOptions:
        self._only_with("label_smoothing", "robust")
        return self


class CpoOptions(Options):
    """``CPOConfig``."""

    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False, description="Scale of the log-probabilities.")
    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo"] = Field(
        default="sigmoid", description="Form of the loss."
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="Share of labels assumed to be wrong; for `loss_type` sigmoid and simpo.",
    )
    cpo_alpha: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of the cross-entropy of the chosen completion.",
    )
    simpo_gamma: float = Field(
        default=0.5,
        ge=0,
        allow_inf_nan=False,
        description="Margin between chosen and rejected; for `loss_type: simpo`.",
    )

    @model_validator(mode="after")
    def _reads(self) -> CpoOptions:
        self._only_with("label_smoothing", "sigmoid", "simpo")
        self._only_with("simpo_gamma", "simpo")
        return self


class SimpoOptions(Options):
    """``CPOConfig`` with ``loss_type="simpo"`` and ``cpo_alpha=0``, as its documentation sets SimPO."""

    beta: float = Field(
        default=0.1, gt=0, allow_inf_nan=False, description="Scale of the mean log-probabilities."
    )
    simpo_gamma: float = Field(
        default=0.5, ge=0, allow_inf_nan=False, description="Margin between chosen and rejected."
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="Share of labels assumed to be wrong."
    )
    cpo_alpha: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of the cross-entropy of the chosen completion.",
    )


class OrpoOptions(Options):
    """``ORPOConfig``."""

    beta: float = Field(
        default=0.1,
        gt=0,
        allow_inf_nan=False,
        description="Weight of the odds ratio beside the cross-entropy of the chosen completion.",
    )


class KtoOptions(Options):
    """``KTOConfig``; ``reference`` as in `DpoOptions`."""

    beta: float = Field(
        default=0.1,
        gt=0,
        allow_inf_nan=False,
        description="How strongly deviation from the reference is penalised.",
    )
    loss_type: Literal["kto", "apo_zero_unpaired"] = Field(default="kto", description="Form of the loss.")
    desirable_weight: float = Field(
        default=1.0, ge=0, allow_inf_nan=False, description="Weight of desirable completions."
    )
    undesirable_weight: float = Field(
        default=1.0, ge=0, allow_inf_nan=False, description="Weight of undesirable completions."
    )
    reference: str = Field(
        default=BASE_ROWS,
        min_length=1,
        description="What log-probabilities are compared with: `__base__`, the base model, or `init_from`, "
        "the adapter's starting weights.",
    )
