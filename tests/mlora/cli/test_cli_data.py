"""`mlora data show`: samples with their trained tokens marked."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlora.cli.app import app
from tiny_run import run_data, write_jsonl
from typer.testing import CliRunner


def shown(base: Path, folder: Path, dataset: dict[str, Any], rows: list[Any], *words: str, **own: Any) -> Any:
    """The command's result for a run of two adapters of one dataset."""
    data = run_data(base, folder)
    write_jsonl(folder / "rows.jsonl", rows)
    data["datasets"] = [{"name": "rows", "path": "rows.jsonl"} | dataset]
    plain = {"dataset": "rows", "eval_dataset": None, "eval_steps": None, "max_length": 40} | own
    data["adapters"] = [data["adapters"][0] | plain | {"name": name} for name in ("a", "b")]
    (folder / "run.yaml").write_text(yaml.safe_dump(data))
    return CliRunner().invoke(app, ["data", "show", str(folder / "run.yaml"), *words])


COMPLETIONS = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "é\x1b", "completion": "x\ny"}]


def test_trained_text_is_marked(tiny_base: Path, tmp_path: Path) -> None:
    result = shown(tiny_base, tmp_path, {"format": "prompt_completion"}, COMPLETIONS)
    assert result.stdout == (
        "a, b: dataset rows, 2 samples, 13 tokens\n"
        "\nsample 1: 6 tokens, 2 trained\n1+1=⟦2<end>⟧\n"
        "\nsample 2: 7 tokens, 4 trained\né\\x1b⟦x\ny<end>⟧\n"
    )


def test_adapters_that_read_a_dataset_in_two_ways(tiny_base: Path, tmp_path: Path) -> None:
    words = ["--samples", "1", "--set", "adapters.b.max_length=5"]
    result = shown(tiny_base, tmp_path, {"format": "prompt_completion"}, COMPLETIONS, *words)
    assert result.stdout == (
        "a: dataset rows, 2 samples, 13 tokens\n\nsample 1: 6 tokens, 2 trained\n1+1=⟦2<end>⟧\n"
        "\nb: dataset rows, 2 samples, 10 tokens\n\nsample 1: 5 tokens, 1 trained\n1+1=⟦2⟧\n"
    )
    assert "warning: dataset 'rows': 2 of 2 samples are longer than max_length 5" in result.stderr


def test_json_has_ids_and_labels(tiny_base: Path, tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [5, -100, 9]}]
    result = shown(tiny_base, tmp_path, {"format": "tokens"}, rows, "a", "--json")
    (found,) = map(json.loads, result.stdout.splitlines())
    assert found["adapters"] == ["a"]
    assert (found["input_ids"], found["labels"]) == ([5, 6, 7], [5, -100, 9])
    assert [marked for _, marked in found["spans"]] == [False, True]


@pytest.mark.parametrize(
    ("dataset", "rows", "own", "lines"),
    [
        (
            {"format": "preference"},
            [{"prompt": "p", "chosen": "yes", "rejected": "n"}],
            {"objective": "dpo"},
            [
                "sample 1, chosen: 5 tokens, 4 trained",
                "p⟦yes<end>⟧",
                "sample 1, rejected: 3 tokens, 2 trained",
            ],
        ),
        (
            {"format": "unpaired"},
            [{"prompt": "p", "completion": "c", "label": False}] * 2,
            {"objective": "kto"},
            ["sample 1, undesirable: 3 tokens, 2 trained", "p⟦c<end>⟧"],
        ),
        (
            {"format": "classification"},
            [{"text": "ab", "label": "bad"}, {"text": "c", "label": "good"}],
            {"lora": {"r": 2, "task_type": "SEQ_CLS", "target_modules": ["q_proj"]}},
            ["sample 1: 2 tokens, label bad", "ab", "sample 2: 1 tokens, label good"],
        ),
        (
            {"format": "classification"},
            [{"input_ids": [66, 67, 68], "labels": ["O", -100, "B"]}],
            {"lora": {"r": 2, "task_type": "TOKEN_CLS", "target_modules": ["q_proj"]}},
            ["sample 1: 3 tokens, 2 labelled: O, B"],
        ),
    ],
    ids=["pairs", "judged", "label", "labels of tokens"],
)
def test_other_samples(
    dataset: dict[str, Any],
    rows: list[Any],
    own: dict[str, Any],
    lines: list[str],
    tiny_base: Path,
    tmp_path: Path,
) -> None:
    result = shown(tiny_base, tmp_path, dataset, rows, "a", **own)
    assert set(lines) <= set(result.stdout.splitlines()), result.output


def test_held_out_samples(tiny_base: Path, tmp_path: Path) -> None:
    rows = [{"input_ids": [n, 1]} for n in range(10)]
    split = {"format": "tokens", "validation_split": 3}
    words = ["--eval", "--json", "--samples", "10"]
    result = shown(tiny_base, tmp_path, split, rows, *words, eval_dataset="rows", eval_steps=2)
    assert len(result.stdout.splitlines()) == 3
    result = shown(tiny_base, tmp_path, {"format": "tokens"}, rows, "--eval")
    assert (result.exit_code, result.stderr) == (1, "error: no adapter has an eval_dataset\n")


def test_an_unknown_adapter(tiny_base: Path, tmp_path: Path) -> None:
    result = shown(tiny_base, tmp_path, {"format": "tokens"}, [{"input_ids": [1, 2]}], "aa")
    assert result.exit_code == 1
    assert result.stderr == "error: aa: no such adapter; did you mean 'a'?\n"
