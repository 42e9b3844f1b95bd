"""Adapters of every kind, start, optimizer and objective in one run: each as alone, resumed, over stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlora
import pytest
from mlora.config.config_file import resolve_config
from safetensors.torch import load_file

from tests.mlora.seam_runs import train_and_resume
from tests.mlora.tiny_run import losses, random_tokens, run_data, save_base, write_jsonl
from tests.tolerances import assert_same_up_to_rounding

NIGHTLY = pytest.mark.nightly
ALL: dict[str, Any] = {"r": 4, "target_modules": "all-linear"}
SOME: dict[str, Any] = {"r": 3, "target_modules": ["q_proj", "v_proj"]}
ADAPTERS: dict[str, dict[str, Any]] = {
    "first": {"lora": ALL | {"lora_dropout": 0.2}},
    "dora": {"lora": ALL | {"use_dora": True, "lora_dropout": 0.3}, "optim": "adafactor"},
    "pissa": {"lora": SOME | {"init_lora_weights": "pissa", "lora_dropout": 0.1}},
    "eva": {"lora": SOME | {"init_lora_weights": "eva"}, "init_samples": 8},
    "plus": {"lora": SOME | {"use_rslora": True}, "loraplus_lr_ratio": 4.0},
    "fa": {"lora": SOME, "optim": "lora_fa"},
    "head": {"lora": SOME | {"modules_to_save": ["lm_head", "norm"]}},
    "tokens": {"lora": SOME | {"trainable_token_indices": [5, 6, 7]}},
    "embedding": {"lora": {"r": 2, "target_modules": ["embed_tokens", "o_proj"]}},
    "labels": {"lora": SOME | {"task_type": "SEQ_CLS"}, "num_labels": 3, "dataset": "labels"},
    "answers": {"lora": SOME | {"task_type": "QUESTION_ANS", "lora_dropout": 0.1}, "dataset": "answers"},
    "number": {"lora": SOME | {"task_type": "SEQ_CLS"}, "num_labels": 1, "dataset": "numbers"},
    "topics": {"lora": SOME | {"task_type": "SEQ_CLS"}, "dataset": "topics"},
    "dpo": {
        "lora": ALL | {"lora_dropout": 0.1},
        "objective": {"name": "dpo", "beta": 0.3},
        "dataset": "pairs",
    },
    "kto": {"lora": ALL | {"use_dora": True}, "objective": "kto", "dataset": "judged"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


def data_of(base: Path, folder: Path, adapters: list[str], stages: int = 1) -> dict[str, Any]:
    ids = [sample["input_ids"] for sample in random_tokens(16, 5)]
    write_jsonl(folder / "labels.jsonl", [{"input_ids": own, "label": own[0] % 3} for own in ids])
    write_jsonl(folder / "numbers.jsonl", [{"input_ids": own, "label": own[0] / 100} for own in ids])
    names = ["news", "sport", "weather"]
    topics = [{"input_ids": own, "label": [name for name in names if own[0] % len(name)]} for own in ids]
    write_jsonl(folder / "topics.jsonl", topics)
    places = [{"start_positions": own[0] % len(own), "end_positions": len(own) - 1} for own in ids]
    answers = [{"input_ids": own, **place} for own, place in zip(ids, places, strict=True)]
    write_jsonl(folder / "answers.jsonl", answers)
    texts = [{"prompt": f"{n} + {n} = ", "chosen": str(2 * n), "rejected": str(n)} for n in range(9)]
    write_jsonl(folder / "pairs.jsonl", texts)
    judged = [{"prompt": f"{n} = ", "completion": str(n), "label": n % 2 == 0} for n in range(9)]
    write_jsonl(folder / "judged.jsonl", judged)
    data = run_data(base, folder, pipeline={"stages": stages})
    formats = {"pairs": "preference", "judged": "unpaired", "answers": "question_answering"}
    formats |= dict.fromkeys(("labels", "numbers", "topics"), "classification")
    data["datasets"] += [{"name": n, "path": f"{n}.jsonl", "format": kind} for n, kind in formats.items()]
    common = {"dataset": "one", "per_device_train_batch_size": 4}
    data["adapters"] = [{"name": name} | common | ADAPTERS[name] for name in adapters]
    return data


def trained(base: Path, folder: Path, names: list[str], stages: int = 1) -> dict[str, Any]:
    """Returns the losses and the saved tensors of each adapter."""
    folder.mkdir()
    result = mlora.train(resolve_config(data_of(base, folder, names, stages), folder=folder))
    assert result.status == "finished", result
    run = folder / "run"
    return {
        name: (losses(run, name), load_file(run / "adapters" / name / "adapter_model.safetensors"))
        for name in names
    }


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, (own, tensors) in found.items():
        assert own == pytest.approx(expected[name][0], rel=1e-5), name
        for key, tensor in tensors.items():
            if key.endswith("qa_outputs.bias"):  # moves all places alike: its gradient is rounding only
                continue
            assert_same_up_to_rounding(tensor, expected[name][1][key], f"{name} {key}", 1e-4)


@pytest.fixture(scope="module")
def together(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(base, tmp_path_factory.mktemp("runs") / "together", list(ADAPTERS))


@pytest.mark.parametrize("name", [*ADAPTERS])
def test_each_trains_as_alone(base: Path, tmp_path: Path, together: dict[str, Any], name: str) -> None:
    assert_alike(trained(base, tmp_path / "alone", [name]), together)


def test_two_stages_are_one(base: Path, tmp_path: Path, together: dict[str, Any]) -> None:
    assert_alike(trained(base, tmp_path / "stages", list(ADAPTERS), stages=2), together)


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=NIGHTLY)])
def test_resume_is_bit_equal(base: Path, tmp_path: Path, stages: int) -> None:
    train_and_resume(data_of(base, tmp_path, list(ADAPTERS), stages), tmp_path)


@pytest.mark.parametrize("names", [["labels"], pytest.param(["answers", "number", "topics"], marks=NIGHTLY)])
def test_a_memory_limit_serves_norms_of_blocks_and_heads(
    base: Path, tmp_path: Path, names: list[str]
) -> None:
    data = data_of(base, tmp_path, [*names, "head"])
    data["adapters"][-1]["lora"] = SOME | {"modules_to_save": ["input_layernorm"]}
    data |= {"scheduler": {"memory_limit": "2GiB"}}
    found = mlora.train(resolve_config(data, folder=tmp_path)).adapters
    assert [(one.state, one.message) for one in found.values()] == [("finished", "")] * (len(names) + 1)


def test_two_uses_of_one_module_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    data = data_of(base, tmp_path, ["head", "first"])
    data["adapters"][1]["lora"] = {"r": 2, "target_modules": ["lm_head"]}
    found = mlora.train(resolve_config(data, folder=tmp_path)).adapters
    assert [one.state for one in found.values()] == ["finished", "refused"]
    assert found["first"].message.startswith("layer lm_head: adapter 'head' trains a copy of it and adapter")
