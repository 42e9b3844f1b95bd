"""The documentation's commands parse, its YAML fits the schema, its Python imports what exists."""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import typer
from jsonschema import Draft202012Validator
from mlora.cli.app import app
from mlora.config.schema import run_schema, submission_schema
from mlora.config.yaml_file import load_yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]
BLOCK = re.compile(r"^( *)(```+)(\S*)[^\n]*\n(.*?)^ *\2$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`(mlora [^`\n]+)`")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
UsageError = typer.BadParameter.__bases__[0]
OURS = {"mlora", "mlora_ext", "peft", "torch", "transformers"}


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yields the language and the text of each block of code."""
    for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield match[3], dedent(match[4])


def named(pages: list[Path]) -> Any:
    """Returns a mark that runs a test for each page."""
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def command_lines(page: Path) -> Iterator[str]:
    """Yields each line of a block that runs `mlora`, without comments."""
    for language, text in blocks(page):
        lines = text.replace("\\\n", " ").splitlines()
        for line in lines if language in ("", "console", "bash") else ():
            if "[OPTIONS]" not in line and (match := re.match(r"(?:\$ |.* --no-python )?(mlora .*)", line)):
                yield match[1]


def parts(words: list[str]) -> tuple[Any, list[str]]:
    """Returns the command that the words after `mlora` name, and the words that are left for it."""
    command, rest = COMMANDS[words[0]], words[1:]
    if rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def fault_of(line: str) -> str:
    """Returns why the command line refuses a line; empty: it takes it."""
    line = re.sub(r"\[more\.yaml \.\.\.\]", "more.yaml", line).replace("[--json]", "--json")
    words = shlex.split(line, comments=True)[1:]
    if words[0] in ("--help", "--version"):
        return ""
    if words[0] not in COMMANDS:
        return f"{line}: no such command"
    command, rest = parts(words)
    try:
        command.make_context(words[0], list(rest))
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group of commands alone prints its help
            return ""
        return f"{line}: {error.format_message()}"  # type: ignore[attr-defined]
    except typer.Exit:
        return ""
    return ""


@named([page for page in PAGES if list(command_lines(page))])
def test_command_lines_parse(page: Path) -> None:
    faults = [fault_of(line) for line in command_lines(page)]
    assert [fault for fault in faults if fault] == []


def unknown_words(code: str) -> list[str]:
    """Returns what does not exist of a command that a sentence names: the command, or options of it."""
    words = code.replace("[", " ").replace("]", " ").split()[1:]
    if words[0] not in COMMANDS:
        return words[:1] if re.fullmatch(r"[a-z]+", words[0]) else []
    command, rest = parts(words)
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    options = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    return [] if words[0] == "bench" else [option for option in options if option not in known]


@named([page for page in PAGES if INLINE.search(page.read_text(encoding="utf-8"))])
def test_commands_in_sentences_exist(page: Path) -> None:
    found = INLINE.findall(page.read_text(encoding="utf-8"))
    assert {code: unknown for code in found if (unknown := unknown_words(code))} == {}


def relaxed(schema: Any) -> Any:
    """Returns a schema that demands no key, for snippets that show some keys only."""
    if isinstance(schema, list):
        return [relaxed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: relaxed(each) for key, each in schema.items() if key != "required"}


def shown(data: Any) -> Any:
    """Returns a snippet's data without `...`, which stands for what is left out."""
    if isinstance(data, dict):
        return {key: shown(value) for key, value in data.items() if "..." not in (key, value)}
    return [shown(each) for each in data if each != "..."] if isinstance(data, list) else data


RUN, TASK = run_schema(), submission_schema()
WHOLE = [Draft202012Validator(RUN), Draft202012Validator(TASK)]
FRAGMENT = [Draft202012Validator(relaxed(RUN) | {"anyOf": [{}]}), Draft202012Validator(relaxed(TASK))]


def misfits(text: str) -> list[str]:
    """Returns what a schema refuses of YAML that shows a run, a task, or a part of one."""
    data = shown(load_yaml(text, "snippet"))
    entries = data if isinstance(data, list) else [data]
    whole = isinstance(data, dict) and {"base_model", "output_dir"} < data.keys()
    found = []
    for entry in entries:
        each = [[error.message for error in one.iter_errors(entry)] for one in (WHOLE if whole else FRAGMENT)]
        found += min(each, key=len)
    return found


def of_language(pages: list[Path], *languages: str) -> list[Path]:
    """Returns the pages that have code in one of these languages."""
    return [page for page in pages if any(language in languages for language, _ in blocks(page))]


@named(of_language(PAGES, "yaml"))
def test_yaml_fits_the_schema(page: Path) -> None:
    snippets = [text for language, text in blocks(page) if language == "yaml"]
    assert {text: faults for text in snippets if (faults := misfits(text))} == {}


@named(of_language(PAGES, "json"))
def test_json_can_be_read(page: Path) -> None:
    lines = [line for language, text in blocks(page) if language == "json" for line in text.splitlines()]
    assert all(isinstance(json.loads(line), dict) for line in lines)


def missing_names(text: str) -> list[str]:
    """Returns what a snippet imports, or reads of `mx`, that does not exist."""
    tree, found = ast.parse(text.replace(", ...)", ")")), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in OURS:
            module = import_module(node.module)
            found += [f"{node.module}.{each.name}" for each in node.names if not hasattr(module, each.name)]
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] in OURS:
                    import_module(each.name)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            package = {"mx": "mlora_ext", "mlora_ext": "mlora_ext", "mlora": "mlora"}.get(node.value.id)
            if package and not hasattr(import_module(package), node.attr):
                found.append(f"{package}.{node.attr}")
    return found


@named(of_language(PAGES, "python"))
def test_python_compiles_and_imports_what_exists(page: Path) -> None:
    snippets = [text for language, text in blocks(page) if language == "python"]
    assert [name for text in snippets for name in missing_names(text)] == []


def test_faults_are_found() -> None:
    assert "No such option" in fault_of("mlora train run.yaml --stage 2")
    assert "no such command" in fault_of("mlora trian run.yaml")
    assert fault_of("mlora train run.yaml --stages 2   # a comment") == ""
    assert "Missing argument" in fault_of("mlora generate -p x")
    assert unknown_words("mlora simulate offload --to-devise 3") == ["--to-devise"]
    assert misfits("scheduler: {memory_limt: 8GiB}")
    assert misfits("base_model: x\noutput_dir: y\nadapters: [{name: a}]")
    assert misfits("adapters: [{name: a}]") == []
    assert misfits("- {name: a, lora: {r: 8, ...}, ...}") == []
    assert missing_names("import mlora_ext as mx\nmx.convert_modle(model)") == ["mlora_ext.convert_modle"]
    assert missing_names("from mlora import Engin") == ["mlora.Engin"]
