"""Runs whose heads predict labels: what they save, as PEFT and Transformers read it, and what is refused."""

import copy
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from limited_runs import Watching, interrupt
from mlora.config.config_file import resolve_config
from mlora.errors import RunError
from mlora.run.reporter import PlainLines
from mlora.run.run import resume, train
from mlora.store.run_folder import read_metrics
from peft import PeftModel
from tiny_run import write_jsonl
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

TEXTS = ["good cat", "bad dog", "a good day", "bad", "so bad", "good, good", "not so bad", "good?"]
TAGS = {"g": "GOOD", "b": "BAD"}
LINES: dict[str, list[dict[str, Any]]] = {
    "mood": [{"text": text, "label": "good" if "good" in text else "bad"} for text in TEXTS],
    "length": [{"text": text, "label": len(text) / 10} for text in TEXTS],
    "letters": [{"text": text, "label": [int(one in text) for one in "agd"]} for text in TEXTS],
    "words": [{"text": text, "label": sorted({"good", "bad", "so"} & set(text.split()))} for text in TEXTS],
    "tags": [
        {"input_ids": [ord(one) - 32 for one in text], "labels": [TAGS.get(one, "O") for one in text]}
        for text in TEXTS
    ],
    "where": [
        {
            "question": "word?",
            "context": text,
            "answers": {"text": [word], "answer_start": [text.index(word)]},
        }
        for text in TEXTS
        for word in (["good"] if "good" in text else ["bad"])
    ],
}
LOW: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "up_proj"]}
TASKS = {"tags": "TOKEN_CLS", "where": "QUESTION_ANS"}
COUNTS = {"length": 1, "letters": 3}


def run_of(base: Path, folder: Path, names: list[str]) -> dict[str, Any]:
    adapters, datasets = [], []
    for name in names:
        write_jsonl(folder / f"{name}.jsonl", LINES[name])
        kind = "question_answering" if name == "where" else "classification"
        datasets.append({"name": name, "path": f"{name}.jsonl", "format": kind})
        lora = LOW | {"task_type": TASKS.get(name, "SEQ_CLS")}
        count = {"num_labels": COUNTS[name]} if name in COUNTS else {}
        adapters.append({"name": name, "dataset": name, "eval_dataset": name, "lora": lora, **count})
    defaults = {"max_steps": 3, "learning_rate": 3e-2, "per_device_train_batch_size": 3}
    shared = {"base_model": str(base), "output_dir": "run", "device": "cpu", "base_gemm": "aten", "seed": 1}
    return shared | {"defaults": defaults, "datasets": datasets, "adapters": adapters}


def over_peft(base: Path, folder: Path) -> Any:
    """An adapter's folder over the class that Transformers has for it."""
    labels = json.loads((folder / "labels.json").read_text()) if (folder / "labels.json").exists() else {}
    if "id2label" in labels:
        labels["id2label"] = {int(place): name for place, name in labels["id2label"].items()}
    task = json.loads((folder / "adapter_config.json").read_text())["task_type"]
    kind: Any = {
        "SEQ_CLS": AutoModelForSequenceClassification,
        "TOKEN_CLS": AutoModelForTokenClassification,
        "QUESTION_ANS": AutoModelForQuestionAnswering,
    }[task]
    if task == "QUESTION_ANS":
        model = kind.from_pretrained(base, key_mapping={r"^model\.": "transformer."})
    else:
        size = {"num_labels": COUNTS[folder.name]} if folder.name in COUNTS else {}
        model = kind.from_pretrained(base, **labels, **size)
    return PeftModel.from_pretrained(model, str(folder)).eval()


