"""The README.md of an adapter's folder or a merged model, with the metadata that PEFT and the hub write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from mlora.config.adapter_config import AdapterConfig
from mlora.objectives.registry import name_of
from mlora.store.disk import write_file

if TYPE_CHECKING:
    from peft import LoraConfig

CARD = "README.md"
_TASKS = {
    None: ("CausalLM", "text-generation"),
    "SEQ_CLS": ("SequenceClassification", "text-classification"),
    "TOKEN_CLS": ("TokenClassification", "token-classification"),
    "QUESTION_ANS": ("QuestionAnswering", "question-answering"),
}
"""Of each task: the end of the name of Transformers' class, and the hub's tag."""


def write_card(
    folder: Path,
    lora: LoraConfig,
    adapter: AdapterConfig,
    step: int,
    base: str,
    *,
    name: str | None = None,
    kind: Literal["adapter", "merged"] = "adapter",
    more: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes the card of an adapter, or of a model into which one was merged; RunError if that fails.

    Args:
        folder: the adapter's or the model's.
        lora: the adapter's config as its folder has it.
        adapter: its training.
        step: the optimizer step of its weights.
        base: the base model, a folder or a hub id.
        name: of the card; None = the adapter's.
        kind: as for `card_text`.
        more: further rows of the table.
    """
    from mlora_ext.adapters.trained_parts import labels_of, task_heads, task_of

    task = task_of(lora) if task_heads(lora) else None
    labels = labels_of(lora).get("num_labels") if kind == "adapter" else None
    facts = {**lora_facts(lora), **training_facts(adapter, step=step), **more}
    text = card_text(name or adapter.name, base, kind, task, facts, labels=labels)
    write_file(folder / CARD, text.encode())


def training_facts(adapter: AdapterConfig, *, step: int) -> dict[str, str]:
    """Returns what a card says of an adapter's training; nothing of it depends on a clock."""
    batch = adapter.per_device_train_batch_size * adapter.gradient_accumulation_steps
    return {
        "Optimizer steps": str(step),
        "Dataset": adapter.dataset,
        "Objective": name_of(adapter.objective),
        "Samples a step": str(batch),
        "max_length": str(adapter.max_length),
        "Learning rate": f"{adapter.learning_rate:g}, {adapter.lr_scheduler_type}",
        "Optimizer": adapter.optim,
    }


def lora_facts(lora: LoraConfig) -> dict[str, str]:
    """Returns what a card says of an adapter's shape."""
    targets = lora.target_modules or ()
    shown = targets if isinstance(targets, str) else ", ".join(sorted(targets))
    facts = {"r": str(lora.r), "lora_alpha": f"{lora.lora_alpha:g}", "target_modules": shown}
    for key in ("use_rslora", "use_dora", "lora_bias", "modules_to_save", "target_parameters"):
        if value := getattr(lora, key):
            facts[key] = ", ".join(sorted(value)) if isinstance(value, list | set | tuple) else str(value)
    for key in ("rank_pattern", "alpha_pattern"):
        if value := getattr(lora, key):
            facts[key] = f"{len(value)} entries"
    return facts


def card_text(
    name: str,
    base: str,
    kind: Literal["adapter", "merged"],
    task: str | None,
    facts: Mapping[str, str],
    labels: int | None = None,
) -> str:
    """Returns the content of ``README.md``: base model, tags, facts, and how to load the folder.

    Args:
        name: of the adapter.
        base: the base model, a folder or a hub id.
        kind: an adapter's folder, or a merged model.
        task: PEFT's ``task_type``; None = a causal language model.
        facts: rows of the table of training.
        labels: the number of labels of the adapter's head.
    """
    from huggingface_hub import ModelCardData

    ending, pipeline = _TASKS[task if task in _TASKS else None]
    adapter = kind == "adapter"
    relation = "adapter" if adapter else "finetune"
    data = ModelCardData(
        base_model=base,
        library_name="peft" if adapter else "transformers",
        pipeline_tag=pipeline,
        tags=[f"base_model:{relation}:{base}", "lora", "mlora-ext", "transformers"],
    )
    rows = [f"| {key} | {_cell(value)} |" for key, value in facts.items()]
    what = (
        f"A LoRA adapter for `{base}`, in PEFT's format."
        if adapter
        else f"`{base}` with a LoRA adapter merged into its weights."
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name}",
        f"{what} Trained with mlora-ext.",
        "## How to load",
        f"```python\n{_loading(base, ending, adapter, labels)}\n```",
        "## Training",
        "\n".join(["| | |", "|---|---|", *rows]),
    ]
    return "\n\n".join(parts) + "\n"


def _loading(base: str, ending: str, adapter: bool, labels: int | None) -> str:
    kind = f"AutoModelFor{ending}"
    if not adapter:
        return f'from transformers import {kind}\n\nmodel = {kind}.from_pretrained("path/to/this/folder")'
    more = "" if labels is None else f", num_labels={labels}"
    return (
        f"from peft import PeftModel\nfrom transformers import {kind}\n\n"
        f"base = {kind}.from_pretrained({base!r}{more})\n"
        'model = PeftModel.from_pretrained(base, "path/to/this/folder")'
    )


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
