"""Make `mlora_ext/routing/sample_table.json`: trial passes over every class say where its samples lie.

Run it as ``python tests/ext/zoo/sample_dims.py``. With names of model types it prints their lines.
"""

import copy
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import transformers
from compare import Sample, _advice, all_double, collate
from families import FAMILIES, Family
from inputs import make_batches, make_model
from parts import parts_of
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.models.auto import modeling_auto

import mlora_ext as mx
from mlora_ext.convert.locate import trial_passes
from mlora_ext.routing.call_kind import sizes_of
from mlora_ext.routing.sample_table import TABLE, PlaceLine, keys_of, rows_of
from mlora_ext.routing.samples import EVERY, SampleDim, find_places
from mlora_ext.routing.trial_passes import Observer

HEADS = (
    "_FOR_CAUSAL_LM",
    "_FOR_MASKED_LM",
    "_FOR_SEQUENCE_CLASSIFICATION",
    "_FOR_TOKEN_CLASSIFICATION",
    "_FOR_QUESTION_ANSWERING",
)
HAVE_HEADS = ("encoder", "encoder with a pooler", "encoder-decoder")
"""Groups whose heads have a `forward` of their own; those of decoders are Llama's."""
NO_HEADS = {"LongformerForQuestionAnswering", "ReformerModelWithLMHead", "T5ForSequenceClassification"}
"""Classes that the zoo's inputs do not fit."""
UNTOLD = {
    "deepseek_v3.DeepseekV3Attention",
    "doge.DogeAttention",
    "minicpm3.MiniCPM3Attention",
    "rwkv.RwkvFeedForward",
    "rwkv.RwkvSelfAttention",
    "speech_to_text.Speech2TextAttention",
}
"""Owners whose rows of a sample follow from no argument in `generate`: trial passes look at their models."""
Line = tuple[str, str, int]
"""Owner, name in it, dimensions: what the table has an entry for."""


def observed(family: Family) -> dict[Line, set[str]]:
    """What trial passes find for each line of a class: in two batches and both modes, on every layer.

    Converted models show what else their layers see, such as products with a weight that other code reads.
    """
    model = make_model(family)
    batches = make_batches(family, model)
    found = defaultdict[Line, set[str]](set)
    with all_double():
        keys = keys_of(model)
        for samples, training in product(batches, (False, True)):
            _add(found, keys, model.train(training), samples, partial(_by_hooks, model))
        own = defaultdict[Line, set[str]](set)
        for one in _converted(model.eval(), batches[0]):
            _add(own, keys, one, batches[0], one.mlora_router.observed)
    for line, texts in own.items():  # a converted layer may see rows in another order, as experts of Llama 4
        seen = {text for text in found[line] if not text.startswith("!")}
        found[line] = texts | (found[line] if any(text.startswith("!") for text in texts) else seen)
    return dict(found)


def heads() -> list[Family]:
    """Other classes over the same bodies, whose own layers have lines, too."""
    known = {family.kind for family in FAMILIES}
    found: dict[str, Family] = {}
    for family in FAMILIES:
        for mapping in HEADS if family.group in HAVE_HEADS else ():
            kind = getattr(modeling_auto, f"MODEL{mapping}_MAPPING_NAMES").get(family.model_type)
            for one in (kind,) if isinstance(kind, str) else kind or ():
                if one not in known | NO_HEADS:
                    found[one] = replace(family, kind=one)
    return list(found.values())


def observed_head(family: Family) -> dict[Line, set[str]]:
    """As `observed`, in evaluation mode and without adapters."""
    model = make_model(family)
    found = defaultdict[Line, set[str]](set)
    with all_double():
        for samples in make_batches(family, model):
            if family.group == "encoder-decoder" and "SequenceClassification" in family.kind:
                ends = torch.full((1, 1), model.config.eos_token_id)  # the head reads the row of this token
                samples = [{"input_ids": torch.cat([one["input_ids"], ends], 1)} for one in samples]
            _add(found, keys_of(model), model, samples, partial(_by_hooks, model))
    return dict(found)


