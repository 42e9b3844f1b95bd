"""An adapter's optimizer is PyTorch's and Transformers': values, clipping, schedules, resume."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from mlora.optim.optim_config import OptimConfig
from mlora.optim.registry import TORCH, optimizer_kind
from mlora.optim.schedules import schedule_of
from mlora.optim.step_rule import StepRule, Update
from torch import nn
from transformers import get_scheduler

from tests.mlora.seam_runs import data_of, train_and_resume

SCHEDULES = {
    "linear": {},
    "cosine": {"num_cycles": 0.7},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {},
    "cosine_with_min_lr": {"min_lr_rate": 0.2},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.2},
    "warmup_stable_decay": {"num_decay_steps": 5},
}


def parameters() -> list[nn.Parameter]:
    """As a bank has them: A contiguous, B a transposed view."""
    return [nn.Parameter(torch.randn(7, 33)), nn.Parameter(torch.randn(7, 19).t())]


def twin(mine: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in mine]


class Optimizer:
    """The decision and the update, as the engine puts them together."""

    def __init__(self, parameters: list[nn.Parameter], config: OptimConfig) -> None:
        self.rule = StepRule(config)
        self.stage = optimizer_kind(config.optim)({str(i): p for i, p in enumerate(parameters)}, config)

    def step(self, divisor: float) -> tuple[float, float, Update]:
        done = self.rule.decide(self.stage.squares().item(), divisor)
        self.stage.apply(done[-1])
        return done


def set_gradients(mine: list[nn.Parameter], theirs: list[nn.Parameter], tokens: int) -> None:
    for p, q in zip(mine, theirs, strict=True):
        q.grad = torch.randn_like(q)
        p.grad = (q.grad * tokens).as_strided(p.shape, p.stride()).copy_(q.grad * tokens)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
@pytest.mark.parametrize("bound", [0.0, 0.4, 1e6])
@pytest.mark.parametrize("held", [False, True], ids=["autograd", "held"])
def test_steps_are_pytorchs(optim: str, bound: float, held: bool) -> None:
    mine = parameters()
    theirs = twin(mine)
    config = OptimConfig(
        3e-2, optim, 0.1, max_grad_norm=bound, lr_scheduler_type="cosine", warmup_steps=3, total_steps=12
    )
    ours = Optimizer(mine, config)
    written: list[set[str]] = [{"a"}, {"a"}]
    if held:
        ours.stage.hold_gradients("a", written)
    assert ours.stage.compiled == held
    if optim == "sgd":
        peer: torch.optim.Optimizer = torch.optim.SGD(theirs, lr=3e-2, weight_decay=0.1)
    else:
        peer = torch.optim.AdamW(theirs, lr=3e-2, weight_decay=0.1)
    schedule = get_scheduler("cosine", peer, 3, 12)
    for step in range(12):
        set_gradients(mine, theirs, tokens=step + 5)
        if held:
            for names in written:
                names.add("a")
        norm = torch.nn.utils.clip_grad_norm_(theirs, bound or float("inf"))
        rate = peer.param_groups[0]["lr"]
        learning_rate, grad_norm, update = ours.step(divisor=step + 5)
        peer.step()
        schedule.step()
        assert update.taken
        assert learning_rate == pytest.approx(rate, rel=1e-12, abs=1e-15)
        assert grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert all(not p.grad.any() if held else p.grad is None for p in mine)
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_transformers(name: str) -> None:
    config = OptimConfig(
        1e-2, lr_scheduler_type=name, lr_scheduler_kwargs=SCHEDULES[name], warmup_steps=4, total_steps=20
    )
    factor = schedule_of(config)
    peer = torch.optim.SGD([torch.zeros(1)], lr=1e-2)
    schedule = get_scheduler(name, peer, 4, 20, dict(SCHEDULES[name]))
    for step in range(20):
        assert 1e-2 * factor(step) == pytest.approx(peer.param_groups[0]["lr"], rel=1e-12, abs=1e-15)
        peer.step()
        schedule.step()


@pytest.mark.parametrize("name", ["reduce_lr_on_plateau", "greedy", "liner"])
def test_other_schedules_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"lr_scheduler_type '{name}'"):
        StepRule(OptimConfig(lr_scheduler_type=name, total_steps=5))


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_a_gradient_that_is_not_finite_changes_nothing(optim: str) -> None:
    mine = parameters()
    ours = Optimizer(mine, OptimConfig(1e-2, optim, lr_scheduler_type="constant"))
    set_gradients(mine, twin(mine), 1)
    ours.step(1)
    before, state = [p.detach().clone() for p in mine], ours.stage.state_dict()
    set_gradients(mine, twin(mine), 1)
    mine[1].grad[3, 2] = float("inf")
    assert not ours.step(1)[-1].taken
    assert all(torch.equal(p, q) for p, q in zip(mine, before, strict=True))
    after = ours.stage.state_dict()
    assert ours.stage.steps == ours.rule.steps == 1
    assert after.keys() == state.keys()
    for name in after:
        assert all(torch.equal(a, b) for a, b in zip(after[name], state[name], strict=True))


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_resume_is_bit_equal(optim: str) -> None:
    config = OptimConfig(1e-2, optim, weight_decay=0.1, warmup_steps=2, total_steps=8)
    mine = parameters()
    ours = Optimizer(mine, config)
    gradients = [[torch.randn_like(p) for p in mine] for _ in range(6)]
    kept = None
    for step, values in enumerate(gradients):
        if step == 3:
            kept = [p.detach().clone() for p in mine], ours.stage.state_dict()
        for p, value in zip(mine, values, strict=True):
            p.grad = value.clone()
        ours.step(2.0)
    assert kept is not None
    again = [nn.Parameter(p.clone()) for p in kept[0]]
    resumed = Optimizer(again, config)
    resumed.rule.steps = 3
    resumed.stage.load_state_dict(3, kept[1])
    for values in gradients[3:]:
        for p, value in zip(again, values, strict=True):
            p.grad = value.clone()
        resumed.step(2.0)
    assert all(torch.equal(p, q) for p, q in zip(mine, again, strict=True))


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
@pytest.mark.parametrize(
    "odd",
    [
        torch.randn(3, 4, 5).permute(2, 0, 1),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(6, 9)[:, :4],
        torch.randn(5, 4, dtype=torch.float64),
        torch.randn(5, 4).bfloat16(),
        torch.randn(()),
        torch.randn(0, 4),
    ],
    ids=["permuted", "channels last", "with gaps", "fp64", "bf16", "scalar", "empty"],
)
def test_parameters_of_any_kind(optim: str, odd: torch.Tensor) -> None:
    """An adapter kind of one's own may have them; a gradient that is there has other strides."""
    mine = [nn.Parameter(odd.clone()), nn.Parameter(torch.randn(7, 3))]
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    ours = Optimizer(mine, OptimConfig(1e-2, optim, 0.1, lr_scheduler_type="constant", max_grad_norm=0.5))
    mine[1].grad = torch.zeros(3, 7).t()
    written: list[set[str]] = [set(), set()]
    ours.stage.hold_gradients("a", written)
    assert mine[1].grad.stride() == mine[1].stride()
    kind = torch.optim.SGD if optim == "sgd" else torch.optim.AdamW
    peer = kind(theirs, lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        for p, q, names in zip(mine, theirs, written, strict=True):
            q.grad = torch.randn_like(q)
            p.grad.copy_(q.grad)
            names.add("a")
        torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        peer.step()
        assert ours.step(1)[-1].taken
    for p, q in zip(mine, theirs, strict=True):
        tolerance = 2e-2 if p.dtype == torch.bfloat16 else 3e-6
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_held_gradients_are_zeros_after_a_step_and_every_version_counts(optim: str) -> None:
    """Backward notices a Parameter that was changed in place by its version."""
    mine = parameters()
    ours = Optimizer(mine, OptimConfig(1e-2, optim, lr_scheduler_type="constant"))
    written: list[set[str]] = [set(), set()]
    ours.stage.hold_gradients("a", written)
    for step in range(3):
        held, before = [p.grad for p in mine], [p._version for p in mine]
        assert ours.stage.squares() == 0
        for p, names in zip(mine, written, strict=True):
            p.grad.copy_(torch.full_like(p, step + 1.0))
            names.add("a")
        assert ours.stage.squares() == pytest.approx((step + 1) ** 2 * sum(p.numel() for p in mine))
        ours.step(1)
        assert all(p.grad is g and not g.any() for p, g in zip(mine, held, strict=True))
        assert all(p._version > version for p, version in zip(mine, before, strict=True))
        assert not any(written)
        assert not ours.stage.gradients()


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
@pytest.mark.parametrize("held", [False, True], ids=["autograd", "held"])
def test_the_largest_rate_ruins_its_own_adapter_and_raises_nothing(optim: str, held: bool) -> None:
    mine = parameters()
    config = OptimConfig(1e30, optim, 1e6, lr_scheduler_type="constant", adam_beta1=0.999999)
    ours = Optimizer(mine, config)
    for _ in range(3):
        set_gradients(mine, twin(mine), 1)
        if held:
            ours.stage.hold_gradients("a", [{"a"}, {"a"}])
        ours.step(1)
    assert all(not p.isfinite().all() or p.abs().max() > 1e20 for p in mine)


def test_an_optimizer_that_fails_leaves_no_gradient_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step would add to it."""
    mine = parameters()
    ours = Optimizer(mine, OptimConfig(1e-2, "sgd", lr_scheduler_type="constant"))
    written: list[set[str]] = [{"a"}, {"a"}]
    ours.stage.hold_gradients("a", written)
    set_gradients(mine, twin(mine), 1)

    def fails(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ours.stage, "step", fails)
    with pytest.raises(ZeroDivisionError):
        ours.step(1)
    assert not ours.stage.gradients()
    assert not any(p.grad.any() for p in mine)
    assert ours.stage.steps == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optim", "adam"),
        ("learning_rate", -1.0),
        ("learning_rate", 1e31),
        ("learning_rate", "1e-3"),
        ("weight_decay", 1e7),
        ("max_grad_norm", float("nan")),
        ("adam_beta2", 1.0),
    ],
)
def test_bad_values_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        OptimConfig(**{field: value})


def test_a_schedule_without_a_number_is_refused_before_it_begins() -> None:
    kwargs = {"power": float("nan")}
    with pytest.raises(ValueError, match="lr_scheduler_type 'polynomial': its factor at step 8 is nan"):
        schedule_of(OptimConfig(lr_scheduler_type="polynomial", lr_scheduler_kwargs=kwargs, total_steps=9))
    with pytest.raises(ValueError, match="lr_scheduler_type 'polynomial'"):
        schedule_of(
            OptimConfig(
                lr_scheduler_type="polynomial",
                lr_scheduler_kwargs={"power": "two"},
                warmup_steps=3,
                total_steps=9,
            )
        )


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial"])
def test_a_schedule_that_ends_needs_its_end(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}': needs total_steps, the step at which it ends"):
        schedule_of(OptimConfig(lr_scheduler_type=name))


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        (
            "linear",
            {"min_lr": 1e-5},
            "lr_scheduler_kwargs: the schedule 'linear' has no 'min_lr'; it has none",
        ),
        ("cosine", {"cycles": 2}, "the schedule 'cosine' has no 'cycles'; it has num_cycles"),
        ("warmup_stable_decay", None, "the schedule 'warmup_stable_decay' needs num_decay_steps"),
        (
            "cosine",
            {"num_cycles": "x"},
            "'cosine': could not convert .*; lr_scheduler_kwargs: {'num_cycles': 'x'}",
        ),
    ],
)
def test_arguments_that_a_schedule_does_not_have(name: str, kwargs: dict | None, expected: str) -> None:
    config = OptimConfig(lr_scheduler_type=name, lr_scheduler_kwargs=kwargs, total_steps=9)
    with pytest.raises(ValueError, match=expected) as error:
        schedule_of(config)
    assert "()" not in str(error.value)


SHAPES = [(3, 4), (5,), (2, 2)]


@pytest.mark.parametrize("name", TORCH)
def test_it_is_torchs_own(name: str) -> None:
    """Also where a Parameter has its first gradient late, and after its state was saved and loaded."""
    config = OptimConfig(0.05, f"torch.optim.{name}", weight_decay=0.1, adam_beta2=0.95, adam_epsilon=1e-6)
    kind = optimizer_kind(config.optim)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    torchs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    named = {f"w{i}": p for i, p in enumerate(ours)}
    wanted = {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    known = inspect.signature(getattr(torch.optim, name)).parameters
    library = getattr(torch.optim, name)(
        torchs, lr=0.05, **{key: value for key, value in wanted.items() if key in known}
    )
    optimizer = kind(named, config)
    for step in range(6):
        for i, (own, theirs) in enumerate(zip(ours, torchs, strict=True)):
            late = i == 2 and step < 2
            gradient = torch.randn_like(own)
            own.grad, theirs.grad = (None, None) if late else (4 * gradient, gradient)
        optimizer.apply(Update(0.05, 0.25, True))
        library.step()
        if step in (1, 3):
            state, optimizer = optimizer.state_dict(), kind(named, config)
            optimizer.load_state_dict(step + 1, state)
    assert all(map(torch.equal, ours, torchs))
    assert kind.state_bytes(SHAPES) == sum(t.nbytes for own in optimizer.state for t in own)
    with pytest.raises(ValueError, match="moments do not fit"):
        kind({"w0": torch.nn.Parameter(torch.zeros(9, 9))}, config).load_state_dict(1, state)


@pytest.mark.parametrize("stages", [1, 2])
def test_it_trains_and_resumes(tiny_base: Path, tmp_path: Path, stages: int) -> None:
    data = data_of(tiny_base, tmp_path, stages, optim="torch.optim.NAdam", learning_rate=1e-3)
    data["adapters"][1] |= {"optim": "torch.optim.Adagrad"}
    train_and_resume(data, tmp_path)
