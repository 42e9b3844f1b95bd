"""Refuses what an adapter cannot be put on: each function raises ValueError, before anything is changed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..adapters.kind import LayerSpec
from ..adapters.lora_config import init_kind
from ..adapters.registry import kind_for
from ..adapters.trained_parts import TRAINED_COPY, TRAINED_ROWS
from ..errors import AdapterError
from ..frozen.quantized.families import family_of, fault_of, is_gptqmodel, is_library_layer
from ..layers.adapter_layer import AdapterLayer
from ..layers.embedding import MultiLoRAEmbedding, has_plain_rows
from ..layers.experts import MultiLoRAExperts, MultiLoRAGivenRows
from ..layers.layer_kinds import layer_kind
from ..layers.linear import MultiLoRALinear, is_plain_linear, is_transposed
from ..layers.over_module import plain_module
from ..layers.parameter_layer import MultiLoRAMatrix, ParameterLayer

if TYPE_CHECKING:
    from peft import LoraConfig

MOVED = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
)
"""Attributes with the hooks that run in a module's forward and backward; `move_hooks` moves them."""
_OF_BITSANDBYTES = frozenset({"_load_state_dict_pre_hooks"})
"""Hooks that bitsandbytes puts on each of its layers."""
_ON_PARAMETERS: tuple[type[ParameterLayer], ...] = (MultiLoRAGivenRows, MultiLoRAExperts, MultiLoRAMatrix)
_WHAT = {TRAINED_COPY: "trains a copy of it", TRAINED_ROWS: "trains rows of it"}
_TRIAL = """
import json, re, resource, sys, time
for number, (how, pattern) in enumerate(json.load(sys.stdin)):
    if number == 0:
        keys = pattern
        continue
    print(number, flush=True)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 2,) * 2)
    find = getattr(re.compile(pattern), how)
    for key in keys:
        find(key)
"""


def check_patterns(modules: Mapping[str, nn.Module], name: str, config: LoraConfig) -> None:
    """Refuses a pattern of a config that is none, or that takes seconds on a model's names.

    Python's `re` cannot be interrupted, and holds the GIL. So patterns with several repeats or alternatives,
    which may backtrack, are first matched in a process of their own, for one or two seconds of CPU time.
    `modules` are the base's, by name: what adapters add would make each call's names new.
    """
    patterns = list(_patterns(config))
    for field, given, _, whole in patterns:
        try:
            re.compile(whole)
        except (re.error, RecursionError, OverflowError) as error:
            raise AdapterError(name, f"{field}: {given!r} is not a pattern: {error}") from error
    risky = [one for one in patterns if len(re.findall(r"[*+?{|]", one[1])) > 1]
    if not risky:
        return
    keys = []
    for key, module in modules.items():
        keys += [key, *(f"{key}.{own}" for own, _ in module.named_parameters(recurse=False))]
    slow = _too_slow(tuple(keys), tuple((how, whole) for *_, how, whole in risky))
    if slow is not None:
        field, given, *_ = risky[slow]
        raise AdapterError(
            name,
            f"{field}: {given!r} takes too long to match this model's names; write it "
            "without a repeat inside a repeat, such as (a+)+",
        )


def _patterns(config: LoraConfig) -> Iterator[tuple[str, str, str, str]]:
    """Yields each pattern: its field, as it is written, PEFT's function of `re`, and what that is given."""
    for field in ("target_modules", "exclude_modules"):
        if isinstance(value := getattr(config, field), str):
            yield field, value, "fullmatch", value
    for one in config.modules_to_save or ():
        yield "modules_to_save", one, "match", rf"(^|.*\.){one}($|\..*)"
    value = config.layers_pattern or []
    for one in [value] if isinstance(value, str) else value:
        yield "layers_pattern", one, "match", rf"(?:^|.*?\.){one}\.(?P<idx>\d+)\."
    for field in ("rank_pattern", "alpha_pattern"):
        for one in getattr(config, field) or ():
            yield field, one, "match", rf"(.*\.)?({one})$"


@lru_cache(maxsize=64)
def _too_slow(keys: tuple[str, ...], patterns: tuple[tuple[str, str], ...]) -> int | None:
    """Returns the place of the first pattern that is still matching the keys at its limit, or None."""
    told = json.dumps([("", keys), *patterns])
    command = [sys.executable, "-I", "-S", "-c", _TRIAL]
    done = subprocess.run(command, input=told, stdout=subprocess.PIPE, encoding="ascii", check=False)
    # without a number the process could not start, and PEFT matches the patterns as they are
    begun = done.stdout.split()
    limited = done.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
    return int(begun[-1]) - 1 if limited and begun else None


