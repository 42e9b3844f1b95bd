"""Keeps the norms of the rows of `W + scaling B A`, which DoRA divides by, until A, B or W changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..adapters.kind import AdapterKind
from ..frozen.row_norms import row_norms, row_squares
from .adapter_layer import AdapterLayer
from .bank import AdapterBank

_PLAIN = (Tensor, nn.Parameter)  # fake tensors hold no numbers to keep


@dataclass
class _KeptNorm:
    """One adapter's norms, and what they were computed from.

    Attributes:
        key: changes with the numbers in A, B and W.
        held: the tensors that the key tells of: no other tensor gets their memory meanwhile.
        trained: whether a backward pass has come through the layer's outputs since.
    """

    key: Hashable
    held: Sequence[Tensor]
    norms: Tensor
    trained: bool = False


class KeptNorms:
    """One layer's norms by adapter: computed once for each optimizer step.

    They follow the tensors by address and version, and `Router.updates`. Some optimizers, such as those of
    bitsandbytes, write without counting a version: so norms are computed anew, too, where a backward pass has
    made gradients and they are gone (`zero_grad`). Other writes through `.data` or numpy go unseen: write in
    `torch.no_grad()`, or call `torch.autograd.graph.increment_version(parameter)` after them.

    Attributes:
        computed: counts the norms computed so far, for tests.
    """

    def __init__(self) -> None:
        self.computed = 0
        self._kept: dict[str, _KeptNorm] = {}
        self._squares: tuple[Hashable, Sequence[Tensor], Tensor] | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return KeptNorms, ()

    def forget(self, name: str) -> None:
        """Drops an adapter's norms: it goes."""
        self._kept.pop(name, None)

    def of(self, layer: AdapterLayer, adapters: Mapping[str, AdapterKind]) -> dict[str, Tensor]:
        """Returns `[O]` without gradient for each of a layer's adapters."""
        weights = [t for t in _own_tensors(layer) if not t.is_meta]
        base = _key(weights)
        stale, found = {}, {}
        for name, kind in adapters.items():
            own, spec = layer.parameters_of(name), layer.specs[name]
            key = self._key_of(layer, name, own, base)
            kept = self._kept.get(name)
            if kept is not None and key is not None and kept.key == key and not _has_stepped(kept, own):
                found[name] = kept.norms
            else:
                stale[name] = key, own, (*kind.factors(own, spec), spec.scaling)
        if not stale:
            return found
        parts = [part for _, _, part in stale.values()]
        norms = row_norms(layer.frozen, parts, self._squares_of(layer, base, weights))
        self.computed += len(stale)
        for (name, (key, own, _)), each in zip(stale.items(), norms, strict=True):
            found[name] = each
            self._kept.pop(name, None)
            if key is not None:
                held = [p.detach() for p in own.values()] + [w.detach() for w in weights]
                self._kept[name] = _KeptNorm(key, held, each)
        return found

    def after_backward(self, names: Sequence[str]) -> Callable[[Tensor], None]:
        """Returns a hook for an output of these adapters."""

        def note(_: Tensor) -> None:
            for name in names:
                if name in self._kept:
                    self._kept[name].trained = True

        return note

    def _key_of(
        self, layer: AdapterLayer, name: str, own: Mapping[str, nn.Parameter], base: Hashable | None
    ) -> Hashable | None:
        """Returns a key of the numbers that the norms depend on; None where they cannot be kept."""
        banks = [layer._modules[part] for part in own]
        moves = [bank.moves for bank in banks if isinstance(bank, AdapterBank)]
        mine = _key([p for part, p in own.items() if part in ("lora_A", "lora_B")])
        if mine is None or base is None:
            return None
        update = layer.router.updates.latest.get(name, 0)
        return mine, base, layer.specs[name], update, tuple(moves), layer.frozen

    def _squares_of(self, layer: AdapterLayer, base: Hashable | None, weights: Sequence[Tensor]) -> Tensor:
        key = None if base is None else (base, layer.frozen)
        if key is None or self._squares is None or self._squares[0] != key:
            squares = row_squares(layer.frozen)
            self._squares = None if key is None else (key, [w.detach() for w in weights], squares)
            return squares
        return self._squares[2]


def _own_tensors(layer: AdapterLayer) -> list[Tensor]:
    """Returns the tensors that the frozen weight may be made of: the layer's own."""
    found = [*layer._parameters.values(), *layer._buffers.values()]
    return [tensor for tensor in found if tensor is not None]


def _key(tensors: Sequence[Tensor]) -> Hashable | None:
    """Returns a key that changes with the tensors' numbers; None if one of them does not tell."""
    parts = [part for tensor in tensors for part in _parts(tensor)]
    if any(type(part) not in _PLAIN or part.is_inference() for part in parts):
        return None
    places = tuple((t.data_ptr(), t._version, t.dtype, t.device, t.shape, t.stride()) for t in parts)
    return places, tuple(t._version for t in tensors)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yields a tensor, or those that it wraps, as torchao's quantised tensors do.

    Writes to such a tensor count its own version, and not those of its parts.
    """
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _parts(getattr(tensor, name))


def _has_stepped(kept: _KeptNorm, own: Mapping[str, nn.Parameter]) -> bool:
    """Whether gradients were made and dropped, as after an optimizer's step."""
    return kept.trained and any(p.requires_grad and p.grad is None for p in own.values())
