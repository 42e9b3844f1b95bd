"""PEFT's folders: out, in, the same logits; refusals; nothing half-written."""

import copy
import errno
import json
import os
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from models import gpt2, llama, logits_of, peft_model, token_ids
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from tolerances import assert_same_up_to_rounding

import mlora_ext as mx
from mlora_ext.interop import peft_folder as folder

FIELDS = {
    "names": {"target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"target_modules": "all-linear", "use_rslora": True},
    "regex": {"target_modules": r".*\.1\.mlp\.(up|down)_proj"},
    "default targets": {},
    "layers": {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [1]},
    "excluded": {"target_modules": "all-linear", "exclude_modules": r".*\.0\..*"},
    "patterns": {
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 3},
        "alpha_pattern": {r".*1\.mlp\.up_proj": 7},
    },
    "patterns that overlap": {  # PEFT writes their keys sorted, and the first match counts
        "target_modules": "all-linear",
        "rank_pattern": {"self_attn.q_proj": 2, "q_proj": 3, "k_proj": 4},
        "alpha_pattern": {"self_attn.v_proj": 7, "1.mlp.up_proj": 3, "(up|v)_proj": 5},
    },
}


@pytest.mark.parametrize("name", FIELDS)
def test_round_trip_through_peft(name: str, tmp_path: Path) -> None:
    base, ids = llama().eval(), token_ids(2, 6)
    base.config._name_or_path = "some/base"
    config = LoraConfig(r=5, lora_alpha=11, init_lora_weights=False, **FIELDS[name])
    model = mx.convert_model(copy.deepcopy(base), {"one": config})
    expected = logits_of(model, ids)
    mx.save_adapter(model, "one", tmp_path / "one")
    assert sorted(os.listdir(tmp_path)) == ["one"], "no temporary file is left"
    theirs = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "one").eval()
    assert_same_up_to_rounding(logits_of(theirs, ids), expected, "logits of PEFT")
    again = copy.deepcopy(base)
    mx.load_adapter(again, "two", tmp_path / "one")
    assert_same_up_to_rounding(logits_of(again, ids), expected, "logits of what was loaded")
    stored = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == "some/base"
    assert isinstance(stored["target_modules"], list)


def test_the_umask_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to all threads: setting it for an instant gives other threads' files other modes."""
    monkeypatch.delattr(os, "umask")
    model = mx.convert_model(llama(1), {"a": LoraConfig(target_modules=["q_proj"])})
    mx.save_adapter(model, "a", tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
    for file in (tmp_path / "a").iterdir():
        assert file.stat().st_mode == (tmp_path / "b" / "file").stat().st_mode


def test_keys_are_pefts(tmp_path: Path) -> None:
    base = gpt2()
    configs = {"a": LoraConfig(r=3, target_modules=["c_attn", "mlp.c_fc"], fan_in_fan_out=True)}
    peft_model(base, configs).save_pretrained(tmp_path / "theirs")
    mx.save_adapter(mx.convert_model(base, configs), "a", tmp_path / "ours")
    theirs = load_file(tmp_path / "theirs" / "a" / "adapter_model.safetensors")
    ours = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}


def test_from_peft() -> None:
    configs = {
        "a": LoraConfig(r=3, target_modules=["q_proj"], use_rslora=True),
        "b": LoraConfig(r=6, target_modules="all-linear", lora_dropout=0.1),
    }
    peft = peft_model(llama(), configs).eval()
    ids, names = token_ids(3, 6), ["b", "__base__", "a"]
    with torch.no_grad():
        expected = peft(input_ids=ids, adapter_names=names).logits
        model = mx.from_peft(peft).eval()
        assert_same_up_to_rounding(model(input_ids=ids, adapter_names=names).logits, expected, "logits")
    assert not any("base_layer" in key for key in model.state_dict())


@pytest.mark.parametrize("what", ["offloaded", "merged", "name"])
def test_from_peft_refuses_before_it_takes_the_model_apart(what: str) -> None:
    name = "a" if what != "name" else "config"
    config = LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
    peft = peft_model(llama(), {name: config}).eval()
    layer = peft.base_model.model.model.layers[1].self_attn.q_proj
    if what == "offloaded":
        layer.base_layer._hf_hook = object()
    elif what == "merged":
        layer.merge()
    elif what == "name":
        peft.peft_config["a.b"] = peft.peft_config.pop(name)
    ids = token_ids(2, 5)
    with torch.no_grad():
        before = peft.base_model(input_ids=ids).logits
        message = {
            "offloaded": "is offloaded",
            "merged": "unmerge",
            "name": "a.b",
        }
        with pytest.raises(ValueError, match=message[what]):
            mx.from_peft(peft)
        assert torch.equal(peft.base_model(input_ids=ids).logits, before)
    assert layer is peft.base_model.model.model.layers[1].self_attn.q_proj
    assert layer.lora_A[name].weight.requires_grad


