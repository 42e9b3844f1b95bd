"""The synthetic text that `pretrain_base.py` trains the base model on.

The text shows what a byte-level model has to know before an adapter can teach it a task: words, letters and
their order, digits and their order, copying, spelling, positions, records. It holds none of the quickstart's
tasks: nothing is added up, no word is reversed, no letters are sorted and no date changes its format.
"""

import random
import string
from collections.abc import Callable, Iterator


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    """
    Ann Ben Carla David Emma Felix Grace Henry Ida Jonas Karen Liam Mara Nils Olga Paul Rosa Sam Tina
    Victor
    """
)
PLACES = _words(
    """
    Oslo Rome Lima Cairo Delhi Paris Kyoto Quito Tunis Vienna Zurich Boston Madrid Dublin Havana Lagos
    """
)
NOUNS = _words(
    """
    apple boat bird book bridge cat chair clock cloud coat cup desk dog door farm field fish flower
    garden glass hat horse house island jacket key king lake lamp leaf letter map milk moon mountain
    night ocean orange paper pencil picture queen rain ring river road salt ship shoe song star stone
    street table tower train tree valley village violin wagon wall water wind window winter zebra
    """
)
ADJECTIVES = _words(
    """
    big small plain new red blue green warm cold quick slow bright dark quiet loud heavy light round
    sweet young strange happy tired clever famous
    """
)
VERBS = _words(
    """
    saw found bought sold painted carried wanted lost liked watched cleaned opened moved kept broke drew
    """
)
MONTHS = _words("January February March April May June July August September October November December")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
NUMBER_WORDS = _words(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty
    """
)
FIELDS = _words("id name city color size price code owner shelf count level state")
SEPARATORS = (" ", ", ", "-", " | ", "; ", "/", ".", " then ")
ARROWS = (" -> ", " = ", ": ", " => ", " is ", "\n", " | ")


def _letters(rng: random.Random, low: int = 2, high: int = 8) -> str:
    """Random letters, some of them a pronounceable word, some a noun."""
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(NOUNS)
    length = rng.randint(low, high)
    if kind < 0.55:
        pair = ("bcdfghjklmnprstvwz", "aeiouy")
        return "".join(rng.choice(pair[index % 2]) for index in range(length))
    return "".join(rng.choices(string.ascii_lowercase, k=length))


def _token(rng: random.Random) -> str:
    """A word, a number or a code of letters and digits."""
    kind = rng.random()
    if kind < 0.55:
        return _letters(rng)
    if kind < 0.85:
        return str(rng.randrange(10 ** rng.randint(1, 5)))
    return "".join(rng.choices(string.ascii_letters + string.digits, k=rng.randint(2, 7)))


def _sentence(rng: random.Random) -> str:
    name, noun, adjective, verb = (
        rng.choice(NAMES),
        rng.choice(NOUNS),
        rng.choice(ADJECTIVES),
        rng.choice(VERBS),
    )
    number = rng.randint(2, 99)
    return rng.choice(
        (
            f"{name} {verb} the {adjective} {noun} in {rng.choice(PLACES)}.",
            f"The {noun} near the {rng.choice(NOUNS)} was {adjective}.",
            f"{name} and {rng.choice(NAMES)} went to {rng.choice(PLACES)} on {rng.choice(DAYS)}.",
            f"On {rng.choice(MONTHS)} {rng.randint(1, 28)} {name} {verb} a {noun}.",
            f"{name} has {number} coins and a {adjective} {noun}.",
            f"Did {name} see the {noun}? Yes, {name} {verb} it.",
            f"It was {rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1950, 2049)}, and the {noun} was"
            f" {adjective}.",
        )
    )


def story(rng: random.Random) -> str:
    """One to three English sentences from templates."""
    return " ".join(_sentence(rng) for _ in range(rng.randint(1, 3)))


def number_line(rng: random.Random) -> str:
    """Numbers that go up or down by a fixed step."""
    step = rng.choice((1, 1, 1, 1, 2, 2, 3, 4, 5, 10, 10, 100, -1, -1, -2, -5, -10))
    start, count = rng.randrange(rng.choice((20, 100, 100, 1000))), rng.randint(3, 9)
    numbers = [value for value in range(start, start + step * count, step) if value >= 0]
    return rng.choice(SEPARATORS).join(map(str, numbers))


def alphabet_run(rng: random.Random) -> str:
    """A stretch of the alphabet, forwards or backwards, in either case or both."""
    alphabet = rng.choice((string.ascii_lowercase, string.ascii_lowercase, string.ascii_uppercase))
    start, count = rng.randrange(24), rng.randint(2, 10)
    run = list(alphabet[start : start + count : rng.choice((1, 1, 1, 2))])
    if rng.random() < 0.3:
        run = run[::-1]
    if rng.random() < 0.25:
        run = [letter.upper() + letter.lower() for letter in run]
    return rng.choice((*SEPARATORS, "", "")).join(run)


def copying(rng: random.Random) -> str:
    """The same words twice or more."""
    words = [_token(rng) for _ in range(rng.randint(1, 4))]
    text = rng.choice((" ", ", ", "-", "")).join(words)
    times = rng.choice((2, 2, 2, 3))
    return rng.choice(("copy ", "say ", "", "", '"')) + rng.choice(ARROWS).join([text] * times)


def spelling(rng: random.Random) -> str:
    """A word and its letters one by one, in either order of the two."""
    word = _letters(rng, 3, 9)
    spelled = rng.choice(("-", " ", ".", ", ")).join(word)
    pair = (word, spelled) if rng.random() < 0.5 else (spelled, word)
    return rng.choice(ARROWS).join(pair)


def positions(rng: random.Random) -> str:
    """What stands where in a word."""
    word = _letters(rng, 3, 8)
    index = rng.randrange(len(word))
    return rng.choice(
        (
            " ".join(f"{place}={letter}" for place, letter in enumerate(word, 1)) + f" {word}",
            f"{word} " + " ".join(f"{place}={letter}" for place, letter in enumerate(word, 1)),
            f"letter {index + 1} of {word} is {word[index]}",
            f"{word} starts with {word[0]} and ends with {word[-1]}",
            f"the last letter of {word} is {word[-1]}",
            f"{word} has {len(word)} letters",
            f"{word}: after {word[index - 1]} comes {word[index]}" if index else f"{word}: first {word[0]}",
            f"{word}: before {word[index]} stands {word[index - 1]}" if index else f"{word}: last {word[-1]}",
        )
    )


def edits(rng: random.Random) -> str:
    """Words changed letter by letter: doubled, rotated, shortened, one letter replaced or left out."""
    words = [_letters(rng, 3, 7) for _ in range(rng.randint(1, 3))]
    letter = rng.choice(string.ascii_lowercase)
    name, edit = rng.choice(
        (
            ("double", lambda word: "".join(2 * item for item in word)),
            ("rotate", lambda word: word[1:] + word[0]),
            ("back", lambda word: word[-1] + word[:-1]),
            ("tail", lambda word: word[1:]),
            ("head", lambda word: word[:-1]),
            ("ends", lambda word: word[0] + word[-1]),
            (f"add {letter}", lambda word: word + letter),
            (f"put {letter}", lambda word: letter + word),
            ("last", lambda word: word[-1]),
            ("odd", lambda word: word[::2]),
            (f"{letter} first", lambda word: letter + word[1:]),
        )
    )
    arrow = rng.choice(ARROWS)
    return (
        name
        + rng.choice((" ", ": ", "\n"))
        + rng.choice((", ", "\n", "; ")).join(f"{word}{arrow}{edit(word)}" for word in words)
    )


def order(rng: random.Random) -> str:
    """Which of two letters or numbers comes first, and neighbours in the order."""
    if rng.random() < 0.5:
        first, second = sorted(rng.sample(string.ascii_lowercase, 2))
        return rng.choice(
            (
                f"{first} < {second}",
                f"{second} > {first}",
                f"{first} comes before {second}",
                f"{second} comes after {first}",
                f"min({second}, {first}) = {first}",
                f"max({first}, {second}) = {second}",
            )
        )
    limit = rng.choice((10, 10, 100, 1000))
    low, high = sorted(rng.sample(range(limit), 2))
    return rng.choice(
        (
            f"{low} < {high}",
            f"{high} > {low}",
            f"min({high}, {low}) = {low}",
            f"max({low}, {high}) = {high}",
            f"{low} is less than {high}",
            f"{high} is more than {low}",
        )
    )


def extreme(rng: random.Random) -> str:
    """The first or the last of some letters or digits, or the place of one of them."""
    items = rng.sample(rng.choice((string.ascii_lowercase, string.digits)), rng.randint(3, 6))
    joint = rng.choice(("", " ", ","))
    text = joint.join(items)
    picked = rng.choice(items)
    return rng.choice(
        (
            f"min {text} = {min(items)}",
            f"max {text} = {max(items)}",
            f"find {picked} in {text} = {items.index(picked) + 1}",
            f"{text} has {picked}: yes",
            f"{text} without {picked} = {joint.join(item for item in items if item != picked)}",
        )
    )


def counting(rng: random.Random) -> str:
    """How many of something there are, and numbers in words."""
    count, letter, number = rng.randint(1, 9), rng.choice(string.ascii_lowercase), rng.randint(0, 20)
    tens, ones = rng.randint(1, 9), rng.randint(0, 9)
    return rng.choice(
        (
            f"{letter * count} has {count} {letter}",
            f"{count} {letter}: {letter * count}",
            f"{NUMBER_WORDS[number]} = {number}",
            f"{number} is written {NUMBER_WORDS[number]}",
            f"{tens}{ones} is {tens} tens and {ones} ones",
            f"before {number + 1} comes {number}, then {number + 2}",
        )
    )


def calendar(rng: random.Random) -> str:
    """Months and days, their numbers and what follows what."""
    month, day = rng.randrange(12), rng.randrange(7)
    return rng.choice(
        (
            f"month {month + 1} is {MONTHS[month]}",
            f"month {month + 1:02d} is {MONTHS[month][:3]}",
            f"{MONTHS[month]} is month {month + 1}",
            f"after {MONTHS[month]} comes {MONTHS[(month + 1) % 12]}",
            f"{MONTHS[month]} is short {MONTHS[month][:3]}",
            f"after {DAYS[day]} comes {DAYS[(day + 1) % 7]}",
            f"day {day + 1} is {DAYS[day]}",
        )
    )


def record(rng: random.Random) -> str:
    """Fields and values, written twice in two notations."""
    fields = {name: _token(rng) for name in rng.sample(FIELDS, rng.randint(2, 3))}
    notations = (
        "; ".join(f"{name}={value}" for name, value in fields.items()),
        "{" + ", ".join(f'"{name}": "{value}"' for name, value in fields.items()) + "}",
        "\n".join(f"{name}: {value}" for name, value in fields.items()),
        ",".join(fields) + "\n" + ",".join(fields.values()),
        " and ".join(f"the {name} is {value}" for name, value in fields.items()),
    )
    return "\n".join(rng.sample(notations, 2))


FAMILIES: dict[Callable[[random.Random], str], float] = {
    story: 1.0,
    number_line: 1.2,
    alphabet_run: 1.0,
    copying: 1.5,
    spelling: 1.0,
    positions: 1.2,
    edits: 2.0,
    order: 1.0,
    extreme: 1.5,
    counting: 0.6,
    calendar: 0.6,
    record: 0.8,
}


def documents(seed: int) -> Iterator[str]:
    """An endless stream of documents.

    Args:
        seed: The same seed gives the same documents.

    Yields:
        One document of some 5 to 150 ASCII characters.
    """
    rng = random.Random(seed)
    families, weights = list(FAMILIES), list(FAMILIES.values())
    while True:
        yield rng.choices(families, weights)[0](rng)
