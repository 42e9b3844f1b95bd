"""The reference pages are what the code says, and every key of a run's YAML says what it means."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from mlora.config.faults import MODELS
from mlora.config.lora_fields import LoraFields, PeftNotes
from mlora.config.run_config import RunConfig
from mlora.config.schema import run_schema
from mlora.objectives.registry import objective_options
from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
# registered by other tests, in the same process
OBJECTIVES = [model for model in objective_options().values() if model.__module__.startswith("mlora.")]


@pytest.fixture(scope="module")
def make_reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(name: str) -> str:
    """Returns a page of the reference as it is checked in."""
    return (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["command-line.md", "python.md"])
def test_pages_are_up_to_date(make_reference: ModuleType, name: str) -> None:
    assert page(name) == make_reference.PAGES[name](), "run: python docs/make_reference.py"


def test_names_that_the_pages_import_are_public(make_reference: ModuleType) -> None:
    public = {(package, name) for package, name in make_reference.public_names()}
    shown = set[tuple[str, str]]()
    for file in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = file.read_text(encoding="utf-8")
        for module, names in re.findall(r"^from (mlora[\w.]*) import (.+)$", text, re.MULTILINE):
            shown |= {(module, name) for name in names.split(", ")}
    assert ("mlora.offload", "offloaded") in shown
    assert shown <= public


def test_the_page_of_keys_is_up_to_date() -> None:
    # other tests register optimizers and objectives in this process
    code = "import make_reference; print(make_reference.keys_page(), end='')"
    command, docs = [sys.executable, "-c", code], ROOT / "docs"
    done = subprocess.run(command, cwd=docs, capture_output=True, text=True, timeout=60, check=True)
    assert page("run-yaml.md") == done.stdout, "run: python docs/make_reference.py"


def keys() -> Iterator[tuple[str, FieldInfo]]:
    """Yields every key of a run's YAML, by its model and name."""
    models: list[type[BaseModel]] = [RunConfig, *MODELS.values(), LoraFields, *OBJECTIVES]
    for model in models:
        for name, field in model.model_fields.items():
            if not (model is LoraFields and name in PeftNotes.model_fields):
                yield f"{model.__name__}.{name}", field


@pytest.mark.parametrize(("key", "field"), dict(keys()).items(), ids=dict(keys()))
def test_every_key_says_what_it_means(key: str, field: FieldInfo) -> None:
    text = field.description or ""
    assert text, f"{key}: say in one sentence what it means: Field(description=...)"
    assert text.endswith("."), key
    assert text[0] == "`" or text[0].isupper(), key
    assert len(text) <= 160, key


def test_every_part_of_a_config_has_a_section(make_reference: ModuleType) -> None:
    assert set(run_schema()["$defs"]) <= {part for part, _ in make_reference.PARTS.values()}


def test_no_key_is_newer_than_the_project(make_reference: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = [int(part) for part in project["version"].split(".")]
    for key, field in keys():
        since = [int(part) for part in make_reference.since(field).split(".")]
        assert since <= version, key


def test_pages_name_options_and_keys() -> None:
    keys_page, commands = page("run-yaml.md"), page("command-line.md")
    assert "| `max_length` | Most tokens of a sample;" in keys_page
    assert "counts them. | whole number ≥ 2 | 1024 | 0.1.0 |\n" in keys_page
    assert "null: no limit. | size, null | null | 0.1.0 |\n" in keys_page
    assert (
        "| `loss_type` | Form of the loss. | `sigmoid`, `hinge`, `ipo`, `robust` | `sigmoid` |" in keys_page
    )
    assert "| `--prompt PROMPT`, `-p PROMPT` | a prompt; may be repeated |  |" in commands
    assert "## mlora simulate offload\n" in commands
    assert "cuda:&lt;index>" in commands


def test_values_are_written_as_in_yaml(make_reference: ModuleType) -> None:
    written = {None: "null", 5e-05: "5.0e-5", 1e-08: "1.0e-8", 3.0: "3", 0.999: "0.999", "linear": "`linear`"}
    assert {each: make_reference.value(each) for each in written} == written
    assert make_reference.value(True) == "true"
    assert make_reference.value(1) == "1"
    assert make_reference.value(0) == "0"
