"""Letting a route know where the samples of a forward pass lie in the layers' inputs: see `samples`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..linear import MultiLoRALinear
from .call_kind import Call, kind_of, sizes_of
from .other_contents import special_tokens
from .route import Route
from .router import Router, router_of
from .samples import Places, SampleDim, find_places
from .trial_passes import TrialPasses

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
_KINDS = 64
"""Kinds of calls whose places are remembered."""
_STAND_FOR = ("image", "video", "audio", "speech")
"""How the names of tokens begin in whose place a model puts other inputs."""


def install(model: nn.Module) -> None:
    """Have the encoder of an encoder-decoder located, too, where `generate` calls it by itself."""
    encoder = _encoder(model)
    if encoder is not None:
        encoder.register_forward_pre_hook(_before_encoder, with_kwargs=True)


def uninstall(model: nn.Module) -> None:
    """Undo `install`."""
    hooks: dict[int, Any] = getattr(_encoder(model), "_forward_pre_hooks", {})
    for key in [key for key, hook in hooks.items() if hook is _before_encoder]:
        del hooks[key]


def _encoder(model: nn.Module) -> nn.Module | None:
    """The encoder of an encoder-decoder, which `generate` calls by itself."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    encoder = getattr(model, "get_encoder", lambda: None)()
    return encoder if isinstance(encoder, nn.Module) and encoder is not model else None


@torch.compiler.disable
def _before_encoder(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    router = router_of(encoder)
    contents = contents_of(args, kwargs)
    if router.active is not None and not router.is_called and router.observer is None and contents:
        locate(router, router.active, encoder, (args, kwargs), contents)


def locate(
    router: Router, route: Route, module: nn.Module, call: Call, contents: Mapping[str, Tensor]
) -> None:
    """Let a route know where the samples of this forward pass lie in the layers' inputs.

    Args:
        router: of the model.
        route: that the forward pass goes along.
        module: the model, or its encoder.
        call: its arguments.
        contents: `contents_of` these.

    Raises:
        ValueError: if that cannot be found out.
    """
    first = next(iter(contents.values()))
    batch, each = first.shape[0], rows_per_sample(first)
    _check_batch(router, route, batch)
    route.batch, route.each, route.places = batch, each, None
    route.sizes = sizes_of(call, max(1, batch))
    if not route.mixed or first.is_meta:
        return
    if route.layout is not None and (batch == 1 or each == 1):
        return
    others = _of_no_sample(router, module, contents)
    given = kind_of(call, list(contents.values()), _special(router, module))
    kind = (type(module), module.training, bool(others), given)
    # What holds for several rows of each sample holds for one, but not the other way round.
    key = (kind, each > 1 or (kind, True) in router.places)
    if key not in router.places:
        own = [tensor for name, tensor in contents.items() if name not in others]
        left_out = [contents[name] for name in others]
        _refuse_batch_statistics(module)
        passes = TrialPasses(module, call, own, left_out, router.observed)
        found = find_places(passes, route.sizes)
        _mark_eager(module, found)
        if len(router.places) >= _KINDS:
            del router.places[next(iter(router.places))]
        router.places[key] = found
    route.places = router.places[key]


def _check_batch(router: Router, route: Route, batch: int) -> None:
    """Refuse a pass whose samples are not those that the route has adapters for, in their order.

    Raises:
        ValueError: if it has another number of samples than there are names, but for `generate`'s beams.
    """
    names = len(route.samples)
    if route.mixed and names and batch not in (names, names * route.copies):
        router.forget_places()
        raise ValueError(
            f"adapter_names: {names} samples were given names, and the model calls itself with {batch}, so "
            "which of them these are is unknown; give the whole batch one adapter"
        )


def _refuse_batch_statistics(module: nn.Module) -> None:
    """Refuse layers that would mix the rows of different adapters, such as ones put in after conversion.

    Raises:
        ValueError: naming the first of them.
    """
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.training:
            raise ValueError(
                f"layer {name}: normalises by the statistics of the batch, which holds rows of several "
                "adapters; put it into evaluation mode"
            )


def _special(router: Router, module: nn.Module, kinds: tuple[str, ...] = ("",)) -> Tensor:
    """`special_tokens`, collected once; a padding token may be set later."""
    key = (type(module), kinds, getattr(getattr(module, "config", None), "pad_token_id", None))
    if key not in router.specials:
        router.specials[key] = special_tokens(module, kinds)
    return router.specials[key]


def _of_no_sample(router: Router, module: nn.Module, contents: Mapping[str, Tensor]) -> list[str]:
    """Images and the like that are not one per sample, though there are as many: tokens stand for them."""
    first, *others = contents
    if not others or contents[first].is_floating_point():
        return []
    stands = torch.isin(contents[first], _special(router, module, _STAND_FOR).to(contents[first].device))
    counts = stands.flatten(1).sum(1)
    return [] if bool((counts == counts[0]).all()) else others


def _mark_eager(module: nn.Module, places: Places) -> None:
    """Let layers know for which inputs a compiled graph cannot serve several adapters."""
    for layer in module.modules():
        if isinstance(layer, MultiLoRALinear):
            layer.eager_dims |= {
                dims
                for (name, dims), place in places.items()
                if name == layer.name and not (isinstance(place, SampleDim) and place.is_plain)
            }


def contents_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that samples are made of, by name; the first one says how many there are."""
    given = {name: t for name, t in kwargs.items() if isinstance(t, Tensor) and t.dim() > 0}
    if args and isinstance(args[0], Tensor) and args[0].dim() > 0:
        given["0"] = args[0]
    known = [name for name in (*_CONTENTS, "0") if name in given]
    known = known or [name for name in given if "mask" not in name][:1]
    return {name: given[name] for name in known if given[name].shape[0] == given[known[0]].shape[0]}


def rows_per_sample(value: Tensor) -> int:
    """Rows that layers see of each sample, as far as a tensor of the batch says it."""
    if value.dim() == 1:
        return 1
    integers = value.dtype in (torch.int64, torch.int32)
    return math.prod(value.shape[1:] if integers else value.shape[1:-1])
