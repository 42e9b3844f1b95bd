"""Loading a stage by name: the bits of `from_pretrained`, and no more than the stage's own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deep_models import CPU, DEEP, deep, spans
from mlora.model.cut import BlockSpan
from mlora.model.load import load_base, load_stage
from mlora.model.pretrained import load_whole
from safetensors.torch import load_file, save_file
from tiny_models import make
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

STAGES = 3


def save(model: PreTrainedModel, folder: Path, *, shards: bool = False) -> Path:
    model.save_pretrained(folder, max_shard_size="30KB" if shards else "5GB")
    assert len(list(folder.glob("*.safetensors"))) > 3 if shards else (folder / "model.safetensors").is_file()
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32, stages: int = STAGES) -> list[PreTrainedModel]:
    return [load_stage(str(folder), span, CPU, dtype).model for span in spans(stages)]


def tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and buffers that are here, those that no checkpoint holds too."""
    every = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {name: tensor.detach() for name, tensor in every.items() if not tensor.is_meta}


def assert_same_bits(stages: list[PreTrainedModel], whole: PreTrainedModel) -> None:
    expected, seen = tensors(whole), set()
    for model in stages:
        for name, tensor in tensors(model).items():
            assert tensor.dtype == expected[name].dtype, name
            assert torch.equal(tensor, expected[name]), name
            seen.add(name)
    assert seen == set(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [False, True], ids=["one-file", "shards"])
@pytest.mark.parametrize("family", DEEP)
def test_stages_have_the_bits_of_from_pretrained(
    family: str, shards: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Tied heads (gpt2, gemma, cohere, opt) and fused experts (mixtral) among them."""
    folder = save(deep(family), tmp_path, shards=shards)
    whole, stages = load_whole(str(folder), dtype), load(folder, dtype)
    assert_same_bits(stages, whole)
    for model in stages:
        assert not model.training
        assert model.config._name_or_path == whole.config._name_or_path
        assert model.config.dtype == dtype
        assert [name for name, _ in model.named_modules()] == [name for name, _ in whole.named_modules()]
        assert model.config._attn_implementation == whole.config._attn_implementation


def test_a_loaded_stage_runs(tmp_path: Path) -> None:
    for span in spans(STAGES):
        base = load_base(save(deep("gemma2"), tmp_path), CPU, torch.float32, span)
        assert base.span == span


@pytest.mark.parametrize("stored", ["lm_head.weight", "model.embed_tokens.weight", "both", "both, different"])
def test_tied_weights_under_any_name(stored: str, tmp_path: Path) -> None:
    model = deep("gemma3")
    folder = save(model, tmp_path)
    weights = load_file(folder / "model.safetensors")
    names = ["lm_head.weight", "model.embed_tokens.weight"]
    tied = next(weights.pop(name) for name in names if name in weights)
    kept = [name for name in names if name == stored] or names
    weights |= {name: tied + (name == names[0]) * ("different" in stored) for name in kept}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert_same_bits(load(folder), load_whole(str(folder), torch.float32))


def test_keys_without_the_models_prefix(tmp_path: Path) -> None:
    """As checkpoints of the body alone have them."""
    folder = save(deep("gpt2"), tmp_path)
    weights = load_file(folder / "model.safetensors")
    short = {key.removeprefix("transformer."): tensor for key, tensor in weights.items()}
    assert short.keys() != weights.keys()
    save_file(short, folder / "model.safetensors", metadata={"format": "pt"})
    assert_same_bits(load(folder), load_whole(str(folder), torch.float32))


def test_only_the_files_that_hold_a_stages_weights_are_opened(tmp_path: Path) -> None:
    folder = save(deep("llama"), tmp_path, shards=True)
    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    own = {file for key, file in where.items() if ".layers.1." in key}
    for file in set(where.values()) - own:
        (folder / file).unlink()
    load_stage(str(folder), BlockSpan(1, 3, 1, 2), CPU, torch.float32)
    with pytest.raises(ValueError, match=r"^base_model: cannot load .*: the file model-0.* is missing"):
        load_stage(str(folder), BlockSpan(0, 3, 0, 1), CPU, torch.float32)


def without(folder: Path, key: str) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[key]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_weights_are_named_by_the_stage_that_needs_them(tmp_path: Path) -> None:
    folder = save(deep("llama"), tmp_path)
    without(folder, "model.layers.3.mlp.up_proj.weight")
    load_stage(str(folder), spans(2)[0], CPU, torch.float32)
    message = r"^base_model: .* is missing 1 weights, for example model\.layers\.3\.mlp\.up_proj\.weight$"
    with pytest.raises(ValueError, match=message):
        load_stage(str(folder), spans(2)[1], CPU, torch.float32)
    without(folder, "model.norm.weight")
    with pytest.raises(ValueError, match=r"is missing 2 weights, for example model\.layers\.3"):
        load_base(folder, CPU, torch.float32, spans(2)[1])


def other_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def only_pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def damaged(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not safetensors")


def quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_shape, r"cannot load .*: model\.norm\.weight: expected shape \[32\], got \[3\]"),
        (
            only_pickled,
            r"cannot load .*: it has no model\.safetensors .*, only pytorch_model\.bin; several stages",
        ),
        (damaged, r"cannot load .*: Error while deserializing header"),
        (
            quantized,
            r"is quantized \(fp8\), and only checkpoints of .* and awq are served",
        ),
    ],
)
def test_checkpoints_that_no_stage_can_read(change, message: str, tmp_path: Path) -> None:
    folder = save(make("llama"), tmp_path)
    change(folder)
    with pytest.raises(ValueError, match=f"^base_model: .*{message}.*$") as caught:
        load_base(folder, CPU, torch.float32, BlockSpan(1, 2, 1, 2))
    assert "\n" not in str(caught.value)


MEASURE = """
import sys, torch
from mlora.model.cut import BlockSpan
from mlora.model.pretrained import skeleton
from mlora.model.load import load_stage

def status(key):
    with open("/proc/self/status") as lines:
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith(key + ":")))

folder, stage, stages, each = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(1)
skeleton(folder, torch.float32)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
before = status("VmRSS")
span = BlockSpan(stage, stages, stage * each, (stage + 1) * each)
model = load_stage(folder, span, torch.device("cpu"), torch.float32).model
own = sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)
print(own, status("VmHWM") - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)
@pytest.mark.parametrize(
    ("stored", "stages", "megabytes"),
    [
        (torch.bfloat16, [1], 20),
        pytest.param(torch.float32, [0, 3], 12, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_stages_process_never_holds_other_stages_weights(
    stored: torch.dtype, stages: list[int], megabytes: int, tmp_path: Path
) -> None:
    """Nor pages of the file beside its own tensors; tensors that are cast are there twice, four at a time."""
    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=12,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(stored)
    model.to_empty(device="cpu")  # what its numbers are does not matter
    whole = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(tmp_path)
    del model
    for stage in stages:
        command = [sys.executable, "-W", "ignore", "-c", MEASURE, str(tmp_path), str(stage), "4", "2"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        own, peak = map(int, output.split())
        assert 0.2 * whole < own < 0.3 * whole
        assert own < peak <= 1.02 * own + (megabytes << 20)
