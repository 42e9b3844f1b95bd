"""`save_pretrained` writes PEFT folders, which others load; merge_and_unload gives PEFT's numbers."""

import copy
import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from models import CONFIGS, VOCABULARY, converted, copy_weights, gpt2, llama, peft_model, token_ids
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from tolerances import assert_same_up_to_rounding
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MusicgenConfig
from transformers.pytorch_utils import Conv1D

import mlora_ext as mx
from mlora_ext import MultiLoRALinear
from mlora_ext.interop.peft_folder import adapter_state, resized_embeddings

FOLDER = {"adapter_config.json", "adapter_model.safetensors"}


def logits(model: nn.Module, ids: torch.Tensor, **named: object) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids, **named).logits


@pytest.fixture
def base(tmp_path: Path) -> LlamaForCausalLM:
    """A base model that lies in a folder, which adapters then name."""
    llama().save_pretrained(tmp_path / "base")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()


@pytest.mark.parametrize("name", ["a", "default"])
def test_one_adapter_lies_in_the_folder_itself(name: str, base: LlamaForCausalLM, tmp_path: Path) -> None:
    out, ids = tmp_path / "out", token_ids(2, 6)
    model = mx.convert_model(copy.deepcopy(base), {name: CONFIGS["a"]})
    expected = logits(model, ids)
    model.save_pretrained(out)
    assert set(os.listdir(out)) == {*FOLDER, "model.safetensors"}
    native = copy.deepcopy(base)
    native.load_adapter(str(out), name)
    ours = copy.deepcopy(base)
    mx.load_adapter(ours, name, out)
    for other in (
        PeftModel.from_pretrained(copy.deepcopy(base), out),
        AutoModelForCausalLM.from_pretrained(out),
        native,
        ours,
    ):
        assert_same_up_to_rounding(logits(other, ids), expected, type(other).__name__)
    difference = (logits(base, ids) - expected).norm() / expected.norm()
    assert difference > 0.01, "the adapter counts"


def test_several_lie_as_peft_lays_them_out(base: LlamaForCausalLM, tmp_path: Path) -> None:
    out, ids = tmp_path / "out", token_ids(2, 6)
    configs = {"default": CONFIGS["a"], "b": CONFIGS["b"]}
    model = mx.convert_model(copy.deepcopy(base), configs)
    model.save_pretrained(out)
    assert set(os.listdir(out)) == {*FOLDER, "model.safetensors", "b"}
    assert set(os.listdir(out / "b")) == FOLDER
    peft = PeftModel.from_pretrained(copy.deepcopy(base), out)
    peft.load_adapter(str(out / "b"), "b")
    for name in configs:
        peft.set_adapter(name)
        expected = logits(model, ids, adapter_names=[name] * 2)
        assert_same_up_to_rounding(logits(peft, ids), expected, name)
    again = mx.from_peft(peft)
    again.save_pretrained(tmp_path / "again")
    for name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")[name], tensor), name


def test_without_default_nothing_lies_in_the_folder_itself(tmp_path: Path) -> None:
    model = converted()
    model.set_adapter("a")
    model.save_pretrained(tmp_path / "both")
    assert set(os.listdir(tmp_path / "both")) == {"a", "b", "model.safetensors"}
    model.save_pretrained(tmp_path / "one", selected_adapters=["b"])
    assert set(os.listdir(tmp_path / "one")) == {*FOLDER, "model.safetensors"}
    assert json.loads((tmp_path / "one" / "adapter_config.json").read_text())["r"] == CONFIGS["b"].r
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other").exists()


def test_a_state_dict_is_what_is_written(tmp_path: Path) -> None:
    model = converted(a=CONFIGS["a"])
    given = {key: value + 1 if "lora_" in key else value for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=given)
    for key, value in load_file(tmp_path / "adapter_model.safetensors").items():
        assert torch.equal(value, adapter_state(model, "a")[key] + 1), key
    with pytest.raises(ValueError, match="is missing in this process; pass the tensors of all"):
        model.save_pretrained(tmp_path, state_dict={})


