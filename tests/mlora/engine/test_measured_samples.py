"""Samples that are measured on a real engine, as on a GPU; here on a CPU by the same code."""

import math
import random
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from equal_states import assert_equal
from limited_runs import Watching, decisions, die, five_tasks, undisturbed
from mlora.cluster.device import set_allocators
from mlora.config.config_file import resolve_config
from mlora.data.dataset import Sample
from mlora.engine.dry_run import DryStage
from mlora.engine.engine import Engine
from mlora.engine.measured_samples import MeasuredSamples, _growth, _halved
from mlora.engine.stage_group import StageOptions
from mlora.errors import RunError
from mlora.memory.adapter_memory import seed_shapes, spread
from mlora.memory.estimate import MemoryEstimate
from mlora.memory.meter import PeakMemory, used_memory, work_memory
from mlora.memory.model import PeakModel
from mlora.memory.room import RESERVED, MemoryLimit
from mlora.run.run import resume, train
from peft import LoraConfig
from tiny_run import lines, weights

from mlora_ext import MultiLoRALinear
from mlora_ext.routing.router import router_of
from tests.mlora.dry_models import CPU, OPTIM, llama, loras, of

MIB = 2**20
PLENTY = 1 << 50
STATES = (0,)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(llama()) as engine:
        yield engine


def together(shape: dict[str, list[int]]) -> list[int]:
    return [length for lengths in shape.values() for length in lengths]


def free(monkeypatch: pytest.MonkeyPatch, used: int = 0) -> None:
    """Let stages have so much in use, whatever this process has."""
    monkeypatch.setattr(Engine, "used_memory", lambda self: [used] * self.stages)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_a_sample_is_what_a_dry_run_says(checkpointing: bool) -> None:
    source = llama(num_hidden_layers=2)
    options = StageOptions(CPU, torch.float32, checkpointing)
    shapes = [spread("ab", shape) for shape in seed_shapes(90)]
    dry = DryStage(source, options).activations(loras("ab"), shapes)
    samples = MeasuredSamples(Engine(source, gradient_checkpointing=checkpointing), PLENTY)
    found = samples(loras("ab"), STATES, 90)[-len(shapes) :]
    for shape, predicted, (lengths, (phases,)) in zip(shapes, dry, found, strict=True):
        assert sorted(lengths) == sorted(together(shape))
        assert max(phases) == pytest.approx(max(predicted), rel=1e-3)


