"""Where samples lie in the layers of Transformers' classes: a table, so that no trial pass is needed.

`sample_table.json` has, for each class that owns layers, the place of samples in each layer's input, by
number of dimensions. A layer's owner is the innermost module around it whose class is Transformers'; so the
classes that share `LlamaAttention` share its entries. `tests/ext/zoo/sample_dims.py` writes the file from
trial passes over every class of the zoo, and a nightly test repeats them.

A model with an adapter on a layer that the table does not name is looked at by trial passes. Where the table
names a layer but not the number of dimensions, a shape that leaves no doubt is served.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .call_kind import Call
from .samples import SampleDim

TABLE = Path(__file__).with_suffix(".json")
_NEUTRAL = ("torch.nn.", "mlora_ext.")
"""Modules of these packages are not owners; they call what they hold as their owner has told them to."""
_ASK = "; mlora_ext.find_sample_dims(model, call) finds out for such calls"
FOREIGN = f"only classes of Transformers are in the table of places{_ASK}"
UNLISTED = f"the table of places does not have it, and its shape does not say it{_ASK}"
OTHER_SHAPE = f"this shape does not fit its entry in the table of places{_ASK}"
UNEVEN = f"samples have unequal images, or another kind of input that tokens stand for{_ASK}"


@dataclass(frozen=True)
class PlaceLine:
    """A line of the table: where samples lie.

    Attributes:
        any_number: whether a sample may have any number of rows, as windows and patches are. Otherwise it has
            as many as tokens or other rows in some argument, and rows that were selected do not pass.
    """

    place: SampleDim
    any_number: bool = False

    @classmethod
    def parse(cls, text: str) -> PlaceLine | str:
        """Reads `blocks 0`, `blocks 0 any`, or, after `!`, the reason why there is no place."""
        if text.startswith("!"):
            return text[1:]
        order, dim, *rest = text.split()
        return cls(SampleDim(int(dim), order), bool(rest))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.place.order} {self.place.dim}{' any' * self.any_number}"

    def fits(self, shape: Sequence[int], batch: int, rows: frozenset[int]) -> bool:
        """Whether samples lie so in this shape; `rows`: see `rows_of`."""
        dim, order = self.place
        entries, rest = divmod(shape[dim], batch)
        if order == "single":
            others = [*shape[:dim], *shape[dim + 1 : -1]]
            alone = self.any_number or batch not in others or math.prod(others) in rows
            return entries == 1 and not rest and alone
        return not rest and entries > 0 and (self.any_number or entries in rows)


Key = tuple[str, str]
"""A layer's owner and its name inside of it, with `#` for numbers; the owner is empty if it is unknown."""


@cache
def entries() -> Mapping[tuple[str, str, int], PlaceLine | str]:
    """Returns the table: entries, or reasons, by owner, name and number of dimensions."""
    owners = json.loads(TABLE.read_text())["owners"]
    return {
        (owner, name, int(dims)): PlaceLine.parse(text)
        for owner, lines in owners.items()
        for line, names in lines.items()
        for dims, text in [line.split(": ", 1)]
        for name in names.split()
    }


def keys_of(module: nn.Module, prefix: str = "") -> dict[str, Key]:
    """Returns the key of each part of a model, by `prefix` and its name."""
    keys: dict[str, Key] = {}
    others: dict[str, Key] = {}  # a layer with several names knows itself by one of them

    def walk(part: nn.Module, name: str, owner: str | None, inside: str) -> None:
        keys[prefix + name] = (owner or "", inside)
        if type(part).__module__.startswith("mlora_ext."):
            others[str(part.__dict__.get("name"))] = (owner or "", inside)
        own = owner_of(type(part))
        if own is None or (not own and part is module):
            owner = None  # foreign code may arrange rows in any way: nothing inside of it is known
        elif own and owner is not None:
            owner, inside = own, ""
        for child, inner in part._modules.items():
            if inner is not None:
                step = "#" if child.isdecimal() else child
                walk(inner, f"{name}.{child}".lstrip("."), owner, f"{inside}.{step}".lstrip("."))

    walk(module, "", "", "")
    return others | keys


def owner_of(kind: type[nn.Module]) -> str | None:
    """Returns the class of Transformers whose `forward` a class has; "" for torch's containers, else None.

    So the heads that share `GenericForSequenceClassification` are one owner, and a class that FSDP makes is
    the class that it inherits from.
    """
    own = next((base for base in kind.__mro__ if base.__module__.startswith("transformers.")), None)
    having: list[Any] = [base for base in kind.__mro__ if "forward" in base.__dict__]
    forward = inspect.unwrap(having[0].forward)  # Transformers wraps that of each class below its own, too
    defined = [base for base in having if inspect.unwrap(base.forward) is forward][-1]
    if not defined.__module__.startswith("transformers."):
        if not f"{defined.__module__}.".startswith(_NEUTRAL):
            return None
        if own is None:
            return ""
        defined = own
    folders = defined.__module__.split(".")
    return f"{folders[2] if folders[1] == 'models' else folders[1]}.{defined.__qualname__}"


