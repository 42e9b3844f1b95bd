"""Reads YAML, and says in one line what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from mlora.config.strict import shown
from mlora.errors import RunError, first_line
from mlora.regular_files import read_regular

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_LARGEST = 16 << 20  # bytes of a file
OTHER_BASE = re.compile(r"[-+]?(0_*\d[\d_]*|\d[\d_]*(:\d+)+(\.\d*)?)")
MERGE, MERGE_KEY = "tag:yaml.org,2002:merge", object()
MOST_VALUES, DEEPEST = 500_000, 100  # of what aliases stand for, and of brackets

PLAIN = [
    (r"found character '\\t'.*", "YAML is indented with spaces; replace the tab with spaces"),
    (r"found character '(.)' that cannot start any token", r"a value cannot begin with \1; put it in quotes"),
    (
        r"mapping values are not allowed here",
        "a ':' is not expected here; check the indentation and the line before, or put the value in quotes",
    ),
    (r"could not find expected ':'", "this key has no ':'"),
    (r"but found another document", "'---' begins a second document; write one document in a file"),
    (r"found unhashable key", "a key must be text, not a list or a mapping"),
    (
        r"could not determine a constructor for the tag 'tag:yaml.org,2002:value'",
        "= cannot be read; put it in quotes",
    ),
    (
        r"could not determine a constructor for the tag '(.*)'",
        r"the tag \1 is not known; put the value in quotes if it is text",
    ),
    (r"found undefined alias '(.*)'", r"*\1 has no anchor &\1; put it in quotes if it is text"),
    (
        r"expected <block end>, but found .*",
        "is not indented like the lines before it; keys of one level begin in the same column",
    ),
    (r"found unexpected end of stream", "a quote that opens here is not closed"),
    (r"'<stream end>'", "the end"),
    (r"'<document start>', but found '<scalar>'", "'---' after a line that begins with %"),
]
"""Messages of the YAML library, and the words that replace them."""


class _Loader(yaml.SafeLoader):
    """Reads ``1e-4`` as a number. Refuses repeated keys, impossible dates, and ``010`` (which would be 8)."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind, text = node.tag.rpartition(":")[2], str(node.value)
        try:
            value = super().construct_object(node, deep)  # type: ignore[no-untyped-call]
        except (ValueError, KeyError, AttributeError) as error:
            raise _at(
                node,
                f"{text if len(text) <= 60 else text[:59] + '…'} cannot be read as {kind}; "
                "put it in quotes if it is text",
            ) from error
        if kind in ("int", "float") and OTHER_BASE.fullmatch(text):
            raise _at(node, f"YAML reads {text} as {value}; write {value}, or put it in quotes if it is text")
        return value

    def construct_document(self, node: yaml.Node) -> Any:
        self._measured: dict[yaml.Node, tuple[int, int]] = {}
        self._flat: set[yaml.Node] = set()
        self._measure(node)
        return super().construct_document(node)  # type: ignore[no-untyped-call]

    def _measure(self, node: yaml.Node) -> tuple[int, int]:
        """Returns how many values a node stands for, aliases written out, and how deep they are."""
        if self._measured.get(node) == (0, 0):
            raise _at(node, "holds itself, by an alias")
        if node not in self._measured:
            self._measured[node] = 0, 0  # until it is known
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            nodes = [one for part in parts for one in (part if isinstance(part, tuple) else [part])]
            inner = [self._measure(one) for one in nodes]
            found = 1 + sum(size for size, _ in inner), 1 + max((depth for _, depth in inner), default=0)
            if found[0] > MOST_VALUES:
                raise _at(node, f"stands for more than {MOST_VALUES:,} values with its aliases written out")
            if found[1] > DEEPEST:
                raise _at(node, "brackets are nested too deeply")
            self._measured[node] = found
        return self._measured[node]

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Puts what ``<<`` merges into a node, once: its own keys win, then those of the earlier mapping."""
        if node in self._flat:
            return
        self._flat.add(node)
        own: dict[Hashable, tuple[yaml.Node, yaml.Node]] = {}
        for pair in node.value:
            if (key := self._key(pair[0])) in own:
                more = "; write <<: [*first, *second]" if key is MERGE_KEY else ""
                raise _at(pair[0], f"the key {pair[0].value!r} is given twice{more}")
            own[key] = pair
        _, merged = own.pop(MERGE_KEY, (None, None))
        found: dict[Hashable, tuple[yaml.Node, yaml.Node]] = {}
        for source in merged.value if isinstance(merged, yaml.SequenceNode) else [merged] if merged else []:
            if not isinstance(source, yaml.MappingNode):
                raise _at(source, "<< must be a mapping or a list of mappings")
            self.flatten_mapping(source)
            for pair in source.value:
                found.setdefault(self._key(pair[0]), pair)
        node.value = list((found | own).values())

    def _key(self, node: yaml.Node) -> Hashable:
        if node.tag == MERGE:
            return MERGE_KEY
        if node.tag == "tag:yaml.org,2002:value":  # "=", which is text here
            node.tag = "tag:yaml.org,2002:str"
        key = self.construct_object(node)
        if not isinstance(key, Hashable):
            raise _at(node, "found unhashable key")
        return key


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))


def _at(node: yaml.Node, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def load_yaml(text: str, where: str, *, lines: bool = False) -> Any:
    """Returns the content of one YAML document. RunError begins with `where` and, with `lines`, the line."""

    def fault(reason: str, line: int | None = None) -> RunError:
        return RunError(f"{where}{f':{line}' if lines and line else ''}: {reason}")

    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise fault("brackets are nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        mark = error.context_mark if error.context == "while scanning a quoted scalar" else error.problem_mark
        raise fault(_plain(error), mark.line + 1 if mark else None) from error
    except yaml.reader.ReaderError as error:
        reason = f"holds the character #x{error.character:04x}, which YAML does not allow"
        raise fault(reason, text.count("\n", 0, error.position) + 1) from error
    except yaml.YAMLError as error:
        raise fault(first_line(error)) from error


def _plain(error: yaml.MarkedYAMLError) -> str:
    text = str(error.problem or error.context)
    for theirs, ours in PLAIN:
        text = re.sub(theirs, ours, text)
    return text


def read_yaml(path: Path, keys: str = "base_model and adapters") -> dict[str, Any]:
    """Reads a YAML file that holds one mapping. RunError names the file, the line and the fault.

    `keys` are examples of the mapping's keys, for the error if the file holds something else.
    """
    try:
        data = load_yaml(read_regular(path, encoding="utf-8-sig", most=_LARGEST), str(path), lines=True)
    except UnicodeDecodeError as error:
        raise RunError(f"{path}: is not text in UTF-8 (byte {error.start}); expected a YAML file") from error
    except IsADirectoryError as error:
        of_run = path / "config.yaml"
        more = f"; the config of this run is {of_run}" if of_run.is_file() else "; expected a YAML file"
        raise RunError(f"{path}: is a folder{more}") from error
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(data, dict):
        raise RunError(f"{path}: must hold keys such as {keys}, got {_kind(data)}")
    return data


def _kind(data: Any) -> str:
    if isinstance(data, str) and re.search(r":\S", data):
        return f"the text {shown(data)}; write a space after each ':'"
    return {type(None): "nothing", list: "a list"}.get(type(data), "a single value")
