"""Finds a base model, a folder or on the Hugging Face hub, and reads facts about it without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlora.config.lora_fields import build_lora
from mlora.config.strict import is_hub_id, shown
from mlora.errors import RunError, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


SECONDS = 5.0  # for the hub's answer


class BaseInfo:
    """Facts about a base model, a folder or a hub id, without loading its weights.

    `folder` is the folder that was looked for if `name` is a hub id. Raises RunError if nothing is there,
    Transformers cannot read it, or it is quantized in a format that is not served.
    """

    def __init__(self, name: str, folder: str | None = None) -> None:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig

        self.name = name
        try:
            check_base(name, folder)
        except OSError as error:  # a name that is too long, a folder without permission
            raise RunError(f"base_model: {shown(name)} cannot be reached: {error.strerror}") from error
        try:
            self.config: PretrainedConfig = AutoConfig.from_pretrained(name)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
            whole = isinstance(error, StrictDataclassError)  # its first line does not say what is wrong
            reason = " ".join(str(error).split()) if whole else first_line(error)
            raise RunError(f"base_model: cannot load {name}: {reason}") from error
        self.quantization = quantization_of(name, self.config)
        self._tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def blocks(self) -> int:
        """The number of decoder blocks."""
        return int(self.config.get_text_config().num_hidden_layers)

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model was made for, if its config says so.

        With LongRoPE it is the length before the extension. Beyond it, Transformers rotates every row of a
        batch by other angles, so that one long sample would change what other adapters see.
        """
        config = self.config.get_text_config()
        limits = [getattr(config, "max_position_embeddings", None)]
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            limits.append(rope.get("original_max_position_embeddings"))
            limits.append(getattr(config, "original_max_position_embeddings", None))
        known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
        return min(known, default=None)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Returns its tokenizer, loaded at the first call; RunError if there is none or it cannot be read."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self.name)
            except (OSError, ValueError, KeyError) as error:
                raise RunError(
                    f"base_model: cannot load the tokenizer of {self.name}: {first_line(error)}; "
                    "use datasets of format tokens, which need none"
                ) from error
        assert self._tokenizer is not None
        return self._tokenizer

    def targets(self, lora: dict[str, Any]) -> set[str]:
        """Returns the modules that a ``lora`` block targets, by their names in PEFT's files.

        RunError if PEFT refuses the block, or if it targets nothing.
        """
        import torch
        from transformers import AutoModelForCausalLM

        from mlora_ext.nn.targets import target_layers

        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(self.config)
        try:
            layers = target_layers(skeleton, "lora", build_lora(lora))
        except ValueError as error:
            raise RunError(f"lora: {first_line(error)}") from error
        return {f"base_model.model.{layer}" for layer in layers}


def check_base(name: str, folder: Path | str | None = None) -> None:
    """Checks that a base model is a folder with a config, or in the hub's cache, or on the hub.

    The hub is asked once, because its client's own retries take half a minute without a network. `folder` is
    the folder to name in the message; default: that of `name`. Raises RunError of one line.
    """
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise RunError(f"base_model: {name} has no config.json; give a model's folder")
        return
    if Path(name).is_file():
        raise RunError(f"base_model: {name} is a file; expected a model's folder or a model on the hub")
    nowhere = f"base_model: no such folder: {folder or Path(name).resolve()}"
    if not is_hub_id(name):
        raise RunError(nowhere)
    reason = _hub_says(name)
    if reason:
        raise RunError(f"{nowhere}, and the hub cannot provide {name}: {reason}")


SERVED = {
    "bitsandbytes": ("bitsandbytes",),
    "torchao": ("torchao",),
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel",),
}
"""The `quant_method` of checkpoints that can be trained on, and the packages that read them."""
_LOADERS = {"compressed-tensors": "compressed-tensors"}
"""Packages with which Transformers reads other checkpoints."""


def quantization_of(name: str, config: Any) -> dict[str, Any] | None:
    """Returns what a base model's config says of its quantisation, None if it is plain; reads no weights.

    Raises RunError of one line if the format is not served.
    """
    for part in (config, config.get_text_config()):
        said = getattr(part, "quantization_config", None) or getattr(part, "compression_config", None)
        if not said:
            continue
        said = said if isinstance(said, dict) else said.to_dict()
        method = getattr(said.get("quant_method"), "value", said.get("quant_method"))
        if method in SERVED:
            _check_packing(name, method, said)
            return {**said, "quant_method": method}
        what = method or "its config.json has a quantization_config without quant_method"
        package = f"; Transformers reads it with {_LOADERS[method]}" if method in _LOADERS else ""
        *most, last = SERVED
        raise RunError(
            f"base_model: {name} is quantized ({what}), and only checkpoints of {', '.join(most)} and {last} "
            f"are served{package}; use the original model, and `quantization: {{method: bnb-nf4}}` to save "
            "memory"
        )
    return None


def router_loss_fault(config: Any) -> str | None:
    """Returns why a base model cannot be trained whose config asks for its routers' auxiliary loss, or None.

    Transformers computes that loss from all tokens of a batch and all layers, and adds it to cross-entropy.
    """
    text = config.get_text_config()
    asked = any(getattr(part, "output_router_logits", False) for part in (config, text))
    if not asked or getattr(text, "router_aux_loss_coef", None) == 0:
        return None
    return (
        "base_model: its config has output_router_logits: true, which adds its routers' auxiliary loss, "
        "and that loss is not served; set it to false in config.json (Engine: in model.config) to train "
        "without it"
    )


def _check_packing(name: str, method: str, said: dict[str, Any]) -> None:
    """Raises RunError for GPTQ and AWQ checkpoints in another form than layers can be read from."""
    if method not in ("gptq", "awq"):
        return
    forms = (None, "gptq", "gptq_v2") if method == "gptq" else (None, "gemm")
    form = said.get("checkpoint_format") or said.get("version") or said.get("format")
    found = {
        "bits": (said.get("bits", 4), (2, 4, 8)),
        "format": (str(form).lower() if form else None, forms),
        "dynamic": (said.get("dynamic") or None, (None,)),
        "pack_dtype": (str(said.get("pack_dtype") or "int32"), ("int32",)),
    }
    for key, (value, served) in found.items():
        if value not in served:
            values = " or ".join(str(one) for one in served if one is not None) or "without it"
            raise RunError(
                f"base_model: {name} is quantized ({method}) with {key} {value}; served is {values}; use the "
                "original model, and `quantization: {method: bnb-nf4}` to save memory"
            )


def _hub_says(name: str) -> str | None:
    """Returns why the hub does not give a model, or None if it does or if the model is in the cache."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return None
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=SECONDS)
    except GatedRepoError:
        return f"it is gated; ask for access at https://huggingface.co/{name} and `hf auth login`"
    except RepositoryNotFoundError:
        return "there is no such model, or it is private and needs `hf auth login`"
    except EntryNotFoundError:
        return "it has no config.json"
    except HFValidationError:
        return "this is not a valid model name"
    except OfflineModeIsEnabled:
        return "it is not in the cache, and HF_HUB_OFFLINE forbids downloads"
    except HfHubHTTPError as error:
        return error.server_message or f"status {error.response.status_code}"
    except HTTPError as error:
        return f"no answer ({error or type(error).__name__})"
    return None
