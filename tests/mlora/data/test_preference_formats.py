"""Preference lines: tokens, labels and cuts, and one line for every malformed line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlora.data.dataset import Dataset, load_dataset
from mlora.data.preference import joined
from mlora.data.record import sequence_lengths
from mlora.errors import RunError
from mlora.memory.model import SilentRows
from mlora.objectives.registry import objective_of
from tiny_run import save_tokenizer, write_jsonl

CHAT = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ASKED = [{"role": "user", "content": "1+1?"}]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A token a byte, as `<end>`."""
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture
def load(tmp_path: Path, tokenizer: Any) -> Any:
    def load(format: str, *records: dict[str, Any], **options: Any) -> Dataset:
        path = write_jsonl(tmp_path / "d.jsonl", list(records))
        options = {"max_length": 100, "vocab_size": 260, "tokenizer": tokenizer} | options
        return load_dataset("pairs", path, format, **options)

    return load


def texts(tokenizer: Any, part: Any) -> tuple[str, str]:
    """The prompt and the trained completion."""
    place = next((i for i, label in enumerate(part.labels) if label != -100), len(part.labels))
    assert part.labels == (-100,) * place + part.input_ids[place:]
    return tokenizer.decode(part.input_ids[:place]), tokenizer.decode(part.input_ids[place:])


TEXTS = {"prompt": "a+b = ", "chosen": "ab", "rejected": "ba<end>"}
MESSAGES = {"prompt": ASKED, "chosen": answer("2"), "rejected": answer("3")}


def test_labels_may_be_numbers_as_in_trl(load: Any) -> None:
    lines = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False, 1, 0)]
    assert [sample.desirable for sample in load("unpaired", *lines).samples] == [True, False, True, False]


@pytest.mark.parametrize("style", ["dpo", "cpo"])
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (TEXTS, [("a+b = ", "ab<end>"), ("a+b = ", "ba<end>")]),
        ({"chosen": "yes it", "rejected": "yes is"}, [("yes i", "t<end>"), ("yes i", "s<end>")]),
        ({"chosen": "say one", "rejected": "say two"}, [("say", " one<end>"), ("say", " two<end>")]),
        ({"chosen": "ab", "rejected": "abcd"}, [("a", "b<end>"), ("a", "bcd<end>")]),
        (
            MESSAGES,
            [("user:1+1?\nassistant:", "2\n{end}"), ("user:1+1?\nassistant:", "3\n{end}")],
        ),
        (
            {"chosen": ASKED + answer("2"), "rejected": ASKED + answer("3")},
            [("user:1+1?\nassistant:", "2\n{end}"), ("user:1+1?\nassistant:", "3\n{end}")],
        ),
    ],
    ids=["text", "shared start", "shared space", "a start of the other", "messages", "shared messages"],
)
def test_pairs(load: Any, tokenizer: Any, style: str, line: Any, expected: Any) -> None:
    """The template ends an answer; only the style of ``CPOTrainer`` adds the end token to it, too."""
    (pair,) = load("preference", line, style=style).samples
    end = "<end>" if style == "cpo" else ""
    assert [texts(tokenizer, part) for part in pair.parts] == [(p, c.format(end=end)) for p, c in expected]


def test_judged(load: Any, tokenizer: Any) -> None:
    records = [
        {"prompt": "a=", "completion": "b", "label": True},
        {"prompt": "c=", "completion": "d", "label": False},
    ]
    first, second = load("unpaired", *records).samples
    assert (first.desirable, second.desirable) == (True, False)
    assert texts(tokenizer, second.sample) == ("c=", "d<end>")
    chat = {"prompt": ASKED, "completion": answer("2"), "label": True}
    assert texts(tokenizer, load("unpaired", chat).samples[0].sample) == ("user:1+1?\nassistant:", "2\n")


def test_cuts_and_what_is_left_out(load: Any, tokenizer: Any) -> None:
    """As TRL's filter: a prompt that fills ``max_length`` leaves nothing to train."""
    lines = [TEXTS, {"prompt": "long prompt", "chosen": "a", "rejected": "b"}]
    found = load("preference", *lines, max_length=8)
    (pair,) = found.samples
    assert [texts(tokenizer, part) for part in pair.parts] == [("a+b = ", "ab"), ("a+b = ", "ba")]
    assert found.warnings == [
        "dataset 'pairs': 2 of 2 samples are longer than max_length 8 and were cut",
        "dataset 'pairs': 1 of 2 samples have no trained token and are left out",
    ]


