"""TRL's SFTTrainer with a converted model. `make env` installs no TRL: `make peers` runs this."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from tolerances import assert_same_up_to_rounding
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import mlora_ext as mx

pytest.importorskip("trl", reason="TRL is not installed; `make peers` makes an environment with it")

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

pytestmark = pytest.mark.peers
BASE = Path(__file__).resolve().parents[2] / "examples" / "tiny-base"
CONFIG = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.3)
OTHER = LoraConfig(r=8, lora_alpha=8, target_modules="all-linear", lora_dropout=0.1)


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(BASE)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BASE)


def lines(*names: str) -> Dataset:
    kinds = {"a": "reverse", "b": "double"}
    return Dataset.from_list(
        [
            {"prompt": f"{kinds.get(name, 'say')} x{row} = ", "completion": f"{row}x", "adapter": name}
            for row in range(12)
            for name in names
        ]
    )


def arguments(folder: Path, kind: type = SFTConfig, **fields: Any) -> Any:
    return kind(
        str(folder),
        **{
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "learning_rate": 0.01,
            "save_steps": 2,
            "logging_steps": 1,
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "report_to": [],
            **fields,
        },
    )


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def logits(model: nn.Module, ids: torch.Tensor, **named: object) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids, **named).logits


@pytest.mark.parametrize("fields", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2}], ids=str)
def test_sft_resumes_saves_the_best_and_others_load_it(
    fields: dict, base: PreTrainedModel, tokenizer: Any, tmp_path: Path
) -> None:
    def run(folder: Path, checkpoint: Path | None = None) -> SFTTrainer:
        model = mx.convert_model(copy.deepcopy(base), {"a": CONFIG}, seed=5)
        trainer = SFTTrainer(
            model=model,
            args=arguments(
                folder, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, **fields
            ),
            train_dataset=lines("a"),
            eval_dataset=lines("a").select(range(4)),
            processing_class=tokenizer,
        )
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        return trainer

    straight = run(tmp_path / "straight")
    resumed = run(tmp_path / "resumed", tmp_path / "straight" / "checkpoint-4")
    assert losses(resumed)[-2:] == losses(straight)[-2:]
    for key, value in straight.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[key], value), key
    evaluations = [entry["eval_loss"] for entry in straight.state.log_history if "eval_loss" in entry]
    assert straight.evaluate()["eval_loss"] == pytest.approx(min(evaluations), rel=1e-6)

    straight.save_model(str(tmp_path / "out"))
    assert not (tmp_path / "out" / "config.json").exists()
    model = straight.accelerator.unwrap_model(straight.model, keep_fp32_wrapper=False)
    ids = torch.randint(256, (2, 9))
    expected = logits(model, ids)
    theirs = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    native = copy.deepcopy(base)
    native.load_adapter(str(tmp_path / "out"))
    for other in (theirs, loaded, native, model.merge_and_unload()):
        assert_same_up_to_rounding(logits(other, ids), expected, type(other).__name__)
    assert (logits(base, ids) - expected).norm() / expected.norm() > 0.01


def test_sft_trains_an_adapter_as_it_trains_a_peft_model(
    base: PreTrainedModel, tokenizer: Any, tmp_path: Path
) -> None:
    config = copy.deepcopy(CONFIG)
    config.lora_dropout, config.init_lora_weights = 0.0, False
    ours = mx.convert_model(copy.deepcopy(base), {"default": config})
    ours.save_pretrained(tmp_path / "start")
    theirs = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "start", is_trainable=True)
    both = []
    for name, model in (("ours", ours), ("theirs", theirs)):
        args = arguments(tmp_path / name, learning_rate=1e-3)
        trainer = SFTTrainer(model=model, args=args, train_dataset=lines("a"), processing_class=tokenizer)
        trainer.train()
        both.append(losses(trainer))
    assert both[0] == pytest.approx(both[1], rel=1e-5)


class WithNames:
    """TRL's own collator, and beside its tensors whose line each one is."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        names = [row["adapter"] for row in rows]
        return {**self.own(rows), "adapter_names": names}


def test_sft_trains_two_adapters_at_once(base: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    model = mx.convert_model(copy.deepcopy(base), {"a": CONFIG, "b": OTHER})
    before = copy.deepcopy(model.state_dict())
    trainer = SFTTrainer(
        model=model,
        args=arguments(tmp_path, remove_unused_columns=False, max_grad_norm=0.0),
        train_dataset=lines("a", "b"),
        processing_class=tokenizer,
    )
    trainer.data_collator = WithNames(trainer.data_collator)
    trainer.train()
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {key for key in before if "lora_" in key}
    assert losses(trainer)[-1] < losses(trainer)[0]
    assert {"a", "b"} < set(os.listdir(tmp_path / "checkpoint-6"))
    ids = torch.randint(256, (2, 9))
    for name in ("a", "b"):
        theirs = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "checkpoint-6" / name)
        expected = logits(model, ids, adapter_names=[name] * 2)
        assert_same_up_to_rounding(logits(theirs, ids), expected, name)


def test_an_adapter_on_the_head_is_refused(base: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["lm_head", "q_proj"])
    model = mx.convert_model(copy.deepcopy(base), {"a": config})
    trainer = SFTTrainer(
        model=model, args=arguments(tmp_path), train_dataset=lines("a"), processing_class=tokenizer
    )
    with pytest.raises(
        ValueError, match=r"lm_head: TRL's fused_lm_head reads the layer's weight and skips its adapters"
    ):
        trainer.train()
