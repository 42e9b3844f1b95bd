"""The model of an entry under ``datasets`` in a run's config."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from mlora.config.paths import resolve_path
from mlora.config.strict import Strict

WITH_MESSAGES = ("messages", "sharegpt", "prompt_completion")
WITH_PROMPTS = ("prompt_completion", "alpaca")


class DatasetConfig(Strict):
    """A named jsonl file and how its lines are read.

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
    """

    name: str = Field(min_length=1)
    path: str = Field(min_length=1)
    format: Literal["tokens", "text", "prompt_completion", "alpaca", "sharegpt", "messages"]

    @field_validator("path")
    @classmethod
    def _path(cls, value: str, info: ValidationInfo) -> str:
        if "://" in value:
            raise ValueError(f"{value} is a web address; download the file and give its path")
        return resolve_path(value, info)