@torch.no_grad()
def loss_and_hits(model: Any, tokenizer: Any, name: str, line: dict[str, Any]) -> tuple[float, float]:
    """The model's own loss of a line, and the share of right labels, by the names in its config."""
    if name == "where":
        encoded = tokenizer(line["question"], line["context"], return_tensors="pt")
        (start,), (word,) = line["answers"]["answer_start"], line["answers"]["text"]
        first = len(line["question"]) + start  # one token for each letter
        wanted = torch.tensor([first]), torch.tensor([first + len(word) - 1])
        found = model(encoded["input_ids"], start_positions=wanted[0], end_positions=wanted[1])
        hits = [int(each.argmax()) for each in (found.start_logits, found.end_logits)]
        return float(found.loss), float(hits == [int(one) for one in wanted])
    if "text" in line:
        ids = tokenizer(line["text"], return_tensors="pt")["input_ids"]
    else:
        ids = torch.tensor([line["input_ids"]])
    logits, id2label = model(ids).logits[0], model.config.id2label
    if name == "length":
        return float(model(ids, labels=torch.tensor([line["label"]])).loss), float("nan")
    if name in ("letters", "words"):
        flags = line["label"]
        if name == "words":
            flags = [id2label[place] in flags for place in range(3)]
        wanted = torch.tensor([flags], dtype=torch.float)
        return float(model(ids, labels=wanted).loss), float(torch.equal((logits > 0).float(), wanted[0]))
    labels = line["labels"] if name == "tags" else [line["label"]]
    ids_of = {label: place for place, label in id2label.items()}
    answers = [id2label[int(place)] for place in logits.reshape(len(labels), -1).argmax(-1)]
    loss = model(ids, labels=torch.tensor([[ids_of[one] for one in labels]])).loss
    return float(loss), sum(a == b for a, b in zip(answers, labels, strict=True)) / len(labels)


def test_folders_say_in_peft_what_the_run_measured(tiny_base: Path, tmp_path: Path) -> None:
    result = train(resolve_config(run_of(tiny_base, tmp_path, [*LINES]), folder=tmp_path))
    assert result.status == "finished", result
    records = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    for name, lines in LINES.items():
        model = over_peft(tiny_base, tmp_path / "run" / "adapters" / name)
        found = [loss_and_hits(model, tokenizer, name, line) for line in lines]
        weights = [len(line["labels"]) if name == "tags" else 1 for line in lines]
        loss, hits = (
            sum(one[part] * weight for one, weight in zip(found, weights, strict=True)) / sum(weights)
            for part in (0, 1)
        )
        first, entry = (one for one in records if one["adapter"] == name and "eval_loss" in one)
        assert entry["eval_loss"] == pytest.approx(loss, abs=1e-5), name
        if name == "length":
            assert "eval_accuracy" not in entry
        else:
            assert entry["eval_accuracy"] == pytest.approx(hits), name
        assert entry["eval_loss"] < first["eval_loss"], name