def test_the_file_beside_them_restores_all_adapters_and_the_step(tmp_path: Path) -> None:
    model = converted()
    model.mlora_router.step = 7
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    other = converted()
    assert other.load_state_dict(stored, strict=True).missing_keys == []
    assert other.mlora_router.step == 7
    for name in CONFIGS:
        mine = mx.adapter_parameters(other, name)
        assert all(torch.equal(p, mine[key]) for key, p in mx.adapter_parameters(model, name).items())
    key = next(key for key in stored if ".b." in key)
    del stored[key]
    result = other.load_state_dict(stored, strict=False)
    assert result.missing_keys == [key], "a missing adapter is still told"
    assert result.unexpected_keys == []
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({}, strict=True)


def test_the_weights_of_another_model_are_not_overwritten(base: LlamaForCausalLM, tmp_path: Path) -> None:
    before = (tmp_path / "base" / "model.safetensors").read_bytes()
    model = mx.convert_model(base, {"a": CONFIGS["a"]})
    with pytest.raises(ValueError, match="refusing to overwrite the model weights in"):
        model.save_pretrained(tmp_path / "base")
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "base" / "adapter_config.json").exists()
    model.save_pretrained(tmp_path / "out")
    model.save_pretrained(tmp_path / "out")
    assert not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]


@pytest.mark.parametrize(
    "options",
    [
        {"push_to_hub": True},
        {"safe_serialization": False},
        {"max_shard_size": "1MB"},
        {"variant": "fp16"},
        {"save_peft_format": False},
    ],
    ids=str,
)
def test_options_that_cannot_be_served_are_refused(options: dict, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=f"{next(iter(options))}=.*not supported: adapters are saved as PEFT folders"
    ):
        converted().save_pretrained(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_options_at_their_usual_value_are_accepted(tmp_path: Path) -> None:
    converted().save_pretrained(
        tmp_path, token=None, variant=None, safe_serialization=True, save_peft_format=True
    )
    assert (tmp_path / "a" / "adapter_config.json").exists()


def test_a_model_whose_adapters_have_left_writes_the_base(base: LlamaForCausalLM, tmp_path: Path) -> None:
    model = mx.convert_model(copy.deepcopy(base), {"a": CONFIGS["a"]})
    model.delete_adapter("a")
    model.save_pretrained(tmp_path / "out")
    ids = token_ids(1, 5)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again, ids), logits(base, ids))


def test_changes_of_the_configs_are_written(tmp_path: Path) -> None:
    model = converted(a=CONFIGS["a"])
    model.peft_config["a"].revision = "main"
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["revision"] == "main"


def test_an_adapter_that_an_earlier_save_left_in_the_root_goes(tmp_path: Path) -> None:
    """PEFT would load it in place of the newer ones, which lie in folders of their names."""
    model = mx.convert_model(llama(), {"x": CONFIGS["a"]})
    model.save_pretrained(tmp_path / "own")
    mx.save_adapter(model, "x", tmp_path / "other")
    mx.add_adapter(model, "y", CONFIGS["b"])
    model.save_pretrained(tmp_path / "own")
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["model.safetensors", "x", "y"]
    with pytest.raises(ValueError, match=r"save_directory: .*other already holds a PEFT adapter"):
        model.save_pretrained(tmp_path / "other")
    assert (tmp_path / "other" / "adapter_model.safetensors").exists()
    with pytest.raises(ValueError, match=r"folder: .* give one of its subfolders: x, y"):
        mx.load_adapter(model, "z", tmp_path / "own")


def test_arguments_in_the_wrong_order_or_form_are_one_line() -> None:
    model, config = mx.convert_model(llama(), {"x": CONFIGS["a"]}), CONFIGS["b"]
    for call, told in (
        (
            lambda: mx.add_adapter(model, config, "n"),
            "name: expected a name before the config",
        ),
        (lambda: model.add_adapter("n", config), "adapter_config: expected a LoraConfig before the name"),
        (lambda: mx.merge_and_unload(model, ["x"]), r"adapter_name: expected the name of one adapter"),
        (lambda: model.merge_and_unload(adapter_names=["x", "y"]), "adapter_names: expected one adapter"),
        (lambda: model.set_adapter(None), "adapter_name: expected one adapter, got None"),
    ):
        with pytest.raises(ValueError, match=told):
            call()
    assert isinstance(model.merge_and_unload(adapter_names=["x"], progressbar=True), LlamaForCausalLM)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=["body", "head"])
