"""What layers show of an adapter's data, and the initial values that follow from it, on one process.

Letters: T rows, D = d_in, O = d_out, R = rank.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.kind import LayerSpec
from ..adapters.lora import set_values, with_start
from ..adapters.lora_config import init_kind
from ..adapters.peft_start import start_values
from ..errors import AdapterError
from ..layers.adapter_weights import adapter_layers
from ..layers.linear import MultiLoRALinear
from ..once_differentiable import once_differentiable
from ..routing.adapter_info import AdapterInfo
from ..routing.router import router_of
from ..routing.thread_guard import inside_backward
from ..targets.add_remove import named_seed
from ..targets.find import low_rank

_INVERSE_ERROR = 0.05


class Statistics(ABC):
    """Sees the inputs of an adapter's layers in passes of the base model; see `mlora_ext.start.from_data`.

    Args:
        model: converted, or a stage's piece of it.
        name: of the adapter, which is on the model.

    Attributes:
        rows: which rows of the next batch count, `[T]` bool; None: all.
        share: factor on the gradients of the next batch.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.name, self.share = name, 1.0
        self.rows: Tensor | None = None
        self._model = model
        self._watched: set[str] = set()
        self._seen: dict[str, int] = {}
        self._sums: dict[str, Tensor] = {}

    @property
    def _info(self) -> AdapterInfo:
        return router_of(self._model).adapters[self.name]

    def _layers(self) -> dict[str, MultiLoRALinear]:
        """Returns the adapter's linear layers on this process; EVA may put it on others meanwhile."""
        return {
            key: layer
            for key, layer in adapter_layers(self._model, self.name).items()
            if isinstance(layer, MultiLoRALinear) and not layer.lora_A.parameter_of(self.name).is_meta
        }

    def take(self, rows: Tensor | None, share: float = 1.0) -> None:
        """Says which rows of the next batch count, and how much its gradients do."""
        self.rows, self.share = rows, share

    def widths(self) -> dict[str, tuple[int, int]]:
        """Returns D and O of each layer on this process."""
        return {key: (layer.in_features, layer.out_features) for key, layer in self._layers().items()}

    def watch(self, layers: Sequence[str]) -> None:
        """Begins to look at these layers, as far as they are here, and forgets the others."""
        self._watched, self._seen, self._sums = set(layers) & set(self._layers()), {}, {}

    def see(self, layer: str, x: Tensor, y: Tensor) -> Tensor:
        """Takes in one call of a layer; backward may call layers again, which counts once."""
        if layer not in self._watched:
            return y
        if not inside_backward():
            self._seen[layer] = self._seen.get(layer, 0) + 1
        return self._take_in(layer, x.detach(), y)

    def fill(self, layers: Sequence[str]) -> None:
        """Writes the initial values of these layers, as far as they are here, and forgets their statistics.

        Raises ValueError for a layer that no batch reached.
        """
        here = self._layers()
        for key in (key for key in layers if key in here):
            if not self._seen.get(key):
                raise AdapterError(
                    self.name,
                    f"layer {key} was not called by any batch; leave it out of "
                    "the adapter's targets, or call the model uncompiled",
                )
            set_values(here[key].parameters_of(self.name), with_start(self._values(key, here[key])))
        self.watch([])

    def done(self) -> None:
        """Notes that the adapter has its initial values."""
        self._info.awaits_start = False

    def _rows_of(self, x: Tensor) -> Tensor:
        """Returns the rows that count, `[T, D]`: all, where the layer's rows are not those of the batch."""
        x_TD = x.reshape(-1, x.shape[-1])
        rows = self.rows
        return x_TD if rows is None or len(rows) != len(x_TD) else x_TD[rows.to(x.device)]

    def _from_peft(self, key: str, layer: MultiLoRALinear, prepare: Callable[[Any], None], **how: Any) -> Any:
        seed = named_seed(self._info.start_seed, self.name, key)
        spec = layer.specs[self.name]
        return start_values(layer.frozen.dense(), self._info.config, spec, seed, prepare, **how)

    @abstractmethod
    def _take_in(self, key: str, x: Tensor, y: Tensor) -> Tensor:
        """Takes in a call of a watched layer; returns the output to go on with."""

    @abstractmethod
    def _values(self, key: str, layer: MultiLoRALinear) -> dict[str, Tensor]:
        """Returns A and B of a layer."""


