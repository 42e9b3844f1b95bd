"""Datasets: token ids and labels of each format, truncation, and one line for every malformed line."""

import json
import random
from pathlib import Path

import pytest
from mlora.data.dataset import Dataset, Prompt, Sample, load_dataset, read_prompt_lines
from mlora.errors import RunError
from tiny_run import random_tokens, save_tokenizer, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def load(path: Path, format: str = "tokens", **options) -> Dataset:
    options = {"max_length": 100, "vocab_size": 260, "ends": (0,)} | options
    return load_dataset("data", path, format, **options)


def test_tokens_keep_ids_and_labels(tmp_path: Path) -> None:
    records = random_tokens(9, seed=random.randrange(2**32))
    del records[3]["labels"]
    data = load(write_jsonl(tmp_path / "d.jsonl", records))
    for record, sample in zip(records, data.samples, strict=True):
        assert sample.input_ids == tuple(record["input_ids"])
        assert sample.labels == tuple(record.get("labels", record["input_ids"]))
    assert data.warnings == []
    assert data.prompts == []


@pytest.mark.parametrize("mask", [[1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 1, 1]])
def test_padding_is_dropped(tmp_path: Path, mask: list[int]) -> None:
    """Wherever it stands: a model that attends to the rest alone sees the line without padding."""
    ids, labels = iter([5, 6, 7]), iter([5, -100, 7])
    line = {"attention_mask": mask, "input_ids": [next(ids) if one else 9 for one in mask]}
    places, blank = iter(range(1, 4)), mask.count(0)
    line |= {"position_ids": [next(places) if one else 1 for one in mask]}
    parts = [0, blank, 3] if mask[0] == 0 and mask[1] == 0 else [len(mask)]
    line |= {"seq_lengths": parts if mask[-1] else [3, blank]}
    path = write_jsonl(tmp_path / "d.jsonl", [line | {"labels": [next(labels) if m else 9 for m in mask]}])
    assert list(load(path).samples) == [Sample((5, 6, 7), (5, -100, 7))]
    assert load(write_jsonl(tmp_path / "d.jsonl", [line])).samples[0].labels == (5, 6, 7)


@pytest.mark.parametrize("key", ["completion_mask", "assistant_masks"])
def test_masks_of_trained_tokens_are_those_of_trl(tmp_path: Path, key: str) -> None:
    """TRL's collator sets the labels of other tokens to -100."""
    line = {"input_ids": [5, 6, 7, 8], key: [0, 1, 0, 1], "attention_mask": [1, 1, 1, 1]}
    assert load(write_jsonl(tmp_path / "d.jsonl", [line])).samples[0].labels == (-100, 6, -100, 8)


def test_trained_tokens_are_those_after_the_first() -> None:
    assert Sample((5, 6, 7, 8), (5, -100, 7, 8)).trained_tokens == 2


def test_text_ends_with_the_end_token_once(tmp_path: Path, tokenizer) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "ab c"}, {"text": "x<end>"}])
    data = load(path, "text", tokenizer=tokenizer)
    ab_c = (*tuple(tokenizer.convert_tokens_to_ids(list("abĠc"))), 0)
    x = (*tuple(tokenizer.convert_tokens_to_ids(["x"])), 0)
    assert [sample.input_ids for sample in data.samples] == [ab_c, x]
    assert [sample.labels for sample in data.samples] == [ab_c, x]


def test_prompt_completion_trains_completion_and_end_token(tmp_path: Path, tokenizer) -> None:
    path = write_jsonl(
        tmp_path / "d.jsonl", [{"prompt": "1+1=", "completion": "2"}, {"prompt": "é", "completion": "e"}]
    )
    data = load(path, "prompt_completion", tokenizer=tokenizer)
    first = data.samples[0]
    assert tokenizer.decode(first.input_ids) == "1+1=2<end>"
    assert first.labels == (-100,) * 4 + first.input_ids[4:]
    assert len(data.samples[1].input_ids) == 4  # two bytes, one letter, the end
    assert data.prompts[0] == Prompt(first.input_ids[:4], "2", 2)


def test_prompt_that_joins_its_completion_is_masked_as_far_as_it_stays_as_in_trl(tmp_path: Path) -> None:
    joining = save_tokenizer(tmp_path, merges=[("c", "d")])
    path = write_jsonl(
        tmp_path / "d.jsonl", [{"prompt": "abc", "completion": "def"}, {"prompt": "ab", "completion": "c"}]
    )
    data = load(path, "prompt_completion", tokenizer=joining)
    ids = data.samples[0].input_ids
    assert joining.convert_ids_to_tokens(ids) == ["a", "b", "cd", "e", "f", "<end>"]
    assert data.samples[0].labels == (-100, -100, *ids[2:])
    alone = tuple(joining.convert_tokens_to_ids(list("abc")))
    assert data.prompts[0] == Prompt(alone, "def", 4)  # it is asked with all of the prompt
    assert len(data.warnings) == 1
    assert "1 of 2 samples have a prompt whose last token changes" in data.warnings[0]


def test_long_samples_are_cut_and_counted_once(tmp_path: Path) -> None:
    records = [{"input_ids": list(range(1, 1 + length))} for length in (3, 8, 5, 9)]
    data = load(write_jsonl(tmp_path / "d.jsonl", records), max_length=5)
    assert [len(sample.input_ids) for sample in data.samples] == [3, 5, 5, 5]
    assert data.samples[1] == Sample((1, 2, 3, 4, 5), (1, 2, 3, 4, 5))
    assert data.warnings == ["dataset 'data': 2 of 4 samples are longer than max_length 5 and were cut"]


