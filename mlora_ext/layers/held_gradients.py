"""Gradients that adapters keep between steps, for a training loop of one's own."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..ops.held import keeps_gradient
from ..routing.router import router_of
from .adapter_weights import adapter_parameters
from .bank import AdapterBank

_ALIGNMENT = 16
"""Gradients begin at multiples of so many numbers, so that kernels can load 16 bytes at a time."""


class _Kept(NamedTuple):
    """A Parameter, its adapter and name, its gradient and where that lies, or None and 0 if it requires none,
    and whether backward itself adds to that.
    """

    parameter: nn.Parameter
    adapter: str
    name: str
    gradient: Tensor | None
    place: int
    held: bool


class HeldGradients:
    """What `hold_gradients` returns: the gradients of a model's adapters.

    Attributes:
        buffers: each adapter's gradients, one after the other: a vector per device and dtype. To clip an
            adapter's gradients or to look at their norm, use these in place of its Parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self.buffers: dict[str, list[Tensor]] = {}
        self._router = router_of(model)
        self._kept: dict[int, _Kept] = {}
        self._banks = [module for module in model.modules() if isinstance(module, AdapterBank)]
        for adapter in self._router.adapters:
            self._take(adapter, adapter_parameters(model, adapter))
        self._stepping: weakref.WeakKeyDictionary[Optimizer, set[str]] = weakref.WeakKeyDictionary()
        self._hooks = _optimizer_hooks(self)
        self._moves_before = self._moves()

    def zero(self, adapters: Iterable[str] | None = None) -> None:
        """Sets gradients to zero, in place of `optimizer.zero_grad()`.

        Args:
            adapters: of these; None: of all.

        Raises:
            ValueError: an adapter is not in the model, or came after `hold_gradients`.
        """
        names = list(self.buffers if adapters is None else adapters)
        if missing := [name for name in names if name not in self.buffers]:
            raise ValueError(f"adapters: no gradients are held of {missing[0]!r}; call hold_gradients again")
        if buffers := [buffer for name in names for buffer in self.buffers[name]]:
            torch._foreach_zero_(buffers)

    def release(self) -> None:
        """Gives the gradients back to autograd. They stay as they are; a forward pass before is lost."""
        for adapter in self.buffers:  # what it saved adds to these gradients: its backward is refused
            self._router.updates.record(adapter)
        if self._router.held_gradients is self:
            self._router.held_gradients, self._router.accumulates = None, False
        self._hooks()
        self._kept.clear()

    def forget(self, adapter: str) -> None:
        """Drops an adapter: it goes."""
        self.buffers.pop(adapter, None)
        self._kept = {key: kept for key, kept in self._kept.items() if kept.adapter != adapter}

    def _take(self, adapter: str, parameters: dict[str, nn.Parameter]) -> None:
        own = {name: p for name, p in parameters.items() if not p.is_meta and id(p) not in self._kept}
        sizes: dict[tuple[torch.device, torch.dtype], int] = {}
        for p in own.values():
            place = p.device, p.dtype
            sizes[place] = sizes.get(place, 0) + _padded(p.numel()) * p.requires_grad
        left = {
            (device, dtype): torch.zeros(size, device=device, dtype=dtype)
            for (device, dtype), size in sizes.items()
            if size
        }
        self.buffers[adapter] = list(left.values())
        for name, p in own.items():
            gradient = None
            if p.requires_grad:
                buffer = left[p.device, p.dtype]
                left[p.device, p.dtype] = buffer[_padded(p.numel()) :]
                gradient = buffer.as_strided(p.shape, torch.empty_like(p, device="meta").stride())
                if p.grad is not None:
                    gradient.copy_(p.grad)
                p.grad = gradient
            place_of = 0 if gradient is None else gradient.data_ptr()
            self._kept[id(p)] = _Kept(p, adapter, name, gradient, place_of, keeps_gradient(p))

    def _check(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if a gradient that an optimizer uses is not the held one."""
        used = [p for group in optimizer.param_groups for p in group["params"]]
        if self._moves() != self._moves_before and self._has_any(used):
            raise RuntimeError(
                "adapters were added or removed, or the model was moved or loaded, since hold_gradients; "
                "call it again after that"
            )
        stepping = set()
        for p in used:
            kept = self._kept.get(id(p))
            if kept is None:
                continue
            stepping.add(kept.adapter)
            gradient = p.grad
            if gradient is not kept.gradient or (gradient is not None and gradient.data_ptr() != kept.place):
                raise RuntimeError(
                    f"{kept.name}: its .grad is not the one that hold_gradients keeps and backward adds to. "
                    "optimizer.zero_grad() takes it away: call zero() of the held gradients in its place"
                )
            if (gradient is not None) != p.requires_grad or (kept.held and _has_hooks(p)):
                raise RuntimeError(
                    f"{kept.name}: a hook came, or requires_grad changed, since hold_gradients; call it "
                    "again after that"
                )
        self._stepping[optimizer] = stepping

    def _moves(self) -> int:
        """How often adapters came and went, or Parameters got other memory."""
        return self._router.moves + sum(bank.moves for bank in self._banks)

    def _has_any(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether some of these are of adapters, as they were or as they are now."""
        now = {id(p) for bank in self._banks for p in bank.parameters()}
        return any(id(p) in now or id(p) in self._kept for p in parameters)

    def _record(self, optimizer: Optimizer) -> None:
        """Notes an optimizer's step, so that a later backward of an earlier forward pass is refused."""
        for adapter in self._stepping.pop(optimizer, ()):
            self._router.updates.record(adapter)


def hold_gradients(model: nn.Module) -> HeldGradients:
    """Keeps the gradients of all adapters between steps, so that host time does not grow with their number.

    Autograd has one node and one new gradient for each A and each B of a layer, which is most of a step's
    host time from about eight adapters on. Held gradients are zeros at first, and stay; backward adds to them
    itself, in one call per layer. Numbers are the same. The loop has to keep to this:

    - `zero()` of the result in place of `optimizer.zero_grad()`, which takes gradients away. An optimizer of
      torch refuses to step when they are gone.
    - `loss.backward()` only: `inputs=` and `torch.autograd.grad` are refused. No `DistributedDataParallel`,
      which waits for autograd's hooks: add up `buffers` between processes instead.
    - Adapters are changed between a forward pass and its backward by optimizers of torch only, which are
      noticed and refused.
    - An adapter without rows in a batch has zeros for gradients, and not None: give each adapter an optimizer
      of its own, and step those that took part. Others would apply weight decay and momentum.

    Call it again after adapters were added or removed, or the model was moved or loaded, and not between a
    forward pass and its backward. Adapters of which a layer has any that is
    not fp32, or that has hooks, and those of other kinds than LoRA on linear layers and experts, keep
    autograd's way there, and gradients in the same place.

    Args:
        model: converted by `convert_model`.

    Returns:
        What holds the gradients, until its `release()`, or until this is called again.

    Example:
        >>> gradients = mx.hold_gradients(model)
        >>> for batch in batches:
        ...     model(**batch).loss.backward()
        ...     optimizer.step()
        ...     gradients.zero()
    """
    router = router_of(model)
    if router.held_gradients is not None:
        router.held_gradients.release()
    router.moved()
    router.held_gradients, router.accumulates = HeldGradients(model), True
    return router.held_gradients


def _has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _padded(numbers: int) -> int:
    return -(-numbers // _ALIGNMENT) * _ALIGNMENT


def _optimizer_hooks(held: HeldGradients) -> weakref.finalize[Any, HeldGradients]:
    """Watches the steps of all optimizers as long as `held` lives, or until the result is called."""
    own = weakref.ref(held)

    def before(optimizer: Optimizer, *_: Any) -> None:
        if (found := own()) is not None:
            found._check(optimizer)

    def after(optimizer: Optimizer, arguments: Any, named: Any) -> None:
        if (found := own()) is not None:
            if len(arguments) > 1 or named.get("closure") is not None:  # it may have taken gradients away
                found._check(optimizer)
            found._record(optimizer)

    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return weakref.finalize(held, remove)
