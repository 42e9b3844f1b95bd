"""Parts of a model that adapters train beside linear layers: embeddings, rows of them, heads and norms."""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from compare import NAMES, RANKS, Sample, all_double, collate, loss_of
from inputs import FIRST_WORD
from peft import LoraConfig, get_peft_model
from small import VOCABULARY
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

COLUMNS = ("embeddings", "tokens", "head", "norm")
HEADS = (
    "classifier",
    "score",
    "cls_classifier",
    "embedding_decoder",
    "head",
    "text_projection",
    "predict_action",
    "pooler",
)
"""Names of heads, where a model has no output embeddings."""
TOKENS = list(range(FIRST_WORD, VOCABULARY, 2))


@dataclass
class Part:
    """What two adapters train, and the names of the modules with it: one of each list has a gradient.

    `names` are the adapters of the samples of a batch.
    """

    configs: dict[str, LoraConfig]
    modules: list[list[str]]
    names: list[str] = field(default_factory=lambda: NAMES)


def parts_of(model: PreTrainedModel, samples: Sequence[Sample], targets: dict[str, Any]) -> dict[str, Part]:
    """The parts of a model by the column of the table.

    Args:
        model: a base model in fp64.
        samples: of a batch, which shows which heads and norms are used.
        targets: fields of `LoraConfig` that all of them have.
    """
    tables, output, used = _tables(model), _name(model, _output(model)), _used(model, samples)
    found = {}
    if tables:
        both = [tables, *([[output]] if output in used - set(tables) else [])]
        every = [name for names in both for name in names]
        found["embeddings"] = Part(_also(model, targets, every), both)
        rows = {"trainable_token_indices": {tables[0]: TOKENS}}
        found["tokens"] = Part(_configs(targets, **rows), [[*tables, output]])
    for column, name in {"head": _head(model, output, used), "norm": _norm(model, used)}.items():
        if name:
            normalises = any(isinstance(part, _BatchNorm) for part in model.get_submodule(name).modules())
            names = ["a", "b", "b", "a"] if normalises else NAMES  # it needs two samples of each
            found[column] = Part(
                _configs(_beside(targets, model, name), modules_to_save=[name]), [[name]], names
            )
    return found


def _configs(targets: dict[str, Any], **fields: Any) -> dict[str, LoraConfig]:
    return {name: LoraConfig(r=rank, lora_alpha=8, **targets, **fields) for name, rank in RANKS.items()}


def _beside(targets: dict[str, Any], model: nn.Module, name: str) -> dict[str, Any]:
    """The same targets without other linear layers whose names end so: PEFT copies those, too."""
    others = [
        re.escape(other) + r"(\..*)?"  # and what PEFT puts in its place for the first adapter
        for other, module in model.named_modules()
        if other.endswith(name) and other != name and isinstance(module, nn.Linear)
    ]
    left_out = "|".join(filter(None, [targets.get("exclude_modules"), *others]))
    return targets | {"exclude_modules": left_out} if others else targets


def _also(model: nn.Module, targets: dict[str, Any], names: list[str]) -> dict[str, LoraConfig]:
    """Configs whose targets are spelled out by PEFT, with some more."""
    found = {}
    for name, config in _configs(targets).items():
        peft = get_peft_model(copy.deepcopy(model), config)
        found[name] = peft.peft_config["default"]
        every = sorted({*peft.targeted_module_names, *names})
        found[name].target_modules = "|".join(map(re.escape, every))  # a name in a list stands for more
    return found


def _tables(model: PreTrainedModel) -> list[str]:
    """The input embedding, or the first table of the vocabulary's size; then those that share its weight."""
    try:
        own = model.get_input_embeddings()
    except NotImplementedError:
        own = None
    tables = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    first = next((name for name, table in tables.items() if table is own), None)
    first = first or next((n for n, table in tables.items() if table.num_embeddings == VOCABULARY), None)
    if first is None:
        return []
    return [first, *(n for n, t in tables.items() if n != first and t.weight is tables[first].weight)]


def _output(model: PreTrainedModel) -> nn.Module | None:
    own = model.get_output_embeddings()
    return own if isinstance(own, nn.Module) else None


def _used(model: PreTrainedModel, samples: Sequence[Sample]) -> set[str]:
    """The names of modules that are called, and of which a parameter has a gradient."""
    copied, called = copy.deepcopy(model).requires_grad_(True).train(), set()
    for name, module in copied.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.add(name))
    with all_double():
        loss_of(copied(**collate(samples)), len(samples)).backward()
    trained = [name for name, p in copied.named_parameters() if p.grad is not None and p.grad.any()]
    return called & {name.rsplit(".", n)[0] for name in trained for n in range(1, name.count(".") + 1)}


def _head(model: PreTrainedModel, output: str, used: set[str]) -> str:
    """The module around the output embeddings that is not the model's body; else one that is called so.

    A head with a part of its own name stands for that part: PEFT wraps both, one inside the other.
    """
    outermost = output.partition(".")[0]
    if output:
        return output if outermost == model.base_model_prefix else outermost
    name = next((name for name in HEADS if name in used), "")
    inner = f"{name}.{name}"
    return inner if inner in used else name


def _norm(model: PreTrainedModel, used: set[str]) -> str:
    """The last norm with parameters; a batch norm only if there is no other."""
    norms = [
        (not isinstance(module, _BatchNorm), place, name)
        for place, (name, module) in enumerate(model.named_modules())
        if "Norm" in type(module).__name__ and module._parameters and name in used
    ]
    return max(norms)[2] if norms else ""


def _name(model: nn.Module, wanted: nn.Module | None) -> str:
    return next((name for name, module in model.named_modules() if module is wanted), "")
