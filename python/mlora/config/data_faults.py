"""Which of an adapter's keys do not fit the formats of its datasets, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mlora.config.adapter_config import AdapterConfig
from mlora.config.aliases import nearest
from mlora.config.best_rule import unknown_metric
from mlora.config.sections import FORMATS_OF, OF_TASKS, WITH_MESSAGES, WITH_PROMPTS
from mlora.objectives.options import BASE_ROWS, START
from mlora.objectives.registry import (
    CROSS_ENTROPY,
    name_of,
    objectives_taking,
    reads_mismatched,
    reference_of,
    takes,
)


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
        elif formats[name] not in (serve := FORMATS_OF[takes(adapter.objective)]):
            own, found = name_of(adapter.objective), formats[name]
            hint, named = "", " or ".join(_named_formats(adapter, serve))
            if not named:
                task = (adapter.lora or {})["task_type"]
                yield "objective", f"task_type {task} has a loss of its own; remove objective"
                continue
            if ":" in own and found in ("preference", "unpaired"):
                hint = "; `takes: pairs` or `takes: judged` in objective says that it reads preferences"
            elif own == CROSS_ENTROPY and not _format_of_labels(adapter) and _objectives_of(found):
                served = _objectives_of(found)
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


def _objectives_of(format: str) -> list[str]:
    """Returns the names of the objectives that take data of a format."""
    return [
        name for kind, formats in FORMATS_OF.items() if format in formats for name in objectives_taking(kind)
    ]


def _named_formats(adapter: AdapterConfig, serve: Sequence[str]) -> list[str]:
    """Returns the formats to name to an adapter: those of labels only if its head predicts labels."""
    own = _format_of_labels(adapter)
    return [one for one in serve if (own or one) == one and (own or one not in OF_TASKS.values())]


def _format_of_labels(adapter: AdapterConfig) -> str | None:
    """Returns the format that an adapter's head of labels reads; None if it has no such head."""
    return OF_TASKS.get(str((adapter.lora or {}).get("task_type")))
