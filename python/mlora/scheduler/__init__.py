"""Which tasks run when: predicted memory, admission, preemptive priorities. Knows no model."""

from mlora.memory.estimate import MemoryEstimate
from mlora.memory.memory_model import MemoryModel
from mlora.memory.peak_model import PeakModel
from mlora.scheduler.admission import NOBODY, Admission, Bounds, Room, admit, next_batch, sum_of, within
from mlora.scheduler.policy import ORDERS, PLACEMENTS, MemoryNeed, Order, Placement, token_balanced

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
    "sum_of",
    "token_balanced",
    "within",
]