def test_embeddings_that_were_resized_are_saved_with_the_adapter(
    tied: bool, targets: list[str], tmp_path: Path
) -> None:
    if tied and "lm_head" in targets:
        pytest.skip("an adapter on tied weights is refused")

    def resized(rows: int = VOCABULARY + 3) -> LlamaForCausalLM:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model.resize_token_embeddings(rows, mean_resizing=False)
        return model.eval()

    plain = llama()
    plain.config.tie_word_embeddings = tied
    plain.tie_weights()
    plain.save_pretrained(tmp_path / "base")
    ids = torch.cat([token_ids(2, 5), torch.full((2, 1), VOCABULARY + 1)], 1)
    trained = resized()
    model = mx.convert_model(trained, {"a": LoraConfig(r=4, target_modules=targets, init_lora_weights=False)})
    expected = logits(model, ids)
    with pytest.warns(
        UserWarning, match=f"has {VOCABULARY + 3} tokens, that of the base in .* has {VOCABULARY}:"
    ):
        model.save_pretrained(tmp_path / "out")
    peft = PeftModel.from_pretrained(resized(), tmp_path / "out")
    assert_same_up_to_rounding(logits(peft, ids), expected, "PEFT")
    own = resized()
    with pytest.raises(ValueError, match="load the base model that the adapter was trained on"):
        mx.load_adapter(own, "a", tmp_path / "out")
    mx.load_adapter(model, "b", tmp_path / "out")
    assert_same_up_to_rounding(logits(model, ids, adapter_names=["b", "b"]), expected, "beside it")
    resumed = mx.convert_model(own, {"a": LoraConfig(r=4, target_modules=targets)})
    assert not resumed.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=False)[1]
    assert_same_up_to_rounding(logits(resumed, ids), expected, "Trainer's checkpoint")


def test_embeddings_of_the_base_are_not_saved(
    base: LlamaForCausalLM, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    mx.convert_model(base, {"a": CONFIGS["a"]}).save_pretrained(tmp_path / "out")
    assert all("lora_" in key for key in load_file(tmp_path / "out" / "adapter_model.safetensors"))
    assert not list(recwarn)


def test_resized_embeddings_of_a_state_dict_are_those_that_are_saved(
    base: LlamaForCausalLM, tmp_path: Path
) -> None:
    base.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    model = mx.convert_model(base, {name: LoraConfig(r=4, target_modules=["q_proj"]) for name in "ab"})
    gathered = {key: tensor + 1 for key, tensor in model.state_dict().items()}
    with pytest.warns(UserWarning, match="the model's vocabulary has") as told:
        model.save_pretrained(tmp_path / "out", state_dict=gathered)
    assert [one.filename for one in told] == [__file__]
    key = "model.embed_tokens.weight"
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[key], gathered[key])
    for name in "ab":
        saved = load_file(tmp_path / "out" / name / "adapter_model.safetensors")
        assert torch.equal(saved[f"base_model.model.{key}"], gathered[key])


