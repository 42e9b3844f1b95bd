"""Merges (``<<``) by YAML's rule for them, aliases, and documents that stand for too much."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlora.config.yaml_file import load_yaml
from mlora.errors import RunError

KEYS = st.sampled_from(["r", "lora_alpha", "1", "null", "0x1f", "<"])
OWN = st.dictionaries(KEYS, st.integers(0, 99), max_size=4)


@st.composite
def documents(draw: st.DrawFn) -> list[tuple[dict[str, int], list[int | dict[str, int]], bool]]:
    """Returns mappings: own keys, what they merge (earlier ones, or new mappings), whether `<<` is first."""
    found = []
    for number in range(draw(st.integers(1, 6))):
        earlier = st.integers(0, number - 1) if number else st.nothing()
        sources = draw(st.lists(earlier | OWN, max_size=4))
        found.append((draw(OWN), sources, draw(st.booleans())))
    return found


def flow(mapping: dict[str, int]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in mapping.items()) + "}"


@given(documents())
def test_merges_follow_the_rule_of_yaml(document: list[tuple[Any, Any, bool]]) -> None:
    """https://yaml.org/type/merge.html: a mapping's own keys win, then those of the earlier mapping."""
    lines, expected = [], []
    for number, (own, sources, first) in enumerate(document):
        merged = [f"*m{one}" if isinstance(one, int) else flow(one) for one in sources]
        joined = merged[0] if len(merged) == 1 else f"[{', '.join(merged)}]"
        inner = flow(own)[1:-1]
        parts = [f"<<: {joined}", inner] if first else [inner, f"<<: {joined}"]
        lines.append(f"m{number}: &m{number} {{{', '.join(filter(None, parts))}}}\nagain{number}: *m{number}")
        right: dict[str, int] = {}
        for one in reversed(sources):
            right |= expected[one] if isinstance(one, int) else one
        expected.append(right | own)
    found = load_yaml("\n".join(lines), "x.yaml")
    for number, right in enumerate(expected):
        read = {load_yaml(key, "key"): value for key, value in right.items()}
        assert found[f"m{number}"] == found[f"again{number}"] == read


def test_a_base_of_bases() -> None:
    """The issue's own inputs: PyYAML 6.0.4 gives 8 for the first, and the last mapping of a list."""
    text = "b: &b {r: 8}\ns: &s {<<: *b, r: 2}\nx: {<<: *s}\ny: {<<: [*b, *s]}\nz: {<<: [*s, *b]}"
    found = load_yaml(text, "x.yaml")
    assert (found["x"], found["y"], found["z"]) == ({"r": 2}, {"r": 8}, {"r": 2})


BOMB = "a0: &a0 [x, x]\n" + "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9))
CHAIN = "a0: &a0 [x]\n" + "\n".join(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 2000))
MERGES = "a0: &a0 {}\n" + "\n".join(f"a{n}: &a{n} {{<<: *a{n - 1}, k{n}: 1}}" for n in range(1, 90))
TOO_MANY = "stands for more than 500,000 values with its aliases written out"
ITSELF = "holds itself, by an alias"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BOMB, TOO_MANY),
        (CHAIN, "brackets are nested too deeply"),
        ("a: &a [*a]", ITSELF),
        ("a: &a {<<: *a}", ITSELF),
        ("a: {<<: {r: 1}, r: 2, r: 3}", "the key 'r' is given twice"),
        ("{1: 2, 0x1: 3}", "the key '0x1' is given twice"),
        ("{<<: {a: 1}, <<: {b: 1}}", r"the key '<<' is given twice; write <<: \[\*first, \*second\]"),
        ("{<<: [{a: 1}, 3]}", "<< must be a mapping or a list of mappings"),
        ("{<<: null}", "<< must be a mapping or a list of mappings"),
        ("? [a]\n: 1", "a key must be text, not a list or a mapping"),
    ],
)
def test_refused(text: str, expected: str) -> None:
    with pytest.raises(RunError, match=rf"^x\.yaml:\d+: {expected}$"):
        load_yaml(text, "x.yaml", lines=True)


def test_a_long_chain_of_merges_is_read() -> None:
    assert len(load_yaml(MERGES, "x.yaml")["a89"]) == 89
