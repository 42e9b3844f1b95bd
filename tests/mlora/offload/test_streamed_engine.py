"""An engine over a base that stays on disk trains exactly as over one in memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mlora.engine.engine import Engine
from mlora.offload import saved_tensors
from mlora.offload.options import OffloadOptions
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import mlora_ext
from tests.mlora.equal_states import assert_equal
from tests.mlora.offload.families import FAMILIES
from tests.mlora.tiny_models import samples

QUICK_STEPS, STEPS = 6, 20
"""From the third step on, all slots and files are used again."""
SOME = {
    "llama": ["q_proj", "down_proj"],
    "qwen3, tied head": ["k_proj"],
    "gpt2": ["c_attn"],
    "phi3": ["qkv_proj", "gate_up_proj"],
}
ON_DISK = OffloadOptions(base="disk", slots=3, poison=True)


def saved(family: str, folder: Path, dtype: torch.dtype) -> Path:
    torch.manual_seed(3)
    model: PreTrainedModel = FAMILIES[family]()
    model.to(dtype).save_pretrained(folder)
    return folder


def train(family: str, base: Path, offload: OffloadOptions, steps: int, **how) -> list:
    """Losses of all steps of two adapters, the last gradients, and the states at the end."""
    with Engine(base, seed=1, offload=offload, **how) as engine:
        loras = {
            "a": LoraConfig(r=3, target_modules="all-linear", lora_dropout=0.1),
            "b": LoraConfig(r=5, target_modules=SOME[family]),
        }
        for name, lora in loras.items():
            engine.create_adapter(name, lora, OptimConfig(learning_rate=1e-2, total_steps=steps))
        found = []
        for step in range(steps):
            batch = {"a": samples(2, 9, seed=step), "b": samples(1, 14, seed=100 + step)}
            results = engine.forward_backward(batch)
            found.append([results[name].loss_sum for name in loras])
            if step == steps - 1:
                parameters = [mlora_ext.adapter_parameters(engine.model, name) for name in loras]
                found.append(
                    [None if p.grad is None else p.grad.clone() for own in parameters for p in own.values()]
                )
            for name in loras:
                engine.optim_step(name)
        return [*found, [engine.state_dict(name) for name in loras]]


@pytest.mark.pairwise
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("where", ["disk-keep", "disk-swap", "device-swap", "disk-recompute"])
@pytest.mark.parametrize("saved_as", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_gradients_and_states_are_equal_to_the_bit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    family: str,
    dtype: torch.dtype,
    saved_as: torch.dtype,
    where: str,
    stages: int,
) -> None:
    """Weights of another dtype in the files are converted into a scratch file."""
    base = saved(family, tmp_path / "base", saved_as)
    monkeypatch.setattr(saved_tensors, "SMALLEST", 256)
    how = {"dtype": dtype, "stages": stages}
    place, activations = where.split("-")
    out = replace(ON_DISK, base=place, activations=activations)
    steps = STEPS if request.node.get_closest_marker("nightly") else QUICK_STEPS
    in_memory, on_disk = (train(family, base, offload, steps, **how) for offload in (OffloadOptions(), out))
    assert_equal(on_disk, in_memory)


@pytest.mark.parametrize("saved_as", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_that_the_checkpoint_lacks_is_named(tmp_path: Path, saved_as: torch.dtype) -> None:
    base = saved("llama", tmp_path / "base", saved_as)
    tensors = load_file(base / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing 1 weights, for example model\.layers\.2\.mlp\.up_proj"):
        Engine(base, offload=ON_DISK)


def test_what_cannot_stay_on_disk_is_refused(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base", torch.float32)
    with pytest.raises(
        ValueError, match=r"offload\.base: disk reads a model from its files; give its folder"
    ):
        Engine(FAMILIES["llama"](), offload=ON_DISK)
    with pytest.raises(ValueError, match=r"pack_base: .*packing needs a plain weight, got .* StreamedWeight"):
        Engine(base, offload=ON_DISK, frozen_weight="packed")
    with pytest.raises(ValueError, match="slots: expected at least 2 slots"):
        Engine(base, offload=replace(ON_DISK, slots=1))
    with pytest.raises(ValueError, match=r"offload\.base: disk serves models on the CPU so far"):
        Engine(base, offload=ON_DISK, device="meta")


def test_a_folder_for_scratch_files_that_is_missing_is_named(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base", torch.bfloat16)
    with pytest.raises(FileNotFoundError, match="cannot be opened") as error:
        Engine(base, offload=replace(ON_DISK, folders=[str(tmp_path / "gone")]))
    assert error.value.filename == str(tmp_path / "gone")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_it_keeps_to_a_memory_limit(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base", torch.float32)
    with Engine(base, offload=ON_DISK, memory_limit="8GiB") as engine:
        engine.create_adapter("a", LoraConfig(r=3, target_modules=["q_proj"]), OptimConfig(total_steps=1))
        result = engine.forward_backward({"a": samples(2, 9, seed=1)})["a"]
        assert engine.memory is not None
        assert 0 < result.loss_sum < 1000
