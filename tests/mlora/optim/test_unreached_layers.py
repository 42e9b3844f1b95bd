"""An adapter's layers that a step did not use: they have no gradient, though they hold one."""

import torch
from mlora.optim.adamw import AdamW
from mlora.optim.optim_config import OptimConfig
from mlora.optim.step_rule import Update
from peft import LoraConfig
from torch import nn

import mlora_ext as mx
from mlora_ext.layers.adapter_weights import written_marks


class OneOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.used(x)
        return found


def test_a_layer_that_backward_does_not_reach_is_not_decayed() -> None:
    """Zeros do not tell; the layer's marks do."""
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = mx.convert_model(OneOfTwo(), {"a": config}).train()
    router = model.mlora_router
    router.accumulates = True
    optimizer = AdamW(
        mx.adapter_parameters(model, "a"), OptimConfig(learning_rate=0.1, weight_decay=0.5, total_steps=3)
    )
    optimizer.hold_gradients("a", written_marks(model, "a"))
    router.moved()
    before = [p.detach().clone() for p in optimizer.parameters]
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
        assert list(optimizer.gradients()) == [0, 1]
        optimizer.apply(Update(learning_rate=0.1, scale=1.0, taken=True))
        router.updates.record("a")
        assert not optimizer.gradients()
    changed = [not torch.equal(p, old) for p, old in zip(optimizer.parameters, before, strict=True)]
    assert changed == [True, True, False, False]
