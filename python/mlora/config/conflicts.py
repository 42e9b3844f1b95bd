"""What of a run's config does not go together, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mlora.config.adapter_config import AdapterConfig, unknown_metric
from mlora.config.aliases import nearest
from mlora.config.dataset_config import FORMATS, OF_TASKS, WITH_MESSAGES, WITH_PROMPTS
from mlora.config.strict import Location, wrong_keys
from mlora.config.training_fields import TrainingFields
from mlora.objectives.options import BASE_ROWS, START
from mlora.objectives.registry import (
    CROSS_ENTROPY,
    name_of,
    objectives_taking,
    reads_mismatched,
    reference_of,
    takes,
)

Faults = dict[Location, str]
"""Reasons by the path of the key from a `RunConfig`."""


def check_together(config: Any) -> None:
    """Raises ValidationError with the faults of the first rule that a `RunConfig` breaks."""
    for faults in _by_rules(config):
        if faults:
            raise wrong_keys(faults)


def _by_rules(config: Any) -> Iterator[Faults]:
    if config.bf16 and config.fp16:
        yield {(): "bf16 and fp16 are both true; choose one"}
    yield _offload(config)
    if config.quantization:
        yield quantization_faults(config)
    if config.method == "full":
        yield _full(config)
    else:
        needs = "needs lora (PEFT's LoraConfig fields) or init_from (a PEFT folder)"
        lacking = [a.lora is None and a.init_from is None for a in config.adapters]
        yield {("adapters", i): needs for i, lacks in enumerate(lacking) if lacks}
    yield _names(config)
    if config.sweep:
        config.sweep.check_evaluations(config.defaults.model_dump())
    replicas, count = config.pipeline.replicas, config.at_once
    if replicas > count:
        told = f"must be at most {count}, the number of adapters that train at once, got {replicas}"
        yield {("pipeline", "replicas"): told}
    yield _datasets(config)


def _offload(config: Any) -> Faults:
    faults, offload = offload_faults(config, config.device or "cpu"), config.offload
    if config.pack_base and offload.base == "disk":
        faults["pack_base",] = "keeps the base in memory, but offload.base is disk; remove one of them"
    if offload.activations in ("auto", "swap"):
        key, asked = ("offload", "activations"), offload.activations
        if config.gradient_checkpointing:
            faults[key] = f"{asked} says what is recomputed; remove gradient_checkpointing"
        if config.scheduler.memory_limit is not None:
            faults[key] = f"{asked} cannot be used with scheduler.memory_limit yet; remove one of them"
    return faults


def offload_faults(config: Any, device: str) -> Faults:
    """Returns why a run cannot do yet what its ``offload`` says; `device` is where it computes."""
    found: Faults = {}
    offload = config.offload
    if offload.optimizer == "disk" and config.method == "lora":
        found["offload", "optimizer"] = "disk serves method: full; adapters' states are small, use device"
    for key in ("host_memory", "device_memory"):
        if getattr(offload, key) is not None and offload.activations != "auto":
            found["offload", key] = "bounds what activations: auto may use; set that, or remove this key"
    for key in ("base", "optimizer") if device != "cpu" else ():
        if getattr(offload, key) != "device":
            found["offload", key] = f"{getattr(offload, key)} serves the CPU so far, got device {device}"
    return found


def quantization_faults(config: Any) -> Faults:
    """Returns what a `RunConfig` asks for that a quantised base does not do.

    Whether the base is quantised by the run or in its files makes no difference.
    """
    refused: dict[Location, tuple[bool, str]] = {
        ("pack_base",): (config.pack_base, "needs plain weights, but the base model is quantized; remove it"),
        ("method",): (config.method == "full", "full trains the weights, but the base model is quantized"),
        ("offload",): (
            config.offload != type(config.offload)(),
            "does not serve a quantized base model yet; remove offload, or quantization",
        ),
    }
    return {key: reason for key, (asked, reason) in refused.items() if asked}


def _full(config: Any) -> Faults:
    """Returns what a run asks for that full tuning, which trains one task, does not do."""
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
                key: (getattr(adapter, key) is not None, "is of heads; method: full has none")
                for key in ("num_labels", "problem_type", "label_names")
            },
            "load_best_model_at_end": (
                rule is not None and rule.loads,
                "method: full keeps the last weights only; set it to false",
            ),
        }
        refused |= {("adapters", i, key): asked for key, asked in own.items()}
    return {key: reason for key, (asked, reason) in refused.items() if asked}


def _names(config: Any) -> Faults:
    for what in ("adapters", "datasets"):
        names = [each.name for each in getattr(config, what)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            return {(what,): f"the name {twice[0]!r} is used twice; names must differ"}
    by_case: dict[str, str] = {}
    for adapter in config.adapters:  # on a case-insensitive disk their folders would be the same
        other = by_case.setdefault(adapter.name.casefold(), adapter.name)
        if other != adapter.name:
            return {("adapters",): f"{other!r} and {adapter.name!r} differ by case only"}
    return {}


def _datasets(config: Any) -> Faults:
    formats = {dataset.name: dataset.format for dataset in config.datasets}
    faults: Faults = {}
    told: set[tuple[str, str]] = set()
    for index, adapter in enumerate(config.adapters):
        for key, reason in data_faults(adapter, formats):
            if (key, reason) not in told:  # a fault of the defaults is reported once
                faults["adapters", index, *key.split(".")] = reason
                told |= {(key, reason)} if key.split(".")[0] in TrainingFields.model_fields else set()
    return faults


def data_faults(adapter: AdapterConfig, formats: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the keys of an adapter that do not fit its datasets, and why."""
    for key in ("dataset", "eval_dataset"):
        name = getattr(adapter, key)
        if name is None:
            continue
        if name not in formats:
            yield key, f"no dataset is named {name!r}; {nearest(name, list(formats), 'datasets')}"
        elif adapter.assistant_only_loss and formats[name] not in WITH_MESSAGES:
            kinds = " or ".join(WITH_MESSAGES)
            yield "assistant_only_loss", f"needs a {key} of format {kinds}, got {formats[name]!r}"
        elif FORMATS[formats[name]].takes != takes(adapter.objective):
            own, found = name_of(adapter.objective), formats[name]
            hint, named = "", " or ".join(_named_formats(adapter))
            served = objectives_taking(FORMATS[found].takes)
            if not named:
                task = (adapter.lora or {})["task_type"]
                yield "objective", f"task_type {task} has a loss of its own; remove objective"
                continue
            if ":" in own and found in ("preference", "unpaired"):
                hint = "; `takes: pairs` or `takes: judged` in objective says that it reads preferences"
            elif own == CROSS_ENTROPY and served and not _format_of_labels(adapter):
                hint = f"; `objective:` {' or '.join(served)} takes {found}"
            yield key, f"objective {own} needs a {key} of format {named}, got {found!r}{hint}"
    name = name_of(adapter.objective)
    if reads_mismatched(adapter.objective) and adapter.per_device_train_batch_size < 2:
        yield (
            "per_device_train_batch_size",
            f"must be at least 2 for objective {name}, whose KL term pairs prompts with completions of other "
            "samples of the batch",
        )
    asked = adapter.metric_for_best_model
    if asked is not None and (reason := unknown_metric(asked, adapter.objective)):
        yield "metric_for_best_model", reason
    reference = reference_of(adapter.objective)
    if reference not in (None, BASE_ROWS, START):
        yield "objective.reference", f"expected {BASE_ROWS} or {START}, got {reference!r}"
    elif reference == START and adapter.init_from is None:
        yield "objective.reference", f"{START}: add init_from, whose weights it compares with"
    found = formats.get(str(adapter.eval_dataset), WITH_PROMPTS[0])
    if adapter.eval_exact_match and found not in WITH_PROMPTS:
        kinds = " or ".join(WITH_PROMPTS)
        yield "eval_exact_match", f"needs an eval_dataset of format {kinds}, got {found!r}"


def _named_formats(adapter: AdapterConfig) -> list[str]:
    """Returns the formats to name to an adapter: those of labels only if its head predicts labels."""
    serve = [each for each, of in FORMATS.items() if of.takes == takes(adapter.objective)]
    own = _format_of_labels(adapter)
    return [one for one in serve if (own or one) == one and (own or one not in OF_TASKS.values())]


def _format_of_labels(adapter: AdapterConfig) -> str | None:
    """Returns the format that an adapter's head of labels reads; None if it has no such head."""
    return OF_TASKS.get(str((adapter.lora or {}).get("task_type")))
