"""What a run with ``method: full`` may ask for: one task trains all weights of the model."""

from __future__ import annotations

from typing import Any

from mlora.config.strict import Location
from mlora.objectives.registry import reference_of


def full_faults(config: Any) -> dict[Location, str]:
    """Returns, by key, what a `RunConfig` asks for that full tuning does not do."""
    refused: dict[Location, tuple[bool, str]] = {
        ("fp16",): (config.fp16, "overflows are known after the backward pass only; use bf16"),
        ("pack_base",): (config.pack_base, "packs frozen weights, and method: full trains them; remove it"),
        ("sweep",): (config.sweep is not None, "tries adapters; method: full trains one model"),
        ("pipeline", "stages"): (config.pipeline.processes > 1, "method: full has one stage; remove it"),
        ("scheduler", "memory_limit"): (
            config.scheduler.memory_limit is not None,
            "decides which adapters run; with method: full, set offload instead",
        ),
        ("adapters",): (
            len(config.adapters) > 1,
            f"method: full trains one task at a time, got {len(config.adapters)}",
        ),
    }
    for i, adapter in enumerate(config.adapters):
        rule, reference = adapter.best_rule, reference_of(adapter.objective)
        own = {
            "lora": (bool(adapter.lora), "method: full trains all weights; remove it"),
            "init_from": (adapter.init_from is not None, "method: full begins with base_model; remove it"),
            "optim": (
                not adapter.optim.startswith("adamw_torch"),
                f"method: full trains with AdamW, got {adapter.optim!r}; remove it",
            ),
            "loraplus_lr_ratio": (
                adapter.loraplus_lr_ratio is not None,
                "is a rate of lora_B, and method: full has none; remove it",
            ),
            "objective": (
                reference is not None,
                f"compares with {reference}, but method: full trains the base model itself; use an objective "
                "without a reference, such as cpo, simpo or orpo",
            ),
            "eval_exact_match": (adapter.eval_exact_match, "is not served with method: full; remove it"),
            **{
                key: (
                    getattr(adapter, key) is not None,
                    "is of heads; method: full has none",
                )
                for key in ("num_labels", "problem_type", "label_names")
            },
            "load_best_model_at_end": (
                rule is not None and rule.loads,
                "method: full keeps the last weights only; set it to false",
            ),
        }
        refused |= {("adapters", i, key): asked for key, asked in own.items()}
    return {key: reason for key, (asked, reason) in refused.items() if asked}
