"""What tests of the library share."""

import peft
import pytest
from packaging.version import Version
from transformers.integrations import peft as transformers_peft


@pytest.fixture
def transformers_own_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers 5.24 asks for PEFT 0.22, which was not released with it; what it calls is in 0.21."""
    if Version(peft.__version__) < Version(transformers_peft.MIN_PEFT_VERSION):
        monkeypatch.setattr(transformers_peft, "MIN_PEFT_VERSION", peft.__version__)
