"""Start and end tokens stand once, whatever a tokenizer's post-processor adds to a text.

The expected ids are TRL's where the post-processor adds no end. Where it adds one, TRL ends a prompt with it
and a sample with two; here the end that the format writes is the only one.
"""

from pathlib import Path
from typing import Any

import pytest
from mlora.cli.answers import tokens_of
from mlora.data.dataset import Prompt, load_dataset
from mlora.data.label_formats import LabelRules
from tiny_run import save_tokenizer, write_jsonl

END, MORE = 0, 258
ADDED = {"$A": (), "$A <end>": (), "<more> $A": (MORE,), "<more> $A <end>": (MORE,), "<end> $A <end>": (END,)}


@pytest.mark.parametrize(("added", "start"), ADDED.items())
@pytest.mark.parametrize("given", ["", "<more>"])
def test_every_format(added: str, start: tuple[int, ...], given: str, tmp_path: Path) -> None:
    """A text that begins with the start token, as `given`, does not get it twice."""
    tokenizer = save_tokenizer(tmp_path, added=added, bos_token="<more>")

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.convert_tokens_to_ids(list(text)))

    def read(format: str, **line: Any) -> Any:
        path = write_jsonl(tmp_path / "d.jsonl", [line])
        how: dict[str, Any] = {"max_length": 99, "vocab_size": 260, "ends": (END,)}
        rules = LabelRules("SEQ_CLS", "single_label_classification", 2)
        data = load_dataset("d", path, format, tokenizer=tokenizer, labels=rules, **how)
        assert data.warnings == []
        return data

    begin = start if start == (MORE,) or not given else (*start, MORE)
    asked, whole = (*begin, *ids("ab")), (*begin, *ids("abc"), END)
    assert read("text", text=f"{given}abc").samples[0].input_ids == whole
    assert read("text", text=f"{given}abc<end>").samples[0].input_ids == whole
    data = read("prompt_completion", prompt=f"{given}ab", completion="c")
    assert data.samples[0].input_ids == whole
    assert data.samples[0].labels == (-100,) * len(asked) + whole[len(asked) :]
    assert data.prompts == [Prompt(asked, "c", 2)]
    assert tokens_of(tokenizer, [f"{given}ab"], False, None) == [asked]
    pair: dict[str, Any] = {"chosen": "c", "rejected": "d"}
    for style, answers in (("preference", pair), ("unpaired", {"completion": "c", "label": 1})):
        sample = read(style, prompt=f"{given}ab", **answers).samples[0]
        assert sample.parts[0].input_ids == whole
    tail = (END,) if added.endswith("<end>") else ()  # a classifier reads what Transformers' Trainer reads
    labelled = read("classification", text=f"{given}ab", label=1).samples[0]
    assert labelled.input_ids == (*asked, *tail)
    assert tokens_of(tokenizer, [f"{given}ab"], False, None, end=True) == [labelled.input_ids]


@pytest.mark.parametrize(("added", "start"), ADDED.items())
def test_an_empty_prompt_is_the_start_alone(added: str, start: tuple[int, ...], tmp_path: Path) -> None:
    assert tokens_of(save_tokenizer(tmp_path, added=added), [""], False, None) == [start]


def test_any_end_token_ends_an_answer(tmp_path: Path) -> None:
    """In texts and in chats, whose turns the template ends with a token that is not the tokenizer's."""
    tokenizer = save_tokenizer(tmp_path, additional_special_tokens=["<more>"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}<more>{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yes"}]
    other = [{"role": "assistant", "content": "no"}, turns[0], turns[1]]
    said = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in turns]
    lines: dict[str, list[dict[str, Any]]] = {
        "prompt_completion": [{"prompt": "ux<more>a", "completion": "yes<more>"}],
        "messages": [{"messages": turns}, {"messages": other}, {"messages": turns[:1]}],
        "sharegpt": [{"conversations": said}],
    }
    found = {}
    for format, rows in lines.items():
        path = write_jsonl(tmp_path / f"{format}.jsonl", rows)
        for ends in ((END,), (END, MORE), ()):
            how: dict[str, Any] = {"max_length": 99, "vocab_size": 260, "ends": ends}
            data = load_dataset("d", path, format, tokenizer=tokenizer, **how)
            found[format, len(ends)] = [
                (tokenizer.decode(p.input_ids), p.completion, p.completion_tokens) for p in data.prompts
            ]
    answer = ("ux<more>a", "yes", 4)
    assert found["prompt_completion", 2] == [answer]
    assert found["prompt_completion", 1] == [("ux<more>a", "yes<more>", 5)]  # the format's own end follows
    assert found["messages", 2] == [answer, ("ano<more>ux<more>a", "yes", 4)]
    assert found["sharegpt", 2] == [answer]
    assert found["messages", 1] == found["sharegpt", 1] == []
    assert not any(prompts for (_, count), prompts in found.items() if not count)


def test_a_last_answer_that_the_template_opens_in_another_way_has_no_prompt(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}think{% endif %}"
    )
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yes"}]
    path = write_jsonl(tmp_path / "d.jsonl", [{"messages": turns}])
    how: dict[str, Any] = {"max_length": 99, "vocab_size": 260, "ends": (END,)}
    data = load_dataset("d", path, "messages", tokenizer=tokenizer, **how)
    assert data.prompts == []
    assert data.warnings == [
        "dataset 'd': 1 of 1 samples have a last answer that the chat template opens in another way than "
        "add_generation_prompt; exact match leaves them out"
    ]
