"""Transformers' adapter interface (`PeftAdapterMixin`) on a converted model.

The methods sit on the instance, bound to one object that is copied and pickled with its model. A plain
`nn.Module` does not get them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..layers.adapter_weights import (
    adapter_layers,
    adapter_parameters,
    disable,
    disable_adapter,
    one_adapter,
    print_trainable_parameters,
)
from ..routing.router import Router, router_of
from ..targets.add_remove import add_adapter, remove_adapter
from . import trainer_checkpoint
from .merging import merge_and_unload
from .read_folder import adapter_folder, load_into
from .side_files import warn_of_base

if TYPE_CHECKING:
    from peft import LoraConfig

_USUAL = {
    "push_to_hub": False,
    "distributed_checkpoint": False,
    "safe_serialization": True,
    "save_peft_format": True,
    "save_original_format": True,
}
"""Options of Transformers' and PEFT's `save_pretrained`, each with the only value that is supported."""
_OF_THE_HUB = frozenset(
    {"cache_dir", "force_download", "local_files_only", "proxies", "revision", "token", "user_agent"}
)
"""Options that say how a folder is fetched from the hub; here it is on this machine."""


def install(model: nn.Module) -> None:
    """Gives a freshly converted model the interface, if it is a Transformers model."""
    if not callable(getattr(model, "get_adapter_state_dict", None)):
        return
    interface = AdapterInterface(model)
    for name in vars(AdapterInterface):
        if not name.startswith("_"):
            model.__dict__[name] = getattr(interface, name)
    model.__dict__["active_adapters"] = ActiveAdapters(model)
    trainer_checkpoint.install(model)


class ActiveAdapters:
    """`active_adapters` as in a `PeftModel`: Transformers calls it, PEFT's helpers iterate over it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self) -> list[str]:
        """Returns the adapter that `set_adapter` named; if it was not called, all adapters."""
        router = router_of(self.model)
        return list(router.adapters) if router.default is None else [router.default]

    def __iter__(self) -> Iterator[str]:
        """Iterates over the model's only adapter.

        Raises ValueError if it has several: `create_lorafa_optimizer` would pair A of one with B of another.
        """
        names = list(router_of(self.model).adapters)
        if len(names) > 1:
            raise ValueError(
                f"active_adapters: this model has {len(names)} adapters ({', '.join(names)}), and PEFT's "
                "optimizer helpers support one; make an optimizer for each adapter from "
                "mlora_ext.adapter_parameters(model, name)"
            )
        return iter(names)