class Covariances(Statistics):
    """CorDA (Yang et al., 2024, Eq. 1-3): covariances of the layers' inputs, as PEFT's `preprocess_corda`.

    The inputs of each batch are divided by their largest value first, as in PEFT.
    """

    @torch.no_grad()
    def _take_in(self, key: str, x: Tensor, y: Tensor) -> Tensor:
        if inside_backward():
            return y
        rows = self._rows_of(x).float()
        if rows.numel():
            rows = rows / rows.max().abs()
            covariance = rows.t() @ rows
            if not covariance.isfinite().all():
                raise AdapterError(self.name, f"layer {key}: its inputs have no finite covariance")
            self._sums[key] = covariance.add_(self._sums.get(key, 0))
        return y

    def _values(self, key: str, layer: MultiLoRALinear) -> dict[str, Tensor]:
        config, rank = self._info.config, layer.specs[self.name].rank
        kept = slice(-rank, None) if config.corda_config.corda_method == "kpm" else slice(rank)

        def prepare(linear: Any) -> None:
            u, s, v = _decomposed(linear.weight, self._sums.pop(key) / self._seen[key])
            linear.eigens = SimpleNamespace(U_WC=u[:, kept], S_WC=s[kept].clone(), V_WC=v[:, kept])

        found = self._from_peft(key, layer, prepare)
        signs = signs_of(found["lora_A"])  # of both halves of a pair: their product stays
        return {"lora_A": found["lora_A"] * signs, "lora_B": found["lora_B"] * signs.t()}


