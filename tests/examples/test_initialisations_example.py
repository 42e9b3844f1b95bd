"""The example of initialisations trains, and PEFT loads its folders."""

from pathlib import Path

import mlora
import pytest
from make_tasks import __file__ as place
from mlora.config.config_file import resolve_config
from mlora.config.yaml_file import read_yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

EXAMPLES = Path(place).parent


@pytest.mark.filterwarnings("ignore")
def test_its_adapters_train(tmp_path: Path) -> None:
    data = read_yaml(EXAMPLES / "initialisations.yaml")
    data["defaults"] |= {"max_steps": 2, "logging_steps": 1, "init_samples": 32, "warmup_steps": 1}
    config = resolve_config(data | {"output_dir": str(tmp_path / "run")}, folder=EXAMPLES)
    result = mlora.train(config)
    assert result.status == "finished"
    base = AutoModelForCausalLM.from_pretrained(EXAMPLES / "tiny-base")
    for name, adapter in result.adapters.items():
        assert adapter.state == "finished", (name, adapter.message)
    peft = PeftModel.from_pretrained(base, tmp_path / "run" / "adapters" / "pissa")
    assert peft.peft_config["default"].r == 16