def test_samples_without_trained_tokens_are_left_out_and_counted(tmp_path: Path) -> None:
    records = [{"input_ids": [1, 2]}, {"input_ids": [1, 2], "labels": [1, -100]}, {"input_ids": [4]}]
    data = load(write_jsonl(tmp_path / "d.jsonl", records))
    assert [sample.input_ids for sample in data.samples] == [(1, 2)]
    assert data.warnings == ["dataset 'data': 2 of 3 samples have no trained token and are left out"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"input_ids": [1, 2', "is not JSON"),
        ("{]", "; expected one JSON object per line"),
        ("{", "is not JSON: an object continues on the next line; write each object on one line"),
        ('{"text": "x', "is not JSON: Unterminated string starting at character 1"),
        ("[" * 100_000, "is not JSON: brackets are nested too deeply"),
        ("[" + "1" * 5000 + "]", "is not JSON: a number has more than 4300 digits"),
        ("[1, 2]", "must be a JSON object, got a list"),
        ('{"ids": [1]}', "'input_ids' is missing; the line has 'ids'"),
        ('{"input_ids": 3}', "'input_ids' must be a list of whole numbers, got a number"),
        ('{"input_ids": [1, NaN]}', "'input_ids' must hold whole numbers, got nan"),
        ('{"input_ids": [1, true]}', "'input_ids' must hold whole numbers, got True"),
        ('{"input_ids": [1, 260]}', "token id 260 is outside the base model's vocabulary of 260"),
        ('{"input_ids": [-1, 2]}', "token id -1 is outside"),
        ('{"input_ids": [1, 2], "labels": [1]}', "'labels' has 1 entries, but 'input_ids' has 2"),
        ('{"input_ids": [1, 2], "labels": [1, -5]}', "label -5 is outside"),
        ('{"input_ids": [1, 2], "attention_mask": [1]}', "'attention_mask' has 1 entries, but 'input_ids'"),
        ('{"input_ids": [1, 2], "attention_mask": [1, 2]}', "'attention_mask' must hold 0 and 1, got 2"),
        ('{"input_ids": [1, 2], "attention_mask": [0.0, 1]}', "'attention_mask' must hold whole numbers"),
        ('{"input_ids": [1, 2], "completion_mask": [0]}', "'completion_mask' has 1 entries, but"),
        ('{"input_ids": [1, 2], "position_ids": [0]}', "'position_ids' has 1 entries, but 'input_ids' has 2"),
        ('{"input_ids": [1, 2], "position_ids": [0, 0]}', "'position_ids' says that the line holds several"),
        ('{"input_ids": [1, 2], "seq_lengths": [1, 1]}', "write each on a line of its own"),
        ('{"input_ids": [1, 2], "seq_lengths": [1, 1], "position_ids": [5, 6]}', "'seq_lengths' says that"),
    ],
)
def test_malformed_lines_give_file_and_number(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n\n' + line + "\n")
    with pytest.raises(RunError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "a"}, "'completion' is missing; the line has 'prompt'"),
        ({"prompt": "a", "completion": None}, "'completion' must be text, got null"),
        (
            {"prompt": "ab\ud800", "completion": "c"},
            "1: 'prompt' is not valid text: half of a surrogate",
        ),
    ],
)
def test_malformed_prompts_are_named(tmp_path: Path, tokenizer, record: dict, expected: str) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [record])
    with pytest.raises(RunError, match=expected):
        load(path, "prompt_completion", tokenizer=tokenizer)


def test_files_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    with pytest.raises(RunError, match=r"d\.jsonl: cannot be read: No such file"):
        load(path)
    path.write_text("\n")
    with pytest.raises(RunError, match=r"d\.jsonl: the dataset 'data' is empty"):
        load(path)
    path.write_text(json.dumps({"input_ids": [3], "labels": [3]}) + "\n")
    with pytest.raises(RunError, match="no sample of the dataset 'data' has a trained token"):
        load(path)
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(RunError, match=r"d\.jsonl:1: is not UTF-8"):
        load(path)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file whose reading fails")
def test_a_file_that_opens_but_cannot_be_read() -> None:
    with pytest.raises(RunError, match=r"^/proc/self/mem: cannot be read: Input/output error$"):
        load(Path("/proc/self/mem"))


def test_text_needs_a_tokenizer_with_an_end_token(tmp_path: Path, tokenizer) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"text": "a"}])
    with pytest.raises(RunError, match="has no tokenizer; use a dataset of format tokens"):
        load(path, "text")

    tokenizer = save_tokenizer(tmp_path)
    tokenizer.eos_token = None
    with pytest.raises(RunError, match="has no end token"):
        load(path, "text", tokenizer=tokenizer)


def test_samples_beyond_the_models_positions_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [1] * 20}])
    with pytest.raises(
        RunError, match=r"d\.jsonl:2: the sample has 20 tokens, but the base model takes at most 16"
    ):
        load(path, max_positions=16)
    assert len(load(path, max_positions=16, max_length=16).samples[1].input_ids) == 16


def test_prompt_files(tmp_path: Path) -> None:
    text = tmp_path / "p.txt"
    text.write_text("one\n\ntwo\n")
    assert read_prompt_lines(text) == ["one", "two"]
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "x", "completion": "y"}])
    assert read_prompt_lines(path) == ["x"]
