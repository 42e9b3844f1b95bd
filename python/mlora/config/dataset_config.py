"""The model of an entry under ``datasets`` in a run's config, and the formats of its rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationInfo, field_serializer, field_validator, model_validator

from mlora.config.aliases import nearest
from mlora.config.strict import MOST, ResolvedPath, Strict, is_hub_id, resolve_path, shown, wrong_key

WITH_MESSAGES = ("messages", "sharegpt", "prompt_completion")
WITH_PROMPTS = ("prompt_completion", "alpaca", "messages", "sharegpt")


class RowFormat(NamedTuple):
    """A format of a dataset's rows."""

    takes: str  # the kind of objectives that read it
    rows: Sequence[str]  # the fields that each row has, of each kind of rows
    fields: str  # all that it reads


_TEMPLATE = "tools chat_template_kwargs"
_OF_ROWS = "attention_mask position_ids seq_lengths"
FORMATS = {
    "tokens": RowFormat(
        "sequences",
        ("input_ids", "input_ids labels"),
        f"input_ids labels {_OF_ROWS} completion_mask assistant_masks",
    ),
    "text": RowFormat("sequences", ("text",), "text"),
    "prompt_completion": RowFormat("sequences", ("prompt completion",), f"prompt completion {_TEMPLATE}"),
    "alpaca": RowFormat("sequences", ("instruction output",), "instruction input output"),
    "sharegpt": RowFormat("sequences", ("conversations",), f"conversations system {_TEMPLATE}"),
    "messages": RowFormat("sequences", ("messages",), f"messages {_TEMPLATE}"),
    "preference": RowFormat(
        "pairs", ("prompt chosen rejected", "chosen rejected"), f"prompt chosen rejected {_TEMPLATE}"
    ),
    "unpaired": RowFormat("judged", ("prompt completion label",), f"prompt completion label {_TEMPLATE}"),
    "classification": RowFormat(
        "sequences",
        ("text label", "input_ids label", "input_ids labels"),
        f"text label input_ids labels {_OF_ROWS}",
    ),
    "question_answering": RowFormat(
        "sequences",
        ("question context answers", "input_ids start_positions end_positions"),
        f"question context answers input_ids start_positions end_positions {_OF_ROWS}",
    ),
}
FIELDS = frozenset(field for format in FORMATS.values() for field in format.fields.split())
"""The fields of all formats."""
OF_TASKS = {
    "SEQ_CLS": "classification",
    "TOKEN_CLS": "classification",
    "QUESTION_ANS": "question_answering",
}
"""The format of each `task_type` whose head predicts labels."""


class DataFile(Strict):
    """One of several files of a dataset.

    ``weight`` says how often an epoch has its samples: 2 = twice; 0.5 = half of them, drawn once.
    """

    path: str = Field(min_length=1, description="File, folder, or dataset of the hub.")
    weight: float = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="How often an epoch has its samples; a part is drawn once, by the run's seed.",
    )

    @field_validator("path")
    @classmethod
    def _path(cls, value: str, info: ValidationInfo) -> str:
        return data_path(value, info)


def is_hub_dataset(path: str) -> bool:
    """Whether a path may be that of a dataset of the hub: ``owner/name``, without a suffix."""
    return "/" in path and is_hub_id(path) and not os.path.splitext(path)[1]


def data_path(value: str, info: ValidationInfo) -> str:
    """Returns the id of a dataset of the hub as it is, and a path as an absolute one."""
    if "://" in value:
        raise ValueError(f"{value} is a web address; download the file and give its path")
    path = resolve_path(value, info)
    return value if is_hub_dataset(value) and not os.path.exists(path) else path


