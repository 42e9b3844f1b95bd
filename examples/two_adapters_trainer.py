"""Two adapters in one batch with Transformers' Trainer: each with its own loss, learning rate and clipping.

    python examples/two_adapters_trainer.py --output runs/two-adapters

trains on two of the quickstart's tasks, keeps the best checkpoint and writes two PEFT folders.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from drop_in import CONFIGS, HERE, LEARNING_RATES, collate, read_lines
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import mlora_ext as mx


class Collator:
    """Batches of lines that say whose they are.

    Args:
        tokenizer: The base model's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def __call__(self, lines: list[dict[str, str]]) -> dict[str, Any]:
        """Return ids, mask and labels, and beside them whose line each one is."""
        ids, mask, labels = collate(self.tokenizer, lines)
        names = [line["adapter"] for line in lines]
        return {"input_ids": ids, "attention_mask": mask, "labels": labels, "adapter_names": names}


class LossOfEach(Trainer):
    """A Trainer whose loss is the sum of each adapter's own mean: none depends on the other's tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False  # Trainer divides by the number of accumulated batches

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Return the sum, over the adapters in the batch, of the mean loss of their tokens."""
        names = inputs["adapter_names"]
        outputs = model(**{key: value for key, value in inputs.items() if key != "labels"})
        losses = []
        for name in dict.fromkeys(names):
            own = [row for row, owner in enumerate(names) if owner == name]
            logits, labels = outputs.logits[own, :-1], inputs["labels"][own, 1:]
            losses.append(cross_entropy(logits.flatten(0, 1).float(), labels.flatten()))
        loss = torch.stack(losses).sum()
        return (loss, outputs) if return_outputs else loss


class ClipEach(TrainerCallback):
    """Clips each adapter's gradient by its own norm; Trainer's `max_grad_norm` clips all of them together.

    Args:
        names: Of the adapters.
        max_norm: The largest norm of one adapter's gradient.
    """

    def __init__(self, names: Sequence[str], max_norm: float = 1.0) -> None:
        self.names, self.max_norm = names, max_norm

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        """Clip, before the optimizer steps."""
        for name in self.names:
            torch.nn.utils.clip_grad_norm_(mx.adapter_parameters(model, name).values(), self.max_norm)


def optimizer(model: torch.nn.Module, rates: Mapping[str, float]) -> torch.optim.Optimizer:
    """One optimizer for Trainer, with a learning rate for each adapter."""
    groups = [
        {"params": list(mx.adapter_parameters(model, name).values()), "lr": rate}
        for name, rate in rates.items()
    ]
    return torch.optim.AdamW(groups, weight_decay=0.0)


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: TrainingArguments, held_out: int
) -> Trainer:
    """Train every adapter of `CONFIGS`, all in one batch.

    Args:
        model: Converted, with the adapters of `CONFIGS`.
        tokenizer: The base model's.
        arguments: Trainer's; `remove_unused_columns` must be False, or Trainer drops the names of the
            adapters.
        held_out: Lines of each task to evaluate on; every batch has as many of each.

    Returns:
        The Trainer, when it has trained.
    """
    lines = [{"adapter": name, **line} for name in CONFIGS for line in read_lines(name)]
    asked = [
        {"adapter": name, **read_lines(f"{name}-held-out")[index]}
        for index in range(held_out)
        for name in CONFIGS
    ]
    trainer = LossOfEach(
        model=model,
        args=arguments,
        train_dataset=lines,
        eval_dataset=asked,
        data_collator=Collator(tokenizer),
        optimizers=(optimizer(model, LEARNING_RATES), None),
        callbacks=[ClipEach(list(CONFIGS))],
    )
    trainer.train()
    return trainer


def main() -> None:
    """Parse the command line, train and save."""
    parser = argparse.ArgumentParser(description="Two adapters in one batch with Transformers' Trainer.")
    parser.add_argument("--base-model", type=Path, default=HERE / "tiny-base")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.base_model)
    model = AutoModelForCausalLM.from_pretrained(args.base_model)
    mx.convert_model(model, CONFIGS)
    mx.print_trainable_parameters(model)
    arguments = TrainingArguments(
        output_dir=str(args.output),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=50,
        save_total_limit=2,
        load_best_model_at_end=True,
        logging_steps=50,
        max_grad_norm=0.0,
        remove_unused_columns=False,
        report_to=[],
    )
    trainer = train(model, tokenizer, arguments, held_out=50)
    trainer.save_model(str(args.output / "best"))
    print(f"best: {trainer.state.best_model_checkpoint}, loss of both {trainer.state.best_metric:.4f}")
    for name in CONFIGS:
        print(f"{name}: {args.output / 'best' / name}")


if __name__ == "__main__":
    main()
