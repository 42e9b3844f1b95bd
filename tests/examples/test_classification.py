"""The example of a classifier beside causal adapters: it runs, and its classifier learns."""

from pathlib import Path

import drop_in
from mlora.config.config_file import load_config
from mlora.run.run import train
from mlora.store.run_folder import read_metrics

EXAMPLE = Path(drop_in.__file__).parent / "classification.yaml"


def test_it_learns_beside_others(tmp_path: Path) -> None:
    short = ["defaults.max_steps=4", "adapters.kinds.eval_steps=2", "defaults.per_device_train_batch_size=2"]
    config = load_config(EXAMPLE, [f"output_dir={tmp_path / 'run'}", *short])
    result = train(config)
    assert {one.state for one in result.adapters.values()} == {"finished"}
    found = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "eval_accuracy" in line]
    assert [line["step"] for line in found] == [0, 2, 4]
    assert found[-1]["eval_loss"] < found[0]["eval_loss"]
