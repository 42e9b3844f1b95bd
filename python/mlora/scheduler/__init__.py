"""Which tasks run when: memory predicted, admission, preemptive priorities. Knows no model."""

from mlora.memory.estimate import MemoryEstimate
from mlora.memory.memory_model import MemoryModel, PeakModel
from mlora.scheduler.admission import NOBODY, Admission, Estimate, admit, choose
from mlora.scheduler.need import Need, Room
from mlora.scheduler.policy import ORDERS, PACKINGS, Order, Packing, TokenBalanced

__all__ = [
    "NOBODY",
    "ORDERS",
    "PACKINGS",
    "Admission",
    "Estimate",
    "MemoryEstimate",
    "MemoryModel",
    "Need",
    "Order",
    "Packing",
    "PeakModel",
    "Room",
    "TokenBalanced",
    "admit",
    "choose",
]