class DatasetConfig(Strict):
    """Named rows, and how they are read.

    ``path`` is a jsonl, JSON, CSV, TSV, Parquet or Arrow file; a folder that ``Dataset.save_to_disk`` wrote,
    or one of data files; a dataset of the hub (``owner/name``, with ``split``, ``subset`` and ``revision``);
    or a list of these, each with a ``weight`` if need be. ``columns`` says which column holds a field of the
    format. Of each file, the first ``max_samples`` rows are read. With ``streaming``, which needs them, no
    file is downloaded or read to its end. With ``validation_split`` (a share, or a number of samples) some
    samples are held out: ``eval_dataset`` means these, and ``dataset`` all others. ``chat_template`` is a
    Jinja file in place of the model's template.

    Each format trains the tokens that TRL's ``SFTTrainer`` trains on the same data:

    - ``tokens``: ``input_ids``, or ``labels`` if given (-100 = not trained).
    - ``text``: ``text`` and the end token.
    - ``prompt_completion``: ``completion`` and the end token, after ``prompt``. If both are lists of
      messages, the chat template ends the completion, and no end token is added.
    - ``alpaca``: ``output`` and the end token, after Stanford Alpaca's prompt with ``instruction`` and, if
      given and not empty, ``input``.
    - ``messages``: every token of the conversation as the chat template writes it; with
      ``assistant_only_loss``, only tokens that the template marks as the assistant's.
    - ``sharegpt``: the same for ``conversations`` of ``from`` and ``value``.
    - ``preference``: ``chosen`` and ``rejected`` after ``prompt``, all text or all messages, for the
      objectives that take pairs. Without ``prompt``, the start that both share is the prompt.
    - ``unpaired``: ``completion`` after ``prompt``, and ``label``: whether the completion is desirable.
    - ``classification``: ``text`` or ``input_ids``, and ``label``: an id or a name, a list of them, 0 or 1
      for each label, or the number of a regression (``task_type`` SEQ_CLS); or ``input_ids`` and ``labels``,
      one for each token, -100 = none (TOKEN_CLS).
    - ``question_answering``: ``question``, ``context`` and ``answers`` as SQuAD has them, or ``input_ids``,
      ``start_positions`` and ``end_positions`` (QUESTION_ANS).
    """

    name: str = Field(min_length=1, description="Name by which adapters refer to the data.")
    path: list[DataFile] = Field(
        min_length=1,
        description="File, folder, or dataset of the hub (`owner/name`); or a list of these, each with a "
        "`weight` if need be.",
    )
    split: str | None = Field(
        default=None, description="Split of a folder or of the hub's dataset; null: `train`."
    )
    subset: str | None = Field(
        default=None, description="Subset of a folder of data files or of the hub's dataset."
    )
    revision: str | None = Field(
        default=None, description="Branch, tag or commit of the hub's dataset; null: the newest."
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Columns that hold the format's fields, by field; others keep their names.",
    )
    max_samples: int | None = Field(
        default=None,
        ge=1,
        le=MOST,
        description="Most rows that are read of each file, the first ones; null: all.",
    )
    streaming: bool = Field(
        default=False,
        description="Whether the hub's files are read as they arrive, no further than `max_samples`.",
    )
    validation_split: float | None = Field(
        default=None,
        gt=0,
        description="Samples to hold out, for adapters whose `eval_dataset` is this one: a share below 1, "
        "or a number, of all files together.",
    )
    chat_template: ResolvedPath | None = Field(
        default=None, description="Jinja file in place of the model's chat template."
    )
    format: Literal[
        "tokens",
        "text",
        "prompt_completion",
        "alpaca",
        "sharegpt",
        "messages",
        "preference",
        "unpaired",
        "classification",
        "question_answering",
    ] = Field(description="How a line is read, and which of its tokens are trained.")

    @field_validator("path", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """Lists files with their weights, of which a path alone has none."""
        if not isinstance(value, str | list):
            raise ValueError(f"must be a path or a list of paths, got {shown(value)}")
        listed = [value] if isinstance(value, str) else value
        return [{"path": each} if isinstance(each, str) else each for each in listed]

    @field_serializer("path")
    def _shortest(self, files: list[DataFile]) -> str | list[str | dict[str, Any]]:
        short = [file.path if file.weight == 1 else file.model_dump() for file in files]
        alone = short[0] if len(short) == 1 else None
        return alone if isinstance(alone, str) else short

    @field_validator("validation_split")
    @classmethod
    def _share(cls, value: float | None) -> float | None:
        if value is not None and value >= 1 and value != int(value):
            raise ValueError(f"{value:g} is neither a share below 1 nor a whole number of samples")
        return value

    @model_validator(mode="after")
    def _bounded(self) -> DatasetConfig:
        if self.streaming and self.max_samples is None:
            raise wrong_key("streaming", "needs max_samples: how many rows to read of each file")
        return self

    @model_validator(mode="after")
    def _known_fields(self) -> DatasetConfig:
        known = FORMATS[self.format].fields.split()
        unread = [field for field in self.columns if field not in known]
        if unread:
            what = f"the format {self.format} has no such field"
            likely = nearest(unread[0], known, "its fields")
            raise wrong_key(f"columns.{unread[0]}", f"{what}; {likely}")
        return self
