"""Finds a base model, a folder or on the Hugging Face hub, and reads facts about it without its weights."""

from __future__ import annotations

import hashlib
import json
import math
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlora.config.lora_fields import build_lora
from mlora.config.strict import is_hub_id, shown
from mlora.errors import UNREADABLE, RunError, RustTold, file_line, first_line
from mlora.regular_files import MOST, open_regular, read_regular

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


SECONDS = 5.0  # for the hub's answer
DIGEST = "base_model_digest"
"""The key of a base model's digest in the metadata of an adapter's weights."""
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_SAMPLE, _BLOCK = 16 << 20, 16 << 10  # bytes of the weights that a digest reads, and of one read
_TEXTS = {"config.json", "generation_config.json", *TOKENIZER}
_INDICES = (".safetensors.index.json", ".bin.index.json")


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
            self.config: PretrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
        except (*UNREADABLE, StrictDataclassError) as error:
            whole = isinstance(error, StrictDataclassError)  # its first line does not say what is wrong
            reason = " ".join(str(error).split()) if whole else first_line(error)
            raise RunError(f"base_model: cannot load {name}: {reason}") from error
        self.quantization = quantization_of(name, self.config)
        self._tokenizer: PreTrainedTokenizerBase | None = None

    @cached_property
    def digest(self) -> str:
        """What tells this model from others wherever it lies: its commit on the hub, or a digest of files.

        The digest is of the config, the end tokens, the tokenizer, and 16 MiB of the weights, spread evenly
        over their files, so that it costs the same for a large model and a small one. Raises RunError if a
        file cannot be read.
        """
        from transformers.utils import cached_file

        folder = Path(self.name)
        if not folder.is_dir():
            return f"commit:{Path(str(cached_file(self.name, 'config.json'))).parent.name}"
        try:
            return _digest_of(folder)
        except OSError as error:
            raise RunError(f"base_model: {file_line(error)}") from error

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

            said = f"base_model: cannot load the tokenizer of {self.name}"
            try:
                with RustTold(said):
                    self._tokenizer = AutoTokenizer.from_pretrained(self.name, trust_remote_code=False)
            except RunError:
                raise
            except UNREADABLE as error:
                hint = "use datasets of format tokens, which need none"
                raise RunError(f"{said}: {first_line(error)}; {hint}") from error
        assert self._tokenizer is not None
        return self._tokenizer

    def end_tokens(self) -> tuple[int, ...]:
        """Returns the ids of the tokens that end an answer: its generation config's and its tokenizer's.

        RunError if there is none.
        """
        from transformers import GenerationConfig

        try:
            config = GenerationConfig.from_pretrained(self.name)
        except UNREADABLE as error:
            if not isinstance(error, OSError) or (Path(self.name) / "generation_config.json").exists():
                raise RunError(
                    f"base_model: {self.name}: generation_config.json cannot be read: {first_line(error)}"
                ) from error
            # as Transformers does for a model without the file
            config = GenerationConfig.from_model_config(self.config)
        own = config.eos_token_id
        known = [self.tokenizer().eos_token_id, *(own if isinstance(own, list) else [own])]
        ends = tuple(sorted({token for token in known if isinstance(token, int)}))
        if not ends:
            raise RunError(f"base_model: {self.name} has no end token in its generation config or tokenizer")
        return ends

    def targets(self, lora: dict[str, Any]) -> set[str]:
        """Returns the modules that a ``lora`` block targets, by their names in PEFT's files.

        RunError if PEFT refuses the block, or if it targets nothing.
        """
        import torch
        from transformers import AutoModelForCausalLM

        from mlora_ext.targets.find import target_layers

        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(self.config, trust_remote_code=False)
        try:
            layers = target_layers(skeleton, "lora", build_lora(lora))
        except ValueError as error:
            raise RunError(f"lora: {first_line(error)}") from error
        return {f"base_model.model.{layer}" for layer in layers}


