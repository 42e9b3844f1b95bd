"""Silences what bitsandbytes and torchao log when they are imported though nothing is quantised.

Transformers imports torchao, and PEFT bitsandbytes, wherever they are installed.
"""

from __future__ import annotations

import logging

NOTICES = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "%s is an Enum subclass and is now natively supported",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
}
"""How the silenced lines begin, by the loggers that write them. They are about quantised weights."""


def silence_notices() -> None:
    """Lets the loggers of `NOTICES` write all but these lines."""
    for name, start in NOTICES.items():
        logging.getLogger(name).addFilter(_Without(start))


class _Without(logging.Filter):
    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is to be written."""
        return not str(record.msg).startswith(self._start)
