"""How an adapter was trained, and with what: names and values for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlora.report.numbers import count, duration, number, size
from mlora.report.read import Adapter

_TITLES = {
    "python": "Python",
    "torch": "PyTorch",
    "transformers": "Transformers",
    "peft": "PEFT",
    "cuda": "CUDA",
}


def rank_of(config: Mapping[str, Any]) -> int | None:
    """Returns the rank of an adapter's ``lora`` block; PEFT's default is 8."""
    lora = config.get("lora")
    return None if not isinstance(lora, Mapping) else int(lora.get("r") or 8)


def settings_of(adapter: Adapter) -> list[tuple[str, str]]:
    """Returns name and value of an adapter's most important settings."""
    config = adapter.config
    found: list[tuple[str, str]] = []
    if isinstance(lora := config.get("lora"), Mapping):
        found.append(("rank", str(rank_of(config))))
        found.append(("alpha", number(lora.get("lora_alpha") or 8)))
        if lora.get("target_modules"):
            found.append(("targets", _listed(lora["target_modules"])))
        if lora.get("lora_dropout"):
            found.append(("dropout", number(lora["lora_dropout"])))
        kinds = [name for key, name in (("use_rslora", "rsLoRA"), ("use_dora", "DoRA")) if lora.get(key)]
        if kinds:
            found.append(("kind", ", ".join(kinds)))
    if config.get("init_from"):
        found.append(("starts from", Path(config["init_from"]).name))
    if rate := config.get("learning_rate"):
        schedule = str(config.get("lr_scheduler_type") or "").replace("_", " ")
        found.append(("learning rate", f"{number(rate)}{', ' * bool(schedule)}{schedule}"))
    if batch := config.get("per_device_train_batch_size"):
        times = config.get("gradient_accumulation_steps") or 1
        found.append(("batch size", f"{batch}" + (f" \N{MULTIPLICATION SIGN} {times}" if times != 1 else "")))
    objective = config.get("objective") or "cross_entropy"
    name = objective.get("name") if isinstance(objective, Mapping) else objective
    if name != "cross_entropy":
        found.append(("objective", str(name)))
    for title, key in (("optimizer", "optim"), ("trained on", "dataset"), ("evaluated on", "eval_dataset")):
        if config.get(key):
            found.append((title, str(config[key])))
    if adapter.history.tokens:
        found.append(("tokens", f"{count(adapter.history.tokens)} in {duration(adapter.history.seconds)}"))
    if adapter.history.skipped:
        found.append(("skipped steps", f"{adapter.history.skipped:,}"))
    return found


def _listed(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(map(str, value))


def versions_of(starts: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Returns name and value of what the run's last part trained with; earlier versions that differ, too."""
    if not starts:
        return []
    found = []
    last = starts[-1].get("versions", {})
    for name, version in last.items():
        earlier = [start.get("versions", {}).get(name) for start in starts]
        others = [old for old in dict.fromkeys(earlier) if old not in (None, version)]
        more = f" (before: {', '.join(others)})" if others else ""
        found.append((_TITLES.get(name, name), f"{version}{more}"))
    machine = starts[-1].get("machine", {})
    if machine.get("gpu"):
        found.append(("GPU", f"{machine['gpu']}, {size(machine.get('gpu_bytes'))}"))
    if machine:
        threads = machine.get("threads")
        used = f"{threads} thread{'s' * (threads != 1)} on {machine.get('cores')} cores"
        found.append(("CPU", f"{machine.get('cpu')}, {used}"))
        found.append(("device", str(machine.get("device", ""))))
        found.append(("system", str(machine.get("system", ""))))
    return found
