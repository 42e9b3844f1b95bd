"""The example of a quantised base: a few of its steps, and how far from the original it begins."""

import json
import math
from pathlib import Path
from typing import Any

import make_tasks
import mlora
import pytest
import torch
from mlora.config.config_file import load_config
from peft import LoftQConfig, LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import mlora_ext as mx

pytestmark = pytest.mark.peers
EXAMPLE = Path(make_tasks.__file__).parent / "quantized.yaml"


def test_it_trains_over_four_bits(tmp_path: Path) -> None:
    changes = [f"output_dir={tmp_path}/run", "defaults.max_steps=4", "defaults.warmup_steps=1"]
    changes += ["defaults.eval_steps=null", "defaults.per_device_train_batch_size=8"]
    changes += [f"adapters.{name}.eval_dataset=null" for name in ("sums", "sort", "sums-loftq")]
    config = load_config(EXAMPLE, changes)
    assert config.quantization is not None
    assert config.quantization.method == "bnb-nf4"
    assert mlora.train(config).status == "finished"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["adapter"] == "sort"]
    assert len(losses) == 4
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]


def test_loftq_begins_nearer_to_the_original_model() -> None:
    """On the task of one of its adapters; `docs/adapters.md` has the numbers of other ranks."""
    base = EXAMPLE.parent / "tiny-base"
    lines = [json.loads(line) for line in (EXAMPLE.parent / "data/sums-held-out.jsonl").open()][:50]
    batch = AutoTokenizer.from_pretrained(base, padding_side="right")(
        [line["prompt"] + line["completion"] for line in lines], return_tensors="pt", padding=True
    ).to(torch.get_default_device())
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=four_bits, dtype=torch.float32)
    fields: dict[str, Any] = {"r": 16, "lora_alpha": 16, "target_modules": "all-linear"}
    loftq = LoraConfig(**fields, init_lora_weights="loftq", loftq_config=LoftQConfig())
    mx.convert_model(model, {"zero": LoraConfig(**fields), "loftq": loftq}).train()
    mx.initialise_from_weights(model, "loftq", base)
    counts = batch["attention_mask"].bool()
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)(**batch).logits[counts]
        found = {
            name: model(**batch, adapter_names=[name] * len(lines)).logits[counts]
            for name in ("zero", "loftq")
        }
    error = {name: ((logits - wanted).norm() / wanted.norm()).item() for name, logits in found.items()}
    assert error == pytest.approx({"zero": 0.0438, "loftq": 0.0344}, rel=0.02)
