"""Held-out loss and exact match of several adapters at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from mlora.data.preference import joined
from mlora.data.record import Sample, sequence_lengths
from mlora.engine.adapter_state import BatchResult
from mlora.model.generation import GenerationRequest, complete, text_of, without_end
from mlora.tasks.task import Task

if TYPE_CHECKING:
    from mlora.engine.engine import Engine
    from mlora.model.base_info import BaseInfo

# rows of one generation batch; completions are short, so this bounds the key-value cache, not the time
GENERATION_ROWS = 64
SAMPLES = 4  # prompts of a task whose answers `samples.jsonl` keeps
SAMPLE_LETTERS = 600  # of a prompt or an answer that is kept


Batch = Mapping[str | None, Sequence[Sample]]
Fits = Callable[[Mapping[str, Sequence[int]]], bool]
"""Whether memory holds a micro-batch, given the sequence lengths of each task."""


def _never() -> None:
    """Interrupts nothing."""


def evaluate_losses(
    engine: Engine, tasks: Sequence[Task], fits: Fits, check: Callable[[], None] = _never
) -> dict[str, BatchResult]:
    """Returns sums over tasks' ``eval_data``, one micro-batch of each at a time, as far as memory allows.

    `fits` is for training; an evaluation needs less. `check` is called before each micro-batch; what it
    raises ends the evaluation.
    """
    sums = {task.name: BatchResult(0.0, 0) for task in tasks}
    batches = _checked((part for batch in _batches(tasks) for part in _parts(batch, fits)), check)
    for results in engine.evaluate_each(batches, raises=False):
        for name, result in results.items():
            sums[name] = sums[name].plus(result)
    return sums


def _checked(batches: Iterable[Batch], check: Callable[[], None]) -> Iterator[Batch]:
    for batch in batches:
        check()
        yield batch


def _batches(tasks: Sequence[Task]) -> Iterator[dict[str | None, Sequence[Sample]]]:
    """Yields one micro-batch of each task at a time, until all samples have passed."""
    for turn in count():
        batches: dict[str | None, Sequence[Sample]] = {}
        for task in tasks:
            assert task.eval_data is not None
            size = task.config.per_device_eval_batch_size
            rows = task.eval_data.samples[turn * size : (turn + 1) * size]
            if rows:
                batches[task.name] = joined(task.name, rows, task.objective)
        if not batches:
            return
        yield batches


def _parts(
    batch: Mapping[str | None, Sequence[Sample]], fits: Fits
) -> Iterator[Mapping[str | None, Sequence[Sample]]]:
    """Yields a batch, halved until each part fits into memory; a single sample is not cut."""
    rows = [(name, sample) for name, samples in batch.items() for sample in samples]
    lengths = {str(name): sequence_lengths(samples) for name, samples in batch.items()}
    if len(rows) < 2 or fits(lengths):
        yield batch
        return
    for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        part: dict[str | None, list[Sample]] = {}
        for name, sample in half:
            part.setdefault(name, []).append(sample)
        yield from _parts(part, fits)


def _rows_that_fit(requests: Sequence[GenerationRequest], fits: Fits) -> int:
    """Returns how many prompts fit into one batch if all are as long as the longest."""
    longest = max((len(r.input_ids) + r.max_new_tokens for r in requests), default=1)
    names = list(dict.fromkeys(request.adapter for request in requests))
    rows = GENERATION_ROWS
    while rows > 1 and not fits(
        {name: [longest] * len(range(rows)[i :: len(names)]) for i, name in enumerate(names)}
    ):
        rows //= 2
    return rows


def complete_over_stages(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    *,
    ends: Sequence[int],
    rows: int,
    check: Callable[[], None] = _never,
) -> list[tuple[int, ...]]:
    """Completes prompts greedily over several stages; each token computes the whole sequences anew.

    No stage keeps keys and values: simple, and good enough for completions of some tens of tokens. Returns
    the new tokens of each request, up to and with the first of `ends`, or ``max_new_tokens`` of them.
    """
    new: list[list[int]] = [[] for _ in requests]
    going = [index for index, request in enumerate(requests) if request.max_new_tokens > 0]
    while going:
        for start in range(0, len(going), rows):
            check()
            batches: dict[str | None, list[list[int]]] = {}
            part = sorted(going[start : start + rows], key=lambda index: requests[index].adapter)
            for index in part:
                ids = [*requests[index].input_ids, *new[index]]
                batches.setdefault(requests[index].adapter, []).append(ids)
            tokens = engine.next_tokens(batches)
            drawn = [token for name in batches for token in tokens[str(name)]]
            for index, token in zip(part, drawn, strict=True):
                new[index].append(token)
        going = [i for i in going if new[i][-1] not in ends and len(new[i]) < requests[i].max_new_tokens]
    return [tuple(tokens) for tokens in new]


@dataclass
class Answers:
    """What greedy generation made of a task's held-out prompts.

    Args:
        hits: prompts that it completed exactly.
        count: all prompts.
        samples: the first few of them: ``prompt``, ``expected``, ``answer`` and whether it is ``exact``.
    """

    hits: int = 0
    count: int = 0
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The share (0 to 1) of prompts that were completed exactly."""
        return self.hits / self.count


def answer_prompts(
    engine: Engine,
    tasks: Sequence[Task],
    base: BaseInfo,
    fits: Fits,
    check: Callable[[], None] = _never,
) -> Mapping[str, Answers]:
    """Returns what greedy generation makes of each task's prompts, by task name.

    A completion counts if its text equals the expected one and an end token of the base model follows, within
    as many tokens as the expected completion has. `check` is called for each token; what it raises ends the
    work.
    """
    wanted = [(task.name, prompt) for task in tasks if task.eval_data for prompt in task.eval_data.prompts]
    requests = [
        GenerationRequest(name, prompt.input_ids, prompt.completion_tokens) for name, prompt in wanted
    ]
    tokenizer, ends = base.tokenizer(), base.end_tokens()
    rows = _rows_that_fit(requests, fits)
    if engine.alone:
        answers = complete(engine.model, requests, ends=ends, rows=rows, check=check)
    else:
        answers = complete_over_stages(engine, requests, ends=ends, rows=rows, check=check)
    found = {task.name: Answers() for task in tasks}
    for (name, prompt), answer in zip(wanted, answers, strict=True):
        own, ended = found[name], bool(answer) and answer[-1] in ends
        keep = len(own.samples) < SAMPLES
        own.count += 1
        if not (ended or keep):
            continue
        text = text_of(tokenizer, without_end(answer, ends), special=True)
        exact = ended and text == prompt.completion
        own.hits += exact
        if keep:
            asked = text_of(tokenizer, prompt.input_ids, special=True)
            own.samples.append(_sample(asked, prompt.completion, text, exact))
    return found


def _sample(prompt: str, expected: str, answer: str, exact: bool) -> dict[str, Any]:
    """Returns the end of a prompt and the beginnings of what follows: files and reports stay small."""
    if len(prompt) > SAMPLE_LETTERS:
        prompt = f"…{prompt[-SAMPLE_LETTERS:]}"
    texts = {"expected": expected, "answer": answer}
    cut = {
        key: f"{text[:SAMPLE_LETTERS]}…" if len(text) > SAMPLE_LETTERS else text
        for key, text in texts.items()
    }
    return {"prompt": prompt, **cut, "exact": exact}