def test_names_of_labels_are_saved_and_kept(tiny_base: Path, tmp_path: Path) -> None:
    data = run_of(tiny_base, tmp_path, ["mood", "tags", "length"])
    first = train(resolve_config(data, folder=tmp_path))
    assert first.status == "finished"
    adapters = tmp_path / "run" / "adapters"
    stored = {
        name: json.loads((adapters / name / "labels.json").read_text()) for name in ("mood", "tags", "length")
    }
    assert stored == {
        "mood": {"problem_type": "single_label_classification", "id2label": {"0": "bad", "1": "good"}},
        "tags": {"id2label": {"0": "BAD", "1": "GOOD", "2": "O"}},
        "length": {"problem_type": "regression"},
    }
    only_good = write_jsonl(tmp_path / "good.jsonl", [{"text": "fine", "label": "good"}])
    new = write_jsonl(
        tmp_path / "new.jsonl", [{"text": "fine", "label": "good"}, {"text": "hm", "label": "hm"}]
    )
    again = run_of(tiny_base, tmp_path, ["mood", "length"]) | {"output_dir": "again"}
    again["datasets"] += [
        {"name": "good", "path": str(only_good), "format": "classification"},
        {"name": "new", "path": str(new), "format": "classification"},
    ]
    for adapter in again["adapters"]:
        adapter.pop("lora")
        adapter["init_from"] = str(adapters / adapter["name"])
    more = copy.deepcopy(again["adapters"][0])
    again["adapters"][0] |= {"dataset": "good"}
    again["adapters"].append(more | {"name": "more", "eval_dataset": "new"})
    again["adapters"].append(
        again["adapters"][1] | {"name": "wrong", "problem_type": "multi_label_classification"}
    )
    found = train(resolve_config(again, folder=tmp_path)).adapters
    assert {name: one.message for name, one in found.items() if one.state != "finished"} == {
        "more": f"{new}:2: 'label': expected one of the known labels (bad, good), got 'hm'",
        "wrong": "problem_type: is multi_label_classification, but that of the head in init_from is "
        "regression",
    }
    assert json.loads((tmp_path / "again/adapters/mood/labels.json").read_text()) == stored["mood"]
    assert found["mood"].eval_loss["before"] == pytest.approx(first.adapters["mood"].eval_loss["after"])
    again["adapters"] = again["adapters"][:1]
    told = Watching({("mood", 2): interrupt})
    assert (
        train(resolve_config(again, folder=tmp_path), reporter=told, overwrite=True).status == "interrupted"
    )
    (adapters / "mood" / "labels.json").write_text(json.dumps({"id2label": {"0": "good", "1": "bad"}}))
    with pytest.raises(
        RunError, match=r"mood: its labels \(\S+labels\.json\) changed since the checkpoint; put"
    ):
        resume(tmp_path / "again")


def test_names_that_the_training_data_lacks_are_listed(tiny_base: Path, tmp_path: Path) -> None:
    """In the order of their ids; a folder keeps them."""
    data = run_of(tiny_base, tmp_path, ["tags"])
    write_jsonl(tmp_path / "few.jsonl", [line for line in LINES["tags"] if "BAD" not in line["labels"]])
    data["datasets"].append({"name": "few", "path": "few.jsonl", "format": "classification"})
    (tags,) = data["adapters"]
    names = ["O", "GOOD", "BAD"]
    data["adapters"] = [
        tags | {"name": "listed", "dataset": "few", "label_names": names},
        tags | {"name": "found", "dataset": "few"},
        tags | {"name": "short", "label_names": names[:2]},
    ]
    found = train(resolve_config(data, folder=tmp_path)).adapters
    unknown = f"{tmp_path}/tags.jsonl:2: 'labels': expected one of the known labels ({{}}), got 'BAD'"
    hint = "; these are the training data's: list all labels in label_names"
    assert {name: one.message for name, one in found.items() if one.state != "finished"} == {
        "found": unknown.format("GOOD, O") + hint,
        "short": unknown.format("O, GOOD"),
    }
    folder = tmp_path / "run" / "adapters" / "listed"
    stored = json.loads((folder / "labels.json").read_text())
    assert stored == {"id2label": {str(place): name for place, name in enumerate(names)}}
    assert over_peft(tiny_base, folder).config.id2label == dict(enumerate(names))
    again = data | {"output_dir": "again", "adapters": []}
    for name, keys in (("kept", {}), ("other", {"label_names": names[::-1]})):
        adapter = {"name": name, "dataset": "tags", "eval_dataset": "tags", "init_from": str(folder)}
        again["adapters"].append(adapter | keys)
    after = train(resolve_config(again, folder=tmp_path)).adapters
    assert after["kept"].eval_loss["before"] == pytest.approx(found["listed"].eval_loss["after"])
    assert after["other"].message == (
        f"label_names: is {names[::-1]}, but that of the head in init_from is {names}"
    )


def change(name: str, **keys: Any) -> Callable[[dict[str, Any], Path], None]:
    def made(data: dict[str, Any], folder: Path) -> None:
        adapter = next(one for one in data["adapters"] if one["name"] == name)
        for key, value in keys.items():
            adapter[key] = value

    return made


