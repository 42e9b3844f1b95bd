"""`generate` with `adapter_names`, also of copied and pickled models."""

import copy
from pathlib import Path

import pytest
import torch
from models import CONFIGS, converted, copy_weights, llama, peft_model, token_ids

import mlora_ext as mx


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
def test_generate(how: dict) -> None:
    """Each prompt continues as PEFT continues it alone; with the KV cache and padding on the left."""
    base = llama().eval()
    peft = peft_model(base, CONFIGS).eval()
    model = mx.convert_model(copy.deepcopy(base), CONFIGS).eval()
    copy_weights(peft, model, CONFIGS)
    ids = token_ids(3, 5)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **how}
    names = ["b", "a", "__base__"]
    ours = model.generate(ids, attention_mask=mask, adapter_names=names, **options)
    clone = copy.deepcopy(model)
    assert torch.equal(
        clone.generate(input_ids=ids, attention_mask=mask, adapter_names=names, **options), ours
    )
    each = len(ours) // 3
    for index, name in enumerate(names):
        start = 2 if index == 1 else 0
        prompt = ids[index : index + 1, start:]
        if name == "__base__":
            theirs = base.generate(prompt, **options)
        else:
            peft.set_adapter(name)
            theirs = peft.generate(prompt, **options)
        assert torch.equal(ours[index * each : (index + 1) * each, start:], theirs)


def test_generate_samples_several_sequences() -> None:
    model = converted().eval()
    out = model.generate(
        token_ids(2, 4), adapter_names=["a", "b"], do_sample=True, num_return_sequences=3, max_new_tokens=4,
        min_new_tokens=4,
    )  # fmt: skip
    assert out.shape == (6, 8)


def test_pickled_model_is_whole(tmp_path: Path) -> None:
    model, ids = converted().eval(), token_ids(2, 5)
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    options = {"adapter_names": ["b", "a"], "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(again.generate(ids, **options), model.generate(ids, **options))
