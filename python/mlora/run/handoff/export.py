"""Exports an adapter of a run as a PEFT folder with its tokenizer and a model card."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from mlora.config.run_config import RunConfig
from mlora.data.chat import with_template
from mlora.errors import RunError
from mlora.model.base_info import BaseInfo, doubt_of_base
from mlora.run.handoff.adapters import FoundWeights, find_weights, named_adapter, open_run
from mlora.run.handoff.model_card import write_card
from mlora.run.handoff.peft_folders import empty_model, write_peft_folder
from mlora.run.handoff.portable import is_portable, make_portable
from mlora.run.handoff.servers import serving_lines
from mlora.store.new_folder import check_new, new_folder
from mlora_ext.adapters.trained_parts import task_heads, task_of
from mlora_ext.interop.peft_folder import WEIGHTS
from mlora_ext.interop.read_folder import read_config


@dataclass(frozen=True)
class Exported:
    """What was exported.

    Attributes:
        weights: where they came from.
        folder: the new folder.
        served: how to serve it: command lines, or why servers do not read the folder.
        warnings: that the base model is not the one that it was trained over.
    """

    weights: FoundWeights
    folder: Path
    served: list[str]
    warnings: list[str]


def export_adapter(
    run_dir: Path | str,
    name: str,
    *,
    checkpoint: int | None = None,
    portable: bool = False,
    output: Path | str | None = None,
) -> Exported:
    """Writes an adapter as a PEFT folder, also while its run is at work.

    Args:
        run_dir: the run's ``output_dir``.
        name: of the adapter.
        checkpoint: the iteration in the name of a checkpoint; None = the weights with which the adapter
            ended, or those of the newest checkpoint if it has not ended.
        portable: one rank and a scaling of 1, for servers; see `mlora.run.handoff.portable`.
        output: the new folder; default: ``exports/NAME`` in the run's folder.

    Raises:
        RunError: there is no such run, adapter or checkpoint, the output holds something, the adapter cannot
            be portable, or the disk is full. Nothing is left behind.
    """
    folder, config, adapters = open_run(run_dir)
    adapter = named_adapter(folder, adapters, name)
    ending = ("" if checkpoint is None else f"-checkpoint-{checkpoint}") + ("-portable" if portable else "")
    target = folder.path / "exports" / f"{name}{ending}" if output is None else Path(output).absolute()
    if output is None and target.parent.is_symlink():
        raise RunError(f"{target.parent}: is a link; give a folder with --output")
    check_new(target, "--output")
    found = find_weights(folder, name, checkpoint)
    with new_folder(target, "--output") as scratch:
        write_peft_folder(config, adapter, found, scratch)
        served = _for_servers(config, name, scratch, target, portable=portable)
        base = BaseInfo(config.base_model, config.base_folder)
        doubt = doubt_of_base(scratch, base)
        save_tokenizer(base, scratch, adapter.chat_template(config))
        how = {} if config.quantization is None else {"Base quantized with": config.quantization.method}
        more = how | losses_of(found)
        write_card(scratch, read_config(scratch), adapter.config, found.step, config.base_model, more=more)
    return Exported(found, target, served, [f"{name}: {doubt}"] if doubt else [])


def _for_servers(config: RunConfig, name: str, scratch: Path, target: Path, *, portable: bool) -> list[str]:
    """Makes a folder portable, if asked to, and returns how servers take it."""
    try:
        model = empty_model(config)
        lora = read_config(scratch)
    except ValueError as error:
        raise RunError(str(error)) from error
    if task_heads(lora) and not portable:
        return [f"servers do not read adapters of task_type {task_of(lora)}; load the folder with PEFT"]
    if portable:
        make_portable(scratch, model, name)
    elif not is_portable(lora, name, model):
        return ["not every server reads this folder as it is; --portable writes one that they do"]
    lines = serving_lines(config.base_model, name, target, rank_of(scratch))
    if config.quantization is not None:
        how = config.quantization.method
        lines.append(f"the adapter was trained over a base quantized with {how}: quantize it alike, or merge")
    return lines


def rank_of(folder: Path) -> int:
    """Returns the largest rank of a PEFT folder's tensors."""
    with safe_open(folder / WEIGHTS, "pt") as file:
        shapes = [file.get_slice(key).get_shape() for key in file.keys() if ".lora_A." in key]  # noqa: SIM118
    return max((shape[0] for shape in shapes), default=0)


def save_tokenizer(base: BaseInfo, folder: Path, chat_template: str | None) -> None:
    """Saves a base model's tokenizer; a base that has none is left without.

    Args:
        chat_template: the file of a template in place of the tokenizer's own.

    Raises:
        RunError: that file cannot be read.
    """
    tokenizer = None
    with contextlib.suppress(RunError):
        tokenizer = base.tokenizer()
    if tokenizer is not None:
        own = with_template(tokenizer, chat_template, assistant_only_loss=False)
        own.save_pretrained(str(folder))


def losses_of(found: FoundWeights) -> dict[str, str]:
    """Returns what is known of an adapter's losses."""
    return {key: f"{value:.4f}" for key, value in found.losses.items()}
