"""Devices: layers that other processes hold are on the meta device, which stands for a GPU too."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import cpu_offload, disk_offload, dispatch_model
from models import CONFIGS, llama
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mlora_ext as mx
from mlora_ext import MultiLoRALinear
from mlora_ext.frozen.packed import PackedWeight, packs
from mlora_ext.interop.peft_folder import adapter_state


def parts(base: nn.Module) -> list[nn.Module]:
    """Copies of a model of two layers, each with one of the layers."""
    copies = [copy.deepcopy(base) for _ in range(2)]
    for index, model in enumerate(copies):
        model.model.layers[1 - index].to("meta")
    return copies


def merged(models: list[nn.Module], name: str) -> dict[str, torch.Tensor]:
    states = [adapter_state(model, name) for model in models]
    assert not set(states[0]) & set(states[1])
    return states[1] | states[0]


def test_adapters_are_those_of_the_whole_model() -> None:
    """Layers have the same indices, adapters the same initial values; on meta nothing is drawn."""
    base = llama()
    whole = mx.convert_model(copy.deepcopy(base), CONFIGS, seed=5)
    models = [mx.convert_model(model, CONFIGS, seed=5) for model in parts(base)]
    for name in CONFIGS:
        expected = mx.adapter_parameters(whole, name)
        found = [mx.adapter_parameters(model, name) for model in models]
        for key, parameter in expected.items():
            here = [those[key] for those in found if not those[key].is_meta]
            assert len(here) == 1
            assert torch.equal(here[0], parameter)
            assert all(those[key].shape == parameter.shape for those in found)
    indices = [[m.index for m in x.modules() if isinstance(m, MultiLoRALinear)] for x in (whole, *models)]
    assert indices[0] == indices[1] == indices[2]


def test_the_layers_that_are_here_run_along_a_route() -> None:
    base = llama()
    whole = mx.convert_model(copy.deepcopy(base), CONFIGS, seed=5).train()
    model = mx.convert_model(parts(base)[1], CONFIGS, seed=5).train()
    layout, x = mx.SegmentLayout.from_lengths([5, 4]), torch.randn(9, 32)
    results = []
    for each in (whole, model):
        layer = each.model.layers[1].self_attn.q_proj
        with mx.route(each, layout, ["a", "b"], steps=[3, 1]):
            assert all(
                m.group.active is None for m in each.modules() if hasattr(m, "group") and m.layer.is_meta
            )
            y = layer(x)
        y.sum().backward()
        results.append([y.detach(), *(slot.weight.grad for slot in layer.lora_A.children())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert all(p.grad is None for p in model.parameters() if p.is_meta)


def test_adapters_join_and_leave() -> None:
    model = mx.convert_model(parts(llama())[0], {"a": CONFIGS["a"]}, seed=5)
    mx.add_adapter(model, "late", LoraConfig(r=40, target_modules=["q_proj"]), seed=1)
    assert {p.is_meta for p in mx.adapter_parameters(model, "late").values()} == {True, False}
    mx.remove_adapter(model, "a")
    mx.remove_adapter(model, "late")
    assert not [key for key, _ in model.named_parameters() if "lora_" in key]


def test_the_folder_of_all_parts_is_that_of_the_whole_model(tmp_path: Path) -> None:
    base = llama()
    whole = mx.convert_model(copy.deepcopy(base), CONFIGS, seed=5)
    models = [mx.convert_model(model, CONFIGS, seed=5) for model in parts(base)]
    for name in CONFIGS:
        mx.save_adapter(whole, name, tmp_path / "whole" / name)
        mx.save_adapter(models[1], name, tmp_path / "parts" / name, merged(models, name))
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            one, other = tmp_path / "whole" / name / file, tmp_path / "parts" / name / file
            assert one.read_bytes() == other.read_bytes()


def test_a_folder_is_loaded_by_every_part(tmp_path: Path) -> None:
    base = llama()
    whole = mx.convert_model(copy.deepcopy(base), {"a": CONFIGS["a"]}, seed=5)
    mx.save_adapter(whole, "a", tmp_path / "a")
    models = parts(base)
    for model in models:
        mx.load_adapter(model, "new", tmp_path / "a")
        mx.load_adapter(model, "new", tmp_path / "a")
    found, expected = merged(models, "new"), adapter_state(whole, "a")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_weights_of_the_base_in_a_folder_are_compared_where_they_are(tmp_path: Path) -> None:
    base = llama()
    whole = mx.convert_model(copy.deepcopy(base), {"a": CONFIGS["a"]}, seed=5)
    mx.save_adapter(whole, "a", tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    key = "base_model.model.model.layers.1.input_layernorm.weight"
    save_file(load_file(file) | {key: torch.full((32,), 3.0)}, file)
    first, second = parts(base)
    mx.load_adapter(first, "new", tmp_path / "a")
    with pytest.raises(ValueError, match=f"its base weight {key}"):
        mx.load_adapter(second, "new", tmp_path / "a")


def test_weights_that_are_missing_or_wrong_are_named(tmp_path: Path) -> None:
    models = [mx.convert_model(model, CONFIGS, seed=5) for model in parts(llama())]
    weights = merged(models, "a")
    key = next(iter(weights))
    for given, message in [
        (
            None,
            r"^adapter 'a': .*layers\.1.* is missing in this process; pass the tensors of all",
        ),
        (adapter_state(models[1], "a"), r"^adapter 'a': .*layers\.0.* is missing in this process"),
        (weights | {"other": torch.ones(1)}, "^weights: adapter 'a' has no tensor other"),
        (weights | {key: torch.ones(3)}, r"^weights: .*: expected shape \[.*\], got \[3\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            mx.save_adapter(models[0], "a", tmp_path / "a", given)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not packs(torch.empty(1, 1)), reason="this torch has no oneDNN")
def test_weights_that_are_here_are_packed() -> None:
    whole = mx.convert_model(llama(), CONFIGS)
    model = mx.convert_model(parts(llama())[0], CONFIGS)
    assert 0 < mx.pack_base(model) < mx.pack_base(whole)
    packed = {
        key
        for key, m in model.named_modules()
        if isinstance(m, MultiLoRALinear) and isinstance(m.frozen, PackedWeight)
    }
    assert packed
    assert all(key.startswith("model.layers.0.") for key in packed)


OFFLOADS = {
    "cpu": lambda model, folder: cpu_offload(model, torch.device("cpu")),
    "disk": lambda model, folder: disk_offload(model, folder, execution_device=torch.device("cpu")),
    "dispatch": lambda model, folder: dispatch_model(
        model, {"model": "disk", "lm_head": "cpu"}, "cpu", offload_dir=folder, force_hooks=True
    ),
}


@pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)
def test_accelerates_offloading_is_refused(offload: Callable[..., object], tmp_path: Path) -> None:
    """It puts adapters on the meta device, where PyTorch calls the fake kernels."""
    model = mx.convert_model(llama(), CONFIGS).eval()
    with pytest.raises(ValueError, match=r"^layer model\.layers\.0\.self_attn\.q_proj: accelerate's offload"):
        offload(model, tmp_path)


def test_accelerates_hooks_that_do_not_offload_change_nothing() -> None:
    whole = mx.convert_model(llama(), CONFIGS).eval()
    ids = torch.randint(60, (2, 5))
    expected = whole(input_ids=ids, adapter_names=["a", "b"]).logits
    dispatch_model(whole, {"": "cpu"}, main_device="cpu", force_hooks=True)  # its hooks offload nothing
    assert torch.equal(whole(input_ids=ids, adapter_names=["a", "b"]).logits, expected)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("part", ["weight", "lora_A.a.weight", "lora_B.b.weight"])
def test_meta_operands_beside_real_ones_are_refused(part: str, held: bool, backend: str) -> None:
    """The oracle is PyTorch's own rule that operands share a device; it has none for operators of others."""
    model = mx.convert_model(llama(1), CONFIGS)
    model.mlora_router.accumulates = held
    for parameter in mx.adapter_parameters(model, "a").values():
        parameter.grad = torch.zeros_like(parameter) if held else None
    layer, _, name = f"model.layers.0.self_attn.q_proj.{part}".rpartition(".")
    owner = model.get_submodule(layer)
    owner._parameters[name] = nn.Parameter(owner._parameters[name].detach().to("meta"), requires_grad=False)
    layout = mx.SegmentLayout.from_lengths([3, 2])
    with (
        mx.use_backend(backend),
        mx.route(model, layout, ["a", "b"]),
        pytest.raises(ValueError, match="is on the meta device, beside operands that are not"),
    ):
        model.model.layers[0].self_attn.q_proj(torch.randn(5, 32))


