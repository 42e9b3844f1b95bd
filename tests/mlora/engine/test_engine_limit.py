"""An engine with a memory limit, used directly: what does not fit is cut, waits or is refused."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from mlora.engine.engine import Engine
from mlora.engine.measured_samples import MeasuredSamples
from mlora.errors import MemoryLimitError
from mlora.memory.room import MIB, RESERVED, MemoryLimit
from transformers import PreTrainedModel

from tests.mlora.dry_models import OPTIM, llama, loras, of
from tests.mlora.stage_runs import ENVIRONMENT
from tests.tolerances import assert_same_up_to_rounding

BATCH = {"a": of([40, 30, 50, 20, 35]), "b": of([60, 10, 44])}
LENGTHS = {name: [sample.rows for sample in own] for name, own in BATCH.items()}


@pytest.fixture(autouse=True)
def used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has nothing in use, so that the limit is what adapters may take."""
    monkeypatch.setattr(Engine, "used_memory", lambda self: [0] * self.stages)
    monkeypatch.setattr(MemoryLimit, "took", lambda *_: None)


def model() -> PreTrainedModel:
    """One block, and so few tokens that memory grows with every row."""
    return llama(num_hidden_layers=1, vocab_size=50, initializer_range=0.2)


def with_adapters(engine: Engine) -> Engine:
    for name, lora in loras("ab").items():
        engine.create_adapter(name, lora, OPTIM)
    return engine


def limited(share: float, **options: Any) -> Engine:
    """An engine whose limit leaves its two adapters this share of what `BATCH` needs at once."""
    engine = with_adapters(Engine(model(), memory_limit="1TiB", seed=1, **options))
    memory = memory_of(engine)
    needed = memory.estimate.activations(LENGTHS, ["a", "b"])[0]
    states = sum(memory.adapters.admitted(name)[0] for name in "ab")
    memory.limit = RESERVED + states + int(share * needed)
    return engine


def memory_of(engine: Engine) -> MemoryLimit:
    assert engine.memory is not None
    return engine.memory


@pytest.mark.parametrize("limit", ["1KiB", RESERVED])
def test_a_limit_that_leaves_nothing_is_refused_at_once(limit: int | str) -> None:
    said = r"^nothing is left for adapters: of memory_limit .*; raise the limit by (more than )?\d+"
    with pytest.raises(MemoryLimitError, match=said):
        Engine(model(), memory_limit=limit)


