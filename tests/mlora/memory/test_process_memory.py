"""What a process has in use."""

from collections.abc import Iterator
from pathlib import Path

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


def test_free_memory_is_no_more_than_control_groups_leave(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    own = tmp_path / "cgroup"
    own.write_text("0::/outer/inner\n")
    for folder, limit in ((inner, "1000"), (inner.parent, "max")):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 500\ninactive_file 100\nactive_file 50\n")
    assert process_memory._left_by_groups(tmp_path, own) == [1000 - 700 + 150]
    (inner.parent / "memory.max").write_text("750\n")
    assert process_memory._left_by_groups(tmp_path, own) == [450, 200]
    own.write_text("3:memory:/elsewhere\n")
    assert process_memory._left_by_groups(tmp_path, own) == []
