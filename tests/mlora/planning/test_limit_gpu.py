"""A run under a limit on memory where it is measured: on a GPU, and by the same code on a CPU."""

from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from limited_runs import Watching
from mlora.config.config_file import resolve_config
from mlora.engine.engine import Engine
from mlora.memory.estimate import MemoryEstimate
from mlora.run.run import train
from tiny_run import run_data, save_base, write_jsonl

MIB = 2**20
LORAS: list[dict[str, Any]] = [
    {"r": 4, "target_modules": "all-linear"},
    {"r": 16, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1},
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_several_adapters_stay_under_a_limit(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None runs out of memory, and predictions after ten micro-batches are off by 0.25% at most."""
    large = device == "cuda"
    hidden, layers = (512, 4) if large else (64, 2)
    base = save_base(tmp_path / "base", hidden=hidden, layers=layers, max_position_embeddings=1024)
    longest = 600 if large else 90
    ids = [[1 + place % 250 for place in range(8 + 37 * n % (longest - 8))] for n in range(60)]
    write_jsonl(tmp_path / "long.jsonl", [{"input_ids": each} for each in ids])
    shared = {"dataset": "long", "max_steps": 16, "per_device_train_batch_size": 3}
    data = run_data(
        base,
        tmp_path,
        device=device,
        defaults={"learning_rate": 1e-3},
        datasets=[{"name": "long", "path": "long.jsonl", "format": "tokens"}],
        adapters=[
            {"name": f"task{n}", "lora": LORAS[n % 2], "priority": -n // 2, **shared} for n in range(6)
        ],
        scheduler={"memory_limit": (1024 if large else 120) * MIB},
    )
    if not large:
        monkeypatch.setattr(Engine, "limit_memory", partialmethod(Engine.limit_memory, measured=True))
        monkeypatch.setattr(Engine, "used_memory", lambda self: [0])
        monkeypatch.setattr("mlora.engine.stage_worker.used_memory", lambda _: 0)
    errors: dict[str, list[float]] = {}
    observe = MemoryEstimate.observe

    def compare(self: MemoryEstimate, lengths: Any, among: Any, places: Any) -> None:
        model = self._learned[self._key(among)].places[0]
        errors.setdefault(self._key(among), []).append(abs(model.predict(lengths) / max(places[0]) - 1))
        observe(self, lengths, among, places)

    monkeypatch.setattr(MemoryEstimate, "observe", compare)
    monkeypatch.setattr("mlora.memory.estimate._EVERY", 1)
    if large:
        torch.cuda.reset_peak_memory_stats()
    watching = Watching()
    try:
        result = train(resolve_config(data, folder=tmp_path), reporter=watching)
        if large:
            assert torch.cuda.max_memory_reserved() <= data["scheduler"]["memory_limit"]
            assert torch.cuda.memory_stats()["num_ooms"] == 0
    finally:
        if large:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert {adapter.state for adapter in result.adapters.values()} == {"finished"}
    unseen = [error for each in errors.values() for error in each[10:]]
    print({key: [f"{error:.2%}" for error in each] for key, each in errors.items()})
    assert unseen
    assert sum(unseen) / len(unseen) <= 0.0025
