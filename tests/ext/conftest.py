"""One thread: the shapes here are tiny, and waiting for a second one takes longer than the work.

In Triton's interpreter, which is slow, parameters that change nothing of what it runs are for `make soak`.
"""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in list(item.iter_markers("soak_interpreted")):
            params = item.callspec.params
            if params.get("backend") == "triton" and all(
                params[name] in values for name, values in marker.kwargs.items()
            ):
                item.add_marker(pytest.mark.soak)
