"""`examples/preferences.yaml` trains, and its data is what `make_preferences.py` writes."""

import sys
from pathlib import Path

import mlora
import pytest
from mlora.config.config_file import load_config
from mlora.store.run_folder import read_metrics

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_five_objectives_in_one_run(tmp_path: Path) -> None:
    changes = ["defaults.max_steps=2", "defaults.eval_steps=2", "defaults.per_device_train_batch_size=2"]
    config = load_config(EXAMPLES / "preferences.yaml", [*changes, f"output_dir={tmp_path / 'run'}"])
    assert mlora.train(config).status == "finished"
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    steps = {line["adapter"]: line for line in lines if line.get("step") == 2 and "loss" in line}
    assert set(steps) == {"dpo", "ipo", "orpo", "kto", "plain"}
    assert "rewards/margins" in steps["dpo"]
    assert "log_odds_ratio" in steps["orpo"]
    assert "kl" in steps["kto"]
    assert "rewards/margins" not in steps["plain"]


def test_the_data_is_what_the_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sys.modules.pop("make_preferences", None)
    import make_preferences

    files = [name for name in sorted(path.name for path in (EXAMPLES / "data").iterdir())]
    for name in files:
        if "pairs" not in name and "judged" not in name:
            (tmp_path / name).write_bytes((EXAMPLES / "data" / name).read_bytes())
    monkeypatch.setattr(make_preferences, "DATA", tmp_path)
    make_preferences.main()
    made = [name for name in files if "pairs" in name or "judged" in name]
    assert len(made) == 4
    for name in made:
        assert (tmp_path / name).read_bytes() == (EXAMPLES / "data" / name).read_bytes(), name