@pytest.mark.parametrize("more", [{}, {"stages": 2}, {"micro_batches": 3}], ids=str)
def test_what_was_measured_of_small_ones_predicts_larger_ones(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for sequences of 38 rows, and others have up to 300."""
    free(monkeypatch)
    source = llama(num_hidden_layers=2)
    knees = DryStage(source, StageOptions(CPU, torch.float32)).knees
    with Engine(source, **more) as engine:
        models = [PeakModel(knees) for _ in range(engine.stages)]
        samples = MeasuredSamples(engine, RESERVED + 40 * MIB)
        found = samples(loras("ab"), STATES * engine.stages, 300)
        assert 16 < max(max(lengths) for lengths, _ in found) < 75
        for lengths, places in found:
            for model, phases in zip(models, places, strict=True):
                assert max(phases) < 20 * MIB
                model.seed(lengths, phases)
        for name, lora in loras("ab").items():
            engine.create_adapter(name, lora, OPTIM)
        draw = random.Random(0)
        for _ in range(4):
            shape = {name: [draw.randint(8, 300) for _ in range(draw.randint(1, 3))] for name in "ab"}
            batch = {name: of(lengths) for name, lengths in shape.items()}
            future = engine.start(batch, measure=True, whole=True)
            engine.finish(future)
            for model, phases in zip(models, future.measured[0].phases, strict=True):
                assert model.predict(together(shape)) == pytest.approx(max(phases), rel=0.02)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize(
    ("task", "labels"),
    [
        ("SEQ_CLS", {"num_labels": 3}),
        ("SEQ_CLS", {"num_labels": 1}),
        ("SEQ_CLS", {"num_labels": 3, "problem_type": "multi_label_classification"}),
        ("QUESTION_ANS", {}),
    ],
)
def test_a_head_is_measured_with_labels_of_its_own(
    engine: Engine, task: str, labels: dict[str, Any], silent: bool
) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type=task)
    lora.__dict__.update(labels)
    assert MeasuredSamples(engine, PLENTY)({"a": lora}, STATES, 16, silent)
    assert engine.adapters == []


def state_of(engine: Engine) -> list[Any]:
    """All that decides what an engine computes next."""
    states = [engine.state_dict(name) for name in engine.adapters]
    banks = {
        name: [[list(page.shape) for page in bank._pages] for bank in (module.lora_A, module.lora_B)]
        for name, module in engine.model.named_modules()
        if isinstance(module, MultiLoRALinear) and module.lora_A._pages
    }
    router = router_of(engine.model)
    adapters = {name: info.seed for name, info in router.adapters.items()}
    base = {name: p for name, p in engine.model.named_parameters() if ".lora_" not in name}
    part = engine._part
    names = list(part._optimizers), list(part._measured), part._in_flight
    return [states, banks, router.step, adapters, base, torch.get_rng_state(), random.getstate(), names]


def draw_batch(name: str, step: int) -> list[Sample]:
    draw = random.Random(f"{name}{step}")
    ids = [tuple(draw.randrange(8000) for _ in range(draw.randrange(2, 30))) for _ in range(3)]
    return [Sample(each, each) for each in ids]


def test_the_engine_stays_as_it_was_and_trains_alike() -> None:
    source = llama(num_hidden_layers=2)
    losses: list[list[Any]] = [[], []]
    ends = []
    for asked in (False, True):
        engine = Engine(llama(num_hidden_layers=2))
        engine.model.load_state_dict(source.state_dict(), strict=False)
        samples = MeasuredSamples(engine, PLENTY)
        for name in "ab":
            engine.create_adapter(name, loras("ab")[name], OPTIM)
        for step in range(4):
            batch = {name: draw_batch(name, step) for name in "ab"}
            losses[asked].append(engine.forward_backward(batch))
            if step % 2:
                losses[asked].append([engine.optim_step(name) for name in "ab"])
            if asked:  # also in the middle of an accumulation
                before = state_of(engine)
                assert samples(loras("abc"), STATES, 20)
                samples.warm_up()
                assert_equal(state_of(engine), before)
                assert engine.memory_after == []
        ends.append([engine.state_dict(name) for name in "ab"])
    assert losses[0] == losses[1]
    assert_equal(ends[0], ends[1])


def test_the_model_itself_has_the_same_bits_after_it(engine: Engine) -> None:
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    MeasuredSamples(engine, PLENTY)(loras("ab"), STATES, 20)
    assert_equal({name: p.detach() for name, p in engine.model.named_parameters()}, before)
    assert engine.adapters == []


def test_nothing_is_measured_while_something_is_under_way(engine: Engine) -> None:
    engine.create_adapter("a", loras("a")["a"], OPTIM)
    samples = MeasuredSamples(engine, PLENTY)
    future = engine.start({"a": of([9])})
    assert not engine.idle
    assert samples(loras("b"), STATES, 20) == []
    engine.finish(future)
    assert engine.idle
    assert samples(loras("b"), STATES, 20)


def test_nothing_is_measured_where_not_even_the_states_fit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 10 * MIB)
    samples = MeasuredSamples(engine, RESERVED + 30 * MIB)
    assert samples(loras("a"), [20 * MIB], 20) == []
    assert samples(loras("a"), [19 * MIB], 20)


def test_running_out_of_memory_leaves_the_engine_usable(engine: Engine) -> None:
    before = state_of(engine)
    samples = MeasuredSamples(engine, PLENTY)
    passed: list[object] = []

    def run_out(*_: object) -> None:
        passed.append(None)
        if len(passed) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = engine.model.get_submodule("model.layers.3").register_forward_pre_hook(run_out)
    assert samples(loras("a"), STATES, 20) == []
    hook.remove()
    assert len(passed) == 4
    del passed[3:]
    hook = engine.model.get_submodule("model.layers.3").register_forward_pre_hook(run_out)
    with pytest.raises(ValueError, match="the base model alone takes it all; raise the limit"):
        samples.warm_up()
    hook.remove()
    assert engine.idle
    assert_equal(state_of(engine)[:-1], before[:-1])
    assert samples(loras("a"), STATES, 20)


def test_growth_bounds_every_term() -> None:
    assert _growth([4, 2], [4, 4]) == pytest.approx(32 / 20)
    assert _growth([4, 4], [2, 2]) == 1.0
    assert _growth([10], [2] * 10) == 2.0
    assert _growth([10], [20]) == 4.0
    assert _growth([4] * 10, [8]) == 4.0
    assert _growth([4, 4], [4, 2]) == float("inf")
    assert _halved(300, 32) == [300, 150, 75, 38]
    assert _halved(4, 4) == []


def test_what_cannot_be_measured_now_needs_more_than_there_is_and_is_asked_for_again() -> None:
    samples: list[Any] = []
    estimate = MemoryEstimate("+".join, lambda names: list(samples))
    assert estimate.activations({"a": [9]}, ["a"]) == [math.inf]
    assert estimate.predict({"a": [9]}, ["a"]) == [0]
    estimate.adopt()
    assert estimate.state()["learned"] == {}
    samples.append(([9], [[900]]))
    assert estimate.predict({"a": [9]}, ["a"])[0] == pytest.approx(900, abs=1)


class Allocator:
    """The figures of a GPU's allocator, of which each tensor takes what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        monkeypatch.setattr(torch.cuda, "memory_stats", self.stats)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.restart)

    def take(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def restart(self, _: object) -> None:
        self.peak = self.now

    def stats(self, _: object) -> dict[str, int]:
        return {
            "requested_bytes.all.current": self.now,
            "requested_bytes.all.peak": self.peak,
            "active_bytes.all.current": self.now + 512,
            "inactive_split_bytes.all.current": 1024,
        }


def test_what_is_asked_of_a_gpus_allocator_is_counted_by_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    device = torch.device("cuda")
    allocator.take(1000)  # the model
    memory = work_memory(PeakMemory(device))
    memory.restart()
    with memory:
        allocator.take(70)
        allocator.take(-20)
    allocator.take(5000)  # another one's work
    memory.mark()
    with memory:
        allocator.take(30)
        memory.mark()
        allocator.take(-60)
    assert memory.peaks == [70, 80, 80]
    assert memory.live == 20
    assert used_memory(device) == allocator.now + 512 + 1024


def test_a_limit_bounds_the_allocator_of_a_gpu(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1, 4 * (RESERVED + LEFT)))
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *a: told.append(a), raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    for device in (torch.device("cuda:1"), torch.device("cuda")):
        set_allocators(RESERVED + LEFT, device)
        set_allocators(None, device)
    assert told == [(0.25, 1), (0.25, 2)]
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(RunError, match="needs PyTorch's own allocator, this process uses cudaMallocAsync"):
        set_allocators(RESERVED + LEFT, device)


# whole runs

LEFT = 3 * MIB // 2


@pytest.fixture
def run_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as on a GPU, in a process that has nothing in use beside what tasks need."""
    free(monkeypatch)
    monkeypatch.setattr(MemoryLimit, "took", lambda *_: None)
    monkeypatch.setattr(Engine, "limit_memory", partialmethod(Engine.limit_memory, measured=True))


@pytest.fixture
def data(tiny_base: Path, tmp_path: Path) -> dict[str, Any]:
    made = five_tasks(tiny_base, tmp_path, scheduler={"memory_limit": RESERVED + LEFT})
    made["adapters"] = made["adapters"][1:]  # of three kinds
    return made


def run_to_end(
    data: dict[str, Any], folder: Path, name: str, actions: dict[Any, Callable[[], object]]
) -> Path:
    config = resolve_config(data | {"output_dir": name}, folder=folder)
    try:
        done = train(config, reporter=Watching(actions)).status
    except ConnectionAbortedError:
        done = "interrupted"
    if actions:
        assert done == "interrupted"
        done = resume(folder / name).status
    assert done == "finished"
    return folder / name


@pytest.mark.usefixtures("run_measured")
def test_a_run_that_is_cut_off_ends_alike(data: dict[str, Any], tmp_path: Path) -> None:
    whole = run_to_end(data, tmp_path, "whole", {})
    admitted = list(decisions(whole).values())
    assert 1 <= len(admitted[0]) < 4
    assert admitted[0][0] == "high"
    cut = run_to_end(data, tmp_path, "cut", {4: die})
    for run in (cut, undisturbed(cut, tmp_path / "again")):
        assert lines(run) == lines(whole)
        assert weights(run) == weights(whole)


@pytest.mark.usefixtures("run_measured")
def test_a_limit_that_leaves_nothing_to_measure_in_refuses_all(data: dict[str, Any], tmp_path: Path) -> None:
    data["scheduler"]["memory_limit"] = RESERVED
    watching = Watching()
    with pytest.raises(RunError, match="every adapter was refused"):
        train(resolve_config(data, folder=tmp_path), reporter=watching)
    refused = [line for line in watching.lines if "refused" in line]
    assert len(refused) == 4
    assert all("96 MiB are kept in reserve: too little is left to measure" in line for line in refused)
