"""Tells a route where the samples of a forward pass lie in the layers' inputs.

`sample_table` has that for Transformers' classes, so their calls run the base once. Trial passes find it out
for other models, before the first mixed batch of each kind.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
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
from ..routing.sample_table import LayerTable, PlaceLine, TablePlaces, are_even, rows_of
from ..routing.samples import Found, FoundPlaces, find_places
from ..routing.trial_passes import Observer, TrialPasses

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
_DIMS = 9
"""Above the number of dimensions of any layer's input."""
_KINDS = 64
"""Number of kinds of calls for which it is remembered what trial passes have found."""
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
    if not route.mixed or first.is_meta:
        return
    if route.layout is not None and (batch == 1 or each == 1):
        return
    key = type(module), module.training
    if key not in router.tables:
        _refuse_batch_statistics(module)
        layers = [layer.name for layer in module.modules() if isinstance(layer, AdapterLayer) and layer.specs]
        router.tables[key] = LayerTable(module, _prefix_of(module), layers)
        _mark_eager(module, router.tables[key])
    table = router.tables[key]
    if router.found or not table.is_whole:
        route.places = _found_for(router, module, call, looks=not table.is_whole)
    if route.places is None:
        placeholders = _special(router, module, _STAND_FOR).to(first.device)
        even = are_even(call, first, placeholders, patches_of(call[1], first, placeholders))
        route.places = TablePlaces(table, batch, rows_of(call, batch), even)


def _prefix_of(module: nn.Module) -> str:
    """Returns how the names of a module's layers begin in the model around it."""
    for name, layer in module.named_modules():
        if isinstance(layer, AdapterLayer) and layer.name.endswith(f".{name}"):
            return layer.name.removesuffix(name)
    return ""


def find_sample_dims(model: nn.Module, call: Mapping[str, Any]) -> dict[str, str]:
    """Finds out where samples lie in the layers' inputs, for mixed batches of this kind.

    The base runs several times without gradients: on the batch, and on copies of it in which some samples
    have other contents. A row that changes belongs to a sample that changed. With B samples these are about
    log2(B) + 4 forward passes. They leave buffers, attributes, arguments and random numbers as they were, but
    hooks see them; where processes communicate in a forward pass, as with FSDP, all must call this.

    Classes of Transformers that `mlora_ext` has checked need none of this. For other models it runs by itself
    before the first mixed batch of each kind; call it before, where that would hang or disturb. The model
    keeps the answer until adapters are added or removed. It holds for calls of the same kind: the same
    arguments, flags and numbers of dimensions, in the same mode (training or evaluation), whose masks, labels
    and lengths treat samples alike if those of this call do.

    Args:
        model: converted by `convert_model`.
        call: the arguments of the forward call by name, with two samples or more; `adapter_names` is ignored.

    Returns:
        For each layer the place of samples in its input, or the reason why mixed batches are refused there.

    Raises:
        ValueError: if the model was not converted, the call has no batch of two samples or more, or a layer
            uses statistics of the batch.

    Example:
        >>> model = mx.convert_model(MyModel(), configs)
        >>> mx.find_sample_dims(model, {"x": x})
        >>> out = model(x, adapter_names=["a", "b"])
    """
    router = router_of(model)
    given: Call = (), {name: value for name, value in call.items() if name != "adapter_names"}
    contents = contents_of(*given)
    first = next(iter(contents.values()), None)
    if first is None or first.shape[0] < 2:
        raise ValueError("call: expected arguments by name, with a batch of two samples or more")
    router.leave_interrupted()
    router.thread_guard.check()
    found = _look(router, model, given, (_kind(router, model, given), rows_per_sample(first) > 1))
    return {f"{name}, {dims} dimensions": str(one) for (name, dims), one in found.items()}


def _look(router: Router, module: nn.Module, call: Call, key: Hashable) -> dict[tuple[str, int], Found | str]:
    """Runs trial passes, and remembers under `key` what they find."""
    _refuse_batch_statistics(module)
    first = next(iter(contents_of(*call).values()))
    found = find_places(trial_passes(module, call, router.observed), sizes_of(call, first.shape[0]))
    plain = {one for one, place in found.items() if isinstance(place, Found) and place.place.is_plain}
    for layer in module.modules():
        if isinstance(layer, MultiLoRALinear):
            layer.eager_dims |= {dims for name, dims in found.keys() - plain if name == layer.name}
            layer.eager_dims -= {dims for name, dims in plain if name == layer.name}
    if len(router.found) >= _KINDS:
        del router.found[next(iter(router.found))]
    router.found[key] = found
    return found


def _found_for(router: Router, module: nn.Module, call: Call, *, looks: bool) -> FoundPlaces | None:
    """Returns what trial passes have found for such calls; without an answer, `looks` makes them now."""
    named = _by_name(module, call)
    first = next(iter(contents_of(*named).values()))
    kind, several = _kind(router, module, named), rows_per_sample(first) > 1
    # What holds for several rows per sample also holds for one row, but not the other way round.
    found = router.found.get((kind, True), router.found.get((kind, several)))
    if found is None and looks:
        found = _look(router, module, named, (kind, several))
    return None if found is None else FoundPlaces(found, first.shape[0], sizes_of(named, first.shape[0]))


def _by_name(module: nn.Module, call: Call) -> Call:
    """Returns the same call with positional arguments by name."""
    args, kwargs = call
    names = list(inspect.signature(module.forward).parameters)[: len(args)]
    return args[len(names) :], {**dict(zip(names, args, strict=False)), **kwargs}


def _kind(router: Router, module: nn.Module, call: Call) -> Hashable:
    """Returns a key that is equal for calls in which rows are arranged alike, see `kind_of`."""
    contents = contents_of(*call)
    first = next(iter(contents.values()))
    placeholders = _special(router, module, _STAND_FOR).to(first.device)
    uneven, patches = _of_no_sample(contents, placeholders), patches_of(call[1], first, placeholders)
    given = kind_of(call, list(contents.values()), _special(router, module))
    return type(module), module.training, bool(uneven), tuple(patches), given


def trial_passes(
    module: nn.Module, call: Call, observed: Callable[[], AbstractContextManager[Observer]]
) -> TrialPasses:
    """Returns the passes that find out where samples lie in one call of a module; see `samples`."""
    contents = contents_of(*call)
    first = next(iter(contents.values()))
    placeholders = special_tokens(module, _STAND_FOR).to(first.device)
    others = _of_no_sample(contents, placeholders)
    patches = patches_of(call[1], first, placeholders)
    own = [tensor for name, tensor in contents.items() if name not in others]
    left_out = [contents[name] for name in others]
    return TrialPasses(module, call, own, left_out, list(patches.values()), observed)


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


def _of_no_sample(contents: Mapping[str, Tensor], placeholders: Tensor) -> list[str]:
    """Returns names of contents, such as images, that are not one per sample though there are as many.

    Placeholder tokens tell: samples hold unequal numbers of them.
    """
    first, *others = contents
    if not others or contents[first].is_floating_point():
        return []
    counts = torch.isin(contents[first], placeholders).flatten(1).sum(1)
    return [] if bool((counts == counts[0]).all()) else others


def _mark_eager(module: nn.Module, table: LayerTable) -> None:
    """Tells layers for which inputs, by number of dimensions, a compiled graph cannot mix adapters."""
    for layer in module.modules():
        if isinstance(layer, MultiLoRALinear):
            found = {dims: table.of(layer.name, dims) for dims in range(1, _DIMS)}
            plain = {dims for dims, one in found.items() if isinstance(one, PlaceLine) and one.place.is_plain}
            layer.eager_dims |= found.keys() - plain


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
