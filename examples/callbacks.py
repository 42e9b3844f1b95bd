"""Transformers' callbacks per adapter: one stops by Transformers' own rule, one by yours, in the same run.

python examples/callbacks.py --output runs/callbacks
"""

import argparse
from pathlib import Path

import mlora
from mlora.config.config_file import load_config
from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

HERE = Path(__file__).parent


class StopAtLoss(TrainerCallback):
    """Ends an adapter's training once its held-out loss is low enough."""

    def __init__(self, enough: float) -> None:
        self.enough = enough

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
        **kwargs: object,
    ) -> None:
        print(f"{args.run_name}: epoch {state.epoch:.2f}, held-out loss {metrics['eval_loss']:.4f}")
        control.should_training_stop = metrics["eval_loss"] <= self.enough


def callbacks_of(adapter: str) -> TrainerCallback | None:
    """Returns the callback of an adapter, called once for each."""
    if adapter == "reverse":
        return StopAtLoss(enough=1.0)
    if adapter == "sort":
        return EarlyStoppingCallback(early_stopping_patience=3)
    return None


def main() -> None:
    """Trains the four adapters of the quickstart with callbacks for two of them."""
    parser = argparse.ArgumentParser(description="Callbacks per adapter.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    settings = [f"output_dir={args.output.resolve()}", f"defaults.eval_steps={max(1, args.steps // 20)}"]
    settings += [f"adapters.{name}.max_steps={args.steps}" for name in ("sums", "reverse", "sort", "dates")]
    settings += ["defaults.eval_exact_match=false", "adapters.sort.load_best_model_at_end=true"]
    config = load_config(HERE / "quickstart.yaml", settings)
    result = mlora.train(config, callbacks=[callbacks_of])
    for name, adapter in result.adapters.items():
        print(f"{name}: {adapter.state} at step {adapter.step} {adapter.message}".rstrip())


if __name__ == "__main__":
    main()
