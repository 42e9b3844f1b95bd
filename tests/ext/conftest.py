"""What tests of the library share."""

import peft
import pytest
from packaging.version import Version
from transformers.integrations import peft as transformers_peft


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In Triton's interpreter, which is slow: parameters that change nothing of what runs are for soak."""
    for item in items:
        for marker in list(item.iter_markers("soak_interpreted")):
            params = item.callspec.params
            if params.get("backend") == "triton" and all(
                params[name] in values for name, values in marker.kwargs.items()
            ):
                item.add_marker(pytest.mark.soak)


@pytest.fixture
def transformers_own_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers 5.24 asks for PEFT 0.22, which was not released with it; what it calls is in 0.21."""
    if Version(peft.__version__) < Version(transformers_peft.MIN_PEFT_VERSION):
        monkeypatch.setattr(transformers_peft, "MIN_PEFT_VERSION", peft.__version__)
