"""Formats of dialogues and instructions: TRL's tokens and labels, read off the chat template itself, and one
line for every malformed line."""

import re
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
from mlora.config.config_file import resolve_config
from mlora.config.dataset_config import FORMATS, DatasetConfig
from mlora.data.chat import messages_of_key
from mlora.data.dataset import Dataset, Prompt, load_dataset
from mlora.data.formats import format_hint
from mlora.errors import RunError
from mlora.run.run import train
from tiny_run import save_tokenizer, write_jsonl

CHAT = (
    "{% for tool in tools or [] %}[{{ tool['name'] }}]{% endfor %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('tools may not speak') }}{% endif %}"
    "{{ m['role'] }}:"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<end>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if think %}hm{% endif %}{% endif %}"
)
ASKED = [{"role": "system", "content": "brief"}, {"role": "user", "content": "1+1?"}]
ANSWER = {"role": "assistant", "content": "2 é"}
DIALOGUE = [*ASKED, ANSWER, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
WRITTEN = "system:brief\nuser:1+1?\nassistant:2 é<end>\nuser:2+2?\nassistant:4<end>\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture
def load(tmp_path: Path, tokenizer):
    def load(format: str, *records: dict[str, Any], **options: Any) -> Dataset:
        path = write_jsonl(tmp_path / "d.jsonl", list(records))
        options = {"max_length": 1000, "vocab_size": 260, "tokenizer": tokenizer, "ends": (0,)} | options
        return load_dataset("chats", path, format, **options)

    return load


def trained_text(tokenizer, sample) -> list[str]:
    """The runs of trained tokens, as text."""
    marks = "".join("x" if label != -100 else "." for label in sample.labels)
    assert all(label in (-100, token) for token, label in zip(sample.input_ids, sample.labels, strict=True))
    return [tokenizer.decode(sample.input_ids[m.start() : m.end()]) for m in re.finditer("x+", marks)]


def test_messages_train_every_token_of_the_template(load, tokenizer) -> None:
    sample = load("messages", {"messages": DIALOGUE}).samples[0]
    assert sample.input_ids == tuple(tokenizer.apply_chat_template(DIALOGUE)["input_ids"])
    assert tokenizer.decode(sample.input_ids) == WRITTEN
    assert sample.labels == sample.input_ids


def test_assistant_only_loss_trains_what_the_template_marks(load, tokenizer) -> None:
    data = load("messages", {"messages": DIALOGUE}, {"messages": ASKED}, assistant_only_loss=True)
    expected = tokenizer.apply_chat_template(DIALOGUE, return_assistant_tokens_mask=True)
    masked = [
        token if mark else -100
        for token, mark in zip(expected["input_ids"], expected["assistant_masks"], strict=True)
    ]
    assert data.samples[0].labels == tuple(masked)
    assert trained_text(tokenizer, data.samples[0]) == ["2 é<end>", "4<end>"]
    assert len(data.samples) == 1
    assert data.warnings == ["dataset 'chats': 1 of 2 samples have no trained token and are left out"]


def test_sharegpt_reads_as_messages_do(load, tokenizer) -> None:
    speakers = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": speakers[m["role"]], "value": m["content"]} for m in DIALOGUE]
    expected = [*load("messages", {"messages": DIALOGUE}).samples] * 2
    system = {"system": "brief", "conversations": turns[1:]}
    assert list(load("sharegpt", {"conversations": turns}, system).samples) == expected
    only = load("sharegpt", {"conversations": turns}, assistant_only_loss=True).samples[0]
    assert trained_text(tokenizer, only) == ["2 é<end>", "4<end>"]


def test_prompts_of_messages_train_the_completion_as_the_template_ends_it(load, tokenizer) -> None:
    data = load("prompt_completion", {"prompt": ASKED, "completion": [ANSWER]})
    sample = data.samples[0]
    start = tuple(tokenizer.apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"])
    assert sample.input_ids == tuple(tokenizer.apply_chat_template([*ASKED, ANSWER])["input_ids"])
    assert sample.labels == (-100,) * len(start) + sample.input_ids[len(start) :]
    assert trained_text(tokenizer, sample) == ["2 é<end>\n"]
    assert data.prompts == [Prompt(start, "2 é", 5)]
    only = load("prompt_completion", {"prompt": ASKED, "completion": [ANSWER]}, assistant_only_loss=True)
    assert trained_text(tokenizer, only.samples[0]) == ["2 é<end>"]


def test_a_completion_begins_where_the_prompt_alone_differs(load, tokenizer) -> None:
    line = {"prompt": ASKED, "completion": [ANSWER], "chat_template_kwargs": {"think": True}}
    data = load("prompt_completion", line)
    assert trained_text(tokenizer, data.samples[0]) == ["2 é<end>\n"]
    assert data.prompts == []
    assert len(data.warnings) == 1
    assert "1 of 1 samples have a prompt whose end the chat template changes" in data.warnings[0]


def test_tools_go_to_the_template(load, tokenizer) -> None:
    tools = [{"name": "add"}]
    lines = [{"messages": ASKED, "tools": tools}, {"messages": ASKED, "tools": '[{"name": "add"}]'}]
    first, second = load("messages", *lines).samples
    assert tokenizer.decode(first.input_ids).startswith("[add]system:brief")
    assert first == second
    none = [{"messages": ASKED}, *({"messages": ASKED, "tools": tools} for tools in ("", "[]", "null", []))]
    assert list(load("messages", *none).samples) == [load("messages", none[0]).samples[0]] * 5


def test_an_empty_system_text_is_none(load) -> None:
    turns = {"conversations": [{"from": "human", "value": "a"}]}
    with_empty, without = load("sharegpt", turns | {"system": ""}, turns).samples
    assert with_empty == without


def test_parts_of_text_read_as_a_template_writes_them(load, tokenizer) -> None:
    """One that takes lists writes one part after the other; others print the list, or nothing."""
    parts = [{"type": "text", "text": "1+1"}, {"type": "text", "text": "?", "extra": 1}]
    each = "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}"
    template = CHAT.replace("{% else %}{{ m['content'] }}", "{% else %}" + each)
    asked = [{"role": "user", "content": parts}]
    own = tokenizer.apply_chat_template(asked, chat_template=template)["input_ids"]
    plain, listed = load("messages", {"messages": ASKED[1:]}, {"messages": asked}).samples
    assert plain == listed
    assert list(listed.input_ids) == own
    answer = [ANSWER | {"content": [{"type": "text", "text": ANSWER["content"]}]}]
    lines = [{"prompt": asked, "completion": answer}, {"prompt": ASKED[1:], "completion": [ANSWER]}]
    first, second = load("prompt_completion", *lines).samples
    assert first == second
    turns = [{"from": "human", "value": parts}]
    assert load("sharegpt", {"conversations": turns}).samples[0] == plain


def test_null_content_beside_tool_calls_stays_null() -> None:
    """Templates such as DeepSeek's ask whether content is none; Transformers passes null on."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert messages_of_key({"messages": [call | {"name": None}]}, "messages") == [call]


def test_alpaca_trains_the_output_after_stanfords_prompt(load, tokenizer) -> None:
    lines = [{"instruction": "Add.", "input": "1 {2}", "output": "3"}]
    lines += [
        {"instruction": "Hi.", "output": "Yo<end>"} | more for more in ({}, {"input": ""}, {"input": None})
    ]
    data = load("alpaca", *lines)
    assert [trained_text(tokenizer, sample) for sample in data.samples] == [["3<end>"]] + [["Yo<end>"]] * 3
    assert tokenizer.decode(data.samples[0].input_ids) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 {2}\n\n### Response:3<end>"
    )
    assert tokenizer.decode(data.samples[1].input_ids) == (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nHi.\n\n### Response:Yo<end>"
    )
    assert (data.prompts[1].completion, data.prompts[1].completion_tokens) == ("Yo", 3)


@pytest.mark.parametrize(
    ("format", "record", "expected"),
    [
        ("messages", {"text": "a"}, "'messages' is missing; the line has 'text'"),
        (
            "text",
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "'text' is missing; the line has 'prompt', 'chosen', 'rejected'; "
            "lines with 'prompt', 'chosen', 'rejected' are format preference",
        ),
        (
            "alpaca",
            {"prompt": "a", "completion": "b", "label": 1, "source": "c"},
            "lines with 'prompt', 'completion', 'label' are format unpaired",
        ),
        ("messages", {"messages": []}, "'messages' is empty; at least one message is needed"),
        ("messages", {"messages": "hi"}, "'messages' must be a list of objects, got text"),
        ("messages", {"messages": [*ASKED, "hi"]}, "messages[2] must be an object, got text"),
        (
            "messages",
            {"messages": [{"content": "a"}]},
            "messages[0].role is missing; the message has 'content'",
        ),
        (
            "messages",
            {"messages": [{"role": "user"}]},
            "messages[0].content is missing; the message has 'role'",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": 3}]},
            "messages[0].content must be text, got a number",
        ),
        (
            "messages",
            {"messages": [{"role": "bot", "content": "a"}]},
            "messages[0].role must be one of system, ",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": "\ud800"}]},
            "content is not valid text: half",
        ),
        ("messages", {"messages": [{"role": "tool", "content": "a"}]}, "the messages: tools may not speak"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0] must be of type 'text', the only kind that is trained; got 'image_url'",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
            "messages[0].content[0] must be of type 'text', the only kind that is trained; got 'no type'",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text is missing",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": ["a"]}]},
            "messages[0].content[0] must be an object, got text",
        ),
        ("messages", {"messages": ASKED, "tools": "[{"}, "'tools' is not JSON: Expecting property name"),
        ("messages", {"messages": ASKED, "tools": {"a": 1}}, "'tools' must be a list of objects, got an obj"),
        (
            "messages",
            {"messages": ASKED, "chat_template_kwargs": 1},
            "'chat_template_kwargs' must be an object",
        ),
        (
            "messages",
            {"messages": ASKED, "chat_template_kwargs": {"padding": "max_length"}},
            "'chat_template_kwargs': 'padding' is not a template variable; remove it",
        ),
        ("sharegpt", {"conversations": []}, "'conversations' is empty; at least one message is needed"),
        (
            "sharegpt",
            {"conversations": [{"from": "bard", "value": "a"}]},
            "conversations[0].from must be one of",
        ),
        ("sharegpt", {"conversations": [{"from": "human"}]}, "conversations[0].value is missing"),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "a"}], "system": 1},
            "'system' must be text",
        ),
        ("alpaca", {"output": "a"}, "'instruction' is missing; the line has 'output'"),
        ("alpaca", {"instruction": "a", "output": "b", "input": 0}, "'input' must be text, got a number"),
        ("prompt_completion", {"prompt": ASKED, "completion": "a"}, "'completion' must be a list of objects"),
        (
            "prompt_completion",
            {"prompt": "a", "completion": [ANSWER]},
            "'completion' must be text, got a l",
        ),
        ("prompt_completion", {"prompt": [], "completion": [ANSWER]}, "'prompt' is empty"),
    ],
)
def test_malformed_lines_are_named(load, tmp_path: Path, format: str, record: dict, expected: str) -> None:
    good = {"messages": ASKED, "conversations": [{"from": "human", "value": "a"}], "instruction": "a"}
    good |= {"output": "b", "prompt": "a", "completion": "b", "text": "a"}
    with pytest.raises(RunError) as error:
        load(format, good, record)
    assert str(error.value).startswith(f"{tmp_path}/d.jsonl:2: ")
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fault", ["{{ 1 / 0 }}", "{{ range(10**9) }}", "{{ '{x}'.format() }}"])
def test_template_that_fails_is_one_line(tmp_path: Path, fault: str) -> None:
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.chat_template = fault
    path = write_jsonl(tmp_path / "d.jsonl", [{"messages": ASKED}])
    with pytest.raises(RunError, match=r"d\.jsonl:1: the chat template refuses the messages: "):
        load_dataset("chats", path, "messages", max_length=9, vocab_size=260, tokenizer=tokenizer)


def test_a_tokenizer_without_a_chat_template_is_one_line(load, tmp_path: Path) -> None:
    plain = save_tokenizer(tmp_path / "plain")
    for format in ("messages", "sharegpt"):
        with pytest.raises(
            RunError, match=rf"dataset 'chats' of format {format}: messages need a chat template"
        ):
            load(format, {"messages": ASKED}, tokenizer=plain)
    with pytest.raises(RunError, match=r"d\.jsonl:1: messages need a chat template, and the base model's"):
        load("prompt_completion", {"prompt": ASKED, "completion": [ANSWER]}, tokenizer=plain)
    assert load("prompt_completion", {"prompt": "a", "completion": "b"}, tokenizer=plain).samples


def test_assistant_only_loss_needs_marks_and_messages(load, tmp_path: Path) -> None:
    unmarked = save_tokenizer(tmp_path / "unmarked")
    unmarked.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(RunError, match=r"assistant_only_loss needs \{% generation %\} and "):
        load("messages", {"messages": ASKED}, tokenizer=unmarked, assistant_only_loss=True)
    assert load("messages", {"messages": ASKED}, tokenizer=unmarked).samples
    with pytest.raises(RunError, match="1: assistant_only_loss needs messages, but 'prompt' is text"):
        load("prompt_completion", {"prompt": "a", "completion": "b"}, assistant_only_loss=True)


def test_adapters_of_every_format_train_together(tiny_base: Path, tmp_path: Path) -> None:
    base = shutil.copytree(tiny_base, tmp_path / "base")
    (base / "chat_template.jinja").write_text(CHAT)
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = {
        "messages": {"messages": short},
        "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        "prompt_completion": {"prompt": short[:1], "completion": short[1:]},
        "alpaca": {"instruction": "a", "output": "b"},
    }
    for format, line in lines.items():
        write_jsonl(tmp_path / f"{format}.jsonl", [line])
    adapters = [{"name": format, "dataset": format, "lora": {"r": 2}} for format in lines]
    adapters[0] |= {"assistant_only_loss": True}
    adapters[2] |= {"eval_dataset": "prompt_completion", "eval_exact_match": True}
    config = {
        "base_model": str(base),
        "output_dir": "run",
        "device": "cpu",
        "defaults": {"max_steps": 2, "max_length": 64},
        "datasets": [{"name": name, "path": f"{name}.jsonl", "format": name} for name in lines],
        "adapters": adapters,
    }
    result = train(resolve_config(config, folder=tmp_path))
    trained = {name: adapter.tokens for name, adapter in result.adapters.items()}
    # Alpaca's prompt is longer than max_length here, so nothing of it is trained
    assert "no sample of the dataset 'alpaca' has a trained token" in result.adapters["alpaca"].message
    written = len("user:a\nassistant:b\n") + 1
    assert trained == {"messages": 4, "sharegpt": 2 * (written - 1), "prompt_completion": 6, "alpaca": 0}
    assert result.adapters["prompt_completion"].eval_exact_match == {"before": 0.0, "after": 0.0}


def test_every_format_has_keys_of_lines() -> None:
    formats = get_args(DatasetConfig.model_fields["format"].annotation)
    assert set(FORMATS) == set(formats)
    for one in formats:
        line = dict.fromkeys(FORMATS[one].rows[0].split(), 1)
        found = {other: format_hint(other, line) for other in formats}
        assert found[one] == ""
        assert any(hint.endswith(f"are format {one}") for hint in found.values()), one


@pytest.mark.parametrize(
    ("format", "line"),
    [
        ("classification", {"text": "a"}),
        ("unpaired", {"prompt": "a", "completion": "b"}),
        ("question_answering", {"input_ids": [1], "start_positions": 0}),
    ],
)
def test_a_line_that_lacks_one_key_is_of_no_other_format(format: str, line: dict) -> None:
    assert format_hint(format, line) == ""
