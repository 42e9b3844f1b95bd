"""A base model of a few thousand weights with a byte-level tokenizer, and runs over it."""

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from mlora.store.run_folder import read_metrics
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DEVICE = os.environ.get("MLORA_TESTS_DEVICE", "cpu")
"""Where runs train whose test does not say it."""


def save_tokenizer(
    folder: Path, *, merges: Sequence[tuple[str, str]] = (), added: str = "", **names: str
) -> PreTrainedTokenizerFast:
    """Save a tokenizer of one token a byte, and an end token.

    Ids after 256 are those of `merges`, then `<more>` is 258. `added` is what each text becomes, such as
    `<more> $A <end>`; `names` are further special tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0} | {letter: index for index, letter in enumerate(alphabet, 1)}
    vocabulary |= {"".join(pair): index for index, pair in enumerate(merges, 257)}
    if added or names:
        vocabulary["<more>"] = 258
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if added:
        specials = [("<end>", 0), ("<more>", 258)]
        tokenizer.post_processor = processors.TemplateProcessing(single=added, special_tokens=specials)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{"eos_token": "<end>", "pad_token": "<end>", **names}
    )
    fast.save_pretrained(folder)
    return fast


def save_base(folder: Path, *, seed: int = 0, hidden: int = 32, layers: int = 2, **changes: Any) -> Path:
    """Save a random Llama with its tokenizer; `changes` are fields of its config."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 260,
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    LlamaForCausalLM(LlamaConfig(**(shape | changes))).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    """Write one object a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def random_tokens(count: int, seed: int, longest: int = 12) -> list[dict[str, Any]]:
    """Samples of the format `tokens` with some labels that are not trained."""
    draw = random.Random(seed)
    records = []
    for _ in range(count):
        ids = [draw.randrange(1, 260) for _ in range(draw.randrange(3, longest))]
        labels = [-100 if draw.random() < 0.2 else token for token in ids[:-1]] + ids[-1:]
        records.append({"input_ids": ids, "labels": labels})
    return records


def run_data(base: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Two adapters of different ranks, targets, batch sizes and accumulation, on token data with
    evaluation."""
    write_jsonl(folder / "one.jsonl", random_tokens(11, 1))
    write_jsonl(folder / "two.jsonl", random_tokens(7, 2, longest=20))
    data: dict[str, Any] = {
        "base_model": str(base),
        "output_dir": str(folder / "run"),
        "seed": 3,
        "device": DEVICE,
        # else each process measures which library is faster, and they round differently
        "base_gemm": "aten" if DEVICE == "cpu" else None,
        "defaults": {"max_steps": 6, "learning_rate": 5e-3, "logging_steps": 2, "save_steps": 2},
        "datasets": [
            {"name": "one", "path": "one.jsonl", "format": "tokens"},
            {"name": "two", "path": "two.jsonl", "format": "tokens"},
        ],
        "adapters": [
            {
                "name": "first",
                "dataset": "one",
                "eval_dataset": "two",
                "eval_steps": 3,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 3,
                "lora": {"r": 4, "lora_dropout": 0.2, "target_modules": "all-linear"},
            },
            {
                "name": "second",
                "dataset": "two",
                "max_steps": 9,
                "per_device_train_batch_size": 3,
                "shuffle": False,
                "weight_decay": 0.1,
                "lora": {"r": 7, "lora_alpha": 14, "target_modules": ["q_proj", "v_proj"]},
            },
        ],
    }
    return data | changes


def write_run(folder: Path, data: dict[str, Any]) -> Path:
    """Write a run's YAML."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def lines(folder: Path) -> list[dict[str, Any]]:
    """Metrics of a run without what a clock or the machine says."""
    records = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k not in ("seconds", "peak_memory_bytes")} for r in records]


def weights(folder: Path) -> dict[str, bytes]:
    """The files of the adapters of a run."""
    return {
        path.parent.name: path.read_bytes() for path in folder.glob("adapters/*/adapter_model.safetensors")
    }


def losses(folder: Path, name: str) -> list[float]:
    """Returns an adapter's training losses, step by step."""
    records = read_metrics(folder / "metrics.jsonl")
    return [record["loss"] for record in records if record["adapter"] == name and "loss" in record]
