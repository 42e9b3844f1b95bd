"""Merges an adapter of a run into its base model, and writes the result as a Transformers folder."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from mlora.cluster.device import dtype_of
from mlora.config.run_config import RunConfig
from mlora.errors import RunError, first_line
from mlora.model.base_info import BaseInfo, doubt_of_base
from mlora.model.pretrained import load_whole, told_in_one_line
from mlora.model.task_heads import head_place
from mlora.run.handoff.adapters import FoundWeights, find_weights, named_adapter, open_run
from mlora.run.handoff.export import losses_of, save_tokenizer
from mlora.run.handoff.model_card import write_card
from mlora.run.handoff.peft_folders import peft_folder_of
from mlora.store.new_folder import check_new, new_folder
from mlora_ext.adapters.trained_parts import labels_of, task_heads, task_of
from mlora_ext.frozen.quantized.blocks import QuantizedWeight
from mlora_ext.frozen.quantized.families import base_bias, base_weight, family_of, frozen_weight_of
from mlora_ext.interop.read_folder import read_config
from mlora_ext.out_of_memory import is_out_of_memory
from mlora_ext.targets.find import low_rank, target_layers

if TYPE_CHECKING:
    from peft import LoraConfig

_CPU = torch.device("cpu")
_CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}


@dataclass(frozen=True)
class Merged:
    """What was merged: where the weights came from, the new folder, and lines for the user."""

    weights: FoundWeights
    folder: Path
    notes: list[str]


def merge_adapter(
    run_dir: Path | str, name: str, output: Path | str, *, checkpoint: int | None = None
) -> Merged:
    """Writes the base model with an adapter merged into its weights, by PEFT, in the base's dtype.

    The base is loaded once, on the CPU, and merged in place. A quantised one is dequantised first: the result
    computes what the adapter was trained over, and is not quantised.

    Args:
        run_dir: the run's ``output_dir``.
        name: of the adapter.
        output: the new folder.
        checkpoint: as for `mlora.run.handoff.export.export_adapter`.

    Raises:
        RunError: there is no such run, adapter or checkpoint, the output holds something, the adapter cannot
            be merged, or memory or the disk is full. Nothing is left behind.
    """
    folder, config, adapters = open_run(run_dir)
    adapter = named_adapter(folder, adapters, name)
    target = Path(output).absolute()
    check_new(target, "--output")
    found = find_weights(folder, name, checkpoint)
    base, notes = BaseInfo(config.base_model, config.base_folder), list[str]()
    with peft_folder_of(config, adapter, found) as source, new_folder(target, "--output") as scratch:
        lora = read_config(source)
        if doubt := doubt_of_base(source, base):
            notes.append(f"warning: {name}: {doubt}")
        with _told(config, name):
            model = _load(config, base, lora)
            quantized = _dequantize(model)
            _check_bias(name, model, lora)
            _untie(model, name, lora)
            merged = _merge(model, source)
            _check_room(merged, target)
            merged.save_pretrained(str(scratch))
        save_tokenizer(base, scratch, adapter.chat_template(config))
        if quantized:
            notes.append(f"{quantized} quantized layers were dequantized; the merged model is not quantized")
        facts = adapter.config, found.step, config.base_model
        write_card(scratch, lora, *facts, name=target.name, kind="merged", more=losses_of(found))
    return Merged(found, target, notes)


@contextlib.contextmanager
def _told(config: RunConfig, name: str) -> Iterator[None]:
    """Raises what PEFT and Transformers say of an adapter, and a lack of memory, as a RunError."""
    try:
        yield
    except RunError:
        raise
    except (ValueError, NotImplementedError) as error:
        raise RunError(f"{name}: cannot be merged: {first_line(error)}") from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(f"{name}: out of memory while {config.base_model} is loaded and merged") from error


def _load(config: RunConfig, base: BaseInfo, lora: LoraConfig) -> PreTrainedModel:
    """Loads the base model in its own dtype, with the class for the adapter's task."""
    quantized = config.quantization is not None or base.quantization is not None
    if not task_heads(lora):
        dtype = dtype_of(config) if quantized else cast(torch.dtype, "auto")
        return load_whole(config.base_model, dtype, config.quantization, _CPU)
    task, labels = task_of(lora), labels_of(lora)
    if quantized:
        raise RunError(f"an adapter of task_type {task} over a quantized base cannot be merged; use PEFT")
    own, theirs = head_place(base.config, lora).body
    more: dict[str, Any] = {"num_labels": labels["num_labels"]} if "num_labels" in labels else {}
    if "label_names" in labels:
        more = {"id2label": dict(enumerate(labels["label_names"]))}
        more["label2id"] = {name: place for place, name in more["id2label"].items()}
    if "problem_type" in labels:
        more["problem_type"] = labels["problem_type"]
    if own != theirs:
        more["key_mapping"] = {rf"^{own}\.": f"{theirs}."}
    with told_in_one_line(config.base_model):
        kind: Any = getattr(transformers, _CLASSES[task])
        model = kind.from_pretrained(config.base_model, dtype="auto", trust_remote_code=False, **more)
    if model.config.pad_token_id is None:  # by which a classifier finds the last token of a padded sequence
        with contextlib.suppress(RunError):
            tokenizer = base.tokenizer()
            model.config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    return cast(PreTrainedModel, model)