def test_load_peft_folder_into_an_existing_adapter_or_without_any(tmp_path: Path) -> None:
    base, ids = llama().eval(), token_ids(1, 6)
    config = LoraConfig(r=3, target_modules=["q_proj"])
    peft = peft_model(base, {"a": config}).eval()
    peft.save_pretrained(tmp_path)
    model = mx.convert_model(copy.deepcopy(base), {"x": config})
    parameter = next(iter(mx.adapter_parameters(model, "x").values()))
    mx.load_adapter(model, "x", tmp_path / "a")
    assert_same_up_to_rounding(logits_of(model, ids), logits_of(peft, ids), "logits")
    assert next(iter(mx.adapter_parameters(model, "x").values())) is parameter, (
        "optimizers keep their Parameters"
    )
    without = mx.convert_model(copy.deepcopy(base), {})
    mx.load_adapter(without, "x", tmp_path / "a")
    assert torch.equal(logits_of(without, ids), logits_of(model, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_base_stores_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    model = mx.convert_model(llama().to(dtype), {"a": LoraConfig(r=3)})
    mx.save_adapter(model, "a", tmp_path / "a")
    assert {t.dtype for t in load_file(tmp_path / "a" / "adapter_model.safetensors").values()} == {
        torch.float32
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    config = LoraConfig(r=3, target_modules=["q_proj"])
    mx.save_adapter(mx.convert_model(llama(), {"a": config}), "a", tmp_path / "a")
    return tmp_path / "a"


def test_adapter_of_another_base_is_refused_by_layer(saved: Path) -> None:
    layers = mx.convert_model(llama(layers=3), {"b": LoraConfig(r=2)})
    before = set(layers.state_dict())
    with pytest.raises(
        ValueError, match=r"layer model\.layers\.2\.self_attn\.q_proj is missing in the weights"
    ):
        mx.load_adapter(layers, "a", saved)
    assert set(layers.state_dict()) == before
    assert list(layers.mlora_router.adapters) == ["b"]
    weights = load_file(saved / "adapter_model.safetensors")
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    save_file({**weights, key: torch.randn(3, 31)}, saved / "adapter_model.safetensors")
    base = llama()
    before = set(base.state_dict())
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn\.q_proj\.lora_A: expected shape \[3, 32\], got \[3, 31\]"
    ):
        mx.load_adapter(base, "a", saved)
    assert set(base.state_dict()) == before
    assert all(parameter.requires_grad for parameter in base.parameters())


def test_another_scaling_is_refused(saved: Path) -> None:
    model = mx.convert_model(llama(), {"a": LoraConfig(r=3, lora_alpha=9, target_modules=["q_proj"])})
    with pytest.raises(
        ValueError, match=r"q_proj: the model's adapter has scaling 3, the folder's has 2\.66667; load"
    ):
        mx.load_adapter(model, "a", saved)


def test_incomplete_folders_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere has no adapter_config\.json; give a PEFT folder"):
        mx.load_adapter(llama(), "a", tmp_path / "nowhere")
    weights = load_file(saved / "adapter_model.safetensors")
    save_file(
        {**weights, "base_model.model.lm_head.weight": torch.ones(1)}, saved / "adapter_model.safetensors"
    )
    with pytest.raises(ValueError, match=r"its base weight base_model\.model\.lm_head\.weight"):
        mx.load_adapter(llama(), "a", saved)
    (saved / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has neither adapter_model\.safetensors nor adapter_model\.bin"):
        mx.load_adapter(llama(), "a", saved)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(value: float, saved: Path) -> None:
    weights = load_file(saved / "adapter_model.safetensors")
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    weights[key][5, 2] = value
    save_file(weights, saved / "adapter_model.safetensors")
    model = mx.convert_model(llama(), {"b": LoraConfig(r=2)})
    with pytest.raises(ValueError, match=rf"{saved}: the tensor {re.escape(key)} contains NaN or infinity"):
        mx.load_adapter(model, "a", saved)
    assert list(model.mlora_router.adapters) == ["b"]


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:.*should not be contained")
@pytest.mark.parametrize("how", ["targeted", "stored", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_head_and_embeddings_that_peft_stores(how: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """They are the base's own: ignored if the model has them, refused by name if it has others."""
    base = llama().to(dtype)
    if how == "tied":
        base.lm_head.weight, base.config.tie_word_embeddings = base.model.embed_tokens.weight, True
    targets = ["q_proj"] if how == "stored" else ["q_proj", "lm_head"]
    peft = peft_model(base, {"one": LoraConfig(r=3, target_modules=targets)})
    peft.save_pretrained(tmp_path, save_embedding_layers="auto" if how != "stored" else True)
    stored = [key for key in load_file(tmp_path / "one" / "adapter_model.safetensors") if "lora_" not in key]
    assert stored
    model = mx.convert_model(copy.deepcopy(base), {"two": LoraConfig(r=2)})
    mx.load_adapter(model, "one", tmp_path / "one")
    state = dict(peft.named_parameters())
    for key, parameter in mx.adapter_parameters(model, "one").items():
        assert torch.equal(parameter, state[f"base_model.model.{key}"]), key
    mx.load_adapter(copy.deepcopy(base).float(), "one", tmp_path / "one")
    base.get_submodule("lm_head").weight.data[0, 0] += 1
    before = set(base.state_dict())
    with pytest.raises(
        ValueError, match=r"its base weight base_model\.model\.lm_head\..*weight.* the base model that"
    ):
        mx.load_adapter(base, "one", tmp_path / "one")
    assert set(base.state_dict()) == before


def test_unreadable_files_are_refused(saved: Path) -> None:
    config, weights = saved / "adapter_config.json", saved / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors cannot be read"):
        mx.load_adapter(llama(), "a", saved)
    fields = json.loads(config.read_text())
    for change, message in [
        ({"peft_type": "IA3"}, r"an adapter of type 'IA3', expected 'LORA'"),
        ({"shiny": True}, r"the installed PEFT does not know shiny=True; upgrade PEFT"),
        ({"use_qalora": True}, r"adapter 'a': use_qalora=True is not supported"),
        ({"modules_to_save": 3}, r"modules_to_save: expected a pattern or names, got 3"),
        ({"rank_pattern": {"q_proj": "x"}}, r"r: expected an integer >= 1, got 'x'"),
        ({"target_parameters": "x"}, r"PEFT cannot read it: `target_parameters` must be a list of strings"),
    ]:
        config.write_text(json.dumps({**fields, **change}))
        with pytest.raises(ValueError, match=message):
            mx.load_adapter(llama(), "a", saved)
    for content in (b"{", b"\xff\xfe{}", b"[" * 100_000, b'{"r":' * 100_000):
        config.write_bytes(content)
        with pytest.raises(ValueError, match=r"adapter_config\.json is not valid JSON"):
            mx.load_adapter(llama(), "a", saved)
    config.write_text("[]")
    with pytest.raises(ValueError, match=r"an adapter of type \[\], expected 'LORA'"):
        mx.load_adapter(llama(), "a", saved)


@pytest.mark.parametrize("content", [b"", b"damaged", b"PK\x03\x04", {"weight": 3}, {3: torch.ones(1)}, [1]])
def test_unreadable_old_weights_are_refused(saved: Path, content: object) -> None:
    (saved / "adapter_model.safetensors").unlink()
    if isinstance(content, bytes):
        (saved / "adapter_model.bin").write_bytes(content)
    else:
        torch.save(content, saved / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model\.bin(: expected a dict of tensors| cannot be read)"):
        mx.load_adapter(llama(), "a", saved)


def test_failed_save_leaves_the_old_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (saved / "adapter_model.safetensors").read_bytes()
    model = mx.convert_model(llama(), {"a": LoraConfig(r=3)})

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "adapter_state", full_disk)
    with pytest.raises(OSError, match="No space left"):
        mx.save_adapter(model, "a", saved)
    assert (saved / "adapter_model.safetensors").read_bytes() == before
    assert os.listdir(saved.parent) == ["a"]
    monkeypatch.undo()
    (saved / "notes.txt").write_text("mine")
    mx.save_adapter(model, "a", saved)
    assert (saved / "notes.txt").read_text() == "mine"
    assert (saved / "adapter_model.safetensors").read_bytes() != before
    assert os.listdir(saved.parent) == ["a"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_file_system_that_cannot_sync_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """An adapter that was saved is saved; another error of the disk is one."""
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    model = mx.convert_model(llama(), {"a": LoraConfig(r=3)})
    with nullcontext() if number == errno.EINVAL else pytest.raises(OSError, match="Input/output error"):
        mx.save_adapter(model, "a", tmp_path / "a")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(os.listdir(tmp_path / "a"))


def test_save_refusals(saved: Path) -> None:
    model = mx.convert_model(llama(), {"a": LoraConfig(r=3)})
    with pytest.raises(ValueError, match="no adapter 'z'"):
        mx.save_adapter(model, "z", saved)
    with pytest.raises(ValueError, match="is a file; give a folder"):
        mx.save_adapter(model, "a", saved / "adapter_config.json")
