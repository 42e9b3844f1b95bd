"""Greedy answers: the base's most likely tokens up to any of its end tokens, on one stage and on two."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run
from four_adapters import llama
from mlora.engine.engine import Engine
from mlora.model.base_info import BaseInfo
from mlora.model.generation import GenerationRequest, complete
from mlora.run.evaluation import complete_over_stages
from tiny_run import save_base, save_tokenizer, write_jsonl, write_run
from transformers import GenerationConfig

PROMPTS = [(5, 6, 7), (9, 3, 8, 4), (11, 12)]
NEW = 8


@torch.no_grad()
def most_likely(ids: tuple[int, ...], ends: tuple[int, ...]) -> tuple[int, ...]:
    """The definition: each token is the argmax of the logits after all before it."""
    model, new = llama().eval(), list[int]()
    while len(new) < NEW and (not new or new[-1] not in ends):
        new.append(int(model(torch.tensor([[*ids, *new]])).logits[0, -1].argmax()))
    return tuple(new)


def test_answers_are_the_most_likely_tokens_whatever_the_base_asks_for() -> None:
    free = [most_likely(ids, ()) for ids in PROMPTS]
    ends = (free[0][2], free[1][4])  # some answers end at one, some at the other
    expected = [most_likely(ids, ends) for ids in PROMPTS]
    assert len({len(answer) for answer in expected}) > 1
    asks: dict[str, Any] = {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "min_new_tokens": NEW}
    asks |= {"suppress_tokens": [free[0][0]], "eos_token_id": 1, "do_sample": True, "temperature": 9.0}
    requests = [GenerationRequest("__base__", ids, NEW) for ids in PROMPTS]
    model = llama()
    model.generation_config = own = GenerationConfig(**asks)
    with Engine(model) as engine:
        assert complete(engine.model, requests, ends=ends) == expected
        assert engine.model.generation_config is own
    with Engine(llama(), stages=2) as engine:
        assert complete_over_stages(engine, requests, ends=ends, rows=2) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"eos_token_id": [5, 7]}, (0, 5, 7)),
        ({"eos_token_id": 5}, (0, 5)),
        ({}, (0,)),
        (None, (0, 9)),  # without the file, Transformers takes config.json's
    ],
)
def test_end_tokens_are_those_of_config_and_tokenizer(
    said: dict[str, Any] | None, expected: tuple[int, ...], tiny_base: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(tiny_base, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    (base / "generation_config.json").unlink()
    if said is not None:
        (base / "generation_config.json").write_text(json.dumps(said))
    assert BaseInfo(str(base)).end_tokens() == expected


def test_a_run_counts_and_evaluate_measures_exact_answers_of_chats(run: Run, tmp_path: Path) -> None:
    """Its turns end with another token than the tokenizer's, which appends its own to every text."""
    base = save_base(tmp_path / "base", seed=5, hidden=64)
    tokenizer = save_tokenizer(base, added="$A <end>")
    tokenizer.add_tokens(["<more>"])  # an ordinary one: decoding does not skip it
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}<more>{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    tokenizer.save_pretrained(base)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [258]}))
    answers = {"q": "yes", "p": "no", "rr": "so"}
    chats = [
        {"messages": [{"role": "user", "content": key}, {"role": "assistant", "content": answer}]}
        for key, answer in answers.items()
    ]
    write_jsonl(tmp_path / "chats.jsonl", chats)
    write_jsonl(tmp_path / "texts.jsonl", [{"prompt": k, "completion": a} for k, a in answers.items()])
    write_jsonl(tmp_path / "labels.jsonl", [{"text": k, "label": len(k)} for k in answers])
    shared: dict[str, Any] = {"lora": {"r": 8, "target_modules": "all-linear"}}
    kinds = {"chats": "messages", "texts": "prompt_completion", "labels": "classification"}
    adapters = [{"name": n, "dataset": n, "eval_dataset": n, **shared} for n in kinds]
    adapters[0] |= {"eval_exact_match": True}
    adapters[1] |= {"eval_exact_match": True}
    adapters[2] |= {"num_labels": 3, "lora": shared["lora"] | {"task_type": "SEQ_CLS"}}
    data = {
        "base_model": str(base),
        "output_dir": str(tmp_path / "run"),
        "device": "cpu",
        "base_gemm": "aten",
        "defaults": {"max_steps": 60, "learning_rate": 2e-2, "per_device_train_batch_size": 3},
        "datasets": [{"name": n, "path": f"{n}.jsonl", "format": kind} for n, kind in kinds.items()],
        "adapters": adapters,
    }
    assert run("train", write_run(tmp_path, data)).exit_code == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["adapters"]
    assert [summary[n]["eval_exact_match"]["after"] for n in ("chats", "texts")] == [1.0, 1.0]
    done = run("evaluate", tmp_path / "run", "--json")
    assert done.exit_code == 0, done.stderr
    found = {(one["adapter"], one["dataset"]): one for one in json.loads(done.stdout)["results"]}
    assert list(found) == [("__base__", "chats"), ("__base__", "texts"), *((n, n) for n in kinds)]
    assert [one["exact_match"] for one in found.values()] == [0.0, 0.0, 1.0, 1.0, None]
    for name in kinds:
        assert found[name, name]["loss"] == pytest.approx(summary[name]["eval_loss"]["after"], abs=1e-5)
    accuracy = summary["labels"]["eval_accuracy"]["after"]
    assert found["labels", "labels"]["metrics"]["accuracy"] == accuracy == 1.0
    only = run("evaluate", tmp_path / "run", "labels", "--exact-match", "--json")
    assert only.exit_code == 0, only.stderr
    words = json.loads(only.stdout)
    assert [one["adapter"] for one in words["results"]] == ["labels"]
    assert words["notes"] == ["labels: no exact match: its data has no prompts with answers"]
    for words in (["-a", "texts"], ["-a", "chats", "--chat"]):
        said = run("generate", tmp_path / "run", *words, "-p", "q", "-p", "rr", "--json")
        assert said.exit_code == 0, said.stderr
        assert [json.loads(line)["completion"] for line in said.stdout.splitlines()] == ["yes", "so"]
    labels = run("generate", tmp_path / "run", "-a", "labels", "-p", "q", "-p", "rr", "--json")
    assert [json.loads(line)["label"] for line in labels.stdout.splitlines()] == [1, 2]