def _digest_of(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_bytes())
    for key in ("_name_or_path", "transformers_version"):  # say nothing of what the model computes
        config.pop(key, None)
    found = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name in TOKENIZER:
        if (path := folder / name).is_file():
            found.update(f"{name} ".encode() + path.read_bytes())
    found.update(_ends_of(folder / "generation_config.json", config))
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        return "missing: there is no *.safetensors"
    sizes = {path: path.stat().st_size for path in files}
    for path, size in sizes.items():
        found.update(f"{path.name} {size} ".encode())
        count = math.ceil(_SAMPLE / _BLOCK * size / sum(sizes.values())) if size else 0
        step = max(_BLOCK, (size - _BLOCK) / max(1, count - 1))
        with open_regular(path) as file:
            for place in range(min(count, math.ceil(size / _BLOCK))):
                file.seek(round(place * step))
                found.update(file.read(_BLOCK))
    return f"files:{found.hexdigest()[:32]}"


def _ends_of(path: Path, config: dict[str, Any]) -> bytes:
    """Returns what counts of a generation config: its end tokens; everything if it cannot be read.

    `config` is the model's, whose end tokens Transformers takes if there is no file.
    """
    content = path.read_bytes() if path.is_file() else None
    try:
        found = config if content is None else json.loads(content)
        own = found.get("eos_token_id", found.get("text_config", {}).get("eos_token_id"))
        ids = own if isinstance(own, list) else [] if own is None else [own]
        return b"ends " + json.dumps(sorted(set(ids))).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return content or b""


def doubt_of_base(folder: Path, base: BaseInfo) -> str | None:
    """Returns what to warn of if an adapter's folder was written over another base model, else None.

    Raises RunError if the adapter's weights cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        return None
    try:
        with safe_open(file, "pt") as weights:
            told = (weights.metadata() or {}).get(DIGEST, "")
    except (OSError, SafetensorError) as error:
        raise RunError(f"{file}: cannot be read: {first_line(error)}") from error
    kind = told.partition(":")[0]
    if told == base.digest or kind != base.digest.partition(":")[0]:
        return None
    parts = "the weights, config, end tokens or tokenizer"
    return f"was trained over another model than {base.name}: {parts} differ"


def check_base(name: str, folder: Path | str | None = None) -> None:
    """Checks that a base model is a folder with a config, or in the hub's cache, or on the hub.

    The hub is asked once, because its client's own retries take half a minute without a network. `folder` is
    the folder to name in the message; default: that of `name`. Raises RunError of one line.
    """
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise RunError(f"base_model: {name} has no config.json; give a model's folder")
        _check_files(Path(name))
        return
    if Path(name).is_file():
        raise RunError(f"base_model: {name} is a file; expected a model's folder or a model on the hub")
    nowhere = f"base_model: no such folder: {folder or Path(name).resolve()}"
    if not is_hub_id(name):
        raise RunError(nowhere)
    reason = _hub_says(name)
    if reason:
        raise RunError(f"{nowhere}, and the hub cannot provide {name}: {reason}")


def _check_files(folder: Path) -> None:
    """Refuses files of a base model that libraries would wait for, or that lead them out of its folder."""
    for path in folder.iterdir():
        text = path.name in _TEXTS or path.name.endswith(_INDICES)
        if not (text or path.suffix in (".safetensors", ".bin")) or not path.exists():
            continue
        try:
            with open_regular(path, MOST if text else None):
                pass
        except OSError as error:
            raise RunError(f"base_model: {path}: {error.strerror}") from error
        if path.name.endswith(_INDICES):
            weight_map(path)


def weight_map(index: Path) -> dict[str, str]:
    """Returns the file of each tensor of a checkpoint in shards; RunError if the index is malformed."""
    try:
        content = json.loads(read_regular(index))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"base_model: {index}: cannot be read: {first_line(error)}") from error
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise RunError(f"base_model: {index}: needs a 'weight_map' from tensors to files")
    for key, name in found.items():
        if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
            raise RunError(
                f"base_model: {index}: weight_map: {key}: expected the name of a file beside it, got {name!r}"
            )
    return found


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
