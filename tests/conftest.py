"""Options and fixtures for all tests: threads and kernels, fresh random inputs that a failure can repeat, and
everything left as it was found.
"""

import gc
import os
import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cover import leave_to_the_night
from pairwise import leave_the_rest_to_the_night

if not torch.cuda.is_available():
    # Triton reads it when it is imported, as by torch for `mlora_ext`: then kernels run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

from mlora_ext.backends import selection as backend
from mlora_ext.library import LOADED

# A shell starts background jobs with SIGINT ignored, nohup with SIGHUP; here they work as in the foreground.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


RUN_SETS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"}
"""Environment variables that a run sets for its own process."""
WATCHED = ("ATEN_", "CUDA_", "MASTER_", "MKL_", "MLORA_", "OMP_", "ONEDNN_", "TRITON_", "WORLD_")
"""How the names of variables begin that tests may set; libraries set others for themselves."""
CHILD = Path(__file__).resolve().parent / "child"
"""Its `sitecustomize` has processes compute as this one does with `--cpu-isa`."""
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
AT_START = set(os.environ) - {"PYTEST_CURRENT_TEST"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--threads", type=int, default=1, help="of each process; more make tiny shapes slower")
    parser.addoption("--device", help="where tests make tensors that do not say where; default: the CPU")
    parser.addoption("--cpu-isa", help="instruction set of our CPU kernels; default: the best there is")


def pytest_configure(config: pytest.Config) -> None:
    use_own_cache(config)
    gc.disable()  # until all is collected: modules and tests stay, and to search them for garbage takes time
    threads = config.getoption("threads")
    torch.set_num_threads(threads)
    # For the processes that tests start. With fewer cores than threads, MKL and then torch would use fewer.
    os.environ |= {"OMP_NUM_THREADS": str(threads), "MKL_DYNAMIC": "FALSE"}
    if config.getoption("device"):
        torch.set_default_device(config.getoption("device"))
    if config.getoption("cpu_isa"):
        use_cpu_isa(config.getoption("cpu_isa"))


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_the_rest_to_the_night(items)
    leave_to_the_night(items)


@pytest.fixture(autouse=True, scope="module")
def little_to_collect() -> None:
    """Only what a file's own tests made is searched for garbage: all else takes half of a run's time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def use_own_cache(config: pytest.Config) -> None:
    """What runs keep for the machine is read and written in a folder of these tests, not in the user's."""
    folder = tempfile.TemporaryDirectory(prefix="mlora-tests-cache-")
    config.add_cleanup(folder.cleanup)
    user = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    os.environ["XDG_CACHE_HOME"] = folder.name
    for name, variable in (("matplotlib", "MPLCONFIGDIR"), ("huggingface", "HF_HOME")):
        os.environ.setdefault(variable, str(user / name))


def use_cpu_isa(name: str) -> None:
    """In this process and in those that tests start."""
    torch.ops.mlora_ext.use_cpu_isa(name)
    os.environ["MLORA_TESTS_KERNELS"] = f"{name} {torch.ops.mlora_ext.base_gemm(torch.float32)}"
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(CHILD), *([inherited] if inherited else [])])


def shared_state() -> dict[str, object]:
    """What one test could change for the next ones in its process."""
    return {
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "oneDNN": torch.backends.mkldnn.enabled,
        "backend": backend._choice.name,
        "CPU kernels": torch.ops.mlora_ext.cpu_isa() if LOADED else None,
        **{
            f"${key}": value
            for key, value in os.environ.items()
            if (key in AT_START or key.startswith(WATCHED)) and key not in RUN_SETS
        },
        "working folder": os.getcwd(),
        "handlers of signals": [signal.getsignal(number) for number in SIGNALS],
    }


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that changes what others in its process meet: they would depend on the order."""
    before = shared_state()
    yield
    after = shared_state()
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    assert not changed, "a test has to put back what it changes"


@pytest.fixture(autouse=True)
def fresh_seed(request: pytest.FixtureRequest) -> Iterator[int]:
    """Seed torch differently in every run and print the seed with a failure."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"torch.manual_seed({seed}) in {request.node.name}")
    torch.manual_seed(seed)
    yield seed
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A build without the CUDA kernels, also where an earlier test has loaded the emulator of tests/cuda."""
    monkeypatch.setattr(backend, "_has_kernel", lambda key: False)
    backend.gpu_operator.cache_clear()
    backend._on_a_gpu.cache_clear()
    yield
    backend.gpu_operator.cache_clear()
    backend._on_a_gpu.cache_clear()
