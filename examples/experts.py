"""Adapters on a mixture's experts: three kinds of adapters trained together, then loaded in PEFT.

    python examples/experts.py --output runs/experts

makes a tiny mixture with random weights. One adapter is on attention, one on attention and experts, and one
on everything that PEFT's `all-linear` means there. The saved folders' logits are compared with PEFT's.
"""

import argparse
import json
from pathlib import Path

import mlora
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3MoeConfig

import mlora_ext as mx

HERE = Path(__file__).parent
ATTENTION = ["q_proj", "v_proj"]
ADAPTERS = {
    "reverse": {"r": 4, "target_modules": ATTENTION},
    "sort": {"r": 4, "target_modules": ATTENTION, "target_parameters": ["gate_up_proj", "down_proj"]},
    "dates": {"r": 2, "target_modules": "all-linear"},  # attention, experts and routers
}


def save_mixture(folder: Path) -> PreTrainedModel:
    """Saves a random mixture of 8 experts, of which each token takes 2, with the quickstart's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tiny-base")
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def train(base: Path, output: Path, steps: int) -> dict[str, list[float]]:
    """Trains the adapters in one run; returns their losses."""
    config = mlora.RunConfig(
        base_model=str(base),
        output_dir=str(output),
        device="cpu",
        defaults={"max_steps": steps, "learning_rate": 1e-2, "logging_steps": 1, "max_length": 64},
        datasets=[
            {"name": name, "path": str(HERE / "data" / f"{name}.jsonl"), "format": "prompt_completion"}
            for name in ADAPTERS
        ],
        adapters=[{"name": name, "dataset": name, "lora": lora} for name, lora in ADAPTERS.items()],
    )
    mlora.train(config)
    losses: dict[str, list[float]] = {name: [] for name in ADAPTERS}
    for line in (output / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        losses[record["adapter"]].append(record["loss"])
    return losses


def largest_difference(base: Path, run: Path, prompt: str) -> float:
    """Returns how far a mixed batch's logits are from those that PEFT computes with each folder alone."""
    ids = AutoTokenizer.from_pretrained(base)(prompt, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(base)
    for name in ADAPTERS:
        mx.load_adapter(model, name, run / "adapters" / name)
    found = 0.0
    with torch.no_grad():
        together = model(input_ids=ids.repeat(len(ADAPTERS), 1), adapter_names=list(ADAPTERS)).logits
        for row, name in enumerate(ADAPTERS):
            peft = PeftModel.from_pretrained(
                AutoModelForCausalLM.from_pretrained(base), run / "adapters" / name
            )
            found = max(found, float((together[row] - peft(input_ids=ids).logits[0]).abs().max()))
    return found


def main() -> None:
    """Trains, and prints losses and the difference to PEFT."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    base = options.output / "base"
    save_mixture(base)
    for name, losses in train(base, options.output / "run", options.steps).items():
        print(f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    difference = largest_difference(base, options.output / "run", "sort dcba = ")
    print(f"largest difference to PEFT's logits: {difference:.1e}")


if __name__ == "__main__":
    main()