def test_no_micro_batch_runs_under_a_limit_that_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would pass the limit: the first one takes 10 to 20 MiB. Memory of earlier runs does not count."""
    monkeypatch.setattr(Engine, "used_memory", lambda self: [592 * MIB])
    with Engine(model()) as engine:
        monkeypatch.setattr(MeasuredSamples, "warm_up", lambda _: pytest.fail("ran a micro-batch"))
        with pytest.raises(MemoryLimitError, match=r"take 592 MiB.*raise the limit by more than 24 MiB$"):
            engine.limit_memory("600MiB")
        engine.limit_memory("600MiB", enforce=False)  # a run refuses each task by name
        monkeypatch.setattr(MeasuredSamples, "warm_up", lambda _: None)
        engine.limit_memory("600MiB", enforce=False, earlier=100 * MIB)


def test_a_batch_is_cut_until_it_fits_and_computes_the_same() -> None:
    with with_adapters(Engine(model(), seed=1)) as engine:
        expected, gradients = engine.forward_backward(BATCH), engine.state_dict("a")["gradients"]
    for share, least in ((0.4, 3), (0.7, 2), (1.01, 1)):
        with limited(share) as engine:
            future = engine.start(BATCH)
            found = engine.finish(future)
            assert len(future.parts) >= least
            assert (len(future.parts) == 1) == (least == 1)
            for name, result in expected.items():
                assert found[name].tokens == result.tokens
                assert found[name].loss_sum == pytest.approx(result.loss_sum, rel=1e-5)
            for key, gradient in engine.state_dict("a")["gradients"].items():
                assert_same_up_to_rounding(gradient, gradients[key], key)


def test_each_micro_batch_fits_what_the_states_leave() -> None:
    with limited(0.4) as engine:
        memory = memory_of(engine)
        (free,) = memory.room().free or ()
        states = sum(memory.adapters.admitted(name)[0] for name in "ab")
        future = engine.start(BATCH)
        for packed, _ in future.parts:
            lengths = {"a": list(packed.sequences)}
            assert states + memory.estimate.activations(lengths, ["a", "b"])[0] <= free
        engine.finish(future)


def test_a_sample_that_is_too_long_is_refused_before_anything_enters() -> None:
    with limited(0.5) as engine:
        needs = r"adapter 'a': a sample of 250 tokens needs .*; shorten it, remove an adapter, or raise"
        with pytest.raises(MemoryLimitError, match=needs):
            engine.start({"a": of([250]), "b": of([10])})
        assert engine.idle
        engine.forward_backward({"a": of([20]), "b": of([10])})
        assert engine.optim_step("a").step == 1


def test_a_named_limit_is_enough_for_the_sample_that_was_refused() -> None:
    with limited(0.5) as engine:
        with pytest.raises(MemoryLimitError) as refused:
            engine.start({"a": of([250])})
        (missing,) = re.findall(r"raise the limit by (\d+) KiB", str(refused.value))
        memory_of(engine).limit += (int(missing) + 1) << 10
        engine.forward_backward({"a": of([250])})


def test_an_adapter_whose_states_do_not_fit_is_refused_and_the_engine_goes_on() -> None:
    with limited(0.5) as engine:
        number, told = 0, ""
        while not told and number < 100:
            try:
                engine.create_adapter(f"a{number}", loras("a")["a"], OPTIM)
                number += 1
            except MemoryLimitError as error:
                told = str(error)
        assert told.startswith(f"adapter 'a{number}': its weights, gradients and optimizer need ")
        assert engine.adapters == ["a", "b", *(f"a{one}" for one in range(number))]
        for name in engine.adapters[1:]:
            engine.remove_adapter(name)
        engine.create_adapter("b", loras("b")["b"], OPTIM)
        engine.forward_backward(BATCH)


def test_a_config_that_the_base_does_not_take_leaves_no_trace() -> None:
    with limited(0.5) as engine:
        wrong = loras("a")["a"]
        wrong.target_modules = {"nowhere"}
        for _ in range(2):
            with pytest.raises(ValueError, match="nowhere"):
                engine.create_adapter("c", wrong, OPTIM)
        assert not memory_of(engine).adapters.knows("c")
        engine.create_adapter("c", loras("c")["c"], OPTIM)


@pytest.mark.parametrize("owner", ["a", None], ids=["adapters", "base"])
def test_evaluations_and_next_tokens_are_cut_too(owner: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, small = with_adapters(Engine(model(), seed=1)), limited(0.4)
    if owner is None:
        for name in "ab":
            small.remove_adapter(name)
    entered: list[int] = []
    start = small._pipeline.start
    monkeypatch.setattr(small._pipeline, "start", lambda *a, **k: entered.append(k["rows"]) or start(*a, **k))
    batch = {owner: of([60, 50, 40, 70]), **({"__base__": of([30, 60, 20])} if owner else {})}
    expected, found = plain.evaluate(batch), small.evaluate(batch)
    assert found.keys() == expected.keys()
    for name, result in expected.items():
        assert found[name].tokens == result.tokens
        assert found[name].loss_sum == pytest.approx(result.loss_sum, rel=1e-5)
    assert len(entered) > 1
    prompts = {owner: [[5] * rows for rows in (60, 50, 40, 70, 9)]}
    entered.clear()
    assert small.next_tokens(prompts) == plain.next_tokens(prompts)
    assert len(entered) > 1
    with pytest.raises(MemoryLimitError, match="a sample of 900 tokens"):
        small.evaluate({owner: of([900])})
    with pytest.raises(MemoryLimitError, match="a sample of 900 tokens"):
        small.next_tokens({owner: [[5] * 900]})


def test_what_is_measured_is_learned() -> None:
    with limited(1.01) as engine:
        for _ in range(3):
            engine.forward_backward(BATCH)
        (mixture,) = memory_of(engine).estimate.state()["learned"].values()
        assert max(mixture["places"][0]["measured"]) > 0
        assert not memory_of(engine).estimate.stale


def test_samples_that_are_measured_serve_too() -> None:
    """As on a GPU, whose kernels take no fake tensors."""
    with Engine(model(), seed=1) as engine:
        memory = engine.limit_memory("1TiB", measured=True)
        with_adapters(engine)
        memory.limit = RESERVED + int(1.5 * memory.estimate.activations(LENGTHS, ["a", "b"])[0])
        engine.forward_backward(BATCH)
        assert engine.adapters == ["a", "b"]
        with pytest.raises(MemoryLimitError):
            engine.start({"a": of([900])})


def test_over_random_days_nothing_is_beyond_the_limit() -> None:
    dice = random.Random(7)
    with limited(0.5) as engine:
        admission, under_way, refused, cut = engine._admission, [], 0, 0
        assert admission is not None
        for day in range(40):
            batch = {
                name: of([dice.choice([5, 20, 60, 250]) for _ in range(dice.randint(1, 4))])
                for name in engine.adapters
            }
            try:
                under_way.append(engine.start(batch))
                cut += len(under_way[-1].parts) > 1
            except MemoryLimitError:
                refused += 1
            (free,) = admission._free(engine.adapters)
            assert admission._foreseen([])[0] <= free, day
            while under_way and (len(under_way) > 2 or dice.random() < 0.5):
                engine.finish(under_way.pop(0))
        for future in under_way:
            engine.finish(future)
        assert admission._foreseen([]) == [0.0]
        assert refused
        assert cut


def test_after_an_error_the_batch_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with limited(1.01) as engine:
        admission = engine._admission
        assert admission is not None
        hook = engine.model.get_submodule("model.layers.0").register_forward_pre_hook(_run_out)
        with pytest.raises(torch.OutOfMemoryError):
            engine.forward_backward(BATCH)
        hook.remove()
        assert admission._foreseen([]) == [0.0]
        engine.forward_backward(BATCH)


def _run_out(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 2}, "memory_limit: needs a process for each stage"),
        ({"memory_limit": "much"}, "must be a size such as 8GiB"),
        ({"memory_limit": 0}, "must be a size such as 8GiB"),
    ],
)
def test_limits_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(llama(num_hidden_layers=2), **{"memory_limit": "1GiB", **options})
    assert not [thread for thread in threading.enumerate() if "stage" in thread.name]


def test_a_limit_comes_before_the_adapters() -> None:
    with (
        with_adapters(Engine(model())) as engine,
        pytest.raises(ValueError, match="memory_limit: set it before there are adapters"),
    ):
        engine.limit_memory("1GiB")


PROCESS = """
import re, sys
from pathlib import Path
import torch
from mlora.engine.engine import Engine
from mlora.errors import MemoryLimitError
from mlora.memory.meter import used_memory
from tests.mlora.dry_models import OPTIM, llama, loras, of

torch.set_num_threads(1)
model = llama(num_hidden_layers=2, vocab_size=50)
with Engine(model, memory_limit=used_memory(torch.device("cpu")) + (150 << 20)) as engine:
    for name, lora in loras("ab").items():
        engine.create_adapter(name, lora, OPTIM)
    pieces = 0
    for rows in (30, 60):
        future = engine.start({"a": of([rows] * 40), "b": of([2 * rows] * 20)}, ends=["a", "b"])
        pieces = max(pieces, len(future.parts))
        engine.finish(future)
        for name in "ab":
            engine.optim_step(name)
    try:
        engine.forward_backward({"a": of([30000])})
    except MemoryLimitError:
        pass
    else:
        sys.exit("a sample that needs hundreds of megabytes was taken")
    # getrusage would count what the parent had as it forked
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
    print(pieces, engine.memory.limit - (int(peak) << 10))
"""


@pytest.mark.nightly
def test_a_process_stays_within_its_limit() -> None:
    """Batches of 2,400 and more rows, of which the limit holds a part."""
    command = [sys.executable, "-c", PROCESS]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    pieces, spare = map(int, done.stdout.split())
    assert pieces > 1
    assert spare > 0
