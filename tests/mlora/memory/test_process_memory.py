"""What a process has in use."""

from collections.abc import Iterator

import pytest
import torch
from mlora.memory import process_memory
from mlora.memory.process_memory import left_by_runs, used_at_first


@pytest.fixture
def anew() -> Iterator[None]:
    """As in a process that has made no run yet."""
    used_at_first.cache_clear()
    yield
    used_at_first.cache_clear()


@pytest.mark.usefixtures("anew")
def test_what_runs_leave_is_what_came_since_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for used in (500, 450, 700, 520):
        monkeypatch.setattr(process_memory, "used_memory", lambda _, used=used: used)
        found.append(left_by_runs(torch.device("cpu")))
    assert found == [0, 0, 200, 20]