def rows_of(call: Call, batch: int) -> frozenset[int]:
    """Returns how many rows a sample may have: 1, and what the shapes of the arguments say."""
    found = {1}
    lists = list | tuple | Mapping
    for leaf in pytree.tree_leaves(call, is_leaf=lambda value: not isinstance(value, lists)):
        if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[0] == batch:
            found |= {math.prod(leaf.shape[1:]), math.prod(leaf.shape[1:-1])}
    return frozenset(found)


class LayerTable:
    """The table's entries for the layers of one model, or of its encoder.

    Args:
        module: the model, or its encoder.
        prefix: of its layers' names.
        layers: names of those that have adapters.

    Attributes:
        is_whole: whether each of these layers has places for some numbers of dimensions, and no reason.
    """

    def __init__(self, module: nn.Module, prefix: str, layers: Sequence[str] = ()) -> None:
        self._keys = keys_of(module, prefix)
        decoder: Any = None
        head: Any = None
        with suppress(ValueError):  # some are reached through a trained copy, which refuses to be read so
            decoder = getattr(module, "get_decoder", lambda: None)()
            head = getattr(module, "get_output_embeddings", lambda: None)()
        inner = set[int]() if decoder in (module, None) else {id(part) for part in decoder.modules()}
        names = {prefix + name: part for name, part in module.named_modules(remove_duplicate=False)}
        self._text = {name for name, part in names.items() if id(part) in inner or part is head}
        lines = entries().items()
        without = {(owner, name) for (owner, name, _), line in lines if isinstance(line, str)}
        known = {(owner, name) for (owner, name, _), _ in lines} - without
        self.is_whole = known.issuperset(map(self._key, layers))

    def of(self, layer: str, dims: int) -> PlaceLine | str | None:
        """Returns an entry, or the reason why there is no place; None if the table has neither."""
        owner, name = self._key(layer)
        return FOREIGN if not owner else entries().get((owner, name, dims))

    def is_text(self, layer: str) -> bool:
        """Whether a layer sees tokens: it is in the decoder, or the head over it."""
        return layer in self._text or layer.rpartition(".")[0] in self._text

    def _key(self, layer: str) -> Key:
        found = self._keys.get(layer)
        if found is None:  # a parameter that other code reads
            module, _, parameter = layer.rpartition(".")
            owner, name = self._keys.get(module, ("", ""))
            return owner, f"{name}.{parameter}"
        return found


@dataclass(frozen=True)
class TablePlaces:
    """What the table says for one forward pass.

    Attributes:
        table: of the module whose forward is called.
        batch: samples of the forward pass.
        rows: that a sample may have, see `rows_of`.
        even: whether each sample has as many images as others, all of one size.
    """

    table: LayerTable
    batch: int
    rows: frozenset[int]
    even: bool

    def of(self, layer: str, shape: Sequence[int]) -> SampleDim | str:
        """Returns the place in the table; without an entry, one if no other fits the shape."""
        found = self.table.of(layer, len(shape))
        if isinstance(found, str):
            return found
        if not self.even and not self.table.is_text(layer):
            return UNEVEN
        if found is None:
            return SampleDim(0, "single") if self._is_batch_first(shape) else UNLISTED
        return found.place if found.fits(shape, self.batch, self.rows) else OTHER_SHAPE

    def _is_batch_first(self, shape: Sequence[int]) -> bool:
        """Whether a shape is `[batch, rows of a sample, ..., D]` and no other dimension may count samples."""
        first, *others = shape[:-1]
        counted = bool(others) and first == self.batch and self.batch not in others
        return counted and math.prod(others) in self.rows


def are_even(call: Call, tokens: Tensor, placeholders: Tensor, patches: Mapping[str, Tensor]) -> bool:
    """Whether other inputs, such as images, belong to samples evenly.

    Args:
        tokens: `[B, S]` integers; numbers where the model gets embeddings.
        placeholders: `[n]` int64 tokens that stand for parts of images.
        patches: see `patches_of`.
    """
    if not placeholders.numel() or patches:
        return True
    args, kwargs = call
    others = [
        value
        for name, value in (*enumerate(args), *kwargs.items())
        if isinstance(value, Tensor) and value is not tokens and value.is_floating_point()
        if value.dim() > 2 or "pixel" in str(name)
    ]
    if not others:
        return True
    if tokens.is_floating_point() or any(t.shape[0] != tokens.shape[0] or t.dim() < 3 for t in others):
        return False
    counts = torch.isin(tokens, placeholders).flatten(1).sum(1)
    return bool((counts == counts[:1]).all())
