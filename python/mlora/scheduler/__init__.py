"""Which tasks run when: predicted memory, admission, preemptive priorities. Knows no model."""

from mlora.memory.model import MemoryModel
from mlora.scheduler.admission import NOBODY, Admission, Bounds, admit, next_batch
from mlora.scheduler.policy import ORDERS, PLACEMENTS, MemoryNeed, Order, Placement, token_balanced

__all__ = [
    "NOBODY",
    "ORDERS",
    "PLACEMENTS",
    "Admission",
    "Bounds",
    "MemoryModel",
    "MemoryNeed",
    "Order",
    "Placement",
    "admit",
    "next_batch",
    "token_balanced",
]
