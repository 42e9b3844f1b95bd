"""The peer: PEFT training one adapter alone, as Transformers' Trainer does it, on padded batches."""

from collections.abc import Sequence
from pathlib import Path

import torch
from mlora.data.dataset import Sample
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel, get_scheduler


def save_initial(base: PreTrainedModel, lora: LoraConfig, folder: Path) -> None:
    """Save PEFT's freshly initialised adapter."""
    get_peft_model(base, lora).save_pretrained(folder)


def padded(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """A batch as Transformers' collators make it."""
    longest = max(len(sample.input_ids) for sample in samples)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for sample in samples:
        gap = longest - len(sample.input_ids)
        rows["input_ids"].append([*sample.input_ids, *[0] * gap])
        rows["attention_mask"].append([1] * len(sample.input_ids) + [0] * gap)
        rows["labels"].append([*sample.labels, *[-100] * gap])
    return {name: torch.tensor(values) for name, values in rows.items()}


def train(
    model: PeftModel,
    optim: OptimConfig,
    steps: Sequence[Sequence[Sequence[Sample]]],
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """Train on `steps`, each a list of accumulated micro-batches; returns each step's mean token loss.

    The default optimizer is PyTorch's AdamW.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(
        parameters,
        lr=optim.learning_rate,
        betas=(optim.adam_beta1, optim.adam_beta2),
        eps=optim.adam_epsilon,
        weight_decay=optim.weight_decay,
    )
    schedule = get_scheduler(optim.lr_scheduler_type, optimizer, optim.warmup_steps, optim.total_steps)
    model.train()
    losses = []
    for micro_batches in steps:
        tokens = sum(sample.trained_tokens for batch in micro_batches for sample in batch)
        total = 0.0
        for batch in micro_batches:
            loss = model(**padded(batch), num_items_in_batch=tokens).loss
            loss.backward()
            total += loss.item()
        if optim.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(parameters, optim.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