def _decomposed(weight_OD: Tensor, covariance_DD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns U `[O, K]`, S `[K]` and V `[D, K]` with `W = U S Vᵀ`, U and S of `W C` (CorDA, Eq. 1 and 2).

    C gets as much of its mean variance on its diagonal as its inverse needs. Importing PEFT's own function
    needs the package attrs.
    """
    damp, eye = 0.01, torch.eye(len(covariance_DD), device=covariance_DD.device)
    while True:
        damped = covariance_DD + eye * covariance_DD.diagonal().mean() * damp
        inverse = torch.linalg.inv(damped)
        if torch.dist(damped @ inverse, eye) < _INVERSE_ERROR:
            break
        damp *= 2
    u, s, vh = torch.linalg.svd(weight_OD @ damped, full_matrices=False)
    return u, s, (vh @ inverse).t()


class Gradients(Statistics):
    """LoRA-GA (Wang et al., 2024, Eq. 5-7): gradients of the layers' weights, as `preprocess_loraga`."""

    def _take_in(self, key: str, x: Tensor, y: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return y
        anchor = torch.empty(0, device=y.device, requires_grad=True)
        return _Watched.apply(y, x, anchor, self, key)  # type: ignore[no-any-return]

    @torch.no_grad()
    def add(self, key: str, x: Tensor, dy: Tensor) -> None:
        """Adds `share · dyᵀ x [O, D]` to a layer's gradient."""
        x_TD, dy_TO = x.reshape(-1, x.shape[-1]).float(), dy.reshape(-1, dy.shape[-1]).float()
        self._sums[key] = (dy_TO.t() @ x_TD).mul_(self.share).add_(self._sums.get(key, 0))

    def _values(self, key: str, layer: MultiLoRALinear) -> dict[str, Tensor]:
        if key not in self._sums:
            raise AdapterError(self.name, f"layer {key}: the loss has no gradient for it")
        gradient = self._sums.pop(key)
        if not gradient.isfinite().all():
            raise AdapterError(self.name, f"layer {key}: its gradient is not finite")

        def prepare(linear: Any) -> None:
            linear._peft_loraga_grad = gradient.t() if layer.fan_in_fan_out else gradient

        found = self._from_peft(key, layer, prepare, as_conv1d=layer.fan_in_fan_out)
        a, b = found["lora_A"], found["lora_B"]
        return {"lora_A": a * signs_of(a), "lora_B": b * signs_of(b.t()).t()}


class _Watched(torch.autograd.Function):
    """Passes a layer's output on, and its gradient to `Gradients.add`."""

    @staticmethod
    def forward(ctx: Any, y, x, anchor, statistics, key):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.statistics, ctx.key = statistics, key
        return y.view_as(y)

    @staticmethod
    @once_differentiable(lambda ctx: ())
    def backward(ctx: Any, dy: Tensor):  # type: ignore[no-untyped-def]
        ctx.statistics.add(ctx.key, ctx.saved_tensors[0], dy)
        return dy, None, None, None, None


class Components(Statistics):
    """EVA (Paischer et al., 2024, Algorithm 1): principal components of the layers' inputs.

    Found by PEFT's incremental PCA, as in PEFT; layers whose inputs are equal share one.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__(model, name)
        self._components: dict[str, Any] = {}
        self._before: dict[str, Tensor] = {}
        self._hashes: dict[str, str] = {}
        self._wanted: Mapping[str, int] = {}
        self._firsts: Mapping[str, str] = {}

    def hashes(self) -> dict[str, str]:
        """Returns a hash of each layer's input in its first call on this process, before `want`."""
        return self._hashes

    def want(self, counts: Mapping[str, int], firsts: Mapping[str, str]) -> None:
        """Sets how many components of a layer's inputs are wanted, and by whose components it begins.

        Those are its own, or those of a layer with an equal input.
        """
        self._wanted, self._firsts = counts, firsts

    @torch.no_grad()
    def _take_in(self, key: str, x: Tensor, y: Tensor) -> Tensor:
        rows = self._rows_of(x)
        if not self._wanted:
            digest = hashlib.sha256(rows.float().cpu().contiguous().numpy().tobytes()).hexdigest()
            self._hashes.setdefault(key, digest)
        elif len(rows) >= self._wanted[key] and not inside_backward():
            self._fit(key, rows.float())
        return y

    def _fit(self, key: str, rows: Tensor) -> None:
        from peft.utils.incremental_pca import IncrementalPCA

        if key not in self._components:  # the seed is PEFT's
            count = self._wanted[key]
            self._components[key] = IncrementalPCA(count, copy=True, lowrank=True, lowrank_seed=42)
        elif hasattr(self._components[key], "components_"):
            self._before[key] = self._components[key].components_.clone()
        self._components[key].partial_fit(rows)

    def report(self) -> dict[str, tuple[list[float], list[float]]]:
        """Returns each layer's explained variance ratios, and how alike components are to those before."""
        found = {}
        for key, pca in self._components.items():
            alike: list[float] = []
            if key in self._before:
                alike = nn.functional.cosine_similarity(pca.components_, self._before[key]).tolist()
            found[key] = pca.explained_variance_ratio_.tolist(), alike
        return found

    def fill(self, layers: Sequence[str]) -> None:
        """Writes A of these layers, as far as they are here."""
        for key, layer in self._layers().items():
            if key in layers:
                set_values(layer.parameters_of(self.name), self._values(key, layer))

    def _values(self, key: str, layer: MultiLoRALinear) -> dict[str, Tensor]:
        pca, rank = self._components[self._firsts[key]], layer.specs[self.name].rank
        values = pca.components_[:rank]
        if self._info.config.eva_config.whiten:
            values = values / pca.singular_values_[:rank].sqrt().reshape(-1, 1)
        return {"lora_A": values}


def start_specs(model: nn.Module, name: str) -> dict[str, LayerSpec]:
    """Returns an adapter's settings in its linear layers, whose initial values its data gives.

    Raises ValueError if it also has low-rank parts elsewhere, on an embedding or on experts.
    """
    layers = adapter_layers(model, name)
    how = router_of(model).adapters[name].config.init_lora_weights
    for key in low_rank({key: layer.specs[name] for key, layer in layers.items()}):
        if not isinstance(layers[key], MultiLoRALinear):
            raise AdapterError(
                name,
                f"target {key}: init_lora_weights={how!r} serves linear layers only; "
                "remove it from the adapter's targets",
            )
    return {key: layer.specs[name] for key, layer in layers.items() if isinstance(layer, MultiLoRALinear)}


def signs_of(rows: Tensor) -> Tensor:
    """Returns `[R, 1]`, 1 or -1: the sign of each row's largest entry.

    Singular vectors have any sign, which rounding decides; with these signs their largest entry is positive.
    """
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    return torch.where(largest < 0, -1.0, 1.0)


def statistics_of(model: nn.Module, name: str) -> Statistics:
    """Returns what an adapter's initialisation needs to see."""
    kinds: dict[str, Callable[[nn.Module, str], Statistics]] = {
        "eva": Components,
        "corda": Covariances,
        "lora_ga": Gradients,
    }
    return kinds[init_kind(router_of(model).adapters[name].config)](model, name)
