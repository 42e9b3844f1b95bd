"""Write preference data for `preferences.yaml` to `examples/data/`, from the lines of `make_tasks.py`.

    python examples/make_preferences.py

A pair has the right answer as `chosen` and the task's own letters or a wrong number as `rejected`. Of the
unpaired lines every second one has a wrong answer and `"label": false`.
"""

import json
import random
from pathlib import Path

DATA = Path(__file__).parent / "data"
LINES, HELD_OUT = 120, 16


def wrong(prompt: str, answer: str, rng: random.Random) -> str:
    """An answer that is not right: the letters as they were asked, or another number."""
    if answer.isdecimal():
        return str(int(answer) + rng.choice([-10, -1, 1, 10]))
    asked = prompt.split()[1]
    return asked if asked != answer else asked[::-1]


def pairs(source: str, name: str, count: int) -> None:
    """Write `count` pairs of a task's file."""
    rng = random.Random(name)
    found = []
    for line in (DATA / source).read_text().splitlines()[:count]:
        fields = json.loads(line)
        prompt, answer = fields["prompt"], fields["completion"]
        found.append({"prompt": prompt, "chosen": answer, "rejected": wrong(prompt, answer, rng)})
    write(name, found)


def judged(source: str, name: str, count: int) -> None:
    """Write `count` unpaired lines of a task's file."""
    rng = random.Random(name)
    found = []
    for place, line in enumerate((DATA / source).read_text().splitlines()[:count]):
        fields = json.loads(line)
        prompt, answer = fields["prompt"], fields["completion"]
        completion = answer if place % 2 == 0 else wrong(prompt, answer, rng)
        found.append({"prompt": prompt, "completion": completion, "label": place % 2 == 0})
    write(name, found)


def write(name: str, lines: list[dict[str, object]]) -> None:
    """Write one object a line."""
    (DATA / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{name}: {len(lines)} lines")


def main() -> None:
    """Write all files."""
    pairs("sort.jsonl", "sort-pairs.jsonl", LINES)
    pairs("sort-held-out.jsonl", "sort-pairs-held-out.jsonl", HELD_OUT)
    judged("sums.jsonl", "sums-judged.jsonl", LINES)
    judged("sums-held-out.jsonl", "sums-judged-held-out.jsonl", HELD_OUT)


if __name__ == "__main__":
    main()