def check_target(model: nn.Module, name: str, config: LoraConfig, key: str, linear: bool) -> None:
    """Refuses a module that matches `target_modules` but cannot have low-rank parts."""
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    module, short = model.get_submodule(key), key.rpartition(".")[2]
    leave_out = f"remove it from target_modules, or pass exclude_modules=[{short!r}]"
    if type(module) is NonDynamicallyQuantizableLinear:
        raise AdapterError(
            name,
            f"target {key} is not supported: nn.MultiheadAttention reads its weight "
            f"without calling the layer; {leave_out}",
        )
    if not linear and not MultiLoRAEmbedding.serves(module):
        raise AdapterError(
            name,
            f"target {key} is a {type(module).__name__}; only nn.Linear, Conv1D and "
            f"nn.Embedding are supported, and subclasses that keep nn.Linear's forward; {leave_out}",
        )
    try:
        _check_lora_target_modules_mamba(config, model, short)
    except ValueError as error:
        raise AdapterError(
            name,
            f"target {key} is not supported: Mamba's kernels read its weight without "
            f"calling the layer; {leave_out}",
        ) from error


def check_parameters(
    name: str, config: LoraConfig, key: str, module: nn.Module, names: Sequence[str]
) -> list[str]:
    """Returns the targeted parameters of a module in the order in which PEFT wraps them in a new model.

    Refuses them if they cannot have adapters.
    """
    what = f"target_parameters: {key}.{names[0]}"
    for field in ("lora_dropout", "fan_in_fan_out", "lora_bias", "use_dora"):
        if getattr(config, field):
            raise AdapterError(
                name,
                f"{what} is a parameter, for which PEFT serves no {field}; leave {field}="
                f"{getattr(config, field)!r} out, or target modules outside of the experts only",
            )
    if is_weight(module, names):
        return ["weight"]
    adapters = kind_for(name, config)
    if not adapters.is_plain:
        raise AdapterError(
            name, f"{what}: adapters of kind {adapters.name!r} can be put on linear layers only"
        )
    if init_kind(config) == "orthogonal":
        raise AdapterError(
            name,
            f"{what} is a parameter, on which init_lora_weights='orthogonal' is not supported; use True or "
            "'gaussian'",
        )
    kind = next((one for one in _ON_PARAMETERS if one.serves(module)), None)
    if kind is None:
        raise AdapterError(name, f"{what} belongs to a {type(module).__name__}, which is not supported")
    able = kind.candidates(module)
    others = [parameter for parameter in names if parameter not in able]
    if others:
        raise AdapterError(
            name,
            f"target_parameters: {key}.{others[0]} is not supported; in a "
            f"{type(module).__name__} adapters can be put on {' and '.join(able)}",
        )
    return [one for one in able if one in names]


