"""Folders of runs, written by hand: what `mlora report` reads, without any training."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from mlora.store.run_folder import RunFolder
from mlora.tasks.result import AdapterResult
from tiny_run import write_jsonl

VERSIONS = {
    "python": "3.11.7",
    "mlora-ext": "0.1.0",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "peft": "0.21.2",
}
MACHINE = {"system": "Linux 6.1 x86_64", "cpu": "Some CPU", "cores": 8, "threads": 4, "device": "cpu"}
START = {
    "began": "2026-11-27T03:22:00+00:00",
    "iteration": 0,
    "versions": VERSIONS,
    "machine": MACHINE,
    "warnings": ["dataset 'd': 3 of 40 samples are longer than max_length 64 and were cut"],
}


def write_run_folder(
    path: Path,
    adapters: Mapping[str, AdapterResult],
    metrics: Iterable[Mapping[str, Any]],
    *,
    status: str = "finished",
    fields: Mapping[str, Mapping[str, Any]] | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    starts: Sequence[Mapping[str, Any]] = (START,),
    **config: Any,
) -> RunFolder:
    """Write the files of a run; `fields` are those of adapters in its config, by name."""
    path.mkdir(parents=True)
    own = {"dataset": "d", "eval_dataset": "d", "learning_rate": 2e-4, "lora": {"r": 8, "lora_alpha": 16}}
    values = {
        "base_model": "/models/tiny-base",
        "output_dir": str(path),
        "datasets": [{"name": "d", "path": "/data/d.jsonl", "format": "prompt_completion"}],
        "adapters": [{"name": name, **own, **(fields or {}).get(name, {})} for name in adapters],
        **config,
    }
    folder = RunFolder(path)
    folder.config.write_text(yaml.safe_dump(values, sort_keys=False))
    with open(folder.metrics, "w") as file:
        file.writelines(json.dumps(record) + "\n" for record in metrics)
    results = {name: asdict(result) for name, result in adapters.items()}
    folder.write_summary({"status": status, "seconds": 81.0, "adapters": results})
    if samples:
        write_jsonl(folder.samples, [dict(line) for line in samples])
    if starts:
        folder.environment.write_text(json.dumps({"starts": list(starts)}))
    return folder


def step(adapter: str, number: int, loss: float, **more: Any) -> dict[str, Any]:
    """A training line of metrics."""
    line = {"adapter": adapter, "step": number, "loss": loss, "tokens": 100, "learning_rate": 1e-4}
    return {
        **line,
        "grad_norm": 0.5,
        "seconds": 0.25,
        "peak_memory_bytes": 600 * 2**20 + number * 2**16,
        **more,
    }


def falling_lines(names: Sequence[str], steps: int, **more: Any) -> list[dict[str, Any]]:
    """Lines of adapters that learn, each a little otherwise, with an evaluation each tenth of the steps."""
    lines: list[dict[str, Any]] = []
    for number in range(steps + 1):
        for place, name in enumerate(names):
            loss = (
                0.05
                + 2.5 * math.exp(-(4 + place % 5) * number / steps)
                + 0.03 * math.sin(number * (place + 3))
            )
            if number:
                lines.append(step(name, number, loss, grad_norm=1 + math.sin(number), **more))
            if number % max(1, steps // 10) == 0:
                lines.append({"adapter": name, "step": number, "eval_loss": loss + 0.05, "eval_tokens": 400})
    return lines


def result(steps: int, loss: float = 0.1, **more: Any) -> AdapterResult:
    """The result of an adapter that has made all its steps."""
    base: dict[str, Any] = {"step": steps, "max_steps": steps, "loss": loss, "tokens": 100 * steps}
    base |= {"seconds": 0.25 * steps, "eval_loss": {"before": 2.6, "after": loss + 0.05}, "saved_step": steps}
    return AdapterResult(**{"state": "finished", **base, **more})
