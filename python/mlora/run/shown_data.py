"""Samples as adapters see them, with the tokens that are trained: what `mlora data show` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mlora.config.aliases import nearest
from mlora.config.run_config import RunConfig
from mlora.data.preference import Judged, Pair
from mlora.data.record import NOT_TRAINED, AnswerSample, LabelledSample, Sample
from mlora.errors import RunError
from mlora.model.base_info import BaseInfo
from mlora.tasks.task import Task, TaskBuilder
from mlora_ext.adapters.trained_parts import labels_of

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class ShownSequence:
    """A sequence of a sample.

    Attributes:
        title: which one it is, and what it has beside its tokens.
        input_ids, labels: as the loss sees them; -100 = not trained.
        spans: its text in pieces, and whether each is trained; of an answer, whether it is the answer.
    """

    title: str
    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    spans: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class ShownData:
    """The first samples of a dataset, for adapters that read it alike."""

    adapters: tuple[str, ...]
    dataset: str
    samples: int
    tokens: int
    sequences: tuple[ShownSequence, ...]


def shown_data(
    config: RunConfig,
    names: Sequence[str] = (),
    *,
    count: int = 3,
    held_out: bool = False,
    warn: Callable[[str], object] = print,
) -> Iterator[ShownData]:
    """Yields each dataset once for all adapters that read it alike. Loads the tokenizer, no weights.

    Args:
        names: of adapters; none: all.
        count: samples of each dataset, the first ones.
        held_out: show ``eval_dataset`` in place of ``dataset``.
        warn: is told what reading the data warned of.

    Raises:
        RunError: a name is unknown, or data cannot be read.
    """
    if config.sweep is not None:
        config = RunConfig.model_validate(config.with_samples())
    known = [adapter.name for adapter in config.adapters]
    for name in names:
        if name not in known:
            raise RunError(f"{name}: no such adapter; {nearest(name, known, 'adapters')}")
    base = BaseInfo(config.base_model, config.base_folder)
    builder = TaskBuilder(config, base)
    tasks = [builder.build(adapter) for adapter in config.adapters if not names or adapter.name in names]
    for line in builder.warnings:
        warn(line)
    read: dict[int, list[Task]] = {}
    for task in tasks:
        data = task.eval_data if held_out else task.data
        if data is not None:
            read.setdefault(id(data), []).append(task)
    if held_out and not read:
        raise RunError("no adapter has an eval_dataset")
    for alike in read.values():
        yield _shown(alike, _decoder(base), count, held_out)


def _decoder(base: BaseInfo) -> Decode:
    try:
        tokenizer = base.tokenizer()
    except RunError:  # token ids need none
        return lambda ids: "".join(f" {token}" for token in ids)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    return decode


def _shown(tasks: Sequence[Task], decode: Decode, count: int, held_out: bool) -> ShownData:
    task = tasks[0]
    data = task.eval_data if held_out else task.data
    assert data is not None
    name = task.config.eval_dataset if held_out else task.config.dataset
    found = [
        _sequence(sample, title, decode, task)
        for index in range(min(count, len(data.samples)))
        for title, sample in _sequences(data.samples[index], f"sample {index + 1}")
    ]
    names = tuple(each.name for each in tasks)
    return ShownData(names, str(name), len(data.samples), data.samples.tokens, tuple(found))


def _sequences(sample: Any, title: str) -> Iterator[tuple[str, Sample]]:
    if isinstance(sample, Pair):
        yield f"{title}, chosen", sample.chosen
        yield f"{title}, rejected", sample.rejected
    elif isinstance(sample, Judged):
        yield f"{title}, {'desirable' if sample.desirable else 'undesirable'}", sample.sample
    else:
        yield title, sample


def _sequence(sample: Sample, title: str, decode: Decode, task: Task) -> ShownSequence:
    ids, labels = sample.input_ids, sample.labels
    marked, what = [label != NOT_TRAINED for label in labels], "trained"
    is_whole = isinstance(sample, LabelledSample) and sample.whole
    if isinstance(sample, AnswerSample):
        first, last = sample.values
        marked, what = [first <= place <= last for place in range(len(ids))], "the answer"
    elif isinstance(sample, LabelledSample):
        what = f"labelled: {_labels_of(sample, task)}"
        if is_whole:
            what, marked = f"label {_labels_of(sample, task)}", [False] * len(ids)
    else:
        marked[:1] = [False] * len(marked[:1])  # no token precedes it
    places = [0, *(place for place in range(1, len(ids)) if marked[place] != marked[place - 1]), len(ids)]
    texts = [_text(ids, start, end, decode) for start, end in pairwise(places)]
    marks = [marked[start] for start in places[:-1]]
    title += f": {len(ids)} tokens, {what}" if is_whole else f": {len(ids)} tokens, {sum(marked)} {what}"
    return ShownSequence(title, ids, labels, tuple(zip(texts, marks, strict=True)))


def _text(ids: Sequence[int], start: int, end: int, decode: Decode) -> str:
    """Returns the text of tokens in their place: of a word's later tokens, no space is lost."""
    before, whole = decode(ids[:start]), decode(ids[:end])
    return whole.removeprefix(before) if whole.startswith(before) else decode(ids[start:end])


def _labels_of(sample: LabelledSample, task: Task) -> str:
    """Returns the labels of a sequence or of its tokens, by their names where they have some."""
    names = labels_of(task.lora).get("label_names", ()) if task.lora else ()
    if sample.values:
        named = [f"{name} {value:g}" for name, value in zip(names, sample.values, strict=False)]
        return ", ".join(named or (f"{value:g}" for value in sample.values))
    found = (label for label in sample.labels if label != NOT_TRAINED)
    return ", ".join(str(names[label]) if label < len(names) else str(label) for label in found)
