"""`adapter_names=` on a converted model's forward and generate.

Hooks and `generate` sit on the instance; a deep copy or a pickled model has its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .control import refuse_bypassed_head
from .linear import MultiLoRALinear
from .routes import Route
from .routing import Router, router_of
from .samples import Call, Places, SampleDim, find_places

_CONTENTS = (
    "input_ids",
    "inputs_embeds",
    "inputs",
    "input_features",
    "input_values",
    "pixel_values",
    "past_values",
    "X",
    "decoder_input_ids",
    "decoder_inputs_embeds",
)
"""What Transformers' models call the tensors that samples are made of."""


def install(model: nn.Module) -> None:
    """Teach a freshly converted model the argument `adapter_names`."""
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)
    model.register_forward_hook(_after_forward, always_call=True)
    encoder = _encoder(model)
    if encoder is not None:
        encoder.register_forward_pre_hook(_before_encoder, with_kwargs=True)
    if callable(getattr(model, "generate", None)):
        model.__dict__["generate"] = Generate(model)


def uninstall(model: nn.Module) -> None:
    """Take all that off a copy that is to be a plain model."""
    for handlers, ours in (
        (model._forward_pre_hooks, _before_forward),
        (model._forward_hooks, _after_forward),
    ):
        for key in [key for key, hook in handlers.items() if hook is ours]:
            del handlers[key]
    model.__dict__.pop("generate", None)


class Generate:
    """A converted model's `generate`: the model's own, with one adapter per prompt.

    An object and not a method, so that it is copied and pickled with its model.

    Args:
        model: with a `generate` of its own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Generate.

        Args:
            args: as the model's own `generate`.
            adapter_names: one per prompt, `__base__` = none; beams and several return sequences follow their
                prompt.
            kwargs: as the model's own `generate`.

        Returns:
            What the model's own `generate` returns.

        Raises:
            ValueError: if a name is unknown, or there is not one name per prompt.
        """
        kind: Any = type(self.model)
        own = kind.generate
        if adapter_names is None:
            return own(self.model, *args, **kwargs)
        batch = next(iter(_contents(args, kwargs).values()), None)
        if batch is not None:
            _check_count(adapter_names, batch.shape[0])
        router = router_of(self.model)
        with router.entered(router.sampled(adapter_names)):
            return own(self.model, *args, **kwargs)


@torch.compiler.disable
def _before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    router = router_of(model)
    router.leave_interrupted()
    router.turn.check()
    refuse_bypassed_head(model, kwargs)
    names = kwargs.pop("adapter_names", None)
    contents = _contents(args, kwargs)
    batch = next(iter(contents.values()), None)
    route = None
    if names is not None:
        if router.active is not None:
            raise ValueError(
                "adapter_names: a route is active already; give the adapters in one of the two ways"
            )
        if batch is None:
            raise ValueError("adapter_names: expected a batch beside them, such as input_ids=, got none")
        _check_count(names, batch.shape[0])
        route = router.sampled(names)
    target = route or router.active
    if target is not None and batch is not None:
        _locate(router, target, model, (args, kwargs), contents)
    samples, each = (1, None) if batch is None else (batch.shape[0], _rows_per_sample(batch))
    router.begin_call(route, samples, None if each is None else samples * each)
    return args, kwargs


@torch.compiler.disable
def _after_forward(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    router_of(model).end_call(output, model.training)


def _encoder(model: nn.Module) -> nn.Module | None:
    """The encoder of an encoder-decoder, which `generate` calls by itself."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    encoder = getattr(model, "get_encoder", lambda: None)()
    return encoder if isinstance(encoder, nn.Module) and encoder is not model else None


@torch.compiler.disable
def _before_encoder(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    router = router_of(encoder)
    contents = _contents(args, kwargs)
    if router.active is not None and not router.is_called and router.observer is None and contents:
        _locate(router, router.active, encoder, (args, kwargs), contents)


def _locate(
    router: Router, route: Route, module: nn.Module, call: Call, contents: Mapping[str, Tensor]
) -> None:
    """Let a route know where the samples of this forward pass lie in the layers' inputs."""
    first = next(iter(contents.values()))
    route.batch, route.places = first.shape[0], None
    several = _rows_per_sample(first) > 1
    if not route.mixed or first.is_meta or (route.layout is not None and (route.batch == 1 or not several)):
        return
    kind = type(module), tuple((name, tensor.dim()) for name, tensor in contents.items())
    if (*kind, True) not in router.places and (*kind, several) not in router.places:
        places = find_places(module, call, route.batch, list(contents.values()), router.observed)
        router.places[*kind, several] = places
        _mark_eager(module, places)
    route.places = router.places.get((*kind, True)) or router.places[*kind, several]


def _check_count(names: Sequence[str], batch: int) -> None:
    if isinstance(names, str) or len(names) != batch:
        raise ValueError(f"adapter_names: expected one name per sample ({batch}), got {names!r}")


def _mark_eager(module: nn.Module, places: Places) -> None:
    """Let layers know for which inputs a compiled graph cannot serve several adapters."""
    for layer in module.modules():
        if isinstance(layer, MultiLoRALinear):
            layer.eager_dims |= {
                dims
                for (name, dims), place in places.items()
                if name == layer.name and not (isinstance(place, SampleDim) and place.is_plain)
            }


def _contents(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that samples are made of, by name; the first one says how many there are."""
    given = {name: t for name, t in kwargs.items() if isinstance(t, Tensor) and t.dim() > 0}
    if args and isinstance(args[0], Tensor) and args[0].dim() > 0:
        given["0"] = args[0]
    known = [name for name in (*_CONTENTS, "0") if name in given]
    known = known or [name for name in given if "mask" not in name][:1]
    return {name: given[name] for name in known if given[name].shape[0] == given[known[0]].shape[0]}


def _rows_per_sample(value: Tensor) -> int:
    if value.dim() == 1:
        return 1
    integers = value.dtype in (torch.int64, torch.int32)
    return math.prod(value.shape[1:] if integers else value.shape[1:-1])
