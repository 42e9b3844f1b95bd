"""Transformers' Trainer with a converted model: checkpoints, resuming, the best model, two adapters."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from models import VOCABULARY, llama, token_ids
from peft import LoraConfig, PeftModel
from tolerances import assert_same_up_to_rounding
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import mlora_ext as mx

CONFIGS = {
    "a": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.3),
    "b": LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", lora_dropout=0.1),
}
ROWS, LENGTH = 40, 8


def rows(count: int = ROWS, names: tuple[str, ...] = tuple(CONFIGS)) -> list[dict[str, Any]]:
    """Rows that belong to the adapters in turn: what follows a token is learnable, differently for each."""
    start = torch.arange(count)
    return [
        {
            "ids": (int(start[i]) * 7 + torch.arange(LENGTH) * (3 if i % 2 else 5)) % (VOCABULARY - 2) + 2,
            "adapter": names[i % len(names)],
        }
        for i in range(count)
    ]


def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
    ids = torch.stack([row["ids"] for row in batch])
    return {"input_ids": ids, "labels": ids, "adapter_names": [row["adapter"] for row in batch]}


def arguments(folder: Path, **fields: Any) -> TrainingArguments:
    fields = {
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.02,
        "save_steps": 4,
        "logging_steps": 1,
        **fields,
    }
    return TrainingArguments(
        output_dir=str(folder),
        remove_unused_columns=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **fields,
    )


def trainer_of(base: nn.Module, args: TrainingArguments, configs: Any = CONFIGS, **named: Any) -> Trainer:
    model = mx.convert_model(copy.deepcopy(base), configs, seed=3)
    return Trainer(model=model, args=args, train_dataset=rows(), data_collator=collate, **named)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulating": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "bf16": {"bf16": True},
}


@pytest.fixture
def notices(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What Transformers says, also after a command of `mlora` in this process has silenced it."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="transformers")
    return caplog


@pytest.mark.parametrize("how", WAYS)
def test_resuming_equals_a_straight_run_bit_for_bit(
    how: str, tmp_path: Path, notices: pytest.LogCaptureFixture
) -> None:
    base = llama()
    fields = WAYS[how]
    straight = trainer_of(base, arguments(tmp_path / "straight", **fields))
    straight.train()
    resumed = trainer_of(base, arguments(tmp_path / "resumed", **fields))
    notices.clear()
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-8"))
    assert not [record for record in notices.records if "keys in the checkpoint" in record.getMessage()]
    assert losses(resumed)[-4:] == losses(straight)[-4:]
    assert resumed.model.mlora_router.step == straight.model.mlora_router.step > 0
    assert resumed.model.state_dict().keys() == straight.model.state_dict().keys()
    for key, value in straight.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[key], value), key


def test_parts_of_the_base_that_train_are_kept(tmp_path: Path) -> None:
    """Resuming and the best model take them back; PEFT's folders do not hold them, which is told."""
    base = llama()
    fields = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 4, "learning_rate": 0.3}

    def trained(folder: str, resume: Path | None = None) -> Trainer:
        trainer = trainer_of(base, arguments(tmp_path / folder, **fields), eval_dataset=rows(8))
        trainer.model.model.norm.requires_grad_(True)
        with pytest.warns(
            UserWarning, match="model.norm.weight: trained parts of the base model are saved in"
        ):
            trainer.train(resume_from_checkpoint=resume and str(resume))
        return trainer

    straight = trained("straight")
    best = min(entry["eval_loss"] for entry in straight.state.log_history if "eval_loss" in entry)
    assert straight.evaluate()["eval_loss"] == best
    assert not torch.equal(straight.model.model.norm.weight, base.model.norm.weight)
    resumed = trained("resumed", tmp_path / "straight" / "checkpoint-8")
    assert losses(resumed)[-4:] == losses(straight)[-4:]


def test_the_masks_of_a_resumed_run_need_the_step(tmp_path: Path) -> None:
    base = llama()
    straight = trainer_of(base, arguments(tmp_path))
    straight.train()
    resumed = trainer_of(base, arguments(tmp_path / "resumed"))
    model = resumed.model
    model._load_state_dict_pre_hooks.clear()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert losses(resumed)[-4:] != losses(straight)[-4:]


def test_trainers_own_loss_weighs_each_adapter_by_its_share_of_the_tokens(tmp_path: Path) -> None:
    """What docs/own-loop.md says of it."""
    trainer = trainer_of(llama(), arguments(tmp_path))
    model = trainer.model.eval()
    batch = collate(rows(4, ("a", "a", "a", "b")))
    model(**batch).loss.backward()
    mixed = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for name, share in (("a", 0.75), ("b", 0.25)):
        own = [row for row, owner in enumerate(batch["adapter_names"]) if owner == name]
        ids = batch["input_ids"][own]
        model(input_ids=ids, labels=ids, adapter_names=[name] * len(own)).loss.backward()
        for key, parameter in mx.adapter_parameters(model, name).items():
            if "lora_B" in key:
                assert_same_up_to_rounding(mixed[key], parameter.grad * share, key, 1e-4)