class AdapterInterface:
    """Transformers' methods for adapters, and the methods of `PeftModel` that people use most."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def _router(self) -> Router:
        return router_of(self.model)

    def set_adapter(self, adapter_name: str | Sequence[str]) -> None:
        """Sets the adapter of every row in forward calls without `adapter_names`.

        It freezes nothing: any adapter trains on the rows that it is given. Raises ValueError if the model
        has no such adapter, or for a list of several: each row has one adapter here.
        """
        names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name or [])
        if len(names) != 1:
            raise ValueError(
                f"adapter_name: expected one adapter, got {adapter_name!r}; to use several in one batch, "
                "pass adapter_names=[...] (one per sample) to the forward call"
            )
        self._router.check_names("adapter_name", names)
        self._router.default = names[0]

    def disable_adapters(self) -> None:
        """Disables all adapters in every forward call from now on, also in those with `adapter_names`.

        Raises ValueError if a route is active: it was built with its adapters.
        """
        disable(self._router)

    def enable_adapters(self) -> None:
        """Undoes `disable_adapters`."""
        self._router.disabled = False

    def disable_adapter(self) -> Any:
        """Returns a context without adapters, as `PeftModel`'s: see `mlora_ext.disable_adapter`."""
        return disable_adapter(self.model)

    def add_adapter(self, adapter_config: LoraConfig, adapter_name: str | None = None) -> None:
        """Adds an adapter to the model and calls `set_adapter` with it, as Transformers does.

        The name defaults to `default`. Raises ValueError as `mlora_ext.add_adapter` does.
        """
        if isinstance(adapter_config, str):
            raise ValueError(f"adapter_config: expected a LoraConfig before the name, got {adapter_config!r}")
        name = adapter_name or "default"
        add_adapter(self.model, name, adapter_config)
        self.set_adapter(name)

    def delete_adapter(self, adapter_names: str | Sequence[str]) -> None:
        """Removes adapters from the model; raises ValueError and removes none if one is unknown."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        self._router.check_names("adapter_names", names)
        for name in dict.fromkeys(names):
            remove_adapter(self.model, name)

    def load_adapter(
        self,
        peft_model_id: str | os.PathLike[str] | None = None,
        adapter_name: str | None = None,
        peft_config: LoraConfig | Mapping[str, Any] | None = None,
        adapter_state_dict: Mapping[str, Tensor] | None = None,
        low_cpu_mem_usage: bool = False,
        is_trainable: bool = False,
        hotswap: bool | str = "auto",
        local_files_only: bool = False,
        adapter_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Reads an adapter from a PEFT folder and calls `set_adapter` with it, as Transformers does.

        The name defaults to `default`. `peft_config` and `adapter_state_dict` take the place of the folder's
        config and weights, or of the whole folder. Unless `is_trainable`, the adapter is frozen and the model
        put into evaluation mode; with it, the adapter's layers are put into training mode. `hotswap=True`
        only writes the weights into the model's adapter of this name. Without it, a taken name raises
        ValueError. `subfolder` is an option of `adapter_kwargs`; those that only matter on the hub, and
        `low_cpu_mem_usage`, change nothing.
        """
        name = adapter_name or "default"
        swaps = hotswap is True
        if swaps:
            self._router.check_names("adapter_name", [name])
        elif name in self._router.adapters:
            raise ValueError(
                f"adapter_name: the model already has an adapter {name!r}; pass hotswap=True to overwrite "
                "its weights with the folder's, or choose another name"
            )
        options = {**(adapter_kwargs or {}), **others}
        subfolder = options.pop("subfolder", None) or ""
        for option, value in options.items():
            if option not in _OF_THE_HUB and value is not None:
                raise ValueError(f"{option}={value!r}: not supported by load_adapter; leave this option out")
        folder = None if peft_model_id is None else Path(peft_model_id, subfolder)
        with adapter_folder(folder, peft_config, adapter_state_dict) as whole:
            warn_of_base(self.model, name, whole)
            load_into(self.model, name, whole)
        if swaps:
            return
        for parameter in adapter_parameters(self.model, name).values():
            parameter.requires_grad_(is_trainable)
        if is_trainable:
            self.model.training = True  # only this module: its forward passes count dropout steps
            for layer in adapter_layers(self.model, name).values():
                layer.train()
        else:
            self.model.eval()
        self.set_adapter(name)

    def enable_peft_hotswap(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError: adapters of any rank come and go here, so nothing is prepared for them."""
        raise ValueError(
            "enable_peft_hotswap: is not needed: load_adapter(..., hotswap=True) overwrites an adapter of "
            "the same rank and scaling; before you load one of another rank, call delete_adapter"
        )

    def get_adapter_state_dict(
        self, adapter_name: str | None = None, state_dict: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Returns an adapter's weights under Transformers' keys, without PEFT's `base_model.model.`.

        Defaults to the active adapter and to the model's own state dict. Raises ValueError if the model has
        no adapter of this name, or several are active and none is named.
        """
        return trainer_checkpoint.adapter_tensors(
            self.model, one_adapter(self.model, adapter_name), state_dict
        )

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        *,
        selected_adapters: Sequence[str] | None = None,
        **others: Any,
    ) -> None:
        """Writes the adapters as PEFT folders, and the file that a Trainer resumes from; not the base model.

        A single adapter is written to the folder itself. Of several, `default` is, and the others go to
        subfolders with their names, as in `PeftModel.save_pretrained`. `model.safetensors` beside them holds
        all these adapters and the dropout step; Trainer reads it back. `state_dict` replaces the model's own.
        To publish the folder, use `huggingface_hub.upload_folder`: `push_to_hub` must be False. A model
        without adapters saves its base by its own method, which also gets `others`.

        Raises ValueError if a name is unknown, an option is not supported, or the folder holds another model.
        """
        if not self._router.adapters:
            own: Any = type(self.model)
            own.save_pretrained(
                self.model, save_directory, is_main_process, state_dict, push_to_hub, **others
            )
            return
        for option, value in {"push_to_hub": push_to_hub, **others}.items():
            if value is not None and value != _USUAL.get(option):
                raise ValueError(
                    f"{option}={value!r}: not supported: adapters are saved as PEFT folders with one "
                    "safetensors file each; leave this option out"
                )
        names = list(self._router.adapters if selected_adapters is None else selected_adapters)
        self._router.check_names("selected_adapters", names)
        if is_main_process:
            trainer_checkpoint.save(self.model, names, save_directory, state_dict)

    def merge_and_unload(
        self,
        adapter_name: str | None = None,
        *,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: Sequence[str] | None = None,
    ) -> nn.Module:
        """Returns a plain copy with one adapter merged, as PEFT's: see `mlora_ext.merge_and_unload`.

        `progressbar` is ignored: merging is too short for one. `adapter_names` may hold one name.
        """
        if adapter_names is not None and (adapter_name is not None or len(adapter_names) != 1):
            raise ValueError(f"adapter_names: expected one adapter to merge, got {adapter_names!r}")
        name = adapter_names[0] if adapter_names else adapter_name
        return merge_and_unload(self.model, name, safe_merge=safe_merge)

    def print_trainable_parameters(self) -> None:
        """Prints how many parameters train: see `mlora_ext.print_trainable_parameters`."""
        print_trainable_parameters(self.model)