def _add(
    lines: dict[Line, set[str]],
    keys: Mapping[str, tuple[str, str]],
    model: nn.Module,
    samples: Sequence[Sample],
    watched: Callable[[], AbstractContextManager[Observer]],
) -> None:
    """Add what trial passes find; batch norms stay in evaluation mode, as in a converted model."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    batch, call = len(samples), ((), collate(samples))
    passes = trial_passes(model, call, watched)
    found = find_places(passes, sizes_of(call, batch))
    assert EVERY not in found, found[EVERY]
    rows = rows_of(call, batch)
    for (layer, dims), one in found.items():
        owner, name = keys.get(layer) or _of_parameter(keys, layer)
        if isinstance(one, str):
            lines[owner, name, dims].add(f"!{one}")
            continue
        shapes = [shape for shape, _ in passes.changed[0].seen[layer] if len(shape) == dims]
        alone = one.place.order == "single"
        counts = {(shape[:-1].numel() if alone else shape[one.place.dim]) // batch for shape in shapes}
        lines[owner, name, dims].add(str(PlaceLine(one.place, not counts <= rows)))


def _of_parameter(keys: Mapping[str, tuple[str, str]], layer: str) -> tuple[str, str]:
    module, _, parameter = layer.rpartition(".")
    return keys[module][0], f"{keys[module][1]}.{parameter}"


@contextmanager
def _by_hooks(model: nn.Module) -> Iterator[Observer]:
    """Every module with parameters shows its first input, as if it had adapters."""
    observer, handles = Observer(), []
    names = defaultdict[nn.Module, list[str]](list)
    for name, module in model.named_modules(remove_duplicate=False):
        if name and any(True for _ in module.parameters()):
            names[module].append(name)

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if isinstance(module, nn.Embedding) and tensors:  # some make their positions themselves
            tensors = [tensors[0].unsqueeze(-1)]
        x = next((tensor for tensor in tensors if tensor.dim() > 1), None)
        if x is not None:
            seen = x if x.is_floating_point() else x.double()
            for name in names[module]:
                observer.see(name, seen, seen)

    try:
        handles += [module.register_forward_pre_hook(see, with_kwargs=True) for module in names]
        yield observer
    finally:
        for handle in handles:
            handle.remove()


def _converted(model: nn.Module, samples: Sequence[Sample]) -> Iterator[nn.Module]:
    """The model with adapters on all linear layers, and with those on each of its other parts."""
    targets: dict[str, Any] | None = {"target_modules": "all-linear"}
    while True:
        try:
            config = LoraConfig(r=2, **targets)
            yield mx.convert_model(copy.deepcopy(model), {"a": config})
        except ValueError as error:
            targets = _advice(str(error), targets)
            if targets is None:
                raise
        else:
            break
    for own in parts_of(model, samples, targets).values():
        try:
            yield mx.convert_model(copy.deepcopy(model), own.configs)
        except ValueError:
            continue  # the zoo's tests know why


def merged(found: set[str]) -> str:
    """One line of what was found in several calls; a reason if they do not go together."""
    reasons = sorted(one for one in found if one.startswith("!"))
    if reasons:
        return reasons[0]
    entries = [PlaceLine.parse(one) for one in found]
    if len(found) == 1:
        return next(iter(found))
    loose = any(one.any_number for one in entries)
    if len({one.place for one in entries}) == 1:
        return str(PlaceLine(entries[0].place, loose))
    if all(one.place.is_plain for one in entries):
        loose = loose or any(one.place.order == "single" for one in entries)
        return str(PlaceLine(SampleDim(0, "blocks"), loose))
    return "!samples lie in different dimensions of it"


def table(lines: Mapping[Line, set[str]]) -> str:
    """The file: for each owner, its names by what is said of them."""
    owners = defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
    for (owner, name, dims), found in sorted(lines.items()):
        found = {"!its rows of a sample follow from no argument"} if owner in UNTOLD else found
        owners[owner][f"{dims}: {merged(found)}"].append(name)
    text = ",\n".join(
        f"{json.dumps(owner)}: " + json.dumps({line: " ".join(names) for line, names in sorted(by.items())})
        for owner, by in sorted(owners.items())
    )
    head = f'"transformers": "{transformers.__version__}",\n'
    return "{\n" + head + '"owners": {\n' + text + "\n}\n}\n"


def main(chosen: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    lines = defaultdict[Line, set[str]](set)
    every = [(observed, family) for family in FAMILIES] + [(observed_head, head) for head in heads()]
    for observe, family in every:
        if not chosen or family.model_type in chosen:
            print(family.kind, file=sys.stderr, flush=True)
            for line, found in observe(family).items():
                lines[line] |= found
    if chosen:
        print(table(lines), end="")
    else:
        TABLE.write_text(table(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