def relabel(name: str, label: Any, line: int = 2) -> Callable[[dict[str, Any], Path], None]:
    def made(data: dict[str, Any], folder: Path) -> None:
        lines = copy.deepcopy(LINES[name])
        lines[line]["label"] = label
        write_jsonl(folder / f"{name}.jsonl", lines)

    return made


@pytest.mark.parametrize(
    ("changed", "name", "message"),
    [
        (change("mood", num_labels=3), "mood", "num_labels: is 3, but the dataset 'mood' has 2 labels; "),
        (relabel("mood", 1), "mood", "{}/mood.jsonl:3: 'label': expected one of the known labels (bad, "),
        (relabel("length", "1"), "length", "{}/length.jsonl:3: 'label' must be a number in a regression"),
        (relabel("letters", [0, 2]), "letters", "{}/letters.jsonl:3: 'label' must hold 0 or 1 for each of 3"),
        (
            change("length", problem_type="single_label_classification"),
            "length",
            "num_labels: task_type SEQ_CLS needs at least 2 labels, got 1",
        ),
        (
            change("length", num_labels=None),
            "length",
            "num_labels: task_type SEQ_CLS needs the number of labels",
        ),
        (change("where", num_labels=2), "where", "num_labels: needs task_type SEQ_CLS or TOKEN_CLS"),
        (
            change("where", dataset="mood"),
            "where",
            "dataset: task_type QUESTION_ANS needs format question_answering, got 'classification'",
        ),
        (
            change("where", lora=LOW),
            "where",
            "dataset: format question_answering needs lora.task_type: QUESTION_ANS",
        ),
        (
            change("where", lora=LOW | {"task_type": "QUESTION_ANS", "modules_to_save": ["model.norm"]}),
            "where",
            "modules_to_save: 'model.norm' names the body 'model', which LlamaForQuestionAnswering calls "
            "'transformer'; leave out 'model.'",
        ),
    ],
)  # fmt: skip
def test_refused_in_one_line(
    tiny_base: Path, tmp_path: Path, changed: Callable[[dict[str, Any], Path], None], name: str, message: str
) -> None:
    data = run_of(tiny_base, tmp_path, ["mood", name] if name != "mood" else ["mood", "length"])
    changed(data, tmp_path)
    data["defaults"]["max_steps"] = 1
    found = train(resolve_config(data, folder=tmp_path)).adapters
    assert found[name].state == "refused"
    assert message.format(tmp_path) in found[name].message
    assert "\n" not in found[name].message
    assert [one.state for one in found.values()].count("finished") == 1


def test_a_folder_of_another_task_and_one_of_answers(tiny_base: Path, tmp_path: Path) -> None:
    """The message is about `init_from`, as there is no `lora`; an answer's start and end are no labels."""
    data = run_of(tiny_base, tmp_path, ["mood", "where"])
    data["defaults"]["max_steps"] = 1
    plain = {"name": "plain", "dataset": "plain", "lora": LOW}
    write_jsonl(tmp_path / "plain.jsonl", [{"input_ids": [4, 5, 6]}] * 3)
    data["datasets"].append({"name": "plain", "path": "plain.jsonl", "format": "tokens"})
    data["adapters"].append(plain)
    assert train(resolve_config(data, folder=tmp_path)).status == "finished"
    adapters = tmp_path / "run" / "adapters"
    again = data | {"output_dir": "again", "adapters": []}
    for name, dataset in (("plain", "mood"), ("where", "where")):
        again["adapters"].append({"name": name, "dataset": dataset, "init_from": str(adapters / name)})
    out, err = io.StringIO(), io.StringIO()
    train(resolve_config(again, folder=tmp_path), reporter=PlainLines(out, err))
    assert err.getvalue() == (
        "error: plain: refused: dataset: format classification needs an init_from of task_type SEQ_CLS or "
        f"TOKEN_CLS; {adapters / 'plain'} has task_type CAUSAL_LM\n"
    )
    assert re.search(r"^where: \d+ samples, 1 steps$", out.getvalue(), re.M), out.getvalue()
