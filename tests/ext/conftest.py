"""In Triton's interpreter, which is slow, parameters that change nothing of what runs are for `make soak`."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in list(item.iter_markers("soak_interpreted")):
            params = item.callspec.params
            if params.get("backend") == "triton" and all(
                params[name] in values for name, values in marker.kwargs.items()
            ):
                item.add_marker(pytest.mark.soak)
