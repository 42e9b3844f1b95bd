"""Python imports this first in the processes that tests start with `--cpu-isa`: they use its kernels, too.

tests/conftest.py puts this folder on their path, and the name of the instruction set into `VARIABLE`.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

VARIABLE = "MLORA_TESTS_CPU_ISA"


class Operators:
    """Finds the module that loads our operators where Python would, and has it choose the kernels, too."""

    @staticmethod
    def find_spec(
        name: str, path: list[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path) if name == "mlora_ext._ops" else None
        if found is None or found.loader is None:
            return None
        load = found.loader.exec_module

        def load_and_choose(module: ModuleType) -> None:
            load(module)
            if module.LOADED:
                module.torch.ops.mlora_ext.use_cpu_isa(os.environ[VARIABLE])

        found.loader.exec_module = load_and_choose
        return found


if VARIABLE in os.environ:
    sys.meta_path.insert(0, Operators)
