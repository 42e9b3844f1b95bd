"""Finds a base model: a folder, or a model on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlora.config.strict import is_hub_id
from mlora.errors import RunError

SECONDS = 5.0


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


def refuse_quantized(name: str, config: Any) -> None:
    """Refuses a base model (RunError) if its config says that it is quantized; reads no weights."""
    for part in (config, config.get_text_config()):
        said = getattr(part, "quantization_config", None) or getattr(part, "compression_config", None)
        if said:
            method = said.get("quant_method") if isinstance(said, dict) else None
            raise RunError(
                f"base_model: {name} is quantized ({method or 'its config.json has a quantization_config'}), "
                "and quantized bases are not supported yet; use the original model in bf16, fp16 or fp32"
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