def is_weight(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether the parameter is a linear layer's weight: the same as targeting the layer."""
    return MultiLoRALinear.serves(module) and list(names) == ["weight"] and not is_transposed(module)


def check_rows(name: str, key: str, module: nn.Module, spec: LayerSpec) -> None:
    """Refuses a module of `trainable_token_indices` without such rows, or whose rows cannot be trained."""
    plain = plain_module(module)
    known = isinstance(plain, nn.Embedding) or is_plain_linear(plain)
    if known and not has_plain_rows(module):
        raise AdapterError(
            name,
            f"trainable_token_indices: {key} is a {type(plain).__name__} with quantised or "
            "sharded weights, whose rows cannot be trained; leave it out, or do not quantise it",
        )
    try:
        layer_kind(module, spec.kind)
    except ValueError as error:
        raise AdapterError(
            name,
            f"trainable_token_indices: {key} is a {type(plain).__name__}; only plain "
            "embeddings and linear layers have rows that can be trained",
        ) from error
    rows = plain.weight.shape[0]  # type: ignore[union-attr, index]
    for token in spec.tokens:
        if not 0 <= token < rows:
            raise AdapterError(
                name, f"trainable_token_indices: token {token} is outside of {key}, which has {rows} rows"
            )


def check_tied_copies(
    name: str,
    config: LoraConfig,
    modules: Mapping[str, nn.Module],
    wanted: Sequence[str],
    embedding: str,
    tied: Sequence[str],
) -> None:
    """Refuses copies of tied modules that PEFT would not keep tied.

    Of modules in `modules_to_save`, PEFT 0.21 takes only those called `embed_tokens` or `lm_head`.
    """
    from peft.utils.constants import EMBEDDING_LAYER_NAMES

    for key in tied:
        module = plain_module(modules[key])
        if not is_plain_linear(module):
            raise AdapterError(
                name,
                f"ensure_weight_tying: {key} has the weight of {embedding} and is of class "
                f"{type(module).__name__}; only linear layers can share the embedding's copy (PEFT's forward "
                "fails); leave ensure_weight_tying out",
            )
    if not any(one.rpartition(".")[2] in EMBEDDING_LAYER_NAMES for one in config.modules_to_save or ()):
        raise AdapterError(
            name,
            f"ensure_weight_tying: PEFT ties only {' and '.join(EMBEDDING_LAYER_NAMES)}, "
            f"and modules_to_save names {wanted[0]}; name {tied[0]}, or leave ensure_weight_tying out",
        )
    for key in tied:
        if getattr(modules[key], "bias", None) is not None:
            raise AdapterError(
                name,
                f"ensure_weight_tying: {key} has a bias, which PEFT leaves out of a tied "
                "copy; leave ensure_weight_tying out",
            )


def refuse_conflicts(model: nn.Module, plans: Mapping[str, Mapping[str, LayerSpec]]) -> None:
    """Refuses adapters of which one module cannot serve all, the model's and these; names two of them."""
    users: dict[str, dict[str, LayerSpec]] = {
        key: dict(module.specs) for key, module in model.named_modules() if isinstance(module, AdapterLayer)
    }
    for name, plan in plans.items():
        for key, spec in plan.items():
            users.setdefault(key, {})[name] = spec
    copied = {
        key: name for key, specs in users.items() for name, spec in specs.items() if spec.kind == TRAINED_COPY
    }
    for key, specs in users.items():
        if not specs:
            continue
        module, (first, one) = model.get_submodule(key), next(iter(specs.items()))
        for other, spec in specs.items():
            if layer_kind(module, spec.kind) is not layer_kind(module, one.kind):
                says = [_WHAT.get(each.kind, "has low-rank parts on it") for each in (one, spec)]
                raise ValueError(
                    f"layer {key}: adapter {first!r} {says[0]} and adapter {other!r} {says[1]}; one module "
                    "serves one of both: leave it out of one of the adapters"
                )
        for outer, name in copied.items():
            if key.startswith(f"{outer}."):
                raise AdapterError(
                    first,
                    f"layer {key} lies inside {outer}, of which adapter {name!r} trains a "
                    f"copy (modules_to_save); leave {key} out of {first!r}, for example by exclude_modules",
                )


def check_layer(key: str, module: nn.Module, own_parts: bool = False) -> None:
    """Raises ValueError for a layer with anything that the converted layer would not have.

    `own_parts`: it may have other parts than weight and bias, since the converted layer keeps it.
    """
    if hasattr(module, "_hf_hook"):
        raise ValueError(
            f"layer {key}: is offloaded by accelerate; load the model without device_map offloading"
        )
    check_untouched(f"layer {key}", module, _OF_BITSANDBYTES if is_library_layer(module) else ())
    parts = (*module._parameters, *module._buffers, *module._modules)
    others = [name for name in parts if name not in ("weight", "bias")]
    if others and not own_parts and not is_gptqmodel(module):
        raise ValueError(
            f"layer {key}: has {', '.join(others)} beside weight and bias, as after pruning, weight_norm or "
            "parametrizations; make the weight a plain parameter (remove_parametrizations, prune.remove, "
            "remove_weight_norm)"
        )
    if family_of(module) is not None:
        fault = fault_of(module)
        if fault:
            raise ValueError(f"layer {key}: {fault}")
        return
    if is_library_layer(module):  # on the meta device: another stage's
        return
    _check_plain(key, module)


def check_module(key: str, module: nn.Module, allowed: Collection[str] = ()) -> None:
    """Raises ValueError for a module of which copies are trained, if it has anything that they would not.

    `allowed` names attributes whose hooks may be there.
    """
    converted = "."  # its parts are checked when it is converted
    for part, inside in module.named_modules(prefix=key):
        if isinstance(inside, AdapterLayer):
            converted = f"{part}."
        if isinstance(inside, AdapterLayer) or part.startswith(converted):
            continue
        if hasattr(inside, "_hf_hook"):
            raise ValueError(
                f"layer {part}: is offloaded by accelerate; load the model without device_map offloading"
            )
        check_untouched(f"layer {part}", inside, allowed)
        _check_plain(part, inside)


def _check_plain(key: str, module: nn.Module) -> None:
    for name, tensor in module.named_parameters(recurse=False):
        halves = tensor.is_floating_point() and tensor.dtype.itemsize > 1
        if is_traceable_wrapper_subclass(tensor) or not halves:
            kind = type(tensor.data).__name__
            raise ValueError(
                f"layer {key}: expected a plain floating-point {name}, got {kind} of {tensor.dtype}; "
                "quantized bases, except those of bitsandbytes, torchao and gptqmodel, and sharded ones are "
                "not supported; load the original weights"
            )


def check_untouched(what: str, module: nn.Module, allowed: Collection[str] = ()) -> None:
    """Raises ValueError if dropping a module would lose hooks, a replaced forward or a compiled call.

    `what` names the module in messages. `allowed` names attributes whose hooks may be there.
    """
    for field, hooks in vars(module).items():
        if field.endswith("_hooks") and hooks and field not in allowed:
            raise ValueError(
                f"{what}: has {field.strip('_').replace('_', ' ')}, which conversion would discard; remove "
                "them, convert the model, and register them on the converted model"
            )
    own = vars(module).get("forward")
    # PEFT's update_forward_signature puts the class's own forward on the instance.
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        raise ValueError(
            f"{what}: its forward was replaced on the instance, and conversion would discard the "
            "replacement; delete the attribute before you convert the model"
        )
    if module._compiled_call_impl is not None:
        raise ValueError(f"{what}: is compiled, and conversion would undo it; compile the converted model")


def move_hooks(source: nn.Module, target: nn.Module) -> None:
    """Makes one module's forward and backward hooks run with another; their handles still remove them."""
    for field in MOVED:
        target.__dict__[field] = source.__dict__[field]
