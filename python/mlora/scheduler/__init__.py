"""Which tasks run when: predicted memory, admission, preemptive priorities. Knows no model."""

from mlora.memory.estimate import MemoryEstimate
from mlora.memory.memory_model import MemoryModel
from mlora.memory.peak_model import PeakModel
from mlora.scheduler.admission import NOBODY, Admission, Estimate, admit, next_batch
from mlora.scheduler.memory_need import MemoryNeed, Room
from mlora.scheduler.policy import ORDERS, PLACEMENTS, Order, Placement, TokenBalanced

__all__ = [
    "NOBODY",
    "ORDERS",
    "PLACEMENTS",
    "Admission",
    "Estimate",
    "MemoryEstimate",
    "MemoryModel",
    "MemoryNeed",
    "Order",
    "PeakModel",
    "Placement",
    "Room",
    "TokenBalanced",
    "admit",
    "next_batch",
]
