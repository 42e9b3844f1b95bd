"""Python imports this first in the processes that tests start with `--cpu-isa`: they compute as pytest does.

tests/conftest.py puts this folder on their path, and the names of the instruction set of our kernels and of
the library for frozen products, which each process would choose by a measurement, into `VARIABLE`.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

VARIABLE = "MLORA_TESTS_KERNELS"


class Operators:
    """Finds the module that loads our operators where Python would, and has it choose the kernels, too."""

    @staticmethod
    def find_spec(
        name: str, path: list[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path) if name == "mlora_ext.library" else None
        if found is None or found.loader is None:
            return None
        load = found.loader.exec_module

        def load_and_choose(module: ModuleType) -> None:
            load(module)
            if module.LOADED:
                cpu_isa, base_gemm = os.environ[VARIABLE].split()
                module.torch.ops.mlora_ext.use_cpu_isa(cpu_isa)
                module.torch.ops.mlora_ext.set_base_gemm(module.torch.float32, base_gemm)

        found.loader.exec_module = load_and_choose
        return found


if VARIABLE in os.environ:
    sys.meta_path.insert(0, Operators)
