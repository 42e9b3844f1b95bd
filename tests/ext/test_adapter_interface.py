"""A converted model answers Transformers' adapter methods as a model with Transformers' own adapters does."""

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from models import CONFIGS, NAMES, converted, llama, logits_of, peft_model, token_ids
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tolerances import assert_same_up_to_rounding
from torch import nn

import mlora_ext as mx

pytestmark = pytest.mark.usefixtures("transformers_own_adapters")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[nn.Module, nn.Module]:
    """A model with Transformers' own adapters a and b, and a converted one with the same."""
    base = llama().eval()
    peft_model(base, CONFIGS).save_pretrained(tmp_path)
    theirs, ours = copy.deepcopy(base), copy.deepcopy(base)
    for name in CONFIGS:
        theirs.load_adapter(str(tmp_path / name), name)
        mx.load_adapter(ours, name, tmp_path / name)
    return theirs.eval(), ours.eval()


def test_every_method_answers_as_transformers_own(pair: tuple[nn.Module, nn.Module]) -> None:
    theirs, ours = pair
    ids = token_ids(3, 6)
    assert list(ours.peft_config) == list(theirs.peft_config) == ["a", "b"]
    assert ours._hf_peft_config_loaded is theirs._hf_peft_config_loaded is True
    for name in ("a", "b"):
        for model in pair:
            model.set_adapter(name)
        assert ours.active_adapters() == theirs.active_adapters() == [name]
        assert_same_up_to_rounding(logits_of(ours, ids), logits_of(theirs, ids), f"logits of {name}")
        state = theirs.get_adapter_state_dict()
        mine = ours.get_adapter_state_dict()
        assert mine.keys() == state.keys()
        assert all(torch.equal(mine[key], state[key]) for key in state)
        given = {key: value + 1 for key, value in ours.state_dict().items()}
        assert torch.equal(
            next(iter(ours.get_adapter_state_dict(name, given).values())), next(iter(mine.values())) + 1
        )
    for model in pair:
        model.disable_adapters()
    assert_same_up_to_rounding(logits_of(ours, ids), logits_of(theirs, ids), "logits of the base")
    for model in pair:
        model.enable_adapters()
    assert_same_up_to_rounding(logits_of(ours, ids), logits_of(theirs, ids), "logits of b again")
    for model in pair:
        model.delete_adapter("b")
    assert list(ours.peft_config) == list(theirs.peft_config) == ["a"]
    assert_same_up_to_rounding(logits_of(ours, ids), logits_of(theirs, ids), "logits when b is gone")
    for model in pair:
        model.delete_adapter(["a"])
    assert not ours._hf_peft_config_loaded
    assert not theirs._hf_peft_config_loaded


def test_added_and_loaded_adapters_become_the_active_one(
    pair: tuple[nn.Module, nn.Module], tmp_path: Path
) -> None:
    for model in pair:
        model.train()
        model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]), "c")
        assert model.active_adapters() == ["c"]
        model.load_adapter(str(tmp_path / "a"), "d", is_trainable=True)
        assert model.active_adapters() == ["d"]
        assert model.training
        model.load_adapter(str(tmp_path / "a"), "e")
        assert model.active_adapters() == ["e"]
        assert not model.training
        loaded = [p for key, p in model.named_parameters() if ".e." in key]
        assert loaded
        assert not any(p.requires_grad for p in loaded)
        with pytest.raises(ValueError, match=r"adapter 'a'|Adapter with name a"):
            model.load_adapter(str(tmp_path / "b"), "a")
    theirs, ours = pair
    assert all(p.requires_grad for p in mx.adapter_parameters(ours, "d").values())
    ours.load_adapter(tmp_path / "a", "d", hotswap=True)
    with pytest.raises(ValueError, match="no adapter 'z'"):
        ours.load_adapter(tmp_path / "a", "z", hotswap=True)
    for model in pair:
        model.eval().set_adapter("e")
    ids = token_ids(2, 5)
    assert_same_up_to_rounding(logits_of(ours, ids), logits_of(theirs, ids), "logits")


def test_a_frozen_adapter_serves_beside_one_that_trains(
    pair: tuple[nn.Module, nn.Module], tmp_path: Path
) -> None:
    _, model = pair
    model.load_adapter(tmp_path / "b", "frozen")
    model.train()
    ids = token_ids(2, 5)
    model(input_ids=ids, adapter_names=["a", "frozen"]).logits.sum().backward()
    assert all(p.grad is None for p in mx.adapter_parameters(model, "frozen").values())
    assert all(p.grad is not None for p in mx.adapter_parameters(model, "a").values())


