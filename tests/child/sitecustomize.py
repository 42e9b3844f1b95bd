"""Python imports this first in the processes that tests start; tests/conftest.py puts it on their path.

They do not see bitsandbytes and torchao, as after a plain install. Where these are there, PEFT and
Transformers import them: the one takes 1.4 seconds of each process, the other writes to stderr. A test whose
processes need them sets `WITH_QUANTIZERS` in their environment.

With `--cpu-isa` they compute as pytest does: `VARIABLE` names the instruction set of our kernels and the
library for frozen products, which each process would choose by a measurement.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

VARIABLE, WITH_QUANTIZERS = "MLORA_TESTS_KERNELS", "MLORA_TESTS_QUANTIZERS"


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


if WITH_QUANTIZERS not in os.environ:
    sys.modules |= dict.fromkeys(("bitsandbytes", "torchao"))  # type: ignore[arg-type]
if VARIABLE in os.environ:
    sys.meta_path.insert(0, Operators)
