"""Tells a route where the samples of a forward pass lie in the layers' inputs: see `samples`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..layers.adapter_layer import AdapterLayer
from ..layers.copies import Copies
from ..layers.linear import MultiLoRALinear
from ..never_compiled import never_compiled
from ..routing.call_kind import Call, kind_of, sizes_of
from ..routing.other_contents import special_tokens
from ..routing.patches import patches_of
from ..routing.route import Route
from ..routing.router import Router, router_of
from ..routing.samples import Places, SampleDim, find_places
from ..routing.trial_passes import TrialPasses

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
"""Names of the arguments in Transformers' models that hold the samples."""
_KINDS = 64
"""Number of kinds of calls for which the places of samples are remembered."""
_STAND_FOR = ("image", "video", "audio", "speech")
"""How the names of tokens begin that a model replaces by other inputs, such as images."""


def install(model: nn.Module) -> None:
    """Also locates samples in the encoder of an encoder-decoder, which `generate` calls by itself."""
    encoder = _encoder(model)
    if encoder is not None:
        encoder.register_forward_pre_hook(_before_encoder, with_kwargs=True)


def _encoder(model: nn.Module) -> nn.Module | None:
    """Returns the encoder of an encoder-decoder, or None."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    encoder = getattr(model, "get_encoder", lambda: None)()
    return encoder if isinstance(encoder, nn.Module) and encoder is not model else None


@never_compiled
def _before_encoder(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not any(isinstance(module, AdapterLayer) for module in encoder.modules()):
        return
    router = router_of(encoder)
    contents = contents_of(args, kwargs)
    if router.active is not None and not router.is_called and router.observer is None and contents:
        locate(router, router.active, encoder, (args, kwargs), contents)


def locate(
    router: Router, route: Route, module: nn.Module, call: Call, contents: Mapping[str, Tensor]
) -> None:
    """Tells a route where the samples of this forward pass lie in the layers' inputs.

    `module` is the model, or its encoder; `contents` are the `contents_of` the call. Raises ValueError if the
    batch does not match the route, or a layer uses statistics of the batch.
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
    patches = patches_of(call[1], first, _special(router, module, _STAND_FOR).to(first.device))
    given = kind_of(call, list(contents.values()), _special(router, module))
    kind = (type(module), module.training, bool(others), tuple(patches), given)
    # A result for several rows per sample also holds for one row, but not the other way round.
    key = (kind, each > 1 or (kind, True) in router.places)
    if key not in router.places:
        own = [tensor for name, tensor in contents.items() if name not in others]
        left_out = [contents[name] for name in others]
        _refuse_batch_statistics(module)
        passes = TrialPasses(module, call, own, left_out, list(patches.values()), router.observed)
        found = find_places(passes, route.sizes)
        _mark_eager(module, found)
        if len(router.places) >= _KINDS:
            del router.places[next(iter(router.places))]
        router.places[key] = found
    route.places = router.places[key]


def _check_batch(router: Router, route: Route, batch: int) -> None:
    """Raises ValueError if the pass has another number of samples than there are names.

    `generate` may pass `copies` samples per name, such as beams. With other numbers it is unknown which of
    the named samples these are.
    """
    names = len(route.samples)
    if route.mixed and names and batch not in (names, names * route.copies):
        router.forget_places()
        raise ValueError(
            f"adapter_names: got {names} names, but the model calls itself with {batch} samples, and which "
            "adapter each has is unknown; use one adapter for the whole batch"
        )


def _refuse_batch_statistics(module: nn.Module) -> None:
    """Raises ValueError for a BatchNorm of the base in training mode, such as one put in after conversion."""
    copied = {part for copies in module.modules() if isinstance(copies, Copies) for part in copies.modules()}
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.training and part not in copied:
            raise ValueError(
                f"layer {name}: a BatchNorm in training mode uses statistics of the whole batch, so one "
                "adapter's samples would change another's results; call eval() on it"
            )


def _special(router: Router, module: nn.Module, kinds: tuple[str, ...] = ("",)) -> Tensor:
    """Returns `special_tokens`, collected once for each padding token, which may be set later."""
    key = (type(module), kinds, getattr(getattr(module, "config", None), "pad_token_id", None))
    if key not in router.specials:
        router.specials[key] = special_tokens(module, kinds)
    return router.specials[key]


def _of_no_sample(router: Router, module: nn.Module, contents: Mapping[str, Tensor]) -> list[str]:
    """Returns names of contents, such as images, that are not one per sample though there are as many.

    Placeholder tokens tell: samples hold unequal numbers of them.
    """
    first, *others = contents
    if not others or contents[first].is_floating_point():
        return []
    stands = torch.isin(contents[first], _special(router, module, _STAND_FOR).to(contents[first].device))
    counts = stands.flatten(1).sum(1)
    return [] if bool((counts == counts[0]).all()) else others


def _mark_eager(module: nn.Module, places: Places) -> None:
    """Tells layers for which inputs, by number of dimensions, a compiled graph cannot mix adapters."""
    for layer in module.modules():
        if isinstance(layer, MultiLoRALinear):
            layer.eager_dims |= {
                dims
                for (name, dims), place in places.items()
                if name == layer.name and not (isinstance(place, SampleDim) and place.is_plain)
            }


def contents_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors that hold the samples, by name; the first one tells how many samples there are."""
    given = {name: t for name, t in kwargs.items() if isinstance(t, Tensor) and t.dim() > 0}
    if args and isinstance(args[0], Tensor) and args[0].dim() > 0:
        given["0"] = args[0]
    known = [name for name in (*_CONTENTS, "0") if name in given]
    known = known or [name for name in given if "mask" not in name][:1]
    return {name: given[name] for name in known if given[name].shape[0] == given[known[0]].shape[0]}


def rows_per_sample(value: Tensor) -> int:
    """Returns how many rows of each sample layers see, as far as one tensor of the batch tells."""
    if value.dim() == 1:
        return 1
    integers = value.dtype in (torch.int64, torch.int32)
    return math.prod(value.shape[1:] if integers else value.shape[1:-1])
