"""Write the quickstart's four data sets, training and held-out lines, to `examples/data/`.

    python examples/make_tasks.py

Every line is `{"prompt": ..., "completion": ...}`. All prompts of a task are different, so that no held-out
prompt is in its training file.
"""

import argparse
import json
import random
import string
from collections.abc import Callable
from pathlib import Path

MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
DATA = Path(__file__).parent / "data"

Example = tuple[str, str]


def _word(rng: random.Random, low: int, high: int) -> str:
    """A pronounceable word of `low` to `high` letters."""
    pair = ("bcdfghjklmnprstvwz", "aeiou")
    first = rng.randrange(2)
    return "".join(rng.choice(pair[(first + index) % 2]) for index in range(rng.randint(low, high)))


def sums(rng: random.Random) -> Example:
    """The sum of two small numbers: `7 + 15 = ` and `22`."""
    first, second = rng.randint(0, 49), rng.randint(0, 49)
    return f"{first} + {second} = ", str(first + second)


def reverse(rng: random.Random) -> Example:
    """A short word backwards: `reverse nemo = ` and `omen`."""
    word = _word(rng, 3, 6)
    return f"reverse {word} = ", word[::-1]


def sort(rng: random.Random) -> Example:
    """Four different letters in alphabetical order: `sort tkbz = ` and `bktz`."""
    letters = rng.sample(string.ascii_lowercase, 4)
    return f"sort {''.join(letters)} = ", "".join(sorted(letters))


def dates(rng: random.Random) -> Example:
    """An ISO date in words: `2031-05-09 = ` and `9 May 2031`."""
    year, month, day = rng.randint(1950, 2049), rng.randint(1, 12), rng.randint(1, 28)
    return f"{year}-{month:02d}-{day:02d} = ", f"{day} {MONTHS[month - 1]} {year}"


TASKS: dict[str, Callable[[random.Random], Example]] = {
    "sums": sums,
    "reverse": reverse,
    "sort": sort,
    "dates": dates,
}
TRAINING_LINES = {"sums": 2000, "reverse": 1000, "sort": 1000, "dates": 1000}
HELD_OUT_LINES = 100


def examples(name: str, count: int, seed: int = 0) -> list[Example]:
    """Different examples of one task.

    Args:
        name: A key of `TASKS`.
        count: How many, all with different prompts.
        seed: The same seed gives the same examples.

    Returns:
        Pairs of prompt and completion, in random order.
    """
    rng = random.Random(f"{name} {seed}")
    found: dict[str, str] = {}
    while len(found) < count:
        found.update([TASKS[name](rng)])
    return list(found.items())


def split(name: str, seed: int = 0) -> tuple[list[Example], list[Example]]:
    """The training and the held-out examples of one task.

    Args:
        name: A key of `TASKS`.
        seed: The same seed gives the same split.

    Returns:
        `TRAINING_LINES[name]` training and `HELD_OUT_LINES` held-out examples.

    Raises:
        ValueError: A held-out prompt is also a training prompt.
    """
    found = examples(name, HELD_OUT_LINES + TRAINING_LINES[name], seed)
    held_out, training = found[:HELD_OUT_LINES], found[HELD_OUT_LINES:]
    common = dict(held_out).keys() & dict(training).keys()
    if common:
        raise ValueError(f"task {name}: held-out prompts are also trained on: {sorted(common)[:3]}")
    return training, held_out


def write(path: Path, lines: list[Example]) -> None:
    """Write examples as jsonl of `prompt` and `completion`.

    Args:
        path: The file; it is replaced.
        lines: Pairs of prompt and completion.
    """
    rows = (json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in lines)
    path.write_text("".join(row + "\n" for row in rows), encoding="utf-8")


def write_task(name: str, folder: Path) -> None:
    """Write one task's `<name>.jsonl` and `<name>-held-out.jsonl`.

    Args:
        name: A key of `TASKS`.
        folder: An existing folder.
    """
    training, held_out = split(name)
    write(folder / f"{name}.jsonl", training)
    write(folder / f"{name}-held-out.jsonl", held_out)
    print(f"{name}: {len(training)} training lines, {len(held_out)} held-out lines")


def main() -> None:
    """Parse the command line and write every task's two files."""
    parser = argparse.ArgumentParser(description="Write the data of the quickstart's tasks.")
    parser.add_argument("--output", type=Path, default=DATA)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for name in TASKS:
        write_task(name, args.output)


if __name__ == "__main__":
    main()
