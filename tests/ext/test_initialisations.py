"""Initialisations that decompose weights or look at data: as PEFT's, in mixed batches over one base."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import gpt2, llama, loss_of, losses_of_own, token_ids
from peft import LoraConfig, PeftModel
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from peft_starts import DATA, SEED, STARTS, by_peft, config_of, data_of
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn

import mlora_ext as mx

pytestmark = pytest.mark.filterwarnings("ignore")
OTHERS = {
    "plain": LoraConfig(r=3, target_modules=["q_proj", "up_proj", "c_attn"], lora_dropout=0.3),
    "stable": LoraConfig(r=5, use_rslora=True, target_modules="all-linear", init_lora_weights=False),
    "pissa": LoraConfig(
        r=2, target_modules=["v_proj", "c_proj"], init_lora_weights="pissa", lora_dropout=0.2
    ),
}


def converted(base: nn.Module, how: str, config: LoraConfig, *, mixed: bool) -> nn.Module:
    configs = {**(OTHERS if mixed else {}), "own": copy.deepcopy(config)}
    model = mx.convert_model(copy.deepcopy(base), configs, seed=SEED)
    if how in DATA:
        mx.initialise_from_data(model, "own", data_of(how))
    return model


@pytest.mark.parametrize("how", STARTS)
def test_trains_as_pefts(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and in a mixed batch with three adapters of other kinds, over one base that nobody changes."""
    base, config = llama(), config_of(how)
    peft = by_peft(base, config, data_of(how), "own", monkeypatch)
    theirs = {key: p for key, p in peft.named_parameters() if p.requires_grad}
    begin = {key: p.detach().clone() for key, p in theirs.items()}
    expected = losses_of_own(peft, list(theirs.values()))
    for mixed in (False, True):
        model = converted(base, how, config, mixed=mixed)
        own = {k: p for k, p in mx.adapter_parameters(model, "own").items() if p.requires_grad}
        assert len(own) == len(theirs)
        for key, parameter in own.items():
            start = begin[f"base_model.model.{key.replace('.own.', '.default.')}"]
            assert_same_up_to_rounding(parameter.detach(), start, f"initial {key}", 1e-4)
        before = {key: p.detach().clone() for key, p in own.items()}
        names = ["own", "own", *OTHERS] if mixed else ["own", "own"]
        trainable = [p for p in model.parameters() if p.requires_grad]
        losses = losses_of_own(model, trainable, names)
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5
        for key, parameter in own.items():
            other = f"base_model.model.{key.replace('.own.', '.default.')}"
            change = theirs[other].detach() - begin[other]
            assert_same_up_to_rounding(parameter.detach() - before[key], change, key, 1e-4)
        for key, parameter in base.named_parameters():
            assert torch.equal(model.get_parameter(key), parameter), key


