"""Files of strangers: one line for each, soon. Nothing is waited for, and nothing runs out of memory.

`alarm` ends a test that would wait for a pipe; PyTorch's loader of weights reads no pickled code.
"""

import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.config.yaml_file import read_yaml
from mlora.data.dataset import load_dataset, read_prompt_lines
from mlora.data.source import Source
from mlora.errors import RunError
from mlora.model.base_info import BaseInfo
from mlora.model.checkpoint_tensors import files_of
from mlora.model.cut import BlockSpan
from mlora.model.load import load_stage
from mlora.model.pretrained import load_whole
from tiny_run import save_tokenizer, write_jsonl

DEEP = "[" * 100_000 + "]" * 100_000
TEXT, SPECIAL = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "Z", "type_id": 0}}
NONE: dict[str, Any] = {"special_tokens": {}}
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def base(tiny_base: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_base, tmp_path / "base")


def line_of(call: Callable[[], Any]) -> str:
    """The message of what a call raises, which is one line."""
    with pytest.raises(ValueError, match=r"^[^\n]+\Z") as caught:  # RunError is one
        call()
    return str(caught.value)


def changed(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def replaced(file: Path, kind: str) -> None:
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        with open(file, "wb") as sparse:
            sparse.truncate(1 << 34)


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"]
)
def test_files_of_a_base_are_regular_and_not_endless(kind: str, name: str, base: Path) -> None:
    replaced(base / name, kind)
    why = (
        "at most 268435456 are read" if kind == "large" else "is a pipe or a device; expected a regular file"
    )
    line = line_of(lambda: BaseInfo(str(base)))
    if (kind, name) in (("pipe", "config.json"), ("device", "config.json")):
        assert line == f"base_model: {base} has no config.json; give a model's folder"
    else:
        assert line.startswith(f"base_model: {base / name}: ")
        assert why in line


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_yaml_data_and_prompts_are_regular_files(kind: str, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    how: dict[str, Any] = {"max_length": 9, "vocab_size": 300, "tokenizer": tokenizer}
    for name in ("run.yaml", "prompts.txt", "d.jsonl", "d.csv", "folder/train.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        replaced(tmp_path / name, kind)
    calls: list[Callable[[], Any]] = [
        lambda: read_yaml(tmp_path / "run.yaml"),
        lambda: read_prompt_lines(tmp_path / "prompts.txt"),
    ]
    if kind != "large":
        data = ("d.jsonl", "d.csv", "folder")
        calls += [lambda name=name: load_dataset("d", tmp_path / name, "text", **how) for name in data]
        calls += [lambda: Source(str(tmp_path / "d.jsonl")).fingerprint()]
    for call in calls:
        line = line_of(call)
        assert line.startswith(f"{tmp_path}/")
        assert ("are read" if kind == "large" else "expected a regular file") in line


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
@pytest.mark.parametrize(
    "content", [DEEP, "[1]", "3", '{"a": ' + DEEP + "}"], ids=["deep", "list", "number", "key"]
)
def test_json_that_is_not_what_it_should_be(name: str, content: str, base: Path) -> None:
    if name == "config.json" and content.startswith("{"):
        content = content.replace("{", '{"model_type": "llama", ', 1)
    (base / name).write_text(content)

    def read() -> None:
        info = BaseInfo(str(base))
        info.tokenizer()
        info.end_tokens()

    assert line_of(read).startswith("base_model: ")


def test_numbers_that_no_model_can_have(base: Path) -> None:
    changed(base / "config.json", num_attention_heads=0)
    assert line_of(lambda: BaseInfo(str(base))).startswith(f"base_model: cannot load {base}: ")


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ([1], "needs a 'weight_map' from tensors to files"),
        ({}, "needs a 'weight_map'"),
        ({"weight_map": ["a"]}, "needs a 'weight_map'"),
        ({"weight_map": {"a": 3}}, "weight_map: a: expected the name of a file beside it, got 3"),
        ({"weight_map": {"a": "../x.safetensors"}}, "got '../x.safetensors'"),
        ({"weight_map": {"a": "/x.safetensors"}}, "got '/x.safetensors'"),
        ({"weight_map": {"a": ""}}, "got ''"),
        ({"weight_map": {"a": ".."}}, "got '..'"),
    ],
)
def test_an_index_of_shards_names_files_beside_it(index: Any, why: str, base: Path) -> None:
    shutil.move(base / "model.safetensors", base.parent / "x.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    for call in (
        lambda: load_whole(str(base), torch.float32),
        lambda: load_stage(str(base), BlockSpan(0, 1, 0, 2), torch.device("cpu"), torch.float32),
        lambda: files_of(str(base), None),
    ):
        assert why in line_of(call)


