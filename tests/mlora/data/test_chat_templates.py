"""A template of a file in place of the model's, and templates that mark what the assistant says."""

from pathlib import Path
from typing import Any

import pytest
from mlora.config.config_file import resolve_config
from mlora.config.run_config import RunConfig
from mlora.data.chat import with_template
from mlora.data.dataset import load_dataset
from mlora.data.record import Sample
from mlora.errors import RunError
from mlora.model.base_info import BaseInfo
from mlora.tasks.task import Task, TaskBuilder
from tiny_run import run_data, save_tokenizer, write_jsonl

DIALOGUE = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


def config_of(base: Path, folder: Path, dataset: dict[str, Any], **adapter: Any) -> RunConfig:
    data = run_data(base, folder)
    write_jsonl(folder / "chats.jsonl", [{"messages": DIALOGUE}])
    data["datasets"] = [{"name": "chats", "path": "chats.jsonl", "format": "messages"} | dataset]
    own = {"dataset": "chats", "eval_dataset": None, "eval_steps": None, "max_length": 60}
    data["adapters"] = [data["adapters"][0] | own | adapter]
    return resolve_config(data, folder=folder)


def task_of(base: Path, folder: Path, dataset: dict[str, Any], **adapter: Any) -> Task:
    config = config_of(base, folder, dataset, **adapter)
    return TaskBuilder(config, BaseInfo(str(base), str(base))).build(config.adapters[0])


def texts_of(tokenizer: Any, sample: Sample) -> tuple[str, str]:
    """The text of a sample, and that of its trained tokens."""
    pairs = zip(sample.input_ids, sample.labels, strict=True)
    return tokenizer.decode(sample.input_ids), tokenizer.decode([i for i, label in pairs if label != -100])


def test_a_template_of_a_file(tiny_base: Path, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    (tmp_path / "own.jinja").write_text(MARKED)
    own = {"chat_template": "own.jinja"}
    whole = "<user>1+1?<assistant>2<user>2+2?<assistant>4"
    task = task_of(tiny_base, tmp_path, own)
    assert texts_of(tokenizer, task.data.samples[0]) == (whole, whole)
    task = task_of(tiny_base, tmp_path, own, assistant_only_loss=True)
    assert texts_of(tokenizer, task.data.samples[0]) == (whole, "24")
    before = task.data.fingerprint
    (tmp_path / "own.jinja").write_text(MARKED + "\n")
    assert task_of(tiny_base, tmp_path, own).data.fingerprint != before  # a resume refuses it
    with pytest.raises(RunError, match=r"chat_template: .*none\.jinja: cannot be read: No such file"):
        task_of(tiny_base, tmp_path, {"chat_template": "none.jinja"})
    with pytest.raises(RunError, match=r"messages need a chat template, .*; give one in chat_template"):
        task_of(tiny_base, tmp_path, {})


def test_a_template_that_writes_the_day_is_warned_of(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ strftime_now('%Y') }}" + MARKED)
    config = config_of(tiny_base, tmp_path, {"chat_template": "own.jinja"})
    builder = TaskBuilder(config, BaseInfo(str(tiny_base), str(tiny_base)))
    for length in (50, 60):
        builder.build(config.adapters[0].model_copy(update={"max_length": length}))
    assert [line for line in builder.warnings if "strftime_now" in line] == [
        "dataset 'chats': the chat template writes the day on which data is read (strftime_now): a resume "
        "on a later day may read other tokens; name a template with a fixed day in chat_template"
    ]


def test_datasets_of_one_run_may_have_different_templates(tiny_base: Path, tmp_path: Path) -> None:
    """And the tokenizer that they share keeps its own."""
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    (tmp_path / "own.jinja").write_text(MARKED)
    one = with_template(tokenizer, str(tmp_path / "own.jinja"), assistant_only_loss=False)
    two = with_template(tokenizer, None, assistant_only_loss=False)
    assert (one.chat_template, two.chat_template) == (MARKED, "{{ messages[0]['content'] }}")
    assert tokenizer.chat_template == two.chat_template


@pytest.mark.peers
@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("qwen3", "<think>\n\n</think>\n\n2<|im_end|>\n<think>\n\n</think>\n\n4<|im_end|>\n"),
        ("llama3", "2<|eot_id|>4<|eot_id|>"),
        ("qwen2_5", "\n2<|im_end|>\n\n4<|im_end|>\n"),
    ],
)
def test_known_templates_get_the_marks_of_trl(name: str, trained: str, tmp_path: Path) -> None:
    import trl

    template = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    assert "generation %}" not in template.read_text()
    tokenizer = with_template(save_tokenizer(tmp_path), str(template), assistant_only_loss=True)
    path = write_jsonl(tmp_path / "chats.jsonl", [{"messages": DIALOGUE}])
    how: dict[str, Any] = {"max_length": 1000, "vocab_size": 260, "tokenizer": tokenizer}
    data = load_dataset("chats", path, "messages", assistant_only_loss=True, **how)
    assert texts_of(tokenizer, data.samples[0])[1] == trained
