"""Other people's training loops: the step of dropout, inference mode, autocast, Trainer."""

import copy
from pathlib import Path

import pytest
import torch
from models import CONFIGS, assert_same, converted, copy_weights, gradients, llama, peft_model, token_ids
from peft import LoraConfig
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
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


def test_step_set_again_resumes_with_the_same_masks() -> None:
    """The counter is no state dict's: `model.mlora_router.step` is what a loop stores."""
    model, ids = converted().train(), token_ids(2, 5)
    clone = copy.deepcopy(model)
    expected = [model(ids, adapter_names=["a", "b"]).logits for _ in range(4)]
    assert not any("step" in key for key in model.state_dict())
    clone.mlora_router.step = 2
    for logits in expected[2:]:
        assert torch.equal(clone(ids, adapter_names=["a", "b"]).logits, logits)


def test_each_route_that_trains_parts_is_a_step() -> None:
    model, ids = converted().train(), token_ids(1, 5)
    layout = mx.SegmentLayout.from_lengths([5])

    def hidden(part: nn.Module, **options: object) -> torch.Tensor:
        with mx.route(part, layout, ["a"], **options):
            return part(ids).last_hidden_state

    one, two = hidden(model.model), hidden(model.model)
    assert model.mlora_router.step == 2
    assert not torch.allclose(one, two, atol=1e-3)
    assert torch.equal(hidden(model.model, steps=[1]), two)
    with torch.no_grad():
        assert torch.equal(hidden(model.model, steps=[0]), one)
        hidden(model.model)
    hidden(model.model.eval())
    assert model.mlora_router.step == 2


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_parts_do_not_train_with_the_same_masks_for_ever(reentrant: bool | None) -> None:
    """Outside of the model's forward and of routes nobody counts steps."""
    model, ids = converted(a=CONFIGS["a"]).train(), token_ids(2, 5)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    with pytest.raises(ValueError, match=r"draws the same masks in every step; call the converted model"):
        model.model(ids).last_hidden_state.sum().backward()
    with torch.no_grad():
        model.model(ids)
    model.eval().model(ids).last_hidden_state.sum().backward()
    plain = converted(a=LoraConfig(r=4, target_modules=["q_proj"])).train()
    plain.model(ids).last_hidden_state.sum().backward()
    assert gradients(plain)


def test_lbfgs_needs_contiguous_parameters() -> None:
    """Given memory of their own, LBFGS trains them as it trains PEFT's (in fp64: it amplifies rounding)."""
    base, config, ids = (
        llama().double(),
        {"x": LoraConfig(r=4, target_modules=["q_proj", "up_proj"])},
        token_ids(2, 6),
    )
    peft = peft_model(base, config)
    model = mx.convert_model(base, config)
    copy_weights(peft, model, config)

    def losses(trained: nn.Module, parameters: list[nn.Parameter]) -> list[float]:
        optimizer = torch.optim.LBFGS(parameters, max_iter=3, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = trained(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss

        return [float(optimizer.step(closure)) for _ in range(3)]

    parameters = list(mx.adapter_parameters(model, "x").values())
    for fails in (lambda: losses(model, parameters), lambda: parameters_to_vector(parameters)):
        with mx.use_backend("reference"), pytest.raises(RuntimeError, match="view size is not compatible"):
            fails()
    for parameter in parameters:
        parameter.data = parameter.data.contiguous()
    state = dict(peft.named_parameters())
    theirs = losses(peft, [state[f"base_model.model.{key}"] for key in mx.adapter_parameters(model, "x")])
    with mx.use_backend("reference"):
        assert losses(model, parameters) == pytest.approx(theirs, rel=1e-9)
    assert theirs[-1] < theirs[0]
    vector = parameters_to_vector(parameters)
    vector_to_parameters(vector + 1, parameters)
    assert torch.equal(parameters_to_vector(parameters), vector + 1)


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
            adam_epsilon=1e-5,  # else the sign of a gradient that is nothing but rounding is a whole step
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
