"""Makes a PEFT folder that every server reads: one rank, a scaling of 1, linear layers of the blocks only.

Servers differ in what they read of an adapter's config. SGLang 0.5.23 scales by `lora_alpha / r` whatever
`use_rslora` and the patterns say (`sglang/srt/lora/lora.py`), llama.cpp's converter by `lora_alpha` over the
rank of each tensor. A portable folder needs none of these fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn

from mlora.errors import RunError, first_line
from mlora.store.disk import write_file
from mlora_ext.adapters.trained_parts import task_heads, task_of
from mlora_ext.interop.peft_folder import CONFIG, PREFIX, WEIGHTS, weights_file
from mlora_ext.interop.read_folder import read_config
from mlora_ext.layers.embedding import MultiLoRAEmbedding
from mlora_ext.targets.entries import portable_targets
from mlora_ext.targets.find import base_modules, is_linear, target_layers

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor

    from mlora_ext.adapters.kind import LayerSpec

SERVED_TOGETHER = {
    ("q_proj", "k_proj", "v_proj"): ("q_proj", "v_proj"),
    ("gate_proj", "up_proj"): ("gate_proj",),
    ("q_a_proj", "kv_a_proj_with_mqa"): ("q_a_proj",),
}
"""Layers that servers fuse into one, and those of them that SGLang 0.5.23 needs beside any other."""


def unportable(config: LoraConfig) -> Iterator[str]:
    """Yields the fields of an adapter's config that servers refuse or do not read, and why."""
    only = "servers read the low-rank parts of linear layers only"
    if config.use_dora:
        yield "use_dora: neither vLLM nor SGLang serves DoRA"
    if config.lora_bias:
        yield "lora_bias: vLLM refuses it, SGLang does not read it"
    if task_heads(config):
        yield f"task_type {task_of(config)}: {only}"
    elif config.modules_to_save:
        yield f"modules_to_save: {', '.join(config.modules_to_save)}: {only}"
    if config.trainable_token_indices:
        yield f"trainable_token_indices: {only}"
    if config.target_parameters:
        yield "target_parameters: not every server reads LoRA on fused experts"


def _unserved(plan: Mapping[str, LayerSpec], model: nn.Module) -> Iterator[str]:
    """Yields layers of an adapter on which servers do not read it, and why."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for key, spec in plan.items():
        module = model.get_submodule(key)
        if spec.parameters:
            yield f"{key}: not every server reads LoRA on fused experts"
        elif isinstance(module, nn.Embedding | MultiLoRAEmbedding) or module is head:
            yield f"{key}: not every server reads LoRA on embeddings and the output head"


def _plan_of(model: nn.Module, name: str, config: LoraConfig) -> dict[str, LayerSpec]:
    """Returns an adapter's settings by layer. Raises RunError if its config does not fit the model."""
    try:
        return target_layers(model, name, config)
    except ValueError as error:
        raise RunError(first_line(error)) from error


def is_portable(config: LoraConfig, name: str, model: nn.Module) -> bool:
    """Whether a folder is portable as it is: also with another uniform scaling than 1."""
    if config.use_rslora or any(unportable(config)):
        return False
    plan = _plan_of(model, name, config)
    if any(_unserved(plan, model)):
        return False
    short = {key.rpartition(".")[2] for key in plan}
    named = set(config.target_modules or ()) if not isinstance(config.target_modules, str) else set()
    uniform = {(spec.rank, spec.scaling) for spec in plan.values()}
    listed = config.exclude_modules is None and config.layers_to_transform is None
    whole = len(uniform) == 1 and uniform == {(config.r, config.lora_alpha / config.r)}
    return (
        whole and listed and {one.rpartition(".")[2] for one in named} == short and not _lacking(model, plan)
    )


def make_portable(folder: Path, model: nn.Module, name: str) -> None:
    """Rewrites a PEFT folder in place: B takes the scaling, smaller ranks are filled with zeros.

    Args:
        folder: the adapter's.
        model: the base model; no weight is read.
        name: of the adapter, for messages.

    Raises:
        RunError: the adapter has something that a portable folder cannot hold, or the disk is full.
    """
    from peft import LoraConfig
    from safetensors.torch import load_file

    config = read_config(folder)
    faults = list(unportable(config))
    plan = {} if faults else _plan_of(model, name, config)
    if faults := faults or list(_unserved(plan, model)):
        raise RunError(
            "\n".join(f"{name}: cannot be portable: {fault}" for fault in faults)
            + "\nmerge it instead (`mlora merge`), or export it without --portable for PEFT"
        )
    stored = load_file(str(folder / WEIGHTS))
    rank = max(spec.rank for spec in plan.values())
    layers: dict[str, tuple[Tensor, Tensor]] = {}
    for key, spec in plan.items():
        a, b = (stored[f"{PREFIX}{key}.lora_{part}.weight"].float() for part in "AB")
        layers[key] = a, b * spec.scaling
    for key, (d_out, d_in) in _lacking(model, plan).items():
        layers[key] = torch.zeros(0, d_in), torch.zeros(d_out, 0)
    state = {}
    for key in sorted(layers):
        a, b = layers[key]
        state[f"{PREFIX}{key}.lora_A.weight"] = _padded(a, rank, 0)
        state[f"{PREFIX}{key}.lora_B.weight"] = _padded(b, rank, 1)
    new = LoraConfig(
        r=rank,
        lora_alpha=rank,
        task_type="CAUSAL_LM",
        target_modules=list(layers),
        base_model_name_or_path=config.base_model_name_or_path,
        inference_mode=True,
    )
    new.target_modules = portable_targets(model, new, list(layers))["target_modules"]
    with safe_open(folder / WEIGHTS, "pt") as before:
        metadata = before.metadata()
    parts = weights_file(state, metadata)
    write_file(folder / WEIGHTS, lambda file: file.writelines(parts))
    new.save_pretrained(str(folder))
    assert (folder / CONFIG).is_file()


def _padded(tensor: Tensor, rank: int, dim: int) -> Tensor:
    """Returns A or B with zeros up to a rank."""
    missing = list(tensor.shape)
    missing[dim] = rank - missing[dim]
    return torch.cat([tensor, tensor.new_zeros(missing)], dim).contiguous()


def _lacking(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns the layers that servers fuse with an adapter's and that it lacks, with d_out and d_in."""
    modules = dict(base_modules(model))
    found: dict[str, tuple[int, int]] = {}
    for key in plan:
        parent, _, last = key.rpartition(".")
        for group, needed in SERVED_TOGETHER.items():
            for other in needed if last in group else ():
                sibling: Any = modules.get(f"{parent}.{other}")
                if sibling is not None and f"{parent}.{other}" not in plan and is_linear(sibling):
                    found[f"{parent}.{other}"] = (sibling.out_features, sibling.in_features)
    return found
