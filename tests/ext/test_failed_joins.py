"""An error while an adapter gets its Parameters leaves none of them behind; the model works on."""

from typing import Any

import pytest
import torch
from head_models import VOCABULARY, llama, lora
from models import token_ids
from peft import LoraConfig

import mlora_ext as mx
from mlora_ext.layers import copies
from mlora_ext.layers.adapter_layer import AdapterLayer
from mlora_ext.layers.adapter_weights import adapter_layers
from tests.mixtures import mixture

CONFIGS: dict[str, tuple[Any, LoraConfig]] = {
    "DoRA": (llama, LoraConfig(r=3, target_modules=["q_proj", "up_proj"], use_dora=True)),
    "copies": (llama, lora(target_modules=["q_proj"], modules_to_save=["lm_head", "norm"])),
    "rows": (llama, lora(target_modules=["q_proj"], trainable_token_indices=[3, 5])),
    "experts": (lambda: mixture("mixtral"), lora(target_modules=["q_proj", "w1", "w2", "w3"])),
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("where", ["last", "inside"])
def test_an_adapter_is_taken_off(kind: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, config = CONFIGS[kind]
    model = mx.convert_model(build().eval(), {"a": lora(target_modules=["q_proj"])})
    ids, names = token_ids(2, 5) % VOCABULARY, ["a", "__base__"]
    expected = model(input_ids=ids, adapter_names=names).logits
    whole = mx.convert_model(build().eval(), {"b": config})
    last = list(adapter_layers(whole, "b"))[-1]

    def fails(function: Any, after: bool) -> Any:
        def wrapped(self: Any, *args: Any) -> Any:
            found = function(self, *args) if after or getattr(self, "name", last) != last else None
            if getattr(self, "name", last) == last:
                raise MemoryError("no memory for it")
            return found

        return wrapped

    with monkeypatch.context() as patch:
        if where == "last":
            for owner in {type(layer) for layer in adapter_layers(whole, "b").values()}:
                patch.setattr(owner, "put", fails(owner.put, True))
        else:
            patch.setattr(AdapterLayer, "bank", fails(AdapterLayer.bank, False))
            patch.setattr(copies, "_plain_copy", fails(copies._plain_copy, False))
        with pytest.raises(MemoryError):
            mx.add_adapter(model, "b", config)
    assert not adapter_layers(model, "b")
    assert not [key for key in model.state_dict() if ".b." in key]
    assert torch.equal(model(input_ids=ids, adapter_names=names).logits, expected)
    mx.add_adapter(model, "b", config)
    model(input_ids=ids, adapter_names=["a", "b"])
    assert mx.adapter_parameters(model, "b").keys() == mx.adapter_parameters(whole, "b").keys()
