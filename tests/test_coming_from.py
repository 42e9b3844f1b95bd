"""docs/coming-from.md: every key in its last column exists, and `mlora validate` leads old keys to ours."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlora.config.faults import option_of_objective, unknown_key
from mlora.config.schema import run_schema

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "coming-from.md").read_text(encoding="utf-8")
SCHEMA = run_schema()
PARTS = SCHEMA["$defs"]
KEYS = {
    "Keys at the top level": {*SCHEMA["properties"]},
    "Training keys": {*PARTS["TrainingFields"]["properties"]},
    "Keys of lora": {*PARTS["Lora"]["properties"], "init_from"},
    "Keys of datasets": {*PARTS["DatasetConfig"]["properties"], "eval_dataset"},
}
OURS = {*SCHEMA["properties"], *(key for part in PARTS.values() for key in part["properties"])}


def rows(title: str) -> Iterator[list[list[str]]]:
    """Yields each row of a part's table: the keys in each of its cells."""
    (table,) = re.findall(
        rf"^## {title}\n.*?\n\| axolotl .*?\n\|[-|]+\n(.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL
    )
    for line in table.splitlines():
        yield [re.findall(r"`(\w+)[^`]*`", cell) for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("title", KEYS)
def test_every_key_of_ours_exists(title: str) -> None:
    found = [row[3] for row in rows(title)]
    assert len(found) >= 10
    assert {key for keys in found for key in keys} <= KEYS[title]
    assert "init_from" in PARTS["AdapterConfig"]["properties"]


@pytest.mark.parametrize("title", [title for title in KEYS if title != "Keys of datasets"])
def test_every_old_key_leads_to_ours(title: str) -> None:
    old = {key for row in rows(title) for keys in row[:3] for key in keys} - OURS - {"trl"}
    assert len(old) >= 10
    said = {key: option_of_objective(key, 1) or unknown_key(key, list(SCHEMA["properties"])) for key in old}
    lost = [key for key, text in said.items() if "known keys" in text or "not supported" in text]
    assert lost == []


def test_old_keys_of_datasets_lead_to_ours() -> None:
    old = {key for row in rows("Keys of datasets") for keys in row[:3] for key in keys} - OURS
    known = list(PARTS["DatasetConfig"]["properties"])
    assert [key for key in sorted(old) if "known keys" in unknown_key(key, known)] == []
