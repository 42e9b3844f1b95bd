"""Checks what adapters begin with: the PEFT folder of ``init_from``, and the original weights for LoftQ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlora.config.lora_fields import build_lora
from mlora.errors import RunError, first_line
from mlora.model.base_info import doubt_of_base
from mlora.model.original_weights import quantized_already
from mlora.model.stored_quantization import read_quantization
from mlora.regular_files import read_regular
from mlora_ext.adapters.lora_config import needs_weights
from mlora_ext.interop.side_files import PLAIN, doubt_of, method_of

if TYPE_CHECKING:
    from peft import LoraConfig

    from mlora.config.adapter_config import AdapterConfig
    from mlora.config.run_config import RunConfig
    from mlora.config.sections import QuantizationConfig
    from mlora.model.base_info import BaseInfo

TARGETING = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")


def check_init_from(
    adapter: AdapterConfig, base: BaseInfo, quantization: QuantizationConfig | None
) -> list[str]:
    """Checks that ``init_from`` is a PEFT LoRA folder and that a ``lora`` block beside it agrees with it.

    Targets are compared as the modules that they reach in the base model, so ``all-linear`` agrees with the
    list of names that PEFT saves for it. `quantization`: how the run quantises a plain base. Returns warnings
    if the folder names another base model, or one that was quantised in another way.
    """
    folder = Path(str(adapter.init_from))
    if not folder.is_dir():
        raise RunError(f"init_from: no such folder: {folder}")
    if not (folder / "adapter_config.json").is_file():
        raise RunError(f"init_from: {folder} is not a PEFT folder: it holds no adapter_config.json")
    try:
        saved = json.loads(read_regular(folder / "adapter_config.json"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(
            f"init_from: cannot read {folder / 'adapter_config.json'}: {first_line(error)}"
        ) from error
    if not isinstance(saved, dict) or saved.get("peft_type") != "LORA":
        raise RunError(f"init_from: {folder} is not a LoRA adapter")
    saved = {**build_lora({}).to_dict(), **saved}  # an older PEFT wrote fewer keys
    named = str(saved.get("base_model_name_or_path") or "")
    other = bool(named) and not _same_base(named, base.name)
    for key, value in (adapter.lora or {}).items():
        if key not in TARGETING and value != saved[key]:
            _disagree(key, value, saved[key])
    given = {key: value for key, value in (adapter.lora or {}).items() if key in TARGETING}
    if any(value != saved.get(key) for key, value in given.items()) and base.targets(given) != _tuned(folder):
        key = "target_modules" if "target_modules" in given else next(iter(given))
        _disagree(key, given[key], saved.get(key), f" ({folder} was trained on {named})" if other else "")
    doubts = [f"{folder} was trained on {named}, but this run's base_model is {base.name}"] if other else []
    method = quantization.method if quantization else method_of(base.quantization or {"quant_method": PLAIN})
    try:
        read_quantization(folder)
        doubt = doubt_of(folder, method)
    except ValueError as error:
        raise RunError(f"init_from: {first_line(error)}") from error
    doubts += [doubt] if doubt else []
    if not other and (files := doubt_of_base(folder, base)):
        doubts.append(f"{folder} {files}")
    return [f"init_from: {each}" for each in doubts]


def _same_base(one: str, other: str) -> bool:
    """Whether two names can be one base model. Folders move, and owners on the hub change."""
    return Path(one).resolve() == Path(other).resolve() or Path(one).name == Path(other).name


def _disagree(key: str, value: Any, there: Any, why: str = "") -> None:
    written = repr(there) if len(repr(there)) <= 100 else f"{repr(there)[:97]}..."
    raise RunError(
        f"lora.{key}: is {value!r}, but the adapter in init_from has {written}{why}; "
        "write the same value or remove the lora block"
    )


def _tuned(folder: Path) -> set[str]:
    from safetensors import SafetensorError, safe_open

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise RunError(
            f"init_from: {folder} holds no adapter_model.safetensors; remove the lora block to load it"
        )
    try:
        with safe_open(file, "pt") as weights:
            return {key.rpartition(".lora_")[0] for key in weights.keys() if ".lora_" in key}  # noqa: SIM118
    except SafetensorError as error:
        raise RunError(f"init_from: cannot read {file}: {error}") from error


def check_originals(lora: LoraConfig, config: RunConfig, base: BaseInfo) -> None:
    """Raises RunError for LoftQ over a base that is plain, or that is stored quantised."""
    if not needs_weights(lora):
        return
    if base.quantization is not None:
        raise RunError(f"lora: {quantized_already(base.name, base.quantization['quant_method'])}")
    if config.quantization is None:
        raise RunError(
            "lora: init_lora_weights='loftq' needs a quantised base: over a plain one it would replace "
            "weights that all adapters share; add quantization: {method: bnb-nf4}, or use 'pissa'"
        )