def _dequantize(model: PreTrainedModel) -> int:
    """Replaces quantised layers by plain ones, one by one; returns how many there were."""
    layers = {key: module for key, module in model.named_modules() if family_of(module)}
    if not layers:
        return 0
    dtype = next(p.dtype for p in model.parameters() if p.dtype.is_floating_point and p.dtype.itemsize > 1)
    count = len(layers)
    for key in list(layers):
        module = layers.pop(key)
        weight, bias = _dense(module, dtype), base_bias(module, dtype)
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        plain.weight = nn.Parameter(weight.detach().to(dtype).contiguous(), requires_grad=False)
        if bias is not None:
            plain.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
        parent, _, child = key.rpartition(".")
        setattr(model.get_submodule(parent), child, plain)
    for owner, attribute in (
        (model, "hf_quantizer"),
        (model, "_weight_conversions"),  # with those of the quantizer, by which saving would quantise again
        (model, "quantization_method"),
        (model, "is_loaded_in_4bit"),
        (model, "is_loaded_in_8bit"),
        (model.config, "quantization_config"),
    ):
        vars(owner).pop(attribute, None)
    model.is_quantized = False  # type: ignore[assignment]
    return count


def _dense(module: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weight of a quantised layer as plain numbers; the layer may lose its own."""
    holder = nn.Module()
    holder.register_parameter("weight", cast(nn.Parameter, base_weight(module, dtype)))
    found = frozen_weight_of(module, holder, dtype)
    assert isinstance(found, QuantizedWeight)
    return found.rows(0, found.shape[0], dtype)


def _check_bias(name: str, model: nn.Module, lora: LoraConfig) -> None:
    """Raises RunError for a `lora_bias` on layers without bias: the merged layer has no place for it."""
    if not lora.lora_bias:
        return
    for key in target_layers(model, name, lora):
        if getattr(model.get_submodule(key), "bias", None) is None:
            raise RunError(
                f"{name}: cannot be merged: layer {key} has no bias that could take its lora_bias; use the "
                "adapter without merging it (`mlora export`)"
            )


def _untie(model: PreTrainedModel, name: str, lora: LoraConfig) -> None:
    """Gives the output head a weight of its own, if the adapter changes only it or only the embedding."""
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    if lora.ensure_weight_tying or head is None or head.weight is not embedding.weight:
        return
    names = {key for key, module in model.named_modules() if module is head or module is embedding}
    copied = tuple(lora.modules_to_save or ())
    changed = any(key == one or key.endswith(f".{one}") for key in names for one in copied)
    if changed or not names.isdisjoint(low_rank(target_layers(model, name, lora))):
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.get_text_config().tie_word_embeddings = False
        model.config.tie_word_embeddings = False


def _merge(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of Transformers, about what PEFT calls
        tuned = PeftModel.from_pretrained(model, str(folder))
        merged: Any = tuned.merge_and_unload(safe_merge=True)
    assert isinstance(merged, PreTrainedModel)
    return merged


def _check_room(model: nn.Module, target: Path) -> None:
    """Raises RunError before anything is written if the weights do not fit on the disk."""
    seen = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    needed, free = sum(seen.values()), shutil.disk_usage(target.parent).free
    if needed > free:
        raise RunError(
            f"--output: {target} cannot be written: it needs {needed / 2**20:.1f} MiB, and "
            f"{free / 2**20:.1f} MiB are free"
        )
