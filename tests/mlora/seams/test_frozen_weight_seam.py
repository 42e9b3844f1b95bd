"""A frozen weight in one file, under a whole run: 8-bit integers that are dequantised at each use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mlora.config.run_config import RunConfig
from mlora.engine.engine import Engine
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from torch import Tensor, nn

import mlora_ext
from mlora_ext.frozen import registry
from mlora_ext.frozen.weight import FrozenWeight
from tests.mlora.seam_runs import STAGES, data_of, train_and_resume
from tests.mlora.tiny_models import make, samples


class Int8Weight(FrozenWeight):
    """One scale a row; the layer's own weight goes."""

    def __init__(self, layer: nn.Module) -> None:
        weight = layer.frozen.dense()
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        layer.register_buffer("weight_int8", (weight / scale).round().to(torch.int8))
        layer.register_buffer("weight_scale", scale)
        del layer._parameters["weight"]
        self._buffers = layer._buffers

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self._buffers["weight_int8"].shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._buffers["weight_scale"].dtype

    @property
    def device(self) -> torch.device:
        return self._buffers["weight_scale"].device

    @property
    def nbytes(self) -> int:
        return self._buffers["weight_int8"].nbytes + self._buffers["weight_scale"].nbytes

    def dense(self) -> Tensor:
        return self._buffers["weight_int8"] * self._buffers["weight_scale"]


@pytest.fixture(autouse=True)
def int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered for these tests only."""
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))
    registry.register_frozen_weight("int8", Int8Weight)


@pytest.mark.parametrize("stages", STAGES)
def test_a_run_trains_and_resumes(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    monkeypatch.setattr(RunConfig, "frozen_weight", property(lambda _: "int8"))
    run = train_and_resume(data_of(tiny_base, tmp_path, stages), tmp_path)
    assert (run / "adapters" / "first" / "adapter_model.safetensors").is_file()


def test_an_engine_computes_with_the_dequantised_weights() -> None:
    batch, found = samples(4, 12, seed=5), []
    for kind in ("int8", "dequantised"):
        model = make("llama")
        engine = Engine(model, frozen_weight="int8", seed=1)
        if kind == "dequantised":
            dense = {k: m.frozen.dense() for k, m in layers(engine).items()}
            engine = Engine(make("llama"), seed=1)
            for key, layer in layers(engine).items():
                layer.weight.data.copy_(dense[key])
        engine.create_adapter("a", LoraConfig(r=3, init_lora_weights=False), OptimConfig(total_steps=9))
        found.append(engine.forward_backward({"a": batch})["a"].loss_sum)
        engine.optim_step("a")
        found.append(engine.forward_backward({"a": batch})["a"].loss_sum)
    assert found[:2] == pytest.approx(found[2:], rel=1e-5)


def layers(engine: Engine) -> dict[str, mlora_ext.MultiLoRALinear]:
    return {k: m for k, m in engine.model.named_modules() if isinstance(m, mlora_ext.MultiLoRALinear)}
