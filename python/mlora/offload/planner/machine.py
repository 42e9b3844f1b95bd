"""What a machine can do per second, and how much memory a plan may take of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Machine:
    """Rates of a device, a host and a disk.

    A GPU has memory of its own: device and host are two memories, and the device's computation takes no
    processor cores. On a machine without a GPU, device and host are one memory, and the computation runs on
    `compute_cores` of the processor's cores, beside what reads, writes and updates.

    Attributes:
        flops: FLOP/s that the device reaches.
        read, write: bytes per second from the disk to the host and back; 0 = no disk.
        to_device, to_host: bytes per second between host and device.
        one_memory: device and host are one memory; `to_device` and `to_host` mean nothing then.
        shared_disk: reads and writes of the disk add up. Otherwise they run beside each other.
        cores: of the processor.
        compute_cores: those that the device's computation occupies; 0 with a GPU.
        read_seconds, write_seconds: processor seconds for each byte read or written.
        copy_seconds: seconds of the device for each byte of activations that it copies before it is
            swapped; only with one memory.
        update_seconds: processor seconds of the optimizer for each trainable parameter.

    Raises:
        ValueError: a rate is not positive, a cost is negative, or more cores compute than there are.
    """

    flops: float
    read: float = 0.0
    write: float = 0.0
    to_device: float = math.inf
    to_host: float = math.inf
    one_memory: bool = False
    shared_disk: bool = True
    cores: float = 1.0
    compute_cores: float = 0.0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    copy_seconds: float = 0.0
    update_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(self)
        for name in ("flops", "to_device", "to_host", "cores"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a number above 0, got {getattr(self, name)}")
        if self.compute_cores > self.cores:
            raise ValueError(f"compute_cores: expected at most cores={self.cores}, got {self.compute_cores}")

    @property
    def has_disk(self) -> bool:
        """Whether there is a disk that activations can be swapped to."""
        return self.read > 0 and self.write > 0


@dataclass(frozen=True)
class Budget:
    """Bytes that training may take of each memory; with one memory, `device` is the whole budget.

    Raises:
        ValueError: a budget is negative.
    """

    device: float = math.inf
    host: float = math.inf

    def __post_init__(self) -> None:
        check_not_negative(self)


def check_not_negative(data: Machine | Budget) -> None:
    """Raises ValueError if a number of a dataclass is negative or not a number."""
    for field in fields(data):
        value = getattr(data, field.name)
        if not value >= 0:
            raise ValueError(f"{field.name}: expected a number of at least 0, got {value}")
