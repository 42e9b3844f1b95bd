"""Reads a model from a folder or the hub: all of it, or its skeleton without weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch.overrides import TorchFunctionMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from mlora.config.sections import QuantizationConfig
from mlora.errors import UNREADABLE
from mlora.model.base_info import check_base, quantization_of
from mlora.model.quantization import (
    group_size,
    prepare_skeleton,
    quantizer_of,
    transformers_config,
    with_kernel,
)

_CPU = torch.device("cpu")


def load_whole(
    source: str,
    dtype: torch.dtype,
    quantization: QuantizationConfig | None = None,
    device: torch.device = _CPU,
) -> PreTrainedModel:
    """Loads a causal language model; ValueError of one line if it cannot be loaded whole.

    A plain one is loaded on the CPU. A quantised one, by the checkpoint or by `quantization`, on the device.
    """
    check_base(source)
    config = _config(source)
    quantizer = quantizer_of(source, config, quantization, dtype, device)
    if quantizer is not None and group_size(quantizer):
        prepare_skeleton(skeleton(source, dtype), quantizer, dtype, device)  # checks the widths
    more: dict[str, Any] = {} if quantizer is None else {"device_map": {"": device}}
    if quantization is not None:
        more["quantization_config"] = transformers_config(quantization, dtype)
    said = quantization_of(source, config)
    if said is not None:
        config.quantization_config = with_kernel(said)
        more["config"] = config
    with told_in_one_line(source):
        found: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, output_loading_info=True, trust_remote_code=False, **more
        )
    model, loaded = found
    refuse_missing(source, sorted(loaded["missing_keys"]))
    assert isinstance(model, PreTrainedModel)
    return model


def skeleton(source: str, dtype: torch.dtype) -> PreTrainedModel:
    """Builds a causal language model from its config, in evaluation mode; ValueError of one line.

    Parameters are on the meta device, buffers are real.
    """
    check_base(source)
    config = _config(source)
    with told_in_one_line(source):
        return _empty(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False))


def _config(source: str) -> Any:
    with told_in_one_line(source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        _check_decoder(config)
    quantization_of(source, config)
    return config


def skeleton_of(model: PreTrainedModel) -> PreTrainedModel:
    """Builds a skeleton of the same class, config and dtypes; `model` may be cut and have adapters."""
    made = _empty(lambda: type(model)(copy.deepcopy(model.config)))
    dtypes = {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}
    for name, parameter in made.named_parameters():
        dtype = dtypes.get(name, model.dtype)  # a quantised weight is no parameter, or not of its dtype
        parameter.data = parameter.data.to(dtype if dtype.is_floating_point else model.dtype)
    return made


def _check_decoder(config: Any) -> None:
    """Refuses encoders and encoder-decoders by their model type, before anything is loaded."""
    kind = config.model_type
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        whole = "an encoder-decoder model" if config.is_encoder_decoder else "not a causal language model"
        raise ValueError(f"{kind} is {whole}; mlora trains causal language models (decoders) only")
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", True) is False:
        raise ValueError(
            f"{kind} is an encoder (its config.json does not set is_decoder); mlora trains causal language "
            "models (decoders) only"
        )


def _empty(make: Callable[[], Any]) -> PreTrainedModel:
    with init_empty_weights(include_buffers=False):
        with _EmptyOnMeta():
            model = make()
        if any(buffer.is_meta for buffer in model.buffers()):  # made by `torch.empty`, then filled
            model = make()
    assert isinstance(model, PreTrainedModel)
    return model.eval()


def refuse_missing(source: str, missing: list[str]) -> None:
    """Refuses a checkpoint without some weights (ValueError): Transformers draws random values for them."""
    if missing:
        raise ValueError(f"base_model: {source} is missing {len(missing)} weights, for example {missing[0]}")


class _EmptyOnMeta(TorchFunctionMode):
    """Inside `with`, `torch.empty` takes no memory.

    `init_empty_weights` frees the memory later, but glibc does not use it again: the process would hold room
    for a whole model, and later allocations would scatter in it.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


@contextmanager
def told_in_one_line(source: str) -> Iterator[None]:
    """Inside `with`, loading errors of Transformers and safetensors become a ValueError of one line."""
    try:
        yield
    except (*UNREADABLE, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = " ".join(str(error).split())
        raise ValueError(f"base_model: cannot load {source}: {reason}") from error


def stop_noise(model: PreTrainedModel) -> None:
    """Sets layerdrop and router jitter to 0: like a dropout, one draw for a batch ties its adapters."""
    stopped = 0
    for owner in (model.config.get_text_config(), *model.modules()):
        fields = [key for key in vars(owner) if key == "layerdrop" or "jitter" in key]
        for key in fields:
            if isinstance(getattr(owner, key), float) and getattr(owner, key):
                setattr(owner, key, 0.0)
                stopped += 1
    if stopped:
        warnings.warn("layerdrop or router jitter of the base model was set to 0", stacklevel=4)
