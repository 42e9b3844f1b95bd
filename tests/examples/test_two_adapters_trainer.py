"""The Trainer example: beside another adapter each trains as it does alone; the best checkpoint is kept."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import two_adapters_trainer as example
from drop_in import CONFIGS, HERE, LEARNING_RATES, read_lines
from peft import PeftModel
from tolerances import assert_same_up_to_rounding
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainingArguments

import mlora_ext as mx

STEPS = 4


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(HERE / "tiny-base")


def arguments(folder: Path, **fields: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=3,
        max_grad_norm=0.0,
        remove_unused_columns=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        logging_steps=1,
        report_to=[],
        **fields,
    )


def train(
    base: PreTrainedModel, names: list[str], folder: Path, accumulation: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the changes of all weights, of adapters that see the same lines in any company."""
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tiny-base")
    configs = {name: copy.deepcopy(CONFIGS[name]) for name in names}
    for config in configs.values():
        config.lora_dropout = 0.2
    model = mx.convert_model(copy.deepcopy(base), configs)
    start = copy.deepcopy(model.state_dict())
    collator = example.Collator(tokenizer)
    optimizer = example.optimizer(model, {name: LEARNING_RATES[name] for name in names})
    for group in optimizer.param_groups:
        group["eps"] = 1e-2  # without it Adam takes a whole step by the sign of a gradient that is rounding
    data = [[{"adapter": name, **read_lines(name)[row]} for name in names] for row in range(30)]
    trainer = example.LossOfEach(
        model=model,
        args=arguments(folder, gradient_accumulation_steps=accumulation, save_strategy="no"),
        train_dataset=data,
        data_collator=lambda items: collator([line for item in items for line in item]),
        optimizers=(optimizer, None),
        callbacks=[example.ClipEach(names, max_norm=0.5)],
    )
    trainer.train()
    changes = {key: value - start[key] for key, value in model.state_dict().items() if "lora_" in key}
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], changes


@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_adapter_trains_as_it_does_alone(
    accumulation: int, base: PreTrainedModel, tmp_path: Path
) -> None:
    names = list(CONFIGS)
    both, changes = train(base, names, tmp_path, accumulation)
    alone = [train(base, [name], tmp_path, accumulation) for name in names]
    assert both == pytest.approx(
        [sum(pair) for pair in zip(*(run[0] for run in alone), strict=True)], rel=1e-4
    )
    assert len(both) == STEPS
    for _, own in alone:
        for key, change in own.items():
            assert change.norm() > 0
            assert_same_up_to_rounding(changes[key], change, key, 1e-4)


def test_the_script_saves_the_best_as_peft_folders(base: PreTrainedModel, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tiny-base")
    model = mx.convert_model(copy.deepcopy(base), CONFIGS)
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2, save_steps=2, load_best_model_at_end=True)
    trainer = example.train(model, tokenizer, args, held_out=3)
    evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.state.best_metric == min(evaluations)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(evaluations), rel=1e-6)
    trainer.save_model(str(tmp_path / "best"))
    ids = torch.randint(256, (2, 9))
    model.eval()
    for name in CONFIGS:
        peft = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "best" / name).eval()
        with torch.no_grad():
            expected = model(input_ids=ids, adapter_names=[name] * 2).logits
            assert_same_up_to_rounding(peft(input_ids=ids).logits, expected, name)
