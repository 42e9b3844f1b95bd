"""Stores one layer's adapters: each has a Parameter of its own on the rows of a shared page."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PAGE_ROWS = 16


@dataclass
class _Rows:
    """Rows `[row, row + rows)` of one page."""

    page: int
    row: int
    rows: int


class ByAdapter(nn.Module):
    """A module whose children have the names of adapters, which may be those of its attributes: `training`.

    Children go straight into `_modules`, since `add_module` refuses such names.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # `nn.Module` would take the name for a child's

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for methods such as `__deepcopy__`
            raise AttributeError(name)
        return super().__getattr__(name)


class AdapterSlot(nn.Module):
    """Holds one adapter's matrix as `weight`, so that its key is PEFT's `<bank>.<name>.weight`."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Saves a contiguous copy: a view would put the whole page, with other adapters, into the file."""
        values = self.weight.detach().clone(memory_format=torch.contiguous_format)
        destination[prefix + "weight"] = self.weight if keep_vars else values


class AdapterBank(ByAdapter):
    """Stores the adapters of one layer as rows of pages `[rows, width]`.

    Adding or removing an adapter moves no other adapter. Rows run along d_in for A. For B they run along
    d_out (`transposed=True`): the Parameter is the transposed view `[d_out, r]`. So every access is
    contiguous, for any rank. Each Parameter has its own version counter: an optimizer step of one adapter
    keeps the tensors that autograd saved for the others valid.

    Args:
        width: d_in for A, d_out for B.
        transposed: whether Parameters are transposed views of the rows.
        flat: whether Parameters are vectors, of one row each.
        device: where pages are made.
        dtype: dtype of new adapters.

    Attributes:
        moves: counts how often a Parameter came, went or got other memory.
    """

    def __init__(
        self,
        width: int,
        *,
        transposed: bool,
        flat: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.width = width
        self.transposed = transposed
        self.flat = flat
        self.device = torch.device(device)
        self.dtype = dtype
        self._pages: list[Tensor] = []
        self._places: dict[str, _Rows] = {}
        self.moves = 0
        self.register_load_state_dict_post_hook(_adopt)

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    def names(self) -> Iterator[str]:
        """Returns the names of the adapters, in the order in which they were added."""
        return iter(self._modules)

    def parameter_of(self, name: str) -> nn.Parameter:
        """Returns the adapter's Parameter: `[r, width]`, `[width, r]` if transposed, `[width]` if flat."""
        return self._modules[name]._parameters["weight"]  # type: ignore[union-attr, return-value]

    def reserve(self, rows: int) -> None:
        """Makes one page with room for `rows` more rows, so that adapters added next lie together."""
        if rows > 0:
            self._new_page(rows, self.dtype, self.device)

    def add(self, name: str, rank: int) -> nn.Parameter:
        """Gives an adapter the first free run of `rank` rows, filled with zeros.

        Args:
            name: of the adapter; not in the bank yet.
            rank: number of rows.

        Returns:
            The adapter's new Parameter.
        """
        assert name not in self._modules, name
        place = self._find(rank, self.dtype, self.device)
        view = self._view(place)
        view.zero_()
        self._modules[name] = AdapterSlot(nn.Parameter(view.data))
        self._places[name] = place
        self.moves += 1
        return self.parameter_of(name)

    def remove(self, name: str) -> None:
        """Frees the adapter's rows, and the last pages if no adapter is left on them.

        Code that still holds the adapter's Parameter keeps a copy of its values.
        """
        parameter = self.parameter_of(name)
        parameter.data = parameter.data.clone()
        del self._modules[name], self._places[name]
        self.moves += 1
        used = max((place.page + 1 for place in self._places.values()), default=0)
        del self._pages[used:]

    def owns(self, name: str) -> bool:
        """Whether the adapter's Parameter lies on the rows that the bank gave it."""
        view, data = self._view(self._places[name]), self.parameter_of(name).data
        return (view.data_ptr(), view.shape, view.stride(), view.dtype) == (
            data.data_ptr(),
            data.shape,
            data.stride(),
            data.dtype,
        )

    def extra_repr(self) -> str:
        return f"width={self.width}, pages={[list(page.shape) for page in self._pages]}"

    def _find(self, rows: int, dtype: torch.dtype, device: torch.device) -> _Rows:
        for index, page in enumerate(self._pages):
            if page.dtype != dtype or page.device != device:
                continue
            row = 0
            for place in sorted((p for p in self._places.values() if p.page == index), key=lambda p: p.row):
                if place.row - row >= rows:
                    break
                row = place.row + place.rows
            if page.shape[0] - row >= rows:
                return _Rows(index, row, rows)
        return _Rows(self._new_page(max(rows, PAGE_ROWS), dtype, device), 0, rows)

    def _new_page(self, rows: int, dtype: torch.dtype, device: torch.device) -> int:
        self._pages.append(torch.zeros(rows, self.width, dtype=dtype, device=device))
        return len(self._pages) - 1

    def _view(self, place: _Rows) -> Tensor:
        rows = self._pages[place.page][place.row : place.row + place.rows]
        if self.flat:
            return rows[0]
        return rows.t() if self.transposed else rows

    def _rebind(self) -> None:
        """Points every Parameter at its rows again, after the pages have been replaced."""
        self.moves += 1
        for name, place in self._places.items():
            _set_data(self._modules[name], self._view(place))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AdapterBank:
        _adopt(self)
        super()._apply(fn, recurse=False)
        with torch.no_grad():
            self._pages = [fn(page) for page in self._pages]
            for name in self._places:
                gradient = self.parameter_of(name).grad
                self.parameter_of(name).grad = None
                _set_data(self._modules[name], self._view(self._places[name]))
                if gradient is not None:
                    self.parameter_of(name).grad = fn(gradient)
            probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        self.dtype, self.device = probe.dtype, probe.device
        self.moves += 1
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> AdapterBank:
        _adopt(self)
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        clone._rebind()
        return clone

    def __getstate__(self) -> dict[str, Any]:
        _adopt(self)
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rebind()


def _set_data(slot: nn.Module | None, view: Tensor) -> None:
    """Points a slot at other memory; keeps the same Parameter where PyTorch allows it."""
    assert slot is not None
    parameter = slot._parameters["weight"]
    assert parameter is not None
    if torch._has_compatible_shallow_copy_type(parameter, view):
        parameter.data = view.data
    else:
        slot._parameters["weight"] = nn.Parameter(view.data, requires_grad=parameter.requires_grad)


@torch.no_grad()
def _adopt(bank: AdapterBank, _: object = None) -> None:
    """Moves Parameters that got their own memory back onto the bank's pages.

    They get it by `p.data = ...`, or by `load_state_dict(assign=True)`, whose hook this is.
    """
    for name in list(bank._places):
        if bank.owns(name):
            continue
        data = bank.parameter_of(name).data
        view = bank._view(bank._places[name])
        if (data.dtype, data.device) != (view.dtype, view.device):
            rows = bank._places.pop(name).rows
            bank._places[name] = bank._find(rows, data.dtype, data.device)
            view = bank._view(bank._places[name])
        bank.moves += 1
        view.copy_(data)
        _set_data(bank._modules[name], view)
