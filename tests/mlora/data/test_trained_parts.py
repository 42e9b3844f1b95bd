"""Which tokens of a chat are trained: what the template marks, less messages marked as not trained."""

import copy
from pathlib import Path
from typing import Any

import pytest
from mlora.data.chat import overlapping
from mlora.data.dataset import Dataset, load_dataset
from mlora.errors import RunError
from tiny_run import save_tokenizer, write_jsonl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MARKED = (
    "{% for m in messages %}{{ m['role'] }}:"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}|{% endgeneration %}"
    "{% else %}{{ m['content'] }}|{% endif %}{% endfor %}"
)
UNLIKE = "{% for m in messages %}{% if loop.last %}last {% endif %}{{ m['content'] }}{% endfor %}"


def chat(*contents: Any, **last: Any) -> list[dict[str, Any]]:
    """Turns of a user and an assistant; the last one has more keys."""
    roles = ("user", "assistant")
    turns = [{"role": roles[place % 2], "content": text} for place, text in enumerate(contents)]
    return [*turns[:-1], turns[-1] | last]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A token a byte."""
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.chat_template = MARKED
    return tokenizer


@pytest.fixture
def load(tmp_path: Path, tokenizer: Any) -> Any:
    def load(line: dict[str, Any], format: str = "messages", **options: Any) -> Dataset:
        path = write_jsonl(tmp_path / "d.jsonl", [line])
        options = {"max_length": 1000, "vocab_size": 260, "tokenizer": tokenizer} | options
        return load_dataset("chats", path, format, **options)

    return load


def with_own(tokenizer: Any, template: str) -> Any:
    """A copy with another template."""
    own = copy.copy(tokenizer)
    own.chat_template = template
    return own


def trained(tokenizer: Any, data: Dataset) -> str:
    """The text of the one sample, with `_` for each token that is not trained."""
    sample = data.samples[0]
    pairs = zip(sample.input_ids, sample.labels, strict=True)
    kept = [tokenizer.convert_ids_to_tokens(token) if label != -100 else "_" for token, label in pairs]
    return tokenizer.convert_tokens_to_string(kept)


@pytest.mark.parametrize("answer", ["yes", "é", "\N{GRINNING FACE}", "a\N{FAMILY}"])
def test_all_bytes_of_an_answer_and_none_of_the_next_turn_are_trained(
    load: Any, tokenizer: Any, answer: str
) -> None:
    data = load({"messages": chat("a", answer, "secret", answer)}, assistant_only_loss=True)
    turn = "_" * len("user:a|assistant:")
    assert trained(tokenizer, data) == f"{turn}{answer}|{'_' * len('user:secret|assistant:')}{answer}|"


def test_an_answer_that_ends_in_characters_without_a_token(tmp_path: Path) -> None:
    """The next turn is not trained; Transformers before 5.24 trains up to the end."""
    words = {word: place for place, word in enumerate(["[UNK]", "user:", "assistant:", "a", "yes", "secret"])}
    fast = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="[UNK]")
    tokenizer.chat_template = MARKED.replace(":", ": ").replace("|", " ")
    path = write_jsonl(tmp_path / "d.jsonl", [{"messages": chat("a", "yes", "secret", "yes")}])
    how: dict[str, Any] = {"max_length": 99, "vocab_size": 6, "tokenizer": tokenizer}
    data = load_dataset("chats", path, "messages", assistant_only_loss=True, **how)
    assert data.samples[0].labels == (-100, -100, -100, 4, -100, -100, -100, 4)


def test_tokens_with_a_character_in_a_span() -> None:
    places = [(0, 2), (2, 3), (2, 3), (3, 3), (3, 6), (6, 7)]
    assert overlapping(places, [(1, 3), (6, 7)]) == [True, True, True, False, False, True]
    assert overlapping(places, []) == [False] * 6


@pytest.mark.parametrize(
    "mark",
    [
        {"weight": 0},
        {"weight": 0.0},
        {"loss": False},
        {"train": False},
        {"training": 0},
        {"trainable": False},
        {"weight": 0, "train": False, "loss": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("only", [False, True])
def test_a_message_marked_as_not_trained(load: Any, tokenizer: Any, mark: dict[str, Any], only: bool) -> None:
    """It stays in the context, as in axolotl, ms-swift and tinker-cookbook."""
    messages = [*chat("a", "no", **mark), *chat("b", "yes")]
    hidden, answer = "_" * len("assistant:no|"), "_" * len("user:b|assistant:") + "yes|"
    rest = hidden + (answer if only else "user:b|assistant:yes|")
    data = load({"messages": messages}, assistant_only_loss=only)
    assert trained(tokenizer, data) == ("_" * len("user:a|") if only else "user:a|") + rest
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in messages]
    turns[1] |= mark
    assert load({"conversations": turns}, "sharegpt", assistant_only_loss=only).samples[0] == data.samples[0]
    line = {"prompt": messages[:1], "completion": messages[1:]}
    data = load(line, "prompt_completion", assistant_only_loss=only)
    assert trained(tokenizer, data) == "_" * len("user:a|") + rest


def test_marks_of_messages_that_are_not_trained_anyway(load: Any, tokenizer: Any) -> None:
    """As SlimOrca marks all turns; a template need not write a system message alone then."""
    tokenizer = with_own(tokenizer, MARKED.replace("{% for", "{{ messages[1]['content'] and '' }}{% for"))
    messages = [{"role": "system", "content": "s", "weight": None}, *chat("a", "yes", weight=1)]
    messages[1]["weight"] = 0
    data = load({"messages": messages}, assistant_only_loss=True, tokenizer=tokenizer)
    assert trained(tokenizer, data) == "_" * len("system:s|user:a|assistant:") + "yes|"


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ({"weight": 0.5}, "message 2 (assistant): 'weight' must be true or false (or 1 or 0), got 0.5"),
        ({"loss": "false"}, "message 2 (assistant): 'loss' must be true or false (or 1 or 0), got 'false'"),
        ({"weight": float("nan")}, "'weight' must be true or false (or 1 or 0), got nan"),
        ({"weight": 0, "train": True}, "'weight' is 0 and 'train' is True; remove one"),
        ({"train_detail": []}, "'train_detail' weighs parts of a message, which is not supported; remove it"),
        ({"loss_scale": 0.5}, "'loss_scale' weighs parts of a message"),
    ],
)
def test_odd_marks_are_refused(load: Any, mark: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError) as error:
        load({"messages": chat("a", "b", **mark)})
    assert message in str(error.value)


def test_marks_that_ask_for_more_than_is_trained_are_refused(load: Any) -> None:
    more = r"message 1 \(user\) is marked as trained, but assistant_only_loss trains only what the assistant"
    messages = chat("a", trainable=True) + chat("a", "b")[1:]
    assert load({"messages": messages}).samples
    with pytest.raises(RunError, match=more):
        load({"messages": messages}, assistant_only_loss=True)
    with pytest.raises(RunError, match=r"message 1 \(user\) is marked as trained, but a prompt is not"):
        load({"prompt": messages[:1], "completion": messages[1:]}, "prompt_completion")
    pair = {"prompt": chat("a"), "chosen": chat("a", "b", weight=0)[1:], "rejected": chat("a", "c")[1:]}
    with pytest.raises(RunError, match="preference data cannot mark messages with 'weight'; remove it"):
        load(pair, "preference")


def test_a_message_whose_place_the_template_hides(load: Any, tokenizer: Any) -> None:
    with pytest.raises(RunError, match=r"message 2 is marked as not trained, but the chat template writes"):
        load({"messages": [*chat("a", "b", loss=False), *chat("c")]}, tokenizer=with_own(tokenizer, UNLIKE))
    own = with_own(tokenizer, MARKED + "<end>")  # as Phi-3's, which ends the whole chat
    data = load({"messages": [*chat("a", "b", loss=False), *chat("c")]}, tokenizer=own)
    assert trained(tokenizer, data) == "user:a|" + "_" * len("assistant:b|") + "user:c|<end>"
    data = load({"messages": chat("a", "b", loss=False)}, tokenizer=with_own(tokenizer, "x" + MARKED))
    assert trained(tokenizer, data) == "xuser:a|" + "_" * len("assistant:b|")