@pytest.mark.nightly
@pytest.mark.parametrize("how", [how for how in STARTS if how != "olora"])
def test_trains_as_pefts_on_gpt2(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On `Conv1D`. PEFT's OLoRA decomposes its transposed weight there, and fails."""
    base, config = gpt2(), config_of(how, rank_pattern={"c_fc": 6}, alpha_pattern={"c_attn": 3})
    peft = by_peft(base, config, data_of(how), "own", monkeypatch)
    model = converted(base, how, config, mixed=True)
    expected = losses_of_own(peft)
    losses = losses_of_own(model, names=["own", "own", *OTHERS])
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5


@pytest.mark.parametrize(
    ("family", "how", "fields"),
    [
        (
            llama,
            "pissa",
            {"use_rslora": True, "rank_pattern": {"q_proj": 7}, "alpha_pattern": {"up_proj": 3}},
        ),
        (gpt2, "olora", {"rank_pattern": {"c_attn": 2}}),
        (llama, "lora_ga", {}),
    ],
)
def test_folders_are_plain_lora_of_twice_the_rank(
    family: Any, how: str, fields: dict, tmp_path: Path
) -> None:
    base, ids = family().eval(), token_ids(2, 5)
    model = converted(base, how, config_of(how, **fields), mixed=True).eval()
    with torch.no_grad():
        for key, parameter in mx.adapter_parameters(model, "own").items():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            assert parameter.requires_grad == (".lora_" in key)
        mx.save_adapter(model, "own", tmp_path)
        expected = model(input_ids=ids, adapter_names=["own", "own"]).logits
        peft = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
        loaded = copy.deepcopy(base)
        mx.load_adapter(loaded, "x", tmp_path)
        assert peft.peft_config["default"].r == 8
        assert_same_up_to_rounding(peft(input_ids=ids).logits, expected, "PEFT's logits")
        assert_same_up_to_rounding(loaded(input_ids=ids).logits, expected, "logits of what was loaded")
        merged = mx.merge_and_unload(model, "own")(input_ids=ids).logits
        assert_same_up_to_rounding(merged, expected, "merged logits")
    with pytest.raises(ValueError, match=f"adapter 'own': began with init_lora_weights='{how}', and folders"):
        mx.load_adapter(model, "own", tmp_path)


def gradients(model: nn.Module, names: list[str], ids: Tensor) -> dict[str, Tensor]:
    model.mlora_router.step = 3
    logits = model(input_ids=ids, adapter_names=names).logits
    sum(loss_of(logits[i : i + 1], ids[i : i + 1]) for i in range(len(ids))).backward()
    own = mx.adapter_parameters(model, "own")
    found = {key: p.grad.clone() for key, p in own.items() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_is_isolated_with_dropout(backend: str) -> None:
    """Gradients alone are those in a mixed batch; the reference adds the products by another formula."""
    base, ids = llama(), torch.cat([token_ids(2, 6), token_ids(3, 6)])
    model = converted(base, "pissa", config_of("pissa", lora_dropout=0.4), mixed=True)
    with torch.no_grad():
        for parameter in mx.adapter_parameters(model, "own").values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    alone = gradients(model, ["own", "own"], ids[:2])
    with mx.use_backend(backend):
        together = gradients(model, ["own", "own", *OTHERS], ids)
    assert together.keys() == alone.keys()
    for key, gradient in alone.items():
        assert_same_up_to_rounding(together[key], gradient, key)


def test_copies_and_state_dicts_keep_both_halves() -> None:
    ids, base = token_ids(2, 5), llama()
    model = converted(base, "olora", config_of("olora"), mixed=False)
    with torch.no_grad():
        for parameter in mx.adapter_parameters(model, "own").values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    expected = model(input_ids=ids).logits
    assert torch.equal(copy.deepcopy(model)(input_ids=ids).logits, expected)
    other = mx.convert_model(copy.deepcopy(base), {"own": config_of("olora")})
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(input_ids=ids).logits, expected)
    mx.remove_adapter(other, "own")
    assert not any(".own." in key for key in other.state_dict())


def test_a_half_precision_base_keeps_its_output() -> None:
    """A0 and B0 stay in fp32: A B - A0 B0 begins at zero up to the rounding of outputs."""
    base, ids = llama().bfloat16(), token_ids(2, 5)
    with torch.no_grad():
        plain = base(input_ids=ids).logits
        model = converted(base, "pissa", config_of("pissa"), mixed=False)
        found = model(input_ids=ids).logits
    assert {p.dtype for p in mx.adapter_parameters(model, "own").values()} == {torch.float32}
    assert_same_up_to_rounding(found, plain, "logits", 3e-2)


def test_an_adapter_of_data_waits_for_it() -> None:
    torch.manual_seed(1)  # with few seeds EVA leaves all ranks as they are
    ids, base = token_ids(2, 5), llama()
    model = mx.convert_model(copy.deepcopy(base), {"own": config_of("eva"), "b": LoraConfig(r=2)}, seed=SEED)
    with pytest.raises(ValueError, match=r"adapter 'own': init_lora_weights='eva' needs the adapter's data"):
        model(input_ids=ids, adapter_names=["own", "b"])
    before = copy.deepcopy(model.state_dict())
    step = model.mlora_router.step
    with pytest.raises(ValueError, match="adapter 'b': init_lora_weights=True needs no data"):
        mx.initialise_from_data(model, "b", data_of("eva"))
    with pytest.raises(ValueError, match="adapter 'own': expected at least one batch of its data, got none"):
        mx.initialise_from_data(model, "own", [])
    with pytest.raises(ValueError, match="no batch has as many tokens as EVA needs components"):
        mx.initialise_from_data(model, "own", [{"input_ids": ids[:, :2]}])
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in before.items())
    mx.initialise_from_data(model, "own", data_of("eva"))
    assert list(model.mlora_router.adapters) == ["own", "b"]
    assert model.mlora_router.step == step
    assert model.training == base.training
    ranks = [
        layer.specs["own"].rank
        for layer in model.modules()
        if hasattr(layer, "specs") and "own" in layer.specs
    ]
    assert len(set(ranks)) > 1
    assert sum(ranks) <= 4 * 14
    model(input_ids=ids, adapter_names=["own", "b"])


