"""What runs when: memory predicted before it is needed, and who is admitted to it."""

from .memory_model import MemoryModel, PeakModel

__all__ = ["MemoryModel", "PeakModel"]
