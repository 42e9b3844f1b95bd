"""What a stage's process holds: its share of the model and of the micro-batches under way, and no more."""

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.pipeline.order import in_flight_of
from mlora.planning.profile_stage import profile_base
from peft import LoraConfig
from stage_runs import commands
from tiny_run import random_tokens, save_base, write_jsonl, write_run

MIB = 2**20
LEFT = """
import gc, json, pathlib
import mlora.engine.stage_worker, mlora.pipeline.stage
import torch
stages, plain, calls = [], mlora.engine.stage_worker.StageWorker.after_backward, 0
make = mlora.pipeline.stage.Stage.__init__
def noted(self, *arguments):
    stages.append(self)
    make(self, *arguments)
mlora.pipeline.stage.Stage.__init__ = noted
def after_backward(*arguments):
    global calls
    calls += 1
    if calls in {calls!r}:
        gc.collect()
        tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and not o.is_meta]
        found = [len(tensors), sum(t.untyped_storage().nbytes() for t in tensors), len(stages[0]._in_flight)]
        with pathlib.Path({path!r}).open("a") as file:
            file.write(json.dumps([rank, calls, *found]) + "\\n")
    return plain(*arguments)
mlora.engine.stage_worker.StageWorker.after_backward = after_backward
"""


def run_of(folder: Path, base: Path, adapters: int, **changes: Any) -> Path:
    """A run of all-linear adapters on `data.jsonl`."""
    lora = {"r": 8, "target_modules": "all-linear"}
    data: dict[str, Any] = {
        "base_model": str(base),
        "output_dir": str(folder / "run"),
        "device": "cpu",
        "defaults": {"per_device_train_batch_size": 1, "save_steps": None, **changes},
        "datasets": [{"name": "data", "path": "data.jsonl", "format": "tokens"}],
        "adapters": [{"name": f"a{i}", "dataset": "data", "lora": lora} for i in range(adapters)],
    }
    return write_run(folder, data)


@pytest.mark.parametrize(
    ("steps", "calls", "more"),
    [(125, (40, 240), 25), pytest.param(500, (100, 900), 100, marks=pytest.mark.nightly)],
)
def test_nothing_is_left_behind_over_many_steps(
    tmp_path: Path, steps: int, calls: tuple[int, int], more: int
) -> None:
    """Less than one tensor for eight micro-batches."""
    write_jsonl(tmp_path / "data.jsonl", random_tokens(9, 1))
    path = run_of(tmp_path, save_base(tmp_path / "base"), 2, max_steps=steps)
    counts = tmp_path / "counts"
    before = dict.fromkeys(range(2), LEFT.format(path=str(counts), calls=calls))
    with commands(["train", path, "--set", "pipeline.stages=2"], 2, before) as running:
        codes, _, errors = running.end(timeout=200)
    assert codes == [0, 0], errors
    found = {tuple(entry[:2]): entry[2:] for entry in map(json.loads, counts.read_text().splitlines())}
    for rank in range(2):
        (tensors, size, flights), (later, later_size, later_flights) = (found[rank, call] for call in calls)
        assert later <= tensors + more, (tensors, later)  # what is under way differs
        assert later_size <= 1.1 * size
        assert max(flights, later_flights) <= 2


USED = """
import ctypes, mmap, pathlib, re, threading, types, weakref
import mlora.engine.stage_worker, mlora.model.tensor_file
class Info(ctypes.Structure):  # malloc.h
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks used free keep"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
most, mapped, plain = 0, 0, mlora.engine.stage_worker.StageWorker.after_backward
def changed(size):
    global mapped
    mapped += size
def counted(number, size):  # of these, libc knows nothing
    found = mmap.mmap(number, size)
    changed(size)
    weakref.finalize(found, changed, -size)
    return found
mlora.model.tensor_file.mmap = types.SimpleNamespace(mmap=counted)
def look():
    global most
    info = libc.mallinfo2()
    most = max(most, info.used + info.hblkhd + mapped)
def sample():
    while True:
        look()
        time.sleep(0.001)
threading.Thread(target=sample, daemon=True).start()
def after_backward(*arguments):
    pathlib.Path({path!r} + str(rank)).write_text(str(most))
    return plain(*arguments)
mlora.engine.stage_worker.StageWorker.after_backward = after_backward
"""


def peaks(path: Path, folder: Path) -> list[int]:
    """For each stage the most bytes that were allocated at once."""
    before = dict.fromkeys(range(3), USED.format(path=str(folder / "peak")))
    with commands(["train", path], 3, before) as running:
        codes, _, errors = running.end(timeout=200)
    assert codes == [0, 0, 0], errors
    return [int((folder / f"peak{stage}").read_text()) for stage in range(3)]


@pytest.mark.soak  # gigabytes
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc counts what is allocated")
def test_a_stage_holds_its_share(tmp_path: Path) -> None:
    """Beside what the interpreter, the libraries and a model of no size take."""
    shape = {"hidden": 1024, "intermediate_size": 3072, "vocab_size": 4000, "max_position_embeddings": 512}
    measured = {}
    for name, changes in {"small": {}, "large": shape}.items():
        folder = tmp_path / name
        folder.mkdir()
        tokens = 128 if name == "large" else 8
        write_jsonl(folder / "data.jsonl", [{"input_ids": [1 + k % 250 for k in range(tokens)]}] * 8)
        path = run_of(folder, save_base(folder / "base", layers=12, **changes), 3, max_steps=4)
        path.write_text(path.read_text() + "pipeline: {stages: 3, partition: [4, 4, 4]}\n")
        measured[name] = peaks(path, folder)
    lora = LoraConfig(r=8, target_modules="all-linear")
    base = str(tmp_path / "large" / "base")
    table = profile_base(base, (128,), torch.device("cpu"), torch.float32, lora=lora)
    width = 2 * (1024 + 1024) + 2 * (1024 + 512) + 3 * (1024 + 3072)  # in and out, of a block's layers
    adapters = 3 * 4 * 8 * width * 16  # weights, gradients and two moments
    for stage in range(3):
        parts = table.parts(4 * stage, 4 * stage + 4, stage == 0, stage == 2)
        weights = sum(part.weight_bytes for part in parts)
        activations = in_flight_of(stage, 3, 3) * sum(part.activation_bytes for part in parts)
        share = weights + adapters + activations
        allocated = measured["large"][stage] - measured["small"][stage]
        print(f"stage {stage}: share {share / MIB:.0f} MiB, allocated {allocated / MIB:.0f}")
        assert 0.9 * share < allocated < 1.1 * share
