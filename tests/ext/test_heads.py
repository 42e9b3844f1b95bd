"""Heads, embeddings and rows per adapter: trained in mixed batches as PEFT trains each alone."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from head_models import (
    CASES,
    LABELS,
    assert_refused,
    assert_same_training,
    batch,
    llama,
    lora,
    train_mixed,
    train_peft,
)
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from tolerances import assert_same_up_to_rounding
from torch import nn
from transformers import LlamaForSequenceClassification, Trainer, TrainingArguments

import mlora_ext as mx
from mlora_ext.interop.peft_folder import WEIGHTS, adapter_state

EVERY_DAY = [
    "SEQ_CLS",
    "roberta",
    "rows, scaled and tied",
    "heads",
    "rows of both",
    "heads, scaled and kept tied",
]
CASE_OF_THE_NIGHT = [pytest.param(case, 25, marks=pytest.mark.nightly) for case in CASES]


@pytest.mark.parametrize(("case", "steps"), [*((case, 4) for case in EVERY_DAY), *CASE_OF_THE_NIGHT])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_trained_as_peft_trains_each_alone(case: str, steps: int, tmp_path: Path) -> None:
    build, configs = CASES[case]
    base = build().eval()
    model = mx.convert_model(copy.deepcopy(base), copy.deepcopy(configs), seed=5)
    start = {name: adapter_state(model, name) for name in configs}
    draw = torch.Generator(torch.get_default_device()).manual_seed(int(torch.randint(2**31, ())))
    data = {name: [batch(base, draw) for _ in range(steps)] for name in configs}
    for name in configs:
        mx.save_adapter(model, name, tmp_path / name)
    losses = train_mixed(model, data)
    for name in configs:
        theirs, expected = train_peft(base, tmp_path / name, data[name])
        assert losses[name] == pytest.approx(expected, abs=1e-5), name
        assert_same_training(model, name, start[name], theirs)
        check_folders(base, model, name, theirs, tmp_path, data[name][0]["input_ids"])


@torch.no_grad()
def check_folders(
    base: nn.Module, model: nn.Module, name: str, theirs: Any, folder: Path, ids: torch.Tensor
) -> None:
    """Our folder loads in PEFT, PEFT's loads here, and from_peft takes the model over: equal logits."""
    expected = model(input_ids=ids, adapter_names=[name] * len(ids))[0]
    mx.save_adapter(model, name, folder / f"{name}-ours")
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(folder / f"{name}-ours"))
    assert_same_up_to_rounding(loaded(input_ids=ids)[0], expected, "our folder in PEFT")
    trained = theirs.eval()(input_ids=ids)[0]
    theirs.save_pretrained(str(folder / f"{name}-theirs"))
    first, second = (load_file(folder / f"{name}-{whose}" / WEIGHTS) for whose in ("ours", "theirs"))
    assert {key for key in second if ".base_layer." not in key} == first.keys()
    ours = copy.deepcopy(base)
    mx.load_adapter(ours, name, folder / f"{name}-theirs")
    assert_same_up_to_rounding(ours(input_ids=ids)[0], trained, "PEFT's folder here")
    taken = mx.from_peft(theirs)
    assert torch.equal(taken(input_ids=ids, adapter_names=["default"] * len(ids))[0], ours(input_ids=ids)[0])


def scrambled(model: nn.Module, *names: str) -> nn.Module:
    """Gives adapters random weights."""
    for name in names:
        for parameter in mx.adapter_parameters(model, name).values():
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


EVERYTHING = {
    "a": lora(modules_to_save=["norm"], lora_dropout=0.3),
    "b": lora(trainable_token_indices=[3, 5], target_modules=["v_proj", "up_proj"]),
    "c": lora(target_modules=["embed_tokens", "v_proj"], lora_dropout=0.1),
}


def everything(**options: Any) -> nn.Module:
    return scrambled(mx.convert_model(llama(**options), copy.deepcopy(EVERYTHING), seed=3), *"abc")


