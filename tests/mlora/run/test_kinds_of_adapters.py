"""A run with DoRA, lora_bias and plain LoRA: resumed bit for bit, the same over stages, loaded by PEFT."""

from pathlib import Path
from typing import Any

import mlora
import pytest
import torch
from mlora.config.config_file import resolve_config
from mlora.engine.engine import Engine
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from tolerances import assert_same_up_to_rounding
from transformers import AutoModelForCausalLM

import mlora_ext
from mlora_ext import MultiLoRALinear
from tests.mlora.dry_models import llama, of
from tests.mlora.seam_runs import train_and_resume
from tests.mlora.tiny_run import losses, run_data


def data_of(base: Path, folder: Path, stages: int, **fields: Any) -> dict[str, Any]:
    data = run_data(base, folder, pipeline={"stages": stages})
    dora = {"r": 4, "use_dora": True, "lora_dropout": 0.2, "target_modules": "all-linear"}
    data["adapters"][0] |= {"lora": dora | {"rank_pattern": {"q_proj": 2}, "use_rslora": True}}
    data["adapters"][1] |= {"lora": {"r": 3, "lora_bias": True, "target_modules": ["q_proj", "down_proj"]}}
    return data | fields


def test_runs_resume_and_stages_agree(tiny_base: Path, tmp_path: Path) -> None:
    runs = []
    for stages in (1, 2):
        (tmp_path / str(stages)).mkdir()
        runs.append(
            train_and_resume(data_of(tiny_base, tmp_path / str(stages), stages), tmp_path / str(stages))
        )
    one, two = runs
    for name in ("first", "second"):
        assert losses(one, name) == pytest.approx(losses(two, name), abs=1e-6)
        assert len(losses(one, name)) == {"first": 6, "second": 9}[name]
        tensors, others = (load_file(run / "adapters" / name / "adapter_model.safetensors") for run in runs)
        for key, tensor in tensors.items():
            assert_same_up_to_rounding(tensor, others[key], key)
    ids = torch.randint(1, 260, (1, 9))
    for name, part in (("first", "lora_magnitude_vector"), ("second", "lora_B.bias")):
        folder = one / "adapters" / name
        tensors = load_file(folder / "adapter_model.safetensors")
        assert len([key for key in tensors if key.endswith(part)]) * 3 == len(tensors)
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_base), folder).eval()
        mine = AutoModelForCausalLM.from_pretrained(tiny_base).eval()
        mlora_ext.load_adapter(mine, name, folder)
        assert_same_up_to_rounding(
            mine(input_ids=ids).logits.detach(), theirs(input_ids=ids).logits.detach(), name
        )


def test_norms_are_computed_once_for_each_update() -> None:
    """Whatever the micro-batches, and after a state was loaded; the optimizer counts no version itself."""
    engine = Engine(llama(num_hidden_layers=2, vocab_size=60))
    for name in ("a", "b"):
        lora = LoraConfig(r=4, use_dora=True, target_modules=["q_proj"], lora_dropout=0.1)
        engine.create_adapter(name, lora, OptimConfig(learning_rate=1e-2, total_steps=10))
    layers = [m for m in engine.registry.modules() if isinstance(m, MultiLoRALinear) and m.specs]

    def computed() -> int:
        return sum(layer.norms.computed for layer in layers)

    for step in range(3):
        for _ in range(3):
            engine.forward_backward({"a": of([9, 4]), "b": of([3])})
        assert computed() == len(layers) * 2 * (step + 1)
        engine.optim_step("a")
        engine.optim_step("b")
    state, before = engine.state_dict("a"), computed()
    engine.load_state_dict("a", state)
    engine.forward_backward({"a": of([9, 4])})
    assert computed() == before + len(layers)


def test_yaml_takes_them_and_refuses_both_at_once(tiny_base: Path, tmp_path: Path) -> None:
    data = data_of(tiny_base, tmp_path, 1)
    data["adapters"][0]["lora"] |= {"lora_bias": True}
    refused = mlora.train(resolve_config(data, folder=tmp_path)).adapters["first"]
    assert (refused.state, refused.message) == (
        "refused",
        "lora: The argument lora_bias=True is not supported for DoRA, please pass use_dora=False",
    )
