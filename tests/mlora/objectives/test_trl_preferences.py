"""Preference objectives beside TRL's trainers. `make env` installs no TRL: `make peers` runs this.

Adapters of one run against TRL's trainer of each alone: same initial weights, same data in the same order.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlora
import pytest
import torch
from mlora.config.config_file import resolve_config
from mlora.data.dataset import load_dataset
from mlora.data.preference import joined
from mlora.objectives.registry import objective_of, style_of
from mlora.store.run_folder import read_metrics
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("trl", reason="TRL is not installed; `make peers` makes an environment with it")

from datasets import Dataset
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

pytestmark = pytest.mark.peers
BASE = Path(__file__).resolve().parents[3] / "examples" / "tiny-base"
STEPS = 25
BATCH = 4
RATE = 2e-4
TRAINERS: dict[str, tuple[Any, Any]] = {
    "dpo": (DPOConfig, DPOTrainer),
    "cpo": (CPOConfig, CPOTrainer),
    "simpo": (CPOConfig, CPOTrainer),
    "orpo": (ORPOConfig, ORPOTrainer),
    "kto": (KTOConfig, KTOTrainer),
}
NOT_COUNTED = ("logits/", "entropy", "num_tokens", "mean_token_accuracy")  # what needs whole logits


def pairs(count: int, seed: int = 0) -> list[dict[str, str]]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        word = "".join(rng.choices("abcdefgh", k=rng.randint(2, 9)))
        wrong = "".join(rng.sample(word, len(word))) + "x" * rng.randint(0, 3)
        found.append({"prompt": f"reverse {word} = ", "chosen": word[::-1], "rejected": wrong})
    return found


def judged(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    lines = []
    for line in pairs(count, seed):
        good = rng.random() < 0.6
        completion = line["chosen" if good else "rejected"]
        lines.append({"prompt": line["prompt"], "completion": completion, "label": good})
    return lines


def write(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT folder with the weights from which both sides start."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("initial")
    get_peft_model(AutoModelForCausalLM.from_pretrained(BASE), lora()).save_pretrained(folder)
    return folder


Found = tuple[list[float], list[dict[str, float]], dict[str, torch.Tensor]]


def by_trl(
    name: str, options: Mapping[str, Any], lines: Any, initial: Path, folder: Path, **fields: Any
) -> Found:
    """Losses of the optimizer steps, logged metrics, and final weights."""
    config, trainer_kind = TRAINERS[name]
    if name == "simpo":
        options = {"loss_type": "simpo", "cpo_alpha": 0.0, **options}
    if name == "dpo" and "loss_type" in options:
        options = {**options, "loss_type": [options["loss_type"]]}
    accumulation, from_start = fields.pop("gradient_accumulation_steps", 1), fields.pop("from_start", False)
    args = config(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=accumulation,
        learning_rate=RATE,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        dataloader_pin_memory=False,
        **{"max_length": 64, **options, **fields},
    )
    tokenizer, model = AutoTokenizer.from_pretrained(BASE), AutoModelForCausalLM.from_pretrained(BASE)
    common = {"args": args, "train_dataset": Dataset.from_list(lines), "processing_class": tokenizer}
    if from_start:
        tuned = PeftModel.from_pretrained(model, initial, is_trainable=True)
        trainer = trainer_kind(model=tuned, **common)
    else:
        trainer = trainer_kind(model=model, peft_config=lora(), **common)
        set_peft_model_state_dict(trainer.model, load_file(initial / "adapter_model.safetensors"))
    seen: list[float] = []
    compute = trainer.compute_loss

    def recorded(*asked: Any, **named: Any) -> Any:
        loss = compute(*asked, **named)
        seen.append(float(loss.detach()))  # the log has it rounded
        return loss

    trainer.compute_loss = recorded
    trainer.train()
    losses = [sum(seen[i : i + accumulation]) / accumulation for i in range(0, len(seen), accumulation)]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return losses, logged, get_peft_model_state_dict(trainer.model)


def by_mlora(
    adapters: Sequence[dict[str, Any]], datasets: Mapping[str, str], initial: Path, folder: Path
) -> Path:
    data = {
        "base_model": str(BASE),
        "output_dir": str(folder / "run"),
        "device": "cpu",
        "defaults": {
            "max_steps": STEPS,
            "per_device_train_batch_size": BATCH,
            "learning_rate": RATE,
            "shuffle": False,
            "max_length": 64,
        },
        "datasets": [
            {"name": name, "path": str(folder / f"{name}.jsonl"), "format": format}
            for name, format in datasets.items()
        ],
        "adapters": [{"init_from": str(initial), **adapter} for adapter in adapters],
    }
    result = mlora.train(resolve_config(data, folder=folder))
    assert result.status == "finished", result
    return folder / "run"


def check(run: Path, adapter: str, found: Found, initial: Path) -> dict[str, float]:
    """Compares one adapter; returns the largest differences."""
    losses, logged, weights = found
    lines = [
        line for line in read_metrics(run / "metrics.jsonl") if line["adapter"] == adapter and "loss" in line
    ]
    own = [line["loss"] for line in lines]
    assert len(own) == len(losses) == STEPS
    # relative for losses beyond 1, as in test_parity_peft: their rounding in fp32 grows with them
    apart = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(own, losses, strict=True))
    assert apart <= 1e-5
    assert abs(losses[-1] - losses[0]) > 1e-3  # it learns
    metrics = 0.0
    for line, entry in zip(lines, logged, strict=True):
        names = [n for n in entry if "/" in n or n in ("kl", "nll_loss", "log_odds_ratio", "log_odds_chosen")]
        for name in (n for n in names if not n.startswith(NOT_COUNTED)):
            difference = abs(line[name] - entry[name]) / max(1.0, abs(entry[name]))
            metrics = max(metrics, difference)
            assert difference <= 1e-4, (name, line[name], entry[name])
    start = load_file(initial / "adapter_model.safetensors")
    saved = load_file(run / "adapters" / adapter / "adapter_model.safetensors")
    changes = [(saved[key] - start[key], weights[key] - start[key]) for key in saved]
    ours, theirs = (torch.cat([each[side].flatten() for each in changes]) for side in (0, 1))
    weight = float((ours - theirs).norm() / theirs.norm())
    assert weight <= 1e-4
    return {"loss": apart, "metrics": metrics, "weights": weight}


def told(name: str, found: Mapping[str, float]) -> None:
    numbers = ", ".join(f"{what} {number:.1e}" for what, number in found.items())
    print(f"\n{name}: largest differences to TRL: {numbers}")


FOUR = {
    "sigmoid": {},
    "sigmoid-05": {"beta": 0.5},
    "ipo": {"beta": 0.3, "loss_type": "ipo"},
    "hinge": {"beta": 0.2, "loss_type": "hinge"},
}


def test_four_dpo_adapters_in_one_run_equal_four_trainers(initial: Path, tmp_path: Path) -> None:
    lines = pairs(40)
    write(tmp_path / "pairs.jsonl", lines)
    adapters = [
        {"name": name, "dataset": "pairs", "objective": {"name": "dpo", **options}}
        for name, options in FOUR.items()
    ]
    run = by_mlora(adapters, {"pairs": "preference"}, initial, tmp_path)
    for name, options in FOUR.items():
        found = by_trl("dpo", options, lines, initial, tmp_path / name)
        told(f"dpo {name}", check(run, name, found, initial))


def test_the_start_as_reference_is_trls_for_an_adapter_that_was_trained(tmp_path: Path) -> None:
    """TRL takes such an adapter as a PEFT model; beside it one that is compared with the base model."""
    lines, tuned = pairs(40), tmp_path / "tuned"
    config = lora()
    config.init_lora_weights = False
    torch.manual_seed(5)
    get_peft_model(AutoModelForCausalLM.from_pretrained(BASE), config).save_pretrained(tuned)
    write(tmp_path / "pairs.jsonl", lines)
    options = {"start": {"reference": "init_from"}, "base": {}}
    adapters = [
        {"name": name, "dataset": "pairs", "objective": {"name": "dpo", **more}}
        for name, more in options.items()
    ]
    run = by_mlora(adapters, {"pairs": "preference"}, tuned, tmp_path)
    found = by_trl("dpo", {}, lines, tuned, tmp_path / "trl", from_start=True)
    told("dpo, start", check(run, "start", found, tuned))


MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "robust": ("dpo", {"loss_type": "robust", "label_smoothing": 0.1}),
    "cpo": ("cpo", {}),
    "cpo-smooth": ("cpo", {"label_smoothing": 0.2, "beta": 0.3, "cpo_alpha": 0.5}),
    # without cpo_alpha the first batch would have no gradient at all, and Adam would magnify rounding
    "cpo-hinge": ("cpo", {"loss_type": "hinge", "cpo_alpha": 0.2}),
    "cpo-ipo": ("cpo", {"loss_type": "ipo"}),
    "simpo": ("simpo", {"beta": 2.0, "simpo_gamma": 1.0}),
    "orpo": ("orpo", {"beta": 0.2}),
    "kto": ("kto", {"desirable_weight": 1.5, "undesirable_weight": 0.8}),
    "apo": ("kto", {"loss_type": "apo_zero_unpaired"}),
}


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_others_in_one_run_equal_their_trainers(initial: Path, tmp_path: Path, accumulation: int) -> None:
    """Nine objectives and an adapter of cross-entropy, in one batch."""
    data = {"pairs": pairs(40), "judged": judged(40)}
    for name, lines in data.items():
        write(tmp_path / f"{name}.jsonl", lines)
    write(
        tmp_path / "plain.jsonl", [{"prompt": x["prompt"], "completion": x["chosen"]} for x in data["pairs"]]
    )
    adapters = [
        {
            "name": name,
            "dataset": "judged" if kind == "kto" else "pairs",
            "objective": {"name": kind, **options},
            "gradient_accumulation_steps": accumulation,
        }
        for name, (kind, options) in MIXED.items()
    ]
    adapters.append({"name": "plain", "dataset": "plain"})
    formats = {"pairs": "preference", "judged": "unpaired", "plain": "prompt_completion"}
    run = by_mlora(adapters, formats, initial, tmp_path)
    for name, (kind, options) in MIXED.items():
        lines = data["judged" if kind == "kto" else "pairs"]
        found = by_trl(
            kind, options, lines, initial, tmp_path / name, gradient_accumulation_steps=accumulation
        )
        told(name, check(run, name, found, initial))


CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def spoken(text: str, role: str = "assistant") -> dict[str, str]:
    return {"role": role, "content": text}


LINES: dict[str, list[dict[str, Any]]] = {
    "text": [*pairs(12), {"prompt": "a prompt that fills it all ", "chosen": "yes", "rejected": "no"}],
    "shared start": [
        {"chosen": x["prompt"] + x["chosen"], "rejected": x["prompt"] + x["rejected"]} for x in pairs(12, 2)
    ],
    "messages": [
        {"prompt": [spoken(x["prompt"], "user")], "chosen": [spoken(x["chosen"])], "rejected": [spoken("no")]}
        for x in pairs(12, 3)
    ],
    "shared messages": [
        {
            side: [spoken("be brief", "system"), spoken(x["prompt"], "user"), spoken(x[side])]
            for side in ("chosen", "rejected")
        }
        for x in pairs(12, 4)
    ],
}


@pytest.mark.parametrize("name", ["dpo", "cpo", "orpo", "kto"])
@pytest.mark.parametrize("lines", LINES)
@pytest.mark.parametrize("begins", [False, True], ids=["plain", "bos"])
def test_tokens_are_trls(name: str, lines: str, begins: bool, tmp_path: Path) -> None:
    """Of texts and messages, with a prompt and without, cut to `max_length`."""
    records = LINES[lines]
    if name == "kto":
        if "prompt" not in records[0]:
            pytest.skip("unpaired lines have a prompt")
        records = [
            {"prompt": x["prompt"], "completion": x["chosen"], "label": place % 3 == 0}
            for place, x in enumerate(records)
        ]
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = CHAT
    if begins:
        tokenizer.bos_token = "a"
    most = {"messages": 46, "shared messages": 64}.get(lines, 24)
    config, kind = TRAINERS[name]
    args = config(
        str(tmp_path),
        max_length=most,
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    model = AutoModelForCausalLM.from_pretrained(BASE)
    trainer = kind(
        model=model, args=args, train_dataset=Dataset.from_list(records), processing_class=tokenizer
    )
    write(tmp_path / "d.jsonl", records)
    found = load_dataset(
        "d",
        tmp_path / "d.jsonl",
        "unpaired" if name == "kto" else "preference",
        max_length=most,
        vocab_size=model.config.vocab_size,
        tokenizer=tokenizer,
        style=style_of(name),
    ).samples
    theirs = list(trainer.train_dataset)
    if name in ("cpo", "orpo"):  # TRL keeps what has no completion left
        theirs = [x for x in theirs if any(label != -100 for label in x["chosen_labels"][1:])]
    assert len(found) == len(theirs) > 8
    if name == "kto":
        for start in range(0, len(found), BATCH):
            batch = theirs[start : start + BATCH]
            (made,) = joined("a", found[start : start + BATCH], objective_of("kto"))
            expected = [
                (x["prompt_ids"] + x[key])[:most]
                for key in ("completion_ids", "KL_completion_ids")
                for x in batch
            ]
            parts = [*made.sequences, *(part for owner, part in made.silent if owner == "a")]
            assert [list(part.input_ids) for part in parts] == expected
            assert list(made.facts) == [float(x["label"]) for x in batch]
        return
    for pair, line in zip(found, theirs, strict=True):
        for side, part in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            if name == "dpo":
                ids = line["prompt_ids"] + line[f"{side}_ids"]
                labels = [-100] * len(line["prompt_ids"]) + line[f"{side}_ids"]
            else:
                ids, labels = line[f"{side}_input_ids"], line[f"{side}_labels"]
            assert list(part.input_ids) == ids[:most]
            assert list(part.labels) == labels[:most]
