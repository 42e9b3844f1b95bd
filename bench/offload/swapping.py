"""A step in which some blocks' activations are swapped to disk, and what the planner is told about it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlora.offload.activations import Activations, Mode
from mlora.offload.disk import Disk
from mlora.offload.forecast import watched_workload
from mlora.offload.planner.activation_plan import ActivationChoice, ActivationPlan
from mlora.offload.planner.iteration_time import iteration_time
from mlora.offload.planner.machine import Budget, Machine
from mlora.offload.planner.memory_need import memory_need
from mlora.offload.planner.search import Case, PlannedActivations, plan_activations
from mlora.offload.planner.workload import OffloadWorkload, StatePlacement
from mlora.offload.swap_space import WRITING, SwapSpace
from torch import Tensor
from transformers import LlamaForCausalLM

PLACE = StatePlacement(base="device", optimizer="device")
CHOICES: dict[ActivationChoice, Mode] = {
    ActivationChoice.KEEP: "keep",
    ActivationChoice.RECOMPUTE: "recompute",
    ActivationChoice.DISK: "swap",
}


@dataclass(frozen=True)
class Step:
    """Seconds of a forward and a backward pass; the loss, and a sum over one gradient of the first block."""

    seconds: float
    loss: float
    gradient: float


class Swapping:
    """Runs forward and backward passes, all weights trained, without an optimizer.

    Args:
        model: in memory.
        folder: for scratch files.
        rate: bytes per second of all transfers together, a stand-in for a slower disk; 0 = no bound.
        writing: bytes that wait to be written at once. What has not been written when the backward pass wants
            it is not read, so that a small model hardly sees a slow disk. The planner expects one block.

    Attributes:
        blocks: how many there are.
    """

    def __init__(
        self, model: LlamaForCausalLM, folder: Path, rate: float = 0.0, writing: int = WRITING
    ) -> None:
        self.disk = Disk([folder], rate=rate)
        self._model, self._space = model, SwapSpace(self.disk, writing=writing)
        layers = list(model.model.layers)
        self.blocks = len(layers)
        self._first: Tensor = next(layers[0].parameters())
        self._activations = Activations(model, layers, self._space)

    def close(self) -> None:
        """Gives the model back as it was."""
        self._activations.remove()

    def step(self, modes: Sequence[Mode], ids: Tensor) -> Step:
        """Runs a step; `modes` say of each block whether to keep, recompute or swap."""
        self._activations.choose(modes)
        begin = time.perf_counter()
        loss = self._passes(ids)
        return self._ended(loss, time.perf_counter() - begin)

    def workload(self, machine: Machine, ids: Tensor) -> tuple[OffloadWorkload, Step]:
        """Runs a step as `activations: auto` profiles one; returns what the planner sees, and the step."""
        self._activations.watch(swaps=True)
        begin = time.perf_counter()
        loss = self._passes(ids)
        times, seconds = self._activations.times(), time.perf_counter() - begin
        seen = watched_workload(machine, self._activations, times, None, ids.numel(), trained=[], used=0)
        return seen, self._ended(loss, seconds)

    def bytes_of_blocks(self, ids: Tensor) -> list[int]:
        """Returns the bytes that autograd saves in each block, which a swap moves."""
        self._activations.saved.counts = True
        self.step(["keep"] * self.blocks, ids)
        self._activations.saved.counts = False
        return [self._activations.saved.counted[number] for number in range(self.blocks)]

    @property
    def buffers(self) -> int:
        """Bytes of memory that swapped activations pass through."""
        return self._space.memory.nbytes

    def _passes(self, ids: Tensor) -> Tensor:
        with self._activations.of_pass():
            loss: Tensor = self._model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    def _ended(self, loss: Tensor, seconds: float) -> Step:
        assert self._first.grad is not None
        gradient = self._first.grad.double().sum().item()
        self._model.zero_grad()
        return Step(seconds, loss.item(), gradient)


def plan_of(swapped: int, blocks: int) -> ActivationPlan:
    """Returns the plan that swaps the first blocks and recomputes the others."""
    inner = [ActivationChoice.DISK] * swapped + [ActivationChoice.RECOMPUTE] * (blocks - swapped)
    return ActivationPlan((*inner, ActivationChoice.KEEP))


def modes_of(plan: ActivationPlan) -> list[Mode]:
    """Returns what a plan says of each block, in the words of `offloaded`."""
    return [CHOICES[choice] for choice in plan.inner[:-1]]


def case_of(machine: Machine, workload: OffloadWorkload) -> Case:
    """Returns the paper's case: how many blocks to swap, if all others are recomputed."""
    blocks = len(workload.blocks) - 1
    seconds = [predicted(machine, workload, plan_of(count, blocks)) for count in range(blocks + 1)]
    best = seconds.index(min(seconds))
    if best == 0:
        return Case.TRANSFER
    return Case.COMPUTE if best == blocks else Case.INFLECTION


def predicted(machine: Machine, workload: OffloadWorkload, plan: ActivationPlan) -> float:
    """Returns the planner's seconds of a step."""
    return iteration_time(machine, workload, PLACE, plan).seconds


def chosen(machine: Machine, workload: OffloadWorkload) -> PlannedActivations:
    """Returns the planner's plan where there is the memory that swapping all blocks takes."""
    blocks = len(workload.blocks) - 1
    need = memory_need(machine, workload, PLACE, plan_of(blocks, blocks))
    return plan_activations(machine, workload, PLACE, Budget(device=need.device), hidden_stays=True)