@pytest.mark.parametrize("packed", [True, False])
def test_no_row_reaches_another_adapters_part(packed: bool) -> None:
    model, ids = everything(tie_word_embeddings=True).train(), torch.randint(2, 61, (4, 6))
    ids[:, 2] = 3
    layout = mx.SegmentLayout.from_lengths([6, 6, 6, 6], [0, 1, 2, -1])

    def logits() -> torch.Tensor:
        model.mlora_router.step = 7
        if not packed:
            return model(input_ids=ids, adapter_names=["a", "b", "c", "__base__"]).logits
        with mx.route(model, layout, names=["a", "b", "c"]):
            positions = torch.arange(6).repeat(4).unsqueeze(0)
            return model(input_ids=ids.view(1, -1), position_ids=positions).logits.view(4, 6, -1)

    # this model's attention lets packed rows see all earlier ones
    kept = [0] if packed else [0, 2]
    before = logits()
    before[kept].square().sum().backward()
    gradients = {n: [p.grad.clone() for p in mx.adapter_parameters(model, n).values()] for n in "ac"}
    model.zero_grad()
    for parameter in mx.adapter_parameters(model, "b").values():
        parameter.data.fill_(3.0 if packed else float("nan"))  # a NaN goes through a mask
    after = logits()
    after[kept].square().sum().backward()
    assert torch.equal(after[kept], before[kept])
    assert packed or not after[1].isfinite().all()
    for name in "a" if packed else "ac":
        parameters = mx.adapter_parameters(model, name).values()
        for parameter, gradient in zip(parameters, gradients[name], strict=True):
            assert torch.equal(parameter.grad, gradient)


def test_alone_as_in_a_mixed_batch_with_checkpointing() -> None:
    model, ids = everything(tie_word_embeddings=True).train(), torch.randint(2, 61, (4, 6))
    names = ["c", "a", "b", "a"]

    def gradients_of(name: str, rows: list[int], checkpointed: bool) -> dict[str, torch.Tensor]:
        model.zero_grad()
        model.mlora_router.step = 2
        if checkpointed:
            model.gradient_checkpointing_enable()
        logits = model(input_ids=ids[rows], adapter_names=[names[row] for row in rows]).logits
        logits.square().mean((1, 2)).sum().backward()
        model.gradient_checkpointing_disable()
        return {key: p.grad.clone() for key, p in mx.adapter_parameters(model, name).items()}

    for name in "abc":
        alone = [row for row in range(4) if names[row] == name]
        expected = gradients_of(name, alone, False)
        for checkpointed in (False, True):
            for key, value in gradients_of(name, list(range(4)), checkpointed).items():
                assert_same_up_to_rounding(value, expected[key], key)


def test_generate_with_a_cache_and_copies_of_the_model(tmp_path: Path) -> None:
    model, ids = everything(tie_word_embeddings=True).eval(), torch.randint(2, 61, (3, 5))
    ids[:, 3] = 5
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    found = model.generate(input_ids=ids, adapter_names=list("abc"), **options)
    for row, name in enumerate("abc"):
        alone = model.generate(input_ids=ids[row : row + 1], adapter_names=[name], **options)
        assert torch.equal(found[row], alone[0])
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        scrambled(model, "b")
        assert torch.equal(other.generate(input_ids=ids, adapter_names=list("abc"), **options), found)
    half = model.bfloat16()(input_ids=ids, adapter_names=list("abc")).logits
    state = model.state_dict()
    fresh = mx.convert_model(llama(tie_word_embeddings=True), EVERYTHING).bfloat16()
    fresh.load_state_dict(state)
    assert torch.equal(fresh.eval()(input_ids=ids, adapter_names=list("abc")).logits, half)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_merged_as_peft_merges(name: str) -> None:
    model, ids = everything(), torch.randint(2, 61, (2, 6))
    ids[:, 3] = 5
    merged = mx.merge_and_unload(model.eval(), name)
    assert not any("lora" in key or "modules_to_save" in key for key in merged.state_dict())
    with torch.no_grad():
        expected = model(input_ids=ids, adapter_names=[name] * 2).logits
        assert_same_up_to_rounding(merged(input_ids=ids).logits, expected, name)


def test_removed_and_added_while_others_train() -> None:
    model, ids = everything().eval(), torch.randint(2, 61, (2, 6))
    with torch.no_grad():
        before = model(input_ids=ids, adapter_names=["b", "c"]).logits
        mx.remove_adapter(model, "a")
        mx.add_adapter(model, "train", lora(modules_to_save=["norm", "lm_head"]))
        assert torch.equal(model(input_ids=ids, adapter_names=["b", "c"]).logits, before)
        for name in ("b", "c", "train"):
            mx.remove_adapter(model, name)
    assert not [key for key, p in model.named_parameters() if p.requires_grad]
    mx.add_adapter(model, "head", lora(target_modules=["lm_head"]))
    assert next(iter(mx.adapter_parameters(model, "head"))) == "lm_head.lora_A.head.weight"


