"""The pipeline with your own modules: three stages trained as one module.

    python examples/own_pipeline.py

cuts a small network into three stages and trains it on micro-batches, as one module would.
"""

import argparse

import torch
from mlora.pipeline import Pipeline
from torch import Tensor, nn


def make_stages(width: int) -> list[nn.Module]:
    """Three stages; a stage is given what the one before returns."""
    hidden = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)]
    return [*hidden, nn.Linear(width, 1)]


def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """What is differentiated, and what `step` gives back; runs on the last stage."""
    loss = (output - target).square().mean()
    return loss, loss.item()


def train(stages: list[nn.Module], steps: int, micro_batches: int, schedule: str) -> list[float]:
    """Train the stages.

    Args:
        stages: as `make_stages` gives them; they could lie on different devices.
        steps: optimizer steps.
        micro_batches: of each step; they share the stages' time, and gradients add up.
        schedule: `lorapp`, `1f1b` or `gpipe`.

    Returns:
        The mean loss of each step.
    """
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=1e-2)
    pipeline = Pipeline(stages, schedule, loss_fn)
    losses = []
    try:
        for _ in range(steps):
            for _ in range(micro_batches):
                x = torch.randn(64, stages[0][0].in_features)
                pipeline.submit({"input": x}, x.sum(dim=1, keepdim=True).sin())
            reports = pipeline.step()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(reports) / len(reports))
    finally:
        pipeline.close()
    return losses


def main() -> None:
    """Train and print the loss."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--micro-batches", type=int, default=4)
    options.add_argument("--schedule", default="1f1b", choices=["lorapp", "1f1b", "gpipe"])
    chosen = options.parse_args()
    torch.manual_seed(0)
    losses = train(make_stages(4), chosen.steps, chosen.micro_batches, chosen.schedule)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