def test_set_adapter_is_for_rows_that_name_none() -> None:
    model, ids = converted().eval(), token_ids(4, 6)
    with pytest.raises(ValueError, match="adapter_names"):
        model(input_ids=ids)
    model.set_adapter(["b"])
    assert torch.equal(logits_of(model, ids), logits_of(model, ids, adapter_names=["b"] * 4))
    mixed = logits_of(model, ids, adapter_names=NAMES)
    assert not torch.equal(mixed[0], logits_of(model, ids)[0])
    named = model.generate(input_ids=ids, adapter_names=["b"] * 4, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=4, do_sample=False), named)
    with pytest.raises(ValueError, match=re.escape("expected one adapter, got ['a', 'b']")):
        model.set_adapter(["a", "b"])
    with pytest.raises(ValueError, match="no adapter 'x'"):
        model.set_adapter("x")
    assert model.active_adapters() == ["b"]
    mx.remove_adapter(model, "b")
    assert model.active_adapters() == ["a"]


def test_the_default_trains_and_the_others_are_left_alone() -> None:
    model, ids = converted().train(), token_ids(2, 6)
    model.set_adapter("a")
    model.gradient_checkpointing_enable()
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in mx.adapter_parameters(model, "a").values())
    assert all(p.grad is None and p.requires_grad for p in mx.adapter_parameters(model, "b").values())


@pytest.mark.parametrize("how", ["names", "default", "route", "generate"])
def test_disabled_adapters_change_nothing_whoever_is_named(how: str) -> None:
    base = llama().eval()
    model, ids = mx.convert_model(copy.deepcopy(base), CONFIGS), token_ids(4, 6)
    with mx.disable_adapter(model):
        if how == "names":
            got = logits_of(model, ids, adapter_names=NAMES)
        elif how == "default":
            got = logits_of(model, ids)
        elif how == "route":
            layout = mx.SegmentLayout.from_lengths([12, 12], [0, 1])
            with mx.route(model, layout, ["a", "b"], steps=[3, 4]):
                got = logits_of(model, ids)
        else:
            got = model.generate(input_ids=ids, adapter_names=NAMES, max_new_tokens=4, do_sample=False)
    if how == "generate":
        assert torch.equal(got, base.generate(input_ids=ids, max_new_tokens=4, do_sample=False))
    else:
        assert_same_up_to_rounding(got, logits_of(base, ids), "logits of the base")
    assert not torch.equal(logits_of(model, ids, adapter_names=NAMES), logits_of(base, ids))


def test_disabling_is_undone_by_errors_and_keeps_what_was_set_before() -> None:
    model = converted()
    with pytest.raises(ZeroDivisionError), model.disable_adapter():
        raise ZeroDivisionError
    assert not model.mlora_router.disabled
    model.disable_adapters()
    with model.disable_adapter():
        pass
    assert model.mlora_router.disabled
    with pytest.raises(ValueError, match="no adapter 'x'"):
        model(input_ids=token_ids(1, 3), adapter_names=["x"])
    model.enable_adapters()
    layout = mx.SegmentLayout.from_lengths([6], [0])
    with mx.route(model, layout), pytest.raises(ValueError, match="a route is active"):
        model.disable_adapters()
    assert not model.mlora_router.disabled


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_after_the_context_still_leaves_the_adapters_out(reentrant: bool) -> None:
    base = llama()
    model = mx.convert_model(copy.deepcopy(base), CONFIGS).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ids = token_ids(2, 6)
    x = model.get_input_embeddings()(ids).detach().requires_grad_()
    with mx.disable_adapter(model):
        loss = model(inputs_embeds=x, adapter_names=["a", "b"]).logits.square().sum()
    loss.backward()
    y = x.detach().clone().requires_grad_()
    base(inputs_embeds=y).logits.square().sum().backward()
    assert_same_up_to_rounding(x.grad, y.grad, "gradient of the input")
    assert all(p.grad is None for p in model.parameters())


def test_copies_have_interfaces_of_their_own() -> None:
    model = converted()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.set_adapter("b")
        copied.delete_adapter("a")
        assert list(copied.peft_config) == ["b"]
    assert model.active_adapters() == list(model.peft_config) == ["a", "b"]


