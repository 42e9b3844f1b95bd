"""The SFTTrainer example: the loss falls, both adapters train, and PEFT loads their folders."""

import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

pytest.importorskip("trl", reason="TRL is not installed; `make peers` makes an environment with it")

import sft_trainer as example
from drop_in import CONFIGS, HERE

pytestmark = pytest.mark.peers


def test_the_script_trains_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainers = []
    train = example.train
    monkeypatch.setattr(example, "train", lambda *given: trainers.append(train(*given)))
    monkeypatch.setattr(
        "sys.argv", ["sft_trainer.py", "--output", str(tmp_path), "--steps", "20", "--batch-size", "8"]
    )
    example.main()
    assert re.findall(r"^(\w+): ", capsys.readouterr().out, re.M)[-2:] == list(CONFIGS)
    losses = [line["train_loss"] for line in trainers[0].state.log_history if "train_loss" in line]
    assert 0 < losses[0] < 5  # the untrained model's is near 8
    base = AutoModelForCausalLM.from_pretrained(HERE / "tiny-base")
    for name, config in CONFIGS.items():
        peft = PeftModel.from_pretrained(base, tmp_path / name, adapter_name=name)
        assert peft.peft_config[name].r == config.r
        trained = [value for key, value in peft.named_parameters() if f"lora_B.{name}" in key]
        assert trained
        assert all(torch.count_nonzero(value) > 0 for value in trained), name
