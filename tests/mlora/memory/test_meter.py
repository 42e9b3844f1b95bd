"""What a process has in use; live storages, and the memory of a micro-batch measured with them."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mlora.engine.engine import Engine
from mlora.memory import meter
from mlora.memory.meter import LiveMemory, left_by_runs, used_at_first
from tiny_models import make, samples
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.mlora.four_adapters import batch, create, llama

KIB = 256  # fp32 numbers


def test_storages_count_while_they_live() -> None:
    memory = LiveMemory()
    with memory:
        x = torch.ones(4 * KIB)
        view = x.view(2, -1)[0]  # shares x's storage
        assert memory.live == 4096
        x.add_(1.0)
        y = torch.zeros(KIB) + x[:KIB]  # two at once
        assert (memory.live, memory.peaks) == (4096 + 1024, [4096 + 2048])
        del x
        assert memory.live == 4096 + 1024
    del view
    assert memory.live == 1024
    del y
    assert (memory.live, memory.peaks) == (0, [4096 + 2048])


def test_what_was_there_before_does_not_count() -> None:
    weight, memory = torch.ones(KIB, KIB), LiveMemory()
    with memory:
        views = [weight.t(), weight[3], weight.add_(1.0), weight.detach()]
        assert memory.live == 0
        made = torch.tensor([1.0, 2.0])
        assert memory.live == 8
    del views, made


def test_pieces_of_work_add_up_and_others_do_not_count() -> None:
    memory, other = LiveMemory(), LiveMemory()
    with memory:
        x = torch.ones(KIB, requires_grad=True)
        y = (x * 2).exp()
    left = memory.live
    with other:
        more = torch.ones(16 * KIB)
    memory.mark()
    with memory:
        y.sum().backward()
    assert left == 2 * 1024  # exp saves its result; the product is gone
    assert memory.peaks[0] == 3 * 1024
    assert len(memory.peaks) == 2
    assert other.peaks == [more.nbytes]
    memory.restart([more])
    assert memory.live == more.nbytes
    del x, y, more
    assert memory.live == 0


def test_memory_freed_by_another_thread_is_free() -> None:
    memory = LiveMemory()
    with memory:
        kept = [torch.ones(KIB)]
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert memory.live == 0


def test_fake_tensors_count_as_real_ones() -> None:
    def work(memory: LiveMemory) -> list[int]:
        with memory:
            x = torch.ones(KIB, 8, requires_grad=True)
            y = torch.nn.functional.layer_norm(x @ torch.ones(8, 5), [5]).sum()
            memory.mark()
            y.backward()
        return memory.peaks

    real = work(LiveMemory())
    with FakeTensorMode():
        assert work(LiveMemory()) == real
    assert min(real) > 0


@pytest.fixture(params=[1, 2], ids=["one stage", "two stages"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(llama(), stages=request.param)
    create(engine, "a")
    create(engine, "b")
    yield engine
    engine.close()


def phases(engine: Engine, lengths: list[int]) -> tuple[tuple[int, ...], ...]:
    future = engine.start({"a": of_lengths(lengths)}, measure=True)
    engine.finish(future)
    return future.measured[0].phases


def of_lengths(lengths: list[int]) -> list:
    made = samples(1, 2, seed=0)[0]
    return [type(made)((5,) * n, (5,) * n) for n in lengths]


def test_a_micro_batch_needs_the_same_whenever_it_is_measured(engine: Engine) -> None:
    """Updates and the gradients that it makes, or finds, are not its own; constants are made once."""
    first = phases(engine, [20, 9])
    again = phases(engine, [20, 9])
    engine.optim_step("a")
    moments = phases(engine, [20, 9])
    assert again == moments
    for one, other in zip(first, again, strict=True):
        assert one == pytest.approx(other, abs=256)
    assert all(max(peaks) > 29 * 32 * 4 for peaks in first)
    assert phases(engine, [40, 18])[0][0] > 1.8 * first[0][0]


def test_measuring_changes_no_result() -> None:
    measured, plain = Engine(llama()), Engine(llama())
    for engine in (measured, plain):
        create(engine, "a")
        create(engine, "d")
        for place in range(3):
            both = batch("a", 0, place) | batch("d", 0, place)
            engine.finish(engine.start(both, measure=engine is measured))
        for name in "ad":
            engine.optim_step(name)
    for name in "ad":
        ours, theirs = measured.state_dict(name), plain.state_dict(name)
        for key, weight in ours["weights"].items():
            assert torch.equal(weight, theirs["weights"][key]), key


def test_micro_batches_in_flight_are_told_apart(engine: Engine) -> None:
    alone = [phases(engine, lengths) for lengths in ([20, 9], [7])]
    futures = [engine.start({"a": of_lengths(lengths)}, measure=True) for lengths in ([20, 9], [7])]
    futures.append(engine.start({"b": of_lengths([31])}))
    for future in futures:
        engine.finish(future)
    for future, expected in zip(futures, alone, strict=False):
        for one, other in zip(future.measured[0].phases, expected, strict=True):
            assert one == pytest.approx(other, abs=4096)  # another one's table of segments, freed later
    assert max(futures[0].measured[0].phases[0]) > 2 * max(futures[1].measured[0].phases[0])
    assert futures[2].measured == []


def test_each_piece_of_a_batch_is_measured() -> None:
    engine = Engine(llama(), micro_batches=2)
    create(engine, "a")
    create(engine, "b")
    future = engine.start({"a": of_lengths([10, 12]), "b": of_lengths([20])}, measure=True)
    engine.finish(future)
    assert [m.lengths for m in future.measured] == [(10, 12), (20,)]
    assert all(len(m.phases) == 1 for m in future.measured)


def test_checkpointing_needs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for checkpointing in (False, True):
        engine = Engine(make("llama"), gradient_checkpointing=checkpointing)
        create(engine, "a")
        found.append(phases(engine, [60, 30])[0])
    assert found[1][0] < 0.6 * found[0][0]  # forward
    assert found[1][2] > found[1][0]  # backward recomputes


def test_a_parameter_that_backward_never_reached_gets_no_gradient() -> None:
    """Gradients are held as zeros; where none was added, the optimizer must not decay the weight."""
    engine = Engine(llama())
    create(engine, "a")
    optimizer = engine._part._optimizers["a"]
    parameters: list[Tensor] = list(optimizer.parameters)
    assert all(p.grad is not None for p in parameters)
    assert parameters[0].grad is not None
    parameters[0].grad.add_(1.0)
    assert list(optimizer.gradients()) == [0]


@pytest.fixture
def anew() -> Iterator[None]:
    """As in a process that has made no run yet."""
    used_at_first.cache_clear()
    yield
    used_at_first.cache_clear()


@pytest.mark.usefixtures("anew")
def test_what_runs_leave_is_what_came_since_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for used in (500, 450, 700, 520):
        monkeypatch.setattr(meter, "used_memory", lambda _, used=used: used)
        found.append(left_by_runs(torch.device("cpu")))
    assert found == [0, 0, 200, 20]


def test_free_memory_is_no_more_than_control_groups_leave(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    own = tmp_path / "cgroup"
    own.write_text("0::/outer/inner\n")
    for folder, limit in ((inner, "1000"), (inner.parent, "max")):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 500\ninactive_file 100\nactive_file 50\n")
    assert meter._left_by_groups(tmp_path, own) == [1000 - 700 + 150]
    (inner.parent / "memory.max").write_text("750\n")
    assert meter._left_by_groups(tmp_path, own) == [450, 200]
    own.write_text("3:memory:/elsewhere\n")
    assert meter._left_by_groups(tmp_path, own) == []
