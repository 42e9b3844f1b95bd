"""The command lines with which vLLM and SGLang serve an adapter's folder."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that `--max-lora-rank` takes: `MaxLoRARanks` in `vllm/config/lora.py` of vLLM 0.33.0."""
_PLAIN = re.compile(r"[^=,\[\]{}\s\"']+")


def serving_lines(base: str, name: str, folder: Path, rank: int) -> list[str]:
    """Returns a copyable command line for each server, and a line for each that does not serve this rank.

    Args:
        base: the base model, a folder or a hub id.
        name: what requests call the adapter.
        folder: the portable folder.
        rank: the largest rank of the adapter.
    """
    vllm = next((each for each in VLLM_RANKS if each >= rank), None)
    if vllm is None:
        first = f"vLLM serves no rank above {VLLM_RANKS[-1]}, and this adapter has {rank}; use `mlora merge`"
    else:
        given = _pair(name, folder, "name", "path")
        first = _line("vllm serve", base, "--enable-lora --lora-modules", given, "--max-lora-rank", str(vllm))
    given = _pair(name, folder, "lora_name", "lora_path")
    launch = "python -m sglang.launch_server --model-path"
    second = _line(launch, base, "--enable-lora --lora-paths", given, "--max-lora-rank", str(rank))
    return [first, second]


def _pair(name: str, folder: Path, name_key: str, path_key: str) -> str:
    """Returns ``name=path``, or JSON where a letter of them has a meaning there."""
    if _PLAIN.fullmatch(name) and _PLAIN.fullmatch(str(folder)):
        return f"{name}={folder}"
    return json.dumps({name_key: name, path_key: str(folder)})


def _line(start: str, base: str, middle: str, given: str, *end: str) -> str:
    return " ".join([start, shlex.quote(base), middle, shlex.quote(given), *end])
