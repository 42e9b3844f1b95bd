"""Devices, on a machine that has one only: `meta` stands for a GPU, and what is made there has no values."""

import copy

import pytest
import torch
import torch.distributed as dist
from models import llama
from peft import LoraConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mlora_ext as mx


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
