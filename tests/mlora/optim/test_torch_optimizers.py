"""Optimizers of `torch.optim` by their names: each is torch's own, to the bit."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from mlora.optim.optim_config import OptimConfig
from mlora.optim.registry import TORCH, optimizer_kind
from mlora.optim.step_rule import Update

from tests.mlora.seam_runs import data_of, train_and_resume

SHAPES = [(3, 4), (5,), (2, 2)]


@pytest.mark.parametrize("name", TORCH)
def test_it_is_torchs_own(name: str) -> None:
    """Also where a Parameter has its first gradient late, and after its state was saved and loaded."""
    config = OptimConfig(0.05, f"torch.optim.{name}", weight_decay=0.1, adam_beta2=0.95, adam_epsilon=1e-6)
    kind = optimizer_kind(config.optim)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    torchs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    named = {f"w{i}": p for i, p in enumerate(ours)}
    wanted = {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    known = inspect.signature(getattr(torch.optim, name)).parameters
    library = getattr(torch.optim, name)(
        torchs, lr=0.05, **{key: value for key, value in wanted.items() if key in known}
    )
    optimizer = kind(named, config)
    for step in range(6):
        for i, (own, theirs) in enumerate(zip(ours, torchs, strict=True)):
            late = i == 2 and step < 2
            gradient = torch.randn_like(own)
            own.grad, theirs.grad = (None, None) if late else (4 * gradient, gradient)
        optimizer.apply(Update(0.05, 0.25, True))
        library.step()
        if step in (1, 3):
            state, optimizer = optimizer.state_dict(), kind(named, config)
            optimizer.load_state_dict(step + 1, state)
    assert all(map(torch.equal, ours, torchs))
    assert kind.state_bytes(SHAPES) == sum(t.nbytes for own in optimizer.state for t in own)
    with pytest.raises(ValueError, match="moments do not fit"):
        kind({"w0": torch.nn.Parameter(torch.zeros(9, 9))}, config).load_state_dict(1, state)


@pytest.mark.parametrize("stages", [1, 2])
def test_it_trains_and_resumes(tiny_base: Path, tmp_path: Path, stages: int) -> None:
    data = data_of(tiny_base, tmp_path, stages, optim="torch.optim.NAdam", learning_rate=1e-3)
    data["adapters"][1] |= {"optim": "torch.optim.Adagrad"}
    train_and_resume(data, tmp_path)
