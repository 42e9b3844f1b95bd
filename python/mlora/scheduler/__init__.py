"""Which tasks run when: predicted memory, admission, preemptive priorities. Knows no model."""

from mlora.memory.estimate import MemoryEstimate
from mlora.memory.memory_model import MemoryModel, PeakModel
from mlora.scheduler.admission import NOBODY, Admission, Bounds, admit, next_batch
from mlora.scheduler.memory_need import MemoryNeed, Room
from mlora.scheduler.policy import ORDERS, PLACEMENTS, Order, Placement, token_balanced

__all__ = [
    "NOBODY",
    "ORDERS",
    "PLACEMENTS",
    "Admission",
    "Bounds",
    "MemoryEstimate",
    "MemoryModel",
    "MemoryNeed",
    "Order",
    "PeakModel",
    "Placement",
    "Room",
    "admit",
    "next_batch",
    "token_balanced",
]