@pytest.mark.parametrize("style", ["dpo", "cpo"])
def test_pairs_without_a_difference_are_warned_of(load: Any, style: str) -> None:
    same = [{"prompt": "a ", "chosen": "b", "rejected": "b"}, {"chosen": "a b", "rejected": "a b"}]
    found = load("preference", TEXTS, *same, style=style)
    assert len(found.samples) == 3
    assert found.warnings == [
        "dataset 'pairs': 2 of 3 samples have a chosen completion that equals the rejected one"
    ]


def test_a_batch_for_kto_is_one_sample_with_rotated_completions(load: Any, tokenizer: Any) -> None:
    """Each prompt with the whole completion of the sample before, cut to ``max_length`` anew."""
    records = [
        {"prompt": "1", "completion": "one", "label": True},
        {"prompt": "22", "completion": "twotwo", "label": False},
        {"prompt": "333333", "completion": "three", "label": True},
    ]
    samples = load("unpaired", *records, max_length=8).samples
    (made,) = joined("me", samples, objective_of("kto"))
    own = [("1", "one<end>"), ("22", "twotwo"), ("333333", "th")]
    mixed = [("1", "three<end>"), ("22", "one<end>"), ("333333", "tw")]
    assert [texts(tokenizer, part) for part in made.sequences] == own
    assert [(owner, texts(tokenizer, part)) for owner, part in made.silent] == [
        *(("__base__", each) for each in own),
        *(("me", each) for each in mixed),
        *(("__base__", each) for each in mixed),
    ]
    assert (made.facts, made.units) == ((1.0, 0.0, 1.0), 3)
    assert joined("me", [made], objective_of("kto")) == [made]
    lengths = sequence_lengths([made])
    assert [isinstance(length, SilentRows) for length in lengths] == [False] * 3 + [True] * 9
    (plain,) = joined("me", samples, objective_of({"name": "kto", "loss_type": "apo_zero_unpaired"}))
    assert len(plain.silent) == 3


def test_a_batch_of_pairs_shares_the_mean_of_its_tokens(load: Any) -> None:
    lines = [TEXTS, {"prompt": "x", "chosen": "four", "rejected": ""}]
    samples = load("preference", *lines).samples
    for name, tokens in (
        ("cpo", 3 + 5),
        ("orpo", 8 + 5),
    ):  # orpo's prompts are trained, but for the first token
        made = joined("me", samples, objective_of(name))
        assert [sample.facts for sample in made] == [(3.0, 3.0, 2 / tokens), (5.0, 1.0, 2 / tokens)]
        assert sum(sample.sequences[0].trained_tokens for sample in made) == tokens


@pytest.mark.parametrize(
    ("format", "line", "message"),
    [
        (
            "preference",
            {"prompt": "a", "chosen": "b"},
            "'rejected' is missing; the line has 'prompt', 'chosen'",
        ),
        (
            "preference",
            {"prompt": "a", "chosen": "b", "rejected": 3},
            "'rejected' must be text, got a number",
        ),
        (
            "preference",
            {"prompt": "a", "chosen": answer("b"), "rejected": answer("c")},
            "all must be text, or all lists of messages; 'prompt' is text, 'chosen' is messages",
        ),
        ("preference", {"prompt": ASKED, "chosen": [], "rejected": answer("c")}, "'chosen' is empty"),
        (
            "unpaired",
            {"prompt": "a", "completion": "b"},
            "'label' is missing; the line has 'prompt', 'completion'",
        ),
        (
            "unpaired",
            {"prompt": "a", "completion": "b", "label": 2},
            "'label' must be true or false (or 1 or 0), got 2",
        ),
        (
            "unpaired",
            {"prompt": "a", "completion": "b", "label": "good"},
            "'label' must be true or false (or 1 or 0), got text",
        ),
    ],
)
def test_a_malformed_line_is_one_line(
    load: Any, tmp_path: Path, format: str, line: Any, message: str
) -> None:
    good: dict[str, Any] = (
        TEXTS if format == "preference" else {"prompt": "a", "completion": "b", "label": True}
    )
    with pytest.raises(RunError) as error:
        load(format, good, line)
    (told,) = str(error.value).splitlines()
    assert told.startswith(f"{tmp_path / 'd.jsonl'}:2: {message}")


def test_what_the_tokenizer_lacks(load: Any, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the base model has no tokenizer"):
        load("preference", TEXTS, tokenizer=None)
    bare = save_tokenizer(tmp_path)
    with pytest.raises(RunError, match=r"d\.jsonl:1: messages need a chat template"):
        load("preference", MESSAGES, tokenizer=bare)
