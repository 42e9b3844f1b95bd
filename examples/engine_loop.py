"""Your own training loop over `mlora.Engine`: packed batches, an optimizer per adapter, evaluation, folders.

python examples/engine_loop.py --output runs/engine-loop
"""

import argparse
import json
import random
from pathlib import Path

from mlora import Engine, OptimConfig, Sample
from peft import LoraConfig
from transformers import AutoTokenizer, PreTrainedTokenizerBase

HERE = Path(__file__).parent
TASKS = {"reverse": LoraConfig(r=8, lora_alpha=16), "sort": LoraConfig(r=32, use_rslora=True)}
LEARNING_RATES = {"reverse": 4e-3, "sort": 2e-3}


def read(name: str, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Returns a task's samples; only the completion is trained (-100 = not trained)."""
    samples = []
    for line in map(json.loads, (HERE / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()):
        prompt = tokenizer(line["prompt"]).input_ids
        completion = [*tokenizer(line["completion"]).input_ids, tokenizer.eos_token_id]
        samples.append(Sample((*prompt, *completion), (*[-100] * len(prompt), *completion)))
    return samples


def main() -> None:
    """Parses the command line, trains, evaluates and saves."""
    parser = argparse.ArgumentParser(description="Two adapters in your own loop over the engine.")
    parser.add_argument("--base-model", default=str(HERE / "tiny-base"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.base_model)
    train = {name: read(name, tokenizer) for name in TASKS}
    held_out = {name: read(f"{name}-held-out", tokenizer) for name in TASKS}
    draw = random.Random(0)

    with Engine(args.base_model) as engine:
        for name, lora in TASKS.items():
            lora.target_modules = "all-linear"
            optim = OptimConfig(learning_rate=LEARNING_RATES[name], total_steps=args.steps)
            engine.create_adapter(name, lora, optim)
        for step in range(1, args.steps + 1):
            batch = {name: draw.sample(train[name], args.batch_size) for name in TASKS}
            results = engine.forward_backward(batch, ends=list(TASKS))
            for name in TASKS:
                engine.optim_step(name)
            if step % 50 == 0:
                print(f"step {step}: " + ", ".join(f"{n} loss {r.loss:.4f}" for n, r in results.items()))
        for name, result in engine.evaluate(held_out).items():
            print(f"{name}: held-out loss {result.loss:.4f}")
            engine.save(name, args.output / name)


if __name__ == "__main__":
    main()
