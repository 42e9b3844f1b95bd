"""Facts about a base model without its weights: config, vocabulary, tokenizer, modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlora.config.lora_fields import build_lora
from mlora.config.strict import shown
from mlora.errors import RunError, first_line
from mlora.model.hub import check_base, refuse_quantized

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


class BaseInfo:
    """Facts about a base model, a folder or a hub id, without loading its weights.

    `folder` is the folder that was looked for if `name` is a hub id. Raises RunError if nothing is there,
    Transformers cannot read it, or it is quantized.
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
        refuse_quantized(name, self.config)
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
