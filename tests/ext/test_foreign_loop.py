"""Other people's training loops: the step of dropout, inference mode, autocast, Trainer."""

import copy
from pathlib import Path

import pytest
import torch
from models import assert_same, converted, copy_weights, gradients, llama, peft_model, token_ids
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

import mlora_ext as mx


def test_each_training_forward_is_a_step() -> None:
    model, ids = converted().train(), token_ids(1, 5)
    one, two = (model(input_ids=ids, adapter_names=["a"]).logits for _ in range(2))
    assert not torch.allclose(one, two, atol=1e-3)
    with torch.no_grad():
        model(input_ids=ids, adapter_names=["a"])
    model.eval()(input_ids=ids, adapter_names=["a"])
    assert model.mlora_router.step == 2


@pytest.mark.parametrize("how", ["forward", "generate", "route"])
def test_inference_mode_before_training(how: str) -> None:
    """What is cached under inference mode serves a training step afterwards."""
    model, ids = converted().train(), token_ids(2, 5)
    layout = mx.SegmentLayout.from_lengths([5, 5])

    def run(**options: object) -> torch.Tensor:
        if how != "route":
            return model(ids, adapter_names=["a", "b"], **options).logits
        with mx.route(model, layout, names=["a", "b"]):
            return model(ids, **options).logits

    with torch.inference_mode():
        if how == "generate":
            model.generate(ids, adapter_names=["a", "b"], max_new_tokens=2)
        else:
            run()
    model.mlora_router.step = 0
    run().square().sum().backward()
    found = gradients(model)
    clone = copy.deepcopy(model)
    clone.mlora_router.step = 0
    clone(ids, adapter_names=["a", "b"]).logits.square().sum().backward()
    assert_same(found, gradients(clone))


def test_autocast_trains() -> None:
    model = converted().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=token_ids(2, 5), adapter_names=["a", "b"]).logits.float().square().mean()
    loss.backward()
    found = gradients(model)
    assert found
    assert {g.dtype for g in found.values()} == {torch.float32}
    assert all(g.isfinite().all() and g.any() for g in found.values())


def test_transformers_trainer(tmp_path: Path) -> None:
    """A converted model with one adapter trains in Trainer as PEFT's does, and is saved by it."""
    base, config = llama(), LoraConfig(r=4, target_modules="all-linear")
    peft = peft_model(base, {"x": config})
    model = mx.convert_model(copy.deepcopy(base), {"x": config})
    copy_weights(peft, model, {"x": config})
    data = [{"input_ids": ids, "labels": ids} for ids in token_ids(8, 6)]
    losses = []
    for trained in (peft, model):
        arguments = TrainingArguments(
            str(tmp_path / type(trained).__name__), max_steps=4, per_device_train_batch_size=2, seed=5,
            learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(trained, arguments, train_dataset=data)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    mx.add_adapter(model, "y", LoraConfig(r=3))
    model.save_pretrained(tmp_path / "whole")
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    for key, parameter in mx.adapter_parameters(model, "x").items():
        assert torch.equal(stored[key], parameter)