def test_only_adapters_are_in_the_optimizer(tmp_path: Path) -> None:
    trainer = trainer_of(llama(), arguments(tmp_path))
    trainer.create_optimizer()
    held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    wanted = [p for name in CONFIGS for p in mx.adapter_parameters(trainer.model, name).values()]
    assert sorted(map(id, held)) == sorted(map(id, wanted))


class WorseFromStep8(Trainer):
    """A Trainer whose evaluation is best at step 4."""

    def evaluate(self, *args: Any, **named: Any) -> dict[str, float]:
        metrics = {"eval_loss": abs(self.state.global_step - 4.0)}
        self.log(metrics)
        return metrics


@pytest.mark.parametrize("names", [("a",), ("a", "b"), ("default", "b")], ids=str)
def test_the_best_model_is_loaded_at_the_end(names: tuple[str, ...], tmp_path: Path) -> None:
    base = llama()
    configs = dict(zip(names, CONFIGS.values(), strict=False))
    model = mx.convert_model(copy.deepcopy(base), configs)
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=4, load_best_model_at_end=True)
    trainer = WorseFromStep8(
        model=model,
        args=args,
        train_dataset=rows(names=names),
        eval_dataset=rows(4, names),
        data_collator=collate,
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    trainer.save_model(str(tmp_path / "best"))
    ids = token_ids(2, 6)
    model.eval()
    for name in names:
        inside = len(names) > 1 and name != "default"
        for folder in ("best", "checkpoint-4"):
            path = tmp_path / folder / name if inside else tmp_path / folder
            peft = PeftModel.from_pretrained(copy.deepcopy(base), path).eval()
            with torch.no_grad():
                expected = model(input_ids=ids, adapter_names=[name] * 2).logits
                assert_same_up_to_rounding(peft(input_ids=ids).logits, expected, f"{folder} {name}")
        last = tmp_path / "checkpoint-12" / name if inside else tmp_path / "checkpoint-12"
        other = PeftModel.from_pretrained(copy.deepcopy(base), last).eval()
        with torch.no_grad():
            difference = (other(input_ids=ids).logits - expected).norm() / expected.norm()
        assert difference > 1e-3, "the last step is another model"


def test_one_adapter_trains_as_in_a_peft_model(tmp_path: Path) -> None:
    """No names, the usual collator: as one would train a PeftModel."""
    base = llama()
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    model = mx.convert_model(copy.deepcopy(base), {"default": config})
    model.save_pretrained(tmp_path / "start")
    peft = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "start", is_trainable=True)
    data = [{"input_ids": row["ids"], "labels": row["ids"]} for row in rows()]
    both = []
    for name, each in (("ours", model), ("theirs", peft)):
        trainer = Trainer(model=each, args=arguments(tmp_path / name, learning_rate=1e-3), train_dataset=data)
        trainer.train()
        both.append(losses(trainer))
    assert both[0] == pytest.approx(both[1], rel=1e-5)


def test_the_default_adapter_trains_alone(tmp_path: Path) -> None:
    trainer = trainer_of(llama(), arguments(tmp_path, weight_decay=0.1, max_steps=2))
    trainer.model.set_adapter("b")
    trainer.train_dataset = [{"input_ids": row["ids"], "labels": row["ids"]} for row in rows()]
    trainer.data_collator = lambda batch: {
        key: torch.stack([row[key] for row in batch]) for key in ("input_ids", "labels")
    }
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    moved = {key for key, value in trainer.model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved
    assert all(".b." in key for key in moved)


def test_names_that_the_trainer_has_dropped_are_missed_aloud(tmp_path: Path) -> None:
    trainer = trainer_of(llama(), arguments(tmp_path))
    trainer.data_collator = lambda batch: {
        key: v for key, v in collate(batch).items() if key != "adapter_names"
    }
    with pytest.raises(ValueError, match="has 2 adapters"):
        trainer.train()


def test_a_checkpoint_without_an_adapter_says_so(tmp_path: Path, notices: pytest.LogCaptureFixture) -> None:
    base: LlamaForCausalLM = llama()
    args = arguments(tmp_path, max_steps=4)
    one = Trainer(
        model=mx.convert_model(copy.deepcopy(base), {"a": CONFIGS["a"]}),
        args=args,
        train_dataset=rows(names=("a",)),
        data_collator=collate,
    )
    one.train()
    both = trainer_of(base, args)
    both._load_from_checkpoint(str(tmp_path / "checkpoint-4"))
    told = {record.getMessage() for record in notices.records if "missing keys" in record.getMessage()}
    assert len(told) == 1
    message = told.pop()
    assert "lora_A.b.weight" in message
    assert "norm" not in message
