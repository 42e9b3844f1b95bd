"""The settings of initialisations in a run's `lora` block."""

from typing import Any

import pytest
from mlora.config.lora_fields import build_lora


@pytest.mark.parametrize("how", ["eva", "corda", "lora_ga"])
def test_settings_have_pefts_defaults_and_no_others(how: str) -> None:
    key = f"{how}_config"
    default = build_lora({"init_lora_weights": how})
    assert getattr(default, key) == type(getattr(default, key))()
    bad: dict[str, Any] = {"init_lora_weights": how, key: {"rhoo": 2}}
    with pytest.raises(ValueError, match=f"{key}: no setting is named 'rhoo'; "):
        build_lora(bad)


def test_a_setting_is_used() -> None:
    config = build_lora({"init_lora_weights": "eva", "eva_config": {"rho": 3.0}})
    assert config.eva_config is not None
    assert config.eva_config.rho == 3.0