def test_a_model_around_a_resized_base_is_saved(base: LlamaForCausalLM, tmp_path: Path) -> None:
    """It has the base's config, and no embeddings of its own."""

    class WithValueHead(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.config = base, base.config

    base.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    model = mx.convert_model(WithValueHead(base), {"a": LoraConfig(r=4, target_modules=["q_proj"])})
    mx.save_adapter(model, "a", tmp_path / "out")
    assert all("lora_" in key for key in load_file(tmp_path / "out" / "adapter_model.safetensors"))


def test_a_config_of_several_texts_names_no_vocabulary() -> None:
    assert resized_embeddings(type("Model", (nn.Module,), {"config": MusicgenConfig()})()) == {}


GPT2 = {
    "a": LoraConfig(r=3, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, use_rslora=True),
    "b": LoraConfig(r=3, target_modules=["c_proj"], fan_in_fan_out=True, init_lora_weights=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_weights_are_pefts_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    base, configs = (llama(), CONFIGS) if family == "llama" else (gpt2(), GPT2)
    base = base.to(dtype)
    theirs = peft_model(base, configs)
    model = mx.convert_model(copy.deepcopy(base), configs)
    copy_weights(theirs, model, configs)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(7)
    expected_draw = torch.rand(3)
    torch.manual_seed(7)
    merged = mx.merge_and_unload(model, "a")
    assert torch.equal(torch.rand(3), expected_draw), "merging draws no random numbers"
    expected = theirs.merge_and_unload(adapter_names=["a"]).state_dict()
    assert merged.state_dict().keys() == expected.keys() == base.state_dict().keys()
    for key, value in merged.state_dict().items():
        assert torch.equal(value, expected[key]), key
        assert value.dtype == dtype
    assert any(not torch.equal(expected[key], value) for key, value in base.state_dict().items())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    memory = {parameter.data_ptr() for parameter in model.parameters()}
    assert not memory & {parameter.data_ptr() for parameter in merged.parameters()}
    assert {type(m) for m in merged.modules()} == {type(m) for m in base.modules()}


def test_the_layers_own_scaling_counts_and_not_that_of_the_config() -> None:
    model = mx.convert_model(llama(), {"a": CONFIGS["a"]})
    layer = model.model.layers[1].self_attn.q_proj
    layer.specs["a"] = dataclasses.replace(layer.specs["a"], scaling=3.0)
    merged = mx.merge_and_unload(model).model.layers[1].self_attn.q_proj.weight
    change = layer.lora_B.parameter_of("a") @ layer.lora_A.parameter_of("a")
    assert_same_up_to_rounding(merged, layer.weight + 3 * change, "merged weight")


def test_the_copy_is_a_plain_model() -> None:
    base = llama()
    model = mx.convert_model(copy.deepcopy(base), {"a": CONFIGS["a"]}).eval()
    merged = model.merge_and_unload()
    ids = token_ids(2, 5)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    own = set(merged.__dict__) - set(base.__dict__)
    assert not own, f"left on the copy: {own}"
    for kind in (
        "_forward_pre_hooks",
        "_forward_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    ):
        assert not getattr(merged, kind), kind
    mx.convert_model(merged, {"next": CONFIGS["b"]})


def test_what_a_trainer_puts_on_the_instance_stays_behind() -> None:
    model = mx.convert_model(llama(), {"a": CONFIGS["a"]}).eval()
    own = model.forward
    model.forward = lambda *args, **named: own(*args, **named)
    merged = mx.merge_and_unload(model)
    del model.forward
    ids = token_ids(1, 4)
    with torch.no_grad():
        before = merged(input_ids=ids).logits
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(merged(input_ids=ids).logits, before)


def test_lists_of_hooks_on_the_model_are_no_obstacle() -> None:
    """Transformers keeps the handles of `enable_input_require_grads` in one; TRL calls it."""
    model = mx.convert_model(llama(), {"a": CONFIGS["a"]}).eval()
    model.enable_input_require_grads()
    ids = token_ids(2, 7)
    assert_same_up_to_rounding(mx.merge_and_unload(model)(ids).logits, model(ids).logits, "logits")


def test_the_adapter_is_named_or_known() -> None:
    model = mx.convert_model(llama(), CONFIGS)
    with pytest.raises(ValueError, match=r"expected one of the model's adapters \(a, b\), got None"):
        mx.merge_and_unload(model)
    with pytest.raises(ValueError, match="no adapter 'x'"):
        mx.merge_and_unload(model, "x")
    model.set_adapter("b")
    first, second = mx.merge_and_unload(model), mx.merge_and_unload(model, "b")
    assert all(torch.equal(x, y) for x, y in zip(first.parameters(), second.parameters(), strict=True))


def test_tied_weights_are_refused() -> None:
    model = gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    mx.convert_model(model, {"a": LoraConfig(r=2, target_modules=["lm_head"])})
    with pytest.raises(ValueError, match=r"lm_head: its weight is tied to transformer\.wte\.weight"):
        mx.merge_and_unload(model)


def test_a_module_of_nobodys_family() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 6, bias=False), Conv1D(5, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x).relu())

    base = Mixed()
    config = LoraConfig(r=2, target_modules=["one", "two"], init_lora_weights=False)
    model = mx.convert_model(copy.deepcopy(base), {"a": config})
    seen: list[str] = []
    model.one.register_forward_hook(lambda *_: seen.append("one"))
    merged = mx.merge_and_unload(model)
    x = torch.randn(4, 8)
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)
    assert seen == ["one", "one"], "hooks of the user's come along"
    assert not any(isinstance(module, MultiLoRALinear) for module in merged.modules())
    assert not torch.allclose(merged(x), base(x), rtol=1e-4, atol=1e-5)


def test_safe_merge_refuses_what_is_not_finite() -> None:
    model = mx.convert_model(llama(), {"a": CONFIGS["a"]})
    with torch.no_grad():
        next(iter(mx.adapter_parameters(model, "a").values())).fill_(float("inf"))
    with pytest.raises(ValueError, match="NaN"):
        mx.merge_and_unload(model, safe_merge=True)
