"""Heads that adapters train on a causal model: their own `lm_head`, or a classifier that the base lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mlora.objectives.token_losses import LogitRule, Scorer
from mlora_ext.adapters.kind import LayerSpec
from mlora_ext.adapters.lora_config import init_kind
from mlora_ext.adapters.trained_parts import (
    TASK_HEAD_WITH_BIAS,
    TRAINED_ROWS,
    head_kind,
    task_heads,
    task_of,
)
from mlora_ext.errors import AdapterError
from mlora_ext.interop.peft_folder import check_body_names
from mlora_ext.layers.adapter_weights import adapter_layers
from mlora_ext.layers.copies import TaskHeads, TrainedCopies
from mlora_ext.layers.embedding import TrainedRowsLinear
from mlora_ext.layers.layer_kinds import layer_kind
from mlora_ext.layers.linear import MultiLoRALinear
from mlora_ext.layers.sample_copies import SampleCopies
from mlora_ext.routing.router import router_of
from mlora_ext.targets.add_remove import remove_adapter

if TYPE_CHECKING:
    from peft import LoraConfig

_CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}


@dataclass(frozen=True)
class HeadPlace:
    """A head in the model type's class for a task: its name there, the class, and both names of the body."""

    name: str
    kind: str
    body: tuple[str, str]


def prepare_head(model: nn.Module, lora: LoraConfig) -> None:
    """Gives a converted causal model the place for an adapter's head, if the adapter's task has one.

    Raises ValueError if the task is not one of a causal model, or the model type's own class for the task has
    no linear head on the same body.
    """
    task = task_of(lora)
    if not task_heads(lora):
        if task not in ("None", "CAUSAL_LM"):
            raise ValueError(
                f"task_type={task} is not for causal language models, and the base model is one; remove it, "
                "or use CAUSAL_LM"
            )
        return
    places = model.__dict__.setdefault("mlora_task_heads", {})
    if task not in places:
        places[task] = head_place(model.config, lora)
    place: HeadPlace = places[task]
    check_body_names(lora, *place.body, place.kind)
    if isinstance(getattr(model, place.name, None), TaskHeads):
        return
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    std = float(getattr(config, "initializer_range", 0.02))
    heads = TaskHeads(
        head, int(config.hidden_size), std, router=router_of(model), name=place.name, body=place.body
    )
    model.add_module(place.name, heads)


def why_not_started(config: LoraConfig) -> str | None:
    """Returns why a run cannot compute an adapter's initial values from its data; None if it can."""
    if init_kind(config) != "lora_ga" or not task_heads(config):
        return None
    return (
        f"init_lora_weights='lora_ga' needs a loss of the base, which has no head for task_type "
        f"{task_of(config)}; use 'eva' or 'corda'"
    )


def head_place(config: Any, lora: LoraConfig) -> HeadPlace:
    """Returns the head in the model type's class for an adapter's task; ValueError if it is not linear."""
    import transformers

    task = task_of(lora)
    auto: Any = getattr(transformers, _CLASSES[task])
    causal: Any = transformers.AutoModelForCausalLM
    try:
        with torch.device("meta"):
            classifier, base = (one.from_config(config, trust_remote_code=False) for one in (auto, causal))
    except ValueError as error:
        raise ValueError(f"task_type={task}: {config.model_type} has no {_CLASSES[task]}") from error
    names = [n for n in task_heads(lora) if isinstance(getattr(classifier, n, None), nn.Linear)]
    bias = head_kind(lora) == TASK_HEAD_WITH_BIAS
    same = {key for key, _ in classifier.base_model.named_parameters()} == {
        key for key, _ in base.base_model.named_parameters()
    }
    if not names or not same or (getattr(classifier, names[0]).bias is not None) is not bias:
        raise ValueError(
            f"task_type={task}: the head of {type(classifier).__name__} is not one linear layer on the body "
            f"of {type(base).__name__}; it cannot be trained in a run"
        )
    body = (str(base.base_model_prefix), str(classifier.base_model_prefix))
    return HeadPlace(names[0], type(classifier).__name__, body)


