"""Sizes of public models, and what the planner sees of them."""

import pytest
from mlora.simulate.public_models import PUBLIC_MODELS

PUBLISHED = {
    "llama-2-7b": (6.738e9, 6.738e9),
    "llama-2-13b": (13.016e9, 13.016e9),
    "llama-3-70b": (70.554e9, 70.554e9),
    "qwen3-235b-a22b": (235.09e9, 22.19e9),
}
"""Billions of parameters, and those that a token uses, of the hub's model cards."""


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_parameters_are_the_published_ones(name: str) -> None:
    model = PUBLIC_MODELS[name]
    total, active = PUBLISHED[name]
    assert model.parameters == pytest.approx(total, rel=1e-3)
    used = model.layers * model.block_parameters(active=True) + 2 * model.vocabulary * model.hidden
    assert used == pytest.approx(active, rel=1e-3)


def test_a_workload_has_all_experts_to_stream_and_the_active_ones_to_compute() -> None:
    model = PUBLIC_MODELS["qwen3-235b-a22b"]
    work = model.workload(1000, bytes_per_parameter=0.5)
    block, head = work.blocks[0], work.blocks[-1]
    assert len(work.blocks) == 94 + 1
    assert block.weight_bytes == 0.5 * model.block_parameters()
    assert block.flops == 1000 * (2 * model.block_parameters(active=True) + 2 * 64 * 128 * 1024)
    assert block.inner_bytes == 1000 * 2 * (4 * 4096 + 2 * 128 * 68 + 8 * (4 * 1536 + 4096))
    assert (head.weight_bytes, head.inner_bytes) == (0, 0)
    assert head.flops == 1000 * 2 * 151936 * 4096


def test_what_is_trained() -> None:
    model = PUBLIC_MODELS["llama-2-7b"]
    assert model.adapter_parameters == 16 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    lora, full = (model.workload(64, method=method, adapters=3) for method in ("lora", "full"))
    assert lora.blocks[0].trainable == 3 * model.adapter_parameters
    assert full.blocks[0].trainable == model.block_parameters()
    assert full.blocks[0].state_bytes == 12 * model.block_parameters()
    assert lora.resident_bytes > full.resident_bytes
    assert (lora.full, full.full) == (False, True)