class _Code:
    def __reduce__(self) -> Any:
        return os.mkdir, ("pwned",)


def test_pickled_code_is_not_run(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)
    (base / "model.safetensors").unlink()
    (base / "pytorch_model.bin").write_bytes(pickle.dumps({"a": _Code()}, protocol=2))
    assert line_of(lambda: load_whole(str(base), torch.float32)).startswith(
        f"base_model: cannot load {base}: "
    )
    assert not (base / "pwned").exists()


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ ' ' * 10**10 }}", "takes more than 1024 MiB"),
        ("{{ '%1000000000d' % 1 }}", "takes more than "),
        ("{{ 'a'.center(200000000) }}", "takes more than 1024 MiB"),
        ("{{ 9**(9**9) }}", "takes more than 1 s"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "takes more than 1 s",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template refuses the messages: "),
        ("{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", "the chat template refuses the messages: "),
    ],
    ids=["spaces", "digits", "center", "power", "loops", "recursion", "brackets"],
)
def test_a_hostile_chat_template(
    template: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlora.data.template_trial.SECONDS", 1.0)
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.chat_template = template
    path = write_jsonl(tmp_path / "d.jsonl", [{"messages": CHAT}])
    how: dict[str, Any] = {"max_length": 9, "vocab_size": 300, "tokenizer": tokenizer}
    assert why in line_of(lambda: load_dataset("d", path, "messages", **how))


@pytest.mark.parametrize(
    ("part", "own"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        ("model", {"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0]]}),
        ("model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}),
        ("post_processor", {"type": "TemplateProcessing", "single": [TEXT, SPECIAL], "pair": [], **NONE}),
    ],
    ids=["panic while it is read", "bare error", "bare error for a text", "panic for a text"],
)
def test_a_tokenizer_that_fails_in_rust(part: str, own: Any, base: Path, tmp_path: Path) -> None:
    changed(base / "tokenizer.json", **{part: own})
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "abcdefgh"}])

    def read() -> None:
        tokenizer = BaseInfo(str(base)).tokenizer()
        load_dataset("d", path, "text", max_length=9, vocab_size=300, tokenizer=tokenizer)

    line = line_of(read)
    assert line.startswith(
        (f"base_model: cannot load the tokenizer of {base}: ", f"{path}:1: the base model's ")
    )


def test_a_table_of_100_000_columns_names_few(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(100_000)]
    path = tmp_path / "d.csv"
    path.write_text(",".join(names) + "\n" + ",".join("1" for _ in names) + "\n")
    how: dict[str, Any] = {"max_length": 9, "vocab_size": 300, "tokenizer": save_tokenizer(tmp_path)}
    line = line_of(lambda: load_dataset("d", path, "text", **how))
    assert line.startswith(f"{path}:2: 'text' is missing; the line has 'c0', 'c1', ")
    assert len(line) < 300


def test_a_file_of_the_usual_kind_is_read_as_before(base: Path) -> None:
    assert BaseInfo(str(base)).end_tokens() == (0,)
    with pytest.raises(RunError, match="is a folder"):
        read_yaml(base)