@pytest.mark.parametrize(
    ("config", "data", "message"),
    [
        (config_of("lora_ga", r=20), data_of("lora_ga"), "'lora_ga' needs 2 · rank <= 32, got 40"),
        (config_of("corda", r=33), data_of("corda"), "'corda' needs rank <= 32, got 33"),
        (
            config_of("lora_ga"),
            [{"input_ids": torch.ones(1, 5).long()}],
            "needs a loss: give batches with labels",
        ),
    ],
)
def test_data_that_does_not_serve(config: LoraConfig, data: list, message: str) -> None:
    model = mx.convert_model(llama(), {"own": config})
    with pytest.raises(ValueError, match=message):
        mx.initialise_from_data(model, "own", data)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"init_lora_weights": "lora_ga"}, "needs lora_ga_config=LoraGAConfig"),
        (
            {"lora_ga_config": LoraGAConfig()},
            "lora_ga_config=.* is not supported with init_lora_weights=True",
        ),
        (
            {"init_lora_weights": "corda", "corda_config": CordaConfig(covariance_file="x")},
            "corda_config.covariance_file='x' is not supported: covariances are computed from data",
        ),
        ({"init_lora_weights": "pissa", "use_dora": True}, "use_dora"),
    ],
)
def test_settings_that_do_not_fit(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"adapter 'a': .*{message}"):
        mx.convert_model(llama(), {"a": LoraConfig(target_modules=["q_proj"], **fields)})


@pytest.mark.parametrize(
    "fields", [{"modules_to_save": ["lm_head", "norm"]}, {"trainable_token_indices": [3, 5]}]
)
@pytest.mark.parametrize("how", DATA)
def test_trained_parts_do_not_change_the_start(how: str, fields: dict) -> None:
    base, found = llama(), []
    for more in ({}, fields):
        config = config_of(how, target_modules=["q_proj", "up_proj"], **more)
        model = mx.convert_model(copy.deepcopy(base), {"own": config}, seed=SEED)
        mx.initialise_from_data(model, "own", data_of(how))
        found.append({key: p.detach() for key, p in mx.adapter_parameters(model, "own").items()})
        model(input_ids=token_ids(2, 5), adapter_names=["own"] * 2)
    assert len(found[1]) > len(found[0])
    for key, tensor in found[0].items():
        assert torch.equal(found[1][key], tensor), key


def test_an_embedding_has_no_start_from_data() -> None:
    config = config_of("eva", target_modules=["embed_tokens", "q_proj"])
    model = mx.convert_model(llama(), {"own": config})
    with pytest.raises(ValueError, match=r"^adapter 'own': target model\.embed_tokens: .*'eva' serves"):
        mx.initialise_from_data(model, "own", data_of("eva"))


def test_checkpointed_blocks_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics are the same when backward calls the layers again."""
    base, found = llama(), []
    for checkpoints in (False, True):
        model = mx.convert_model(copy.deepcopy(base), {"own": config_of("lora_ga")}, seed=SEED)
        if checkpoints:
            model.gradient_checkpointing_enable()
        mx.initialise_from_data(model, "own", data_of("lora_ga"))
        found.append({key: p.detach() for key, p in mx.adapter_parameters(model, "own").items()})
    for key, tensor in found[0].items():
        assert_same_up_to_rounding(found[1][key], tensor, key, 1e-4)
