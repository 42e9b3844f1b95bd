"""Keeps the weights that an adapter starts from beside it, for objectives that compare with them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlora.engine.put_adapter import plain_lora
from mlora.objectives.options import START
from mlora.objectives.registry import CROSS_ENTROPY
from mlora.optim.optim_config import OptimConfig
from mlora_ext.interop.read_folder import read_config


def put_start_beside(engine: Any, name: str, optim: OptimConfig, folder: str | os.PathLike[str]) -> None:
    """Puts the weights that a new adapter has from a folder on the engine again; nobody trains them.

    Adapters of a replica that start from equal weights share them.
    """
    own = engine._states[name]
    with ExitStack() as unless_put:
        unless_put.callback(engine.remove_adapter, name)
        digest = _digest(engine.weights(name))
        start = _name_of_start(digest, folder, own.replica)
        if not engine._states.users_of(start):
            more: dict[str, Any] = {"seed": 0, "replica": own.replica, "init_from": folder}
            engine._put(start, None, optim, objective=CROSS_ENTROPY, trained=False, **more)
        unless_put.pop_all()
    own.start, own.start_digest = start, digest


def _name_of_start(digest: str, folder: str | os.PathLike[str], replica: int) -> str:
    """Returns the name of weights of this digest in a replica, which says what they are."""
    facts = [digest, plain_lora(read_config(Path(os.fspath(folder)))), replica]
    found = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return f"{START} {found[:16]}"


def _digest(weights: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for key in sorted(weights):
        found.update(key.encode() + weights[key].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()