def test_a_trainer_resumes_what_it_has_saved(tmp_path: Path) -> None:
    data = [{"input_ids": torch.randint(2, 61, (6,)), "labels": i % LABELS} for i in range(8)]

    def trained(steps: int, resume: bool) -> nn.Module:
        torch.manual_seed(1)
        configs = {"default": lora(task_type="SEQ_CLS", modules_to_save=["norm"], lora_dropout=0.2)}
        model = mx.convert_model(llama(LlamaForSequenceClassification), configs, seed=1)
        options: dict[str, Any] = {"save_steps": 2, "max_steps": steps, "report_to": [], "use_cpu": True}
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, lr_scheduler_type="constant", **options
        )
        Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=resume)
        return model

    trained(2, False)
    resumed = adapter_state(trained(4, True), "default")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = adapter_state(trained(4, False), "default")
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)
    assert "base_model.model.score.weight" in whole


# fmt: off
REFUSED: list[tuple[Any, LoraConfig, str]] = [
    (llama, lora(modules_to_save=["lm_heat"]),
     "'lm_heat' matches nothing in the model; did you mean 'lm_head'"),
    (llama, lora(target_modules=["up_proj"], modules_to_save=["self_attn"]),
     "self_attn is a LlamaAttention, which looks at several rows"),
    (llama, lora(target_modules=["lm_head"], modules_to_save=["layers"]),
     "layers is a ModuleList, which is not called itself"),
    (llama, lora(modules_to_save=["rotary_emb"]), "is a LlamaRotaryEmbedding without parameters"),
    (llama, lora(modules_to_save="lm_head"), "expected a list of names of modules, got 'lm_head'"),
    (llama, lora(modules_to_save=["proj"]), "q_proj is in target_modules and is trained itself"),
    (llama, lora(task_type="SEQ_CLS"), "trains a head named classifier or score, and the model has none"),
    (llama, lora(trainable_token_indices=[61]),
     "token 61 is outside of model.embed_tokens, which has 61 rows"),
    (llama, lora(trainable_token_indices=[2, 2]), "a token is named twice"),
    (llama, lora(trainable_token_indices=["a"]), "expected a list of token ids"),
    (llama, lora(trainable_token_indices={"wte": [1]}), "'wte' matches nothing"),
    (llama, lora(trainable_token_indices={"norm": [1]}), "norm is a LlamaRMSNorm; only plain embeddings"),
    (llama, lora(modules_to_save=["lm_head"], trainable_token_indices={"lm_head": [1]}),
     "remove one of them"),
    (llama, lora(target_modules=["norm"]), "only nn.Linear, Conv1D and nn.Embedding are supported"),
]
# fmt: on


@pytest.mark.parametrize(("build", "config", "message"), REFUSED)
def test_refused_with_the_reason(build: Any, config: LoraConfig, message: str) -> None:
    assert_refused(build(), config, message)


def test_two_adapters_that_want_different_things_of_one_module() -> None:
    model = mx.convert_model(llama(), {"a": lora(modules_to_save=["lm_head"])})
    for config in (lora(target_modules=["lm_head"]), lora(trainable_token_indices={"lm_head": [4]})):
        with pytest.raises(
            ValueError, match="layer lm_head: adapter 'a' trains a copy of it and adapter 'b'"
        ):
            mx.add_adapter(model, "b", config)
    head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": head})
    both = {
        "a": lora(target_modules=["body"], modules_to_save=["head"]),
        "b": lora(target_modules=["body", "2"]),
    }
    with pytest.raises(
        ValueError, match=r"layer head\.2 lies inside head, of which adapter 'a' trains a copy"
    ):
        mx.convert_model(model, both)


def test_a_head_of_another_number_of_labels(tmp_path: Path) -> None:
    model = mx.convert_model(llama(LlamaForSequenceClassification), {"a": lora(task_type="SEQ_CLS")})
    mx.save_adapter(model, "a", tmp_path / "a")
    config = copy.deepcopy(model.config)
    config.num_labels = 5
    with pytest.raises(ValueError, match=r"layer score.weight: expected shape \[5, 32\], got \[3, 32\]"):
        mx.load_adapter(LlamaForSequenceClassification(config), "a", tmp_path / "a")