def check_heads(model: nn.Module, name: str) -> None:
    """Removes an adapter that was added, and raises ValueError, if its head cannot be trained here.

    Of what is tied to the embedding, only trained rows of the output head come from another stage. Low-rank
    parts on the output head need whole logits, and classifiers need the head's input. Rows are packed, so
    copies get no whole samples.
    """
    try:
        refuse_sample_copies(
            model, name, {key: layer.specs[name] for key, layer in adapter_layers(model, name).items()}
        )
    except ValueError:
        remove_adapter(model, name)
        raise
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    low_rank = list(head.specs) if isinstance(head, MultiLoRALinear) else []
    if low_rank and label_adapters(model):
        remove_adapter(model, name)
        raise AdapterError(
            name,
            f"classifiers (task_type) cannot be trained beside adapters with the output "
            f"head in target_modules ({', '.join(low_rank)}); use modules_to_save for it, or another run",
        )
    for key, layer in adapter_layers(model, name).items():
        spec = layer.specs[name]
        if not spec.tied_to or (spec.kind == TRAINED_ROWS and layer is head):
            continue
        source: Any = model.get_submodule(spec.tied_to)
        if (source.frozen.device.type == "meta") is not (layer.frozen.device.type == "meta"):
            remove_adapter(model, name)
            raise AdapterError(name, stages_apart(key, spec))


def stages_apart(key: str, spec: LayerSpec) -> str:
    """Returns why an adapter's tied part on a layer cannot be trained, if the other layer is elsewhere."""
    field = "trainable_token_indices" if spec.kind == TRAINED_ROWS else "ensure_weight_tying"
    return f"{field}: {key} is tied to {spec.tied_to}, and they are on different stages; use one stage"


def refuse_sample_copies(model: nn.Module, name: str, layers: Mapping[str, LayerSpec]) -> None:
    """Raises ValueError if an adapter trains a copy of a module that needs whole samples."""
    for key, spec in layers.items():
        if layer_kind(model.get_submodule(key), spec.kind) is SampleCopies:
            raise AdapterError(
                name,
                f"modules_to_save: {key} has convolutions or batch normalisation, which "
                "need whole samples, and a run packs the rows of all samples; leave it out, or train it in a "
                "loop of your own",
            )


def own_heads(model: nn.Module, head: nn.Module, rule: LogitRule, names: Sequence[str]) -> dict[str, Scorer]:
    """Returns what makes an adapter's logits, by name, for the adapters that train a head.

    Args:
        head: the model's output head.
        rule: the model's computation on its output.
    """
    found: dict[str, Scorer] = {}
    for name in names:
        for layer in _classifiers(model):
            if name in layer.specs:
                found[name] = _Plain(layer.modules_to_save.of(name))
        if name in found or not isinstance(head, TrainedCopies | TrainedRowsLinear) or name not in head.specs:
            continue
        found[name] = _Ruled(head, name, rule)
    return found


def label_adapters(model: nn.Module) -> set[str]:
    """Returns the names of the adapters whose heads predict labels, not tokens."""
    return {name for layer in _classifiers(model) for name in layer.specs}


def _classifiers(model: nn.Module) -> list[TaskHeads]:
    return [layer for layer in model.children() if isinstance(layer, TaskHeads)]


class _Plain:
    """A linear head in its own dtype."""

    def __init__(self, head: Any) -> None:
        self.head, self.size = head, head.weight.shape[0]

    def __call__(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.head(rows.to(self.head.weight.dtype))
        return logits


class _Ruled:
    """An adapter's own output head."""

    def __init__(self, head: TrainedCopies | TrainedRowsLinear, name: str, rule: LogitRule) -> None:
        self.head, self.name, self.rule = head, name, rule
        self.size = next(head.base.parameters()).shape[0]

    def __call__(self, rows: Tensor) -> Tensor:
        head = self.head
        if isinstance(head, TrainedCopies):
            return self.rule.apply(_Plain(head.modules_to_save.of(self.name))(rows))
        return self.rule.apply(head.with_rows(self.name, rows, head.base(rows)))
