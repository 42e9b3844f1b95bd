"""Sizes of memory as a config may say them."""

import math

import pytest
from mlora.config.sections import SchedulerConfig, parse_size


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("500 MB", 500_000_000),
        ("1.5k", 1500),
        (".5kib", 512),
        ("1", 1),
        (12, 12),
        (2**60 + 1, 2**60 + 1),
        (1.5e9, 1_500_000_000),
        (1e16, 10**16),
    ],
)
def test_sizes(value: object, size: int) -> None:
    assert parse_size(value) == size
    config = SchedulerConfig(memory_limit=value)
    assert config.limit_bytes == size
    assert SchedulerConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    "value", [0, -1, 0.5, "0.5", "0", "", "8XB", "nan", math.nan, math.inf, True, None, [1], 10**400]
)
def test_what_is_no_size(value: object) -> None:
    with pytest.raises(ValueError, match="must be a size such as 8GiB or 500MB, got "):
        parse_size(value)


def test_no_limit() -> None:
    assert SchedulerConfig().limit_bytes is None
