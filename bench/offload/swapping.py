"""A step in which some blocks' activations are swapped to disk, and what the planner is told about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlora.offload.blocks import BlockForward
from mlora.offload.disk import Disk
from mlora.offload.planner.activation_plan import ActivationPlan, Choice
from mlora.offload.planner.iteration_time import iteration_time
from mlora.offload.planner.machine import Budget, Machine
from mlora.offload.planner.memory_need import memory_need
from mlora.offload.planner.search import Case, PlannedActivations, plan_activations
from mlora.offload.planner.workload import Block, Placement, Workload
from mlora.offload.saved_tensors import SavedTensors
from mlora.offload.swap_space import WRITING, SwapSpace
from torch import Tensor
from transformers import LlamaForCausalLM

PLACE = Placement(base="device", optimizer="device")
CHOICES = {Choice.KEEP: "keep", Choice.RECOMPUTE: "recompute", Choice.DISK: "swap"}


@dataclass(frozen=True)
class Passes:
    """Seconds of a step's parts: those of the blocks, and those of embedding, head and loss.

    Attributes:
        loss, gradient: the loss, and a sum over the gradient of the first block's first matrix.
    """

    forward: float
    head_forward: float
    backward: float
    head_backward: float
    loss: float
    gradient: float

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.forward + self.head_forward + self.backward + self.head_backward


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
        self._saved = SavedTensors(model, None, self._space)
        layers = list(model.model.layers)
        self.blocks = len(layers)
        self._first: Tensor = next(layers[0].parameters())
        self._wrapped = [BlockForward(block, number, self._saved) for number, block in enumerate(layers)]
        self._times: dict[str, float] = {}
        self._hooks = [
            layers[0].register_forward_pre_hook(self._note("begins")),
            layers[-1].register_forward_hook(self._last_is_done),
        ]

    def close(self) -> None:
        """Gives the model back as it was."""
        for hook in self._hooks:
            hook.remove()
        for wrapped in self._wrapped:
            wrapped.remove()

    def step(self, modes: Sequence[str], ids: Tensor) -> Passes:
        """Runs a step; `modes` say of each block whether to keep, recompute or swap."""
        for number, mode in enumerate(modes):
            self._wrapped[number].recomputes = mode == "recompute"
            self._saved.swaps[number] = mode == "swap"
        begin = time.perf_counter()
        with self._saved.of_pass():
            loss = self._model(input_ids=ids, labels=ids).loss
        middle = time.perf_counter()
        loss.backward()
        end, at = time.perf_counter(), self._times
        assert self._first.grad is not None
        gradient = self._first.grad.double().sum().item()
        self._model.zero_grad()
        return Passes(
            forward=at["ends"] - at["begins"],
            head_forward=(at["begins"] - begin) + (middle - at["ends"]),
            backward=end - at["returns"],
            head_backward=at["returns"] - middle,
            loss=loss.item(),
            gradient=gradient,
        )

    def bytes_of_blocks(self, ids: Tensor) -> list[int]:
        """Returns the bytes that autograd saves in each block, which a swap moves."""
        self._saved.counts = True
        self.step(["keep"] * self.blocks, ids)
        self._saved.counts = False
        return [self._saved.counted[number] for number in range(self.blocks)]

    def _note(self, name: str) -> Callable[..., None]:
        def note(*_: object) -> None:
            self._times[name] = time.perf_counter()

        return note

    def _last_is_done(self, _: object, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self._note("ends")()
        hidden = output if isinstance(output, Tensor) else output[0]
        hidden.register_hook(self._note("returns"))


def workload_of(profile: Passes, sizes: Sequence[int], tokens: int) -> Workload:
    """Returns what the planner sees: the blocks, and one that stands for embedding, head and loss.

    The states between blocks are among the blocks' bytes, since a swap moves them, too.

    Args:
        profile: of a step with all blocks recomputed, which the paper profiles (section IV-B).
        sizes: bytes that autograd saves, by block.
        tokens: of the step.
    """
    count = len(sizes)
    seconds = {
        "forward_seconds": profile.forward / count,
        "backward_seconds": (profile.backward - profile.forward) / count,
    }
    blocks = [Block(inner_bytes=size, **seconds) for size in sizes]
    head = Block(forward_seconds=profile.head_forward, backward_seconds=profile.head_backward)
    return Workload([*blocks, head], tokens, method="full")


def plan_of(swapped: int, blocks: int) -> ActivationPlan:
    """Returns the plan that swaps the first blocks and recomputes the others."""
    inner = [Choice.DISK] * swapped + [Choice.RECOMPUTE] * (blocks - swapped)
    return ActivationPlan((*inner, Choice.KEEP))


def modes_of(plan: ActivationPlan) -> list[str]:
    """Returns what a plan says of each block, in the words of `offloaded`."""
    return [CHOICES[choice] for choice in plan.inner[:-1]]


def case_of(machine: Machine, workload: Workload) -> Case:
    """Returns the paper's case: how many blocks to swap, if all others are recomputed."""
    blocks = len(workload.blocks) - 1
    seconds = [predicted(machine, workload, plan_of(count, blocks)) for count in range(blocks + 1)]
    best = seconds.index(min(seconds))
    if best == 0:
        return Case.TRANSFER
    return Case.COMPUTE if best == blocks else Case.INFLECTION


def predicted(machine: Machine, workload: Workload, plan: ActivationPlan) -> float:
    """Returns the planner's seconds of a step."""
    return iteration_time(machine, workload, PLACE, plan).seconds


def chosen(machine: Machine, workload: Workload) -> PlannedActivations:
    """Returns the planner's plan where there is memory to swap or recompute all blocks, and no more."""
    blocks = len(workload.blocks) - 1
    need = memory_need(machine, workload, PLACE, plan_of(blocks, blocks))
    return plan_activations(machine, workload, PLACE, Budget(device=need.device))
