"""Initialises an adapter from its data in a converted model: initialise_from_data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..adapters.lora_config import init_kind, needs_data
from ..errors import AdapterError
from ..layers.adapter_weights import adapter_layers
from ..layers.linear import MultiLoRALinear
from ..routing.router import router_of
from ..routing.undisturbed import undisturbed
from ..targets.add_remove import add_adapter, regroup, remove_adapter
from .passes import initialise
from .statistics import start_specs, statistics_of

if TYPE_CHECKING:
    from peft import LoraConfig


def initialise_from_data(model: nn.Module, name: str, batches: Iterable[Any]) -> None:
    """Gives an adapter its initial values from its data: `init_lora_weights` of eva, corda or lora_ga.

    The base model runs on the batches without any adapter, several times if need be, so the result depends on
    the base, the batches, the seed and the names only. PEFT computes the values, layer by layer. Nothing else
    of the model changes. EVA may give layers other ranks, and take the adapter off some: make optimizers
    afterwards.

    Args:
        model: converted, with all layers in this process.
        name: of the adapter.
        batches: the model's arguments, each a dict, a tuple or a tensor. Padding (`attention_mask`) does not
            count; for EVA also tokens without a label (`labels`), unless `eva_config.use_label_mask` is off.
            For LoRA-GA, a batch must have labels, so that the model returns a loss. CorDA scales each batch
            alone: give one sample a batch for PEFT's result.

    Raises:
        ValueError: the model has no such adapter, its config asks for no data, it targets a layer that is not
            linear, there is no batch, a layer is too narrow for its rank or was not called, or the model
            returns no loss.

    Example:
        >>> model = convert_model(model, {"a": LoraConfig(init_lora_weights="eva", eva_config=EvaConfig())})
        >>> initialise_from_data(model, "a", [tokenizer(text, return_tensors="pt") for text in texts])
    """
    router = router_of(model)
    router.check_names("name", [name])
    config = router.adapters[name].config
    if not needs_data(config):
        raise AdapterError(
            name,
            f"init_lora_weights={config.init_lora_weights!r} needs no data; expected "
            "'eva', 'corda' or 'lora_ga'",
        )
    initialise(name, config, start_specs(model, name), _OneProcess(model, name, list(batches)))


class _OneProcess:
    """See `passes.Passes`: a whole model in this process."""

    def __init__(self, model: nn.Module, name: str, batches: Sequence[Any]) -> None:
        self._model, self._name, self._given = model, name, batches
        self._statistics = statistics_of(model, name)
        self.batches = len(batches)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._config = router_of(model).adapters[name].config
        self._backward = init_kind(self._config) == "lora_ga"

    def ask(self, verb: str, *arguments: Any) -> list[Any]:
        return [getattr(self._statistics, verb)(*arguments)]

    def run(self, index: int) -> None:
        model, batch = self._model, _moved(self._given[index], self._device)
        args, kwargs = _arguments(batch)
        self._statistics.take(self._rows(kwargs), 1 / self.batches)
        modes = [(part, part.training) for part in model.modules()]
        with undisturbed(model), router_of(model).observed_by(self._statistics):
            model.train(self._backward)
            try:
                with torch.set_grad_enabled(self._backward):
                    output = model.forward(*args, **kwargs)
                    if self._backward:
                        self._loss(output).backward()  # type: ignore[no-untyped-call]
            finally:
                for part, mode in modes:
                    part.training = mode

    def put_again(self, config: LoraConfig) -> None:
        router, name = router_of(self._model), self._name
        order, before = list(router.adapters), router.adapters[name]
        default, autocast = router.default, self._autocasts()
        remove_adapter(self._model, name)
        add_adapter(self._model, name, config, autocast_adapter_dtype=autocast)
        after = router.adapters[name]
        after.seed, after.start_seed, router.default = before.seed, before.start_seed, default
        router.adapters = {key: router.adapters[key] for key in order}
        regroup(self._model)

    def _autocasts(self) -> bool:
        layers = adapter_layers(self._model, self._name).values()
        linear = [layer for layer in layers if isinstance(layer, MultiLoRALinear)]
        return any(layer.lora_A.dtype != layer.frozen.dtype for layer in linear)

    def _rows(self, kwargs: Mapping[str, Any]) -> Tensor | None:
        """Returns which tokens of a batch count, `[T]`; None: all."""
        mask, labels = kwargs.get("attention_mask"), kwargs.get("labels")
        rows = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
        eva = getattr(self._config, "eva_config", None)
        if eva is not None and eva.use_label_mask and isinstance(labels, Tensor) and labels.dim() == 2:
            trained = labels != eva.label_mask_value
            rows = trained if rows is None else rows & trained
        return None if rows is None else rows.reshape(-1)

    def _loss(self, output: Any) -> Tensor:
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if loss is None or loss.dim() or not loss.requires_grad:
            raise AdapterError(
                self._name,
                "init_lora_weights='lora_ga' needs a loss: give batches with "
                "labels, so that the model returns one",
            )
        return loss


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def _moved(batch: Any, device: torch.device) -> Any:
    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    return torch.utils._pytree.tree_map(move, dict(batch) if isinstance(batch, Mapping) else batch)
