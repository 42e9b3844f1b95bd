"""One stage's part of the initial values of adapters; the engine's part is in `adapter_start`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from mlora.data.micro_batch import Observation
from mlora.errors import first_line
from mlora.model.base_model import BaseModel
from mlora.model.original_weights import original_weights
from mlora.pipeline import verb
from mlora_ext.routing.router import router_of
from mlora_ext.start.from_weights import ReadWeight, layers_of
from mlora_ext.start.from_weights import start_from_weights as start_layer
from mlora_ext.start.statistics import Statistics, statistics_of


class StageStarts:
    """Statistics of adapters that begin by data, and original weights of those of LoftQ, on one stage."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._statistics: dict[str, Statistics] = {}
        self._originals: dict[str, tuple[ReadWeight, ExitStack]] = {}

    @verb
    def ask_start(self, name: str, question: str, arguments: Sequence[Any] = ()) -> Any:
        """Does what `mlora_ext.start` asks for; `begin` and `end` enclose an adapter's initialisation."""
        if question == "begin":
            self._statistics[name] = statistics_of(self._base.model, name)
            return None
        if question == "end":
            self._statistics.pop(name, None)
            return None
        return getattr(self._statistics[name], question)(*arguments)

    @verb
    def open_originals(self, name: str, source: str) -> dict[str, Any]:
        """Opens the original weights of an adapter's layers that are here.

        Returns how many these are, or what is wrong: an error of a later stage would end all adapters.
        """
        model = self._base.model
        layers = layers_of(model, name)
        try:
            with ExitStack() as unless_opened:
                read = original_weights(model, source, layers, unless_opened)
                self._originals[name] = read, unless_opened.pop_all()
        except ValueError as error:
            return {"fault": first_line(error)}
        return {"layers": len(layers)}

    @verb
    def start_from_weights(self, name: str, layer: str) -> dict[str, Any]:
        """Gives an adapter LoftQ's values in a layer; returns 1 if it is here, else 0, or what is wrong."""
        try:
            return {"layers": start_layer(self._base.model, name, self._originals[name][0], layer)}
        except ValueError as error:
            return {"fault": first_line(error)}

    @verb
    def close_originals(self, name: str) -> dict[str, Any]:
        """Closes what `open_originals` opened, if it is open."""
        if name in self._originals:
            _, stack = self._originals.pop(name)
            stack.close()
        return {"layers": 0}

    def observe(self, observation: Observation) -> None:
        """Shows the active route to an adapter's initialisation."""
        rows, statistics = observation.rows, self._statistics[observation.name]
        statistics.take(None if rows is None else torch.tensor(rows, device="cpu"), observation.share)
        active = router_of(self._base.model).active
        assert active is not None
        active.observe(statistics)
