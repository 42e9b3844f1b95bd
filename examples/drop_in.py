"""Your own training loop with several adapters in one batch: two adapters, two optimizers, one forward pass.

    python examples/drop_in.py --output runs/drop-in

trains on two of the quickstart's tasks, writes two PEFT folders and answers held-out prompts of both at once.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from peft import LoraConfig
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import mlora_ext as mx

HERE = Path(__file__).parent
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CONFIGS = {
    "reverse": LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    "sort": LoraConfig(r=32, lora_alpha=16, use_rslora=True, target_modules=ATTENTION, task_type="CAUSAL_LM"),
}
LEARNING_RATES = {"reverse": 4e-3, "sort": 2e-3}


def read_lines(name: str) -> list[dict[str, str]]:
    """The lines of one of the quickstart's data sets."""
    text = (HERE / "data" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def collate(
    tokenizer: PreTrainedTokenizerBase, lines: list[dict[str, str]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, attention mask and labels `[len(lines), longest]`, int64; only completions are trained."""
    prompts = [tokenizer(line["prompt"]).input_ids for line in lines]
    completions = [[*tokenizer(line["completion"]).input_ids, tokenizer.eos_token_id] for line in lines]
    longest = max(
        len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True)
    )
    ids = torch.full((len(lines), longest), tokenizer.pad_token_id)
    labels = torch.full((len(lines), longest), -100)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        ids[row, :end] = torch.tensor(prompt + completion)
        labels[row, len(prompt) : end] = torch.tensor(completion)
    return ids, (ids != tokenizer.pad_token_id).long(), labels


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, steps: int, batch_size: int
) -> dict[str, float]:
    """Train every adapter of `CONFIGS`, all in one batch.

    Args:
        model: Converted, with the adapters of `CONFIGS`.
        tokenizer: The base model's.
        steps: Optimizer steps of each adapter.
        batch_size: Samples of each adapter in a step.

    Returns:
        The last step's loss of each adapter.
    """
    data = {name: read_lines(name) for name in CONFIGS}
    optimizers, schedules = {}, []
    for name in CONFIGS:
        own = mx.adapter_parameters(model, name).values()
        optimizers[name] = torch.optim.AdamW(own, lr=LEARNING_RATES[name], weight_decay=0.0)
        schedules.append(torch.optim.lr_scheduler.LinearLR(optimizers[name], 1.0, 0.0, total_iters=steps))
    names = [name for name in CONFIGS for _ in range(batch_size)]
    losses: dict[str, float] = {}
    for _ in range(steps):
        lines = [line for name in CONFIGS for line in random.sample(data[name], batch_size)]
        ids, mask, labels = collate(tokenizer, lines)
        logits = model(input_ids=ids, attention_mask=mask, adapter_names=names).logits
        pairs = zip(CONFIGS, logits.split(batch_size), labels.split(batch_size), strict=True)
        by_adapter = {
            name: cross_entropy(out[:, :-1].flatten(0, 1), own[:, 1:].flatten()) for name, out, own in pairs
        }
        torch.stack(list(by_adapter.values())).sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        losses = {name: loss.item() for name, loss in by_adapter.items()}
    return losses


def main() -> None:
    """Parse the command line, train, save and generate."""
    parser = argparse.ArgumentParser(description="Two adapters in your own training loop.")
    parser.add_argument("--base-model", type=Path, default=HERE / "tiny-base")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    random.seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.base_model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.base_model)
    mx.convert_model(model, CONFIGS)
    model.train()
    print(f"training {len(CONFIGS)} adapters together, {args.steps} steps", flush=True)
    for name, loss in train(model, tokenizer, args.steps, args.batch_size).items():
        print(f"{name}: last loss {loss:.4f}")
        mx.save_adapter(model, name, args.output / name)
    model.eval()
    asked = [(name, line) for name in CONFIGS for line in read_lines(f"{name}-held-out")[:20]]
    prompts = tokenizer([line["prompt"] for _, line in asked], return_tensors="pt", padding=True)
    out = model.generate(**prompts, adapter_names=[name for name, _ in asked], max_new_tokens=12)
    texts = tokenizer.batch_decode(out, skip_special_tokens=True)
    expected = [line["prompt"] + line["completion"] for _, line in asked]
    right = [text == wanted for text, wanted in zip(texts, expected, strict=True)]
    for name in CONFIGS:
        answers = [i for i, (asker, _) in enumerate(asked) if asker == name]
        print(f"{name}: {sum(right[i] for i in answers)} of {len(answers)} held-out prompts right, such as")
        for i in answers[:3]:
            print(f"  {texts[i]}   ({'right' if right[i] else 'expected: ' + expected[i]})")


if __name__ == "__main__":
    main()