def test_masks_are_made_on_their_device() -> None:
    mask = mx.ops.dropout.philox_mask(9, 40, p=0.5, seed=1, step=2, layer=3, device="meta")
    assert (mask.device.type, list(mask.shape)) == ("meta", [9, 40])


@pytest.mark.parametrize("init", [True, False, "gaussian"])
def test_initial_values_do_not_depend_on_the_default_device(init: bool | str) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init)
    expected = mx.adapter_parameters(mx.convert_model(llama(1), {"a": config}), "a")
    model = llama(1)
    with torch.device("meta"):
        found = mx.adapter_parameters(mx.convert_model(model, {"a": config}), "a")
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name


STARTS = {"pissa": "pissa", "olora": "olora", "orthogonal": "orthogonal"}


@pytest.mark.parametrize("kind", ["plain", "dora", "rows", *STARTS])
def test_a_default_device_is_for_the_users_own_tensors(kind: str) -> None:
    """Tables that the library makes on the host stay there: a training step under another default device."""
    fields = {"use_dora": kind == "dora", "init_lora_weights": STARTS.get(kind, True)}
    configs = {
        "a": LoraConfig(r=4, target_modules=["q_proj", "up_proj"], lora_dropout=0.3, **fields),
        "b": LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1, trainable_token_indices=[3]),
    }
    model, ids = llama(1), torch.randint(2, 50, (3, 5))
    with torch.device("meta"):
        mx.convert_model(model, configs if kind == "rows" else {**configs, "b": configs["a"]}, seed=1)
        model.train()(input_ids=ids, adapter_names=["b", "a", "__base__"]).logits.sum().backward()
    gradients = [p.grad for p in mx.adapter_parameters(model, "a").values()]
    assert sum(float(g.abs().sum()) for g in gradients if g is not None) > 0


def test_fsdp_shards_the_base_beside_adapters() -> None:
    base, ids, grads = llama(1), torch.randint(2, 50, (3, 5)), []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for shard in (False, True):
            configs = {name: LoraConfig(r=4, init_lora_weights=False) for name in "ab"}
            model = mx.convert_model(copy.deepcopy(base), configs, seed=1)
            trained = [p for p in model.parameters() if p.requires_grad]
            for layer in (*model.model.layers, model) if shard else ():
                fully_shard(layer, mesh=mesh, ignored_params=set(trained))
            out = model(input_ids=ids, adapter_names=["a", "b", "a"]).logits
            out.square().sum().backward()
            grads.append([p.grad for p in trained])
        assert len(grads[0]) > 4
        assert all(gradient.abs().max() > 0 for gradient in grads[0])
        for plain, sharded in zip(*grads, strict=True):
            torch.testing.assert_close(plain, sharded)
        with pytest.raises(NotImplementedError, match="non-contiguous"):
            fully_shard(mx.convert_model(llama(1), {"a": LoraConfig(r=4)}), mesh=mesh)
    finally:
        dist.destroy_process_group()