def test_plain_modules_get_no_methods_but_the_functions_serve_them() -> None:
    small = nn.Sequential(nn.Linear(4, 4))
    model = mx.convert_model(small, {"a": LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)})
    for name in ("set_adapter", "peft_config", "save_pretrained", "_hf_peft_config_loaded"):
        assert not hasattr(model, name)
    x = torch.randn(3, 4)
    with mx.disable_adapter(model):
        plain = model(x)
    assert not torch.equal(plain, model(x))


def test_trainable_parameters_are_printed_as_peft_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    base = llama()
    get_peft_model(copy.deepcopy(base), CONFIGS["a"]).print_trainable_parameters()
    theirs = capsys.readouterr().out
    model = mx.convert_model(base, {"a": CONFIGS["a"]})
    model.print_trainable_parameters()
    assert capsys.readouterr().out == theirs
    mx.add_adapter(model, "b", CONFIGS["b"])
    for parameter in mx.adapter_parameters(model, "b").values():
        parameter.requires_grad_(False)
    mx.print_trainable_parameters(model)
    printed = capsys.readouterr().out.splitlines()
    count = sum(p.numel() for p in mx.adapter_parameters(model, "a").values())
    assert [line.partition(" ||")[0] for line in printed] == [
        f"trainable params: {count:,d}",
        f"adapter a: {count:,d}",
        "adapter b: 0",
    ]


def test_a_fused_head_that_would_pass_the_adapter_by_is_refused() -> None:
    model = converted(
        a=LoraConfig(r=2, target_modules=["lm_head"]), b=LoraConfig(r=2, target_modules=["q_proj"])
    )
    with pytest.raises(ValueError, match=r"lm_head.*\(a\).*target_modules"):
        model(input_ids=token_ids(2, 3), adapter_names=["a", "b"], fused_lm_head=True)


def test_an_adapter_loaded_for_training_drops_in_a_model_in_evaluation_mode(tmp_path: Path) -> None:
    """As in Transformers, whose new layers begin in training mode while the base stays as it is."""
    config = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    theirs, ids = llama().eval(), token_ids(2, 5)
    ours = mx.convert_model(copy.deepcopy(theirs), {"a": config}).eval()
    mx.save_adapter(ours, "a", tmp_path / "a")
    for model in (theirs, ours):
        model.load_adapter(str(tmp_path / "a"), "x", is_trainable=True)
        parts = [module for module in model.modules() if "x" in getattr(module, "lora_A", ())]
        assert len(parts) == 2
        assert all(part.training for part in parts)
        assert not model.model.layers[0].mlp.training
        first, second = (model(input_ids=ids).logits for _ in range(2))
        assert not torch.equal(first, second), "each forward draws masks of its own"
    assert_same_up_to_rounding(logits_of(ours.eval(), ids), logits_of(theirs.eval(), ids), "without dropout")


@pytest.mark.parametrize("given", ["both", "config", "weights"])
def test_configs_and_weights_that_are_given_replace_the_folders(
    given: str, pair: tuple[nn.Module, nn.Module], tmp_path: Path
) -> None:
    theirs, ours = pair
    ids = token_ids(2, 5)
    weights = load_file(tmp_path / "a" / "adapter_model.safetensors")
    config = LoraConfig.from_pretrained(str(tmp_path / "a"))
    if given != "config":
        weights = {key: tensor * 2 for key, tensor in weights.items()}
    if given != "weights":
        config.lora_alpha *= 3
    for model in pair:
        mine = {key.removeprefix("base_model.model."): tensor for key, tensor in weights.items()}
        options = {"peft_config": copy.deepcopy(config), "adapter_state_dict": mine}
        if given != "both" and model is ours:
            options.pop("adapter_state_dict" if given == "config" else "peft_config")
        source = tmp_path if given != "both" and model is ours else None
        hub = {"subfolder": "a", "revision": "main"} if source else None
        model.load_adapter(source, "n", low_cpu_mem_usage=True, adapter_kwargs=hub, **options)
    assert_same_up_to_rounding(logits_of(ours, ids), logits_of(theirs, ids), "logits")


def test_options_of_load_adapter_that_are_refused(pair: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
    _, ours = pair
    with pytest.raises(ValueError, match=r"^peft_model_id: expected a PEFT folder, or both peft_config="):
        ours.load_adapter(None, "n", peft_config=LoraConfig())
    with pytest.raises(ValueError, match=r"^key_mapping=\{\}: not supported by load_adapter"):
        ours.load_adapter(tmp_path / "a", "n", local_files_only=True, key_mapping={})
    with pytest.raises(ValueError, match=r"^enable_peft_hotswap: is not needed"):
        ours.enable_peft_hotswap(target_rank=8)
