"""Errors with fields: callers need not cut a name off a message."""

from __future__ import annotations

import pickle

import pytest
from mlora.errors import NamedRunError, reason_of
from peft import LoraConfig
from torch import nn

import mlora_ext as mx
from mlora_ext.errors import AdapterError, NamedError


@pytest.mark.parametrize(
    "error",
    [AdapterError("a", "is wrong"), NamedError("adapter 'a'", "is wrong"), NamedRunError("a", "is wrong")],
)
def test_an_error_says_what_is_at_fault_and_why(error):
    assert str(error) == f"{error.what}: is wrong" == str(pickle.loads(pickle.dumps(error)))
    assert reason_of(error, error.what) == "is wrong"
    assert reason_of(error, "b") == str(error)
    assert reason_of(ValueError("plain"), "a") == "plain"


def test_a_refused_adapter_is_named():
    with pytest.raises(AdapterError) as error:
        mx.convert_model(nn.Sequential(nn.Linear(4, 4)), {"a": LoraConfig(target_modules=["q"])})
    assert error.value.name == "a"
    assert error.value.message.startswith("target_modules=['q'] match nothing")
