"""The example of a quantised base: a few of its steps."""

import json
import math
from pathlib import Path

import make_tasks
import mlora
import pytest
from mlora.config.config_file import load_config

pytestmark = pytest.mark.peers
EXAMPLE = Path(make_tasks.__file__).parent / "quantized.yaml"


def test_it_trains_over_four_bits(tmp_path: Path) -> None:
    changes = [f"output_dir={tmp_path}/run", "defaults.max_steps=4", "defaults.warmup_steps=1"]
    changes += ["defaults.eval_steps=null", "defaults.per_device_train_batch_size=8"]
    changes += [f"adapters.{name}.eval_dataset=null" for name in ("sums", "sort")]
    config = load_config(EXAMPLE, changes)
    assert config.quantization is not None
    assert config.quantization.method == "bnb-nf4"
    assert mlora.train(config).status == "finished"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["adapter"] == "sort"]
    assert len(losses) == 4
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
