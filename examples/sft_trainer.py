"""Two adapters in one batch with TRL's SFTTrainer: its tokenisation, a learning rate for each adapter.

    python examples/sft_trainer.py --output runs/sft        (needs `pip install trl`)

trains on two of the quickstart's tasks and writes two PEFT folders. SFTTrainer averages the loss over the
tokens of both adapters; `LossOfEach` and `ClipEach` in two_adapters_trainer.py keep them apart.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from drop_in import CONFIGS, HERE, LEARNING_RATES, read_lines
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer
from two_adapters_trainer import optimizer

import mlora_ext as mx


class WithNames:
    """SFTTrainer's own collator, and beside its batch whose sample each row is.

    Args:
        collator: SFTTrainer's.
    """

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return SFTTrainer's batch with `adapter_names`."""
        return {**self.collator(rows), "adapter_names": [row["adapter"] for row in rows]}


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: SFTConfig) -> SFTTrainer:
    """Train every adapter of `CONFIGS`, all in one batch.

    Args:
        model: Converted, with the adapters of `CONFIGS`.
        tokenizer: The base model's.
        arguments: SFTTrainer's; `remove_unused_columns` must be False, and samples must not be packed.

    Returns:
        The SFTTrainer, when it has trained.
    """
    lines = [{**line, "adapter": name} for name in CONFIGS for line in read_lines(name)]
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(lines),
        processing_class=tokenizer,
        optimizers=(optimizer(model, LEARNING_RATES), None),
    )
    trainer.data_collator = WithNames(trainer.data_collator)
    trainer.train()
    return trainer


def main() -> None:
    """Parse the command line, train and save."""
    parser = argparse.ArgumentParser(description="Two adapters in one batch with TRL's SFTTrainer.")
    parser.add_argument("--base-model", type=Path, default=HERE / "tiny-base")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.base_model)
    model = AutoModelForCausalLM.from_pretrained(args.base_model)
    mx.convert_model(model, CONFIGS)
    arguments = SFTConfig(
        output_dir=str(args.output),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        max_length=64,
        bf16=False,
        logging_steps=50,
        save_strategy="no",
        remove_unused_columns=False,
        report_to=[],
    )
    train(model, tokenizer, arguments)
    for name in CONFIGS:
        mx.save_adapter(model, name, args.output / name)
        print(f"{name}: {args.output / name}")


if __name__ == "__main__":
    main()
