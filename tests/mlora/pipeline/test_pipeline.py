"""The pipeline runs anyone's modules, over any number of stages."""

import copy
import threading
from contextlib import closing

import pytest
import torch
from mlora.pipeline import Hooks, ModuleCall, Neighbours, Pipeline, PipelineError, RoundPosition, StageProcess
from mlora.pipeline.actions import gpipe
from mlora.pipeline.message import Message
from torch import Tensor, nn


def mean_square(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    loss = (output - target).square().mean()
    return loss, loss.item()


def blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(count)
    return [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(count)]


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of different lengths."""
    return [(torch.randn(2 + i, 5), torch.randn(2 + i, 5)) for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["lorapp", "1f1b", "gpipe"])
@pytest.mark.parametrize("limits", [{}, {"credit_bytes": 50}, {"in_flight": 1}])
def test_stages_train_as_one_module(count: int, schedule: str, limits: dict[str, int]) -> None:
    stages = blocks(count)
    twins = copy.deepcopy(stages)
    pipeline = Pipeline(stages, schedule, mean_square, **limits)
    for micro_batches in (5, 1, 0, 3):
        data = batches(micro_batches)
        for x, target in data:
            pipeline.submit({"input": x}, target)
        reports = pipeline.step()
        expected = []
        for x, target in data:
            loss, report = mean_square(nn.Sequential(*twins)(x), target)
            loss.backward()
            expected.append(report)
        assert reports == pytest.approx(expected, rel=1e-6)
    pipeline.close()
    for stage, twin in zip(stages, twins, strict=True):
        for p, q in zip(stage.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


class Rotated(nn.Module):
    """Gives complex activations to the next stage."""

    def __init__(self) -> None:
        super().__init__()
        self.angle = nn.Parameter(torch.randn(5))

    def forward(self, input: Tensor) -> Tensor:
        return torch.polar(input, self.angle.expand_as(input)).conj()


class RealPart(nn.Module):
    def forward(self, rotated: Tensor) -> Tensor:
        return rotated.real


def test_complex_activations_get_their_gradients() -> None:
    stages = [Rotated(), RealPart()]
    twins = copy.deepcopy(stages)
    (x, target), *_ = batches(1)
    with closing(Pipeline(stages, "lorapp", mean_square)) as pipeline:
        pipeline.submit({"input": x}, target)
        pipeline.step()
    mean_square(nn.Sequential(*twins)(x), target)[0].backward()
    torch.testing.assert_close(stages[0].angle.grad, twins[0].angle.grad)


def test_only_the_first_stages_process_feeds_a_pipeline() -> None:
    stage = StageProcess(nn.Linear(1, 1), 1, 2, Neighbours(), "lorapp", mean_square)
    with pytest.raises(
        RuntimeError, match="the first stage's process feeds the pipeline; this one calls serve"
    ):
        stage.start(ModuleCall({"input": torch.zeros(1, 1)}, torch.zeros(1, 1)))


def test_lists_of_actions_are_a_schedule() -> None:
    stages = blocks(3)
    pipeline = Pipeline(stages, gpipe(3, 2), mean_square)
    for x, target in batches(2):
        pipeline.submit({"input": x}, target)
    assert len(pipeline.step()) == 2
    pipeline.submit({"input": torch.zeros(1, 5)}, torch.zeros(1, 5))
    with pytest.raises(ValueError, match="expected a round of 2 micro-batches, got 1"):
        pipeline.step()
    pipeline.close()


def test_forward_only_leaves_no_gradient() -> None:
    for stages in (blocks(1), blocks(2)):
        pipeline = Pipeline(stages, "gpipe", mean_square)
        pipeline.submit({"input": torch.randn(4, 5)}, torch.randn(4, 5), train=False)
        pipeline.submit({"input": torch.randn(4, 5)}, torch.randn(4, 5))
        pipeline.submit({"input": torch.randn(4, 5)}, torch.randn(4, 5), train=False)
        kept = copy.deepcopy(stages)
        assert len(pipeline.step()) == 3
        pipeline.submit({"input": torch.randn(4, 5)}, torch.randn(4, 5), train=False)
        grads = [p.grad.clone() for stage in stages for p in stage.parameters()]
        pipeline.step()
        after = [p.grad for stage in stages for p in stage.parameters()]
        assert all(torch.equal(p, q) for p, q in zip(grads, after, strict=True))
        assert all(p.grad is None for stage in kept for p in stage.parameters())
        pipeline.close()


class Pair(nn.Module):
    """Hands on two tensors, one of them whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor, ids: Tensor | None = None, *, shift: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(x.shape[0]) if ids is None else ids
        return self.linear(x), ids + shift


def test_stages_hand_on_several_tensors_and_share_arguments() -> None:
    stages = [Pair(), Pair(), Pair()]
    pipeline = Pipeline(stages, "lorapp", lambda y, t: (y[0].sum() + t, y[1].tolist()))
    pipeline.submit({"x": torch.ones(3, 5)}, 1.0, common={"shift": 10})
    assert pipeline.step() == [[30, 31, 32]]
    assert all(stage.linear.weight.grad is not None for stage in stages)
    pipeline.close()


class Counting(Hooks):
    """Notes what it was asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log: list[str] = []

    def after_backward(self, common):
        self.log.append("backward")
        return {"name": self.name}

    def control(self, verb, arguments):
        if verb == "fail":
            raise ValueError(f"{self.name} does not want to")
        self.log.append(verb)
        return [self.name, arguments["x"]]


def test_controls_reach_every_stage_between_micro_batches() -> None:
    hooks = [Counting(name) for name in "abc"]
    pipeline = Pipeline(blocks(3), "lorapp", mean_square, hooks=hooks)
    numbers = [pipeline.start(ModuleCall({"input": x}, t)) for x, t in batches(3)]
    assert pipeline.control("look", {"x": torch.ones(2)})[1][0] == "b"
    notes = [pipeline.finish(number).notes for number in numbers]
    assert notes == [[{"name": name} for name in "abc"]] * 3
    assert sorted(hooks[1].log) == ["backward"] * 3 + ["look"]
    with pytest.raises(ValueError, match="a does not want to"):
        pipeline.control("fail")
    assert pipeline.control("look", {"x": 1}) == [["a", 1], ["b", 1], ["c", 1]]
    assert pipeline.control("look", {"x": 1}, first_done=True)[0] is None
    pipeline.close()


class Unlucky(nn.Module):
    """Fails at its third micro-batch, forward or backward."""

    def __init__(self, *, backward: bool) -> None:
        super().__init__()
        self.calls = 0
        self.fails_backward = backward

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3 and not self.fails_backward:
            raise ArithmeticError("bad luck")
        y = x * 1
        if self.calls == 3:
            y.register_hook(self._fail)
        return y

    def _fail(self, gradient: Tensor) -> None:
        raise ArithmeticError("bad luck")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_stage_that_raises_ends_all(place: int, backward: bool) -> None:
    before = set(threading.enumerate())
    stages = blocks(4)
    stages[place].append(Unlucky(backward=backward))
    pipeline = Pipeline(stages, "lorapp", mean_square)
    for x, target in batches(6):
        pipeline.submit({"input": x}, target)
    with pytest.raises((PipelineError, ArithmeticError), match="bad luck") as caught:
        pipeline.step()
    if place:
        assert str(caught.value) == f"stage {place}: ArithmeticError: bad luck"
        assert isinstance(caught.value.__cause__, ArithmeticError)
    with pytest.raises(PipelineError, match="has failed"):
        pipeline.start(ModuleCall({"input": torch.zeros(1, 5)}, torch.zeros(1, 5)))
    pipeline.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_close_ends_a_round_that_is_not_whole(schedule: str) -> None:
    before = set(threading.enumerate())
    pipeline = Pipeline(blocks(3), schedule, mean_square)
    pipeline.start(ModuleCall({"input": torch.zeros(1, 5)}, torch.zeros(1, 5)), position=RoundPosition(0, 2))
    assert set(threading.enumerate()) - before
    pipeline.close()
    assert set(threading.enumerate()) <= before


def test_spans_tell_what_each_role_did() -> None:
    pipeline = Pipeline(blocks(2), "1f1b", mean_square, trace=100)
    for x, target in batches(2):
        pipeline.submit({"input": x}, target)
    pipeline.step()
    pipeline.close()
    first, last = ([(span.role, span.sort, span.number) for span in spans] for spans in pipeline.spans())
    for number in (1, 2):
        assert ("compute", "forward", number) in first
        assert ("send", "forward", number) in first
        assert ("receive", "backward", number) in first
        assert ("compute", "backward", number) in first
        assert ("receive", "forward", number) in last
        assert ("compute", "forward", number) in last
        assert ("compute", "backward", number) in last
        assert ("send", "backward", number) in last
    assert all(span.begin <= span.end for spans in pipeline.spans() for span in spans)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="expected at least one, got none"):
        Pipeline([], "lorapp", mean_square)
    with pytest.raises(ValueError, match="expected one of lorapp, 1f1b, gpipe, got 'pipedream'"):
        Pipeline([nn.Linear(1, 1)], "pipedream", mean_square)
    with pytest.raises(ValueError, match=r"hooks: expected one per stage \(1\), got 2"):
        Pipeline([nn.Linear(1, 1)], "lorapp", mean_square, hooks=[Hooks(), Hooks()])
    with pytest.raises(ValueError, match="credit_bytes: expected at least 1, got 0"):
        Pipeline(blocks(2), "lorapp", mean_square, credit_bytes=0)
    with pytest.raises(ValueError, match="in_flight: expected at least 1, got 0"):
        Pipeline(blocks(2), "lorapp", mean_square, in_flight=0)
    pipeline = Pipeline(blocks(2), "1f1b", mean_square)
    with pytest.raises(ValueError, match="this stage knows no 'dance'"):
        pipeline.control("dance")
    pipeline.close()
    pipeline.close()
    with pytest.raises(RuntimeError, match="closed"):
        pipeline.submit({"input": torch.zeros(1, 1)}, torch.zeros(1, 1))
    pipeline = Pipeline(blocks(2), "lorapp", mean_square)
    with pytest.raises(TypeError, match="inputs: expected a dict of the first stage"):
        pipeline.submit(torch.ones(1, 5), torch.ones(1, 5))  # type: ignore[arg-type]
    pipeline.close()
    alone = Pipeline(blocks(1), "lorapp", lambda y, _: y.sum())  # type: ignore[arg-type, return-value]
    alone.submit({"input": torch.ones(1, 5)}, None)
    with pytest.raises(TypeError, match=r"loss_fn: expected \(loss, report\), got a tensor"):
        alone.step()


def test_every_message_waits_for_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each carries an event; what reads its tensors has waited for that."""
    recorded: list[Message] = []
    waited: list[Message] = []
    monkeypatch.setattr(Message, "record", lambda message: recorded.append(message))
    monkeypatch.setattr(Message, "wait", lambda message: waited.append(message))

    def without_event() -> list[str]:
        return sorted(message.sort for message in waited if not any(message is r for r in recorded))

    # these do not leave stage 0: two come from the driver, and one goes to it
    inside = ["backward", "forward", "forward"]
    pipeline = Pipeline(blocks(3), "lorapp", mean_square, hooks=[Counting(name) for name in "abc"])
    pipeline.submit({"input": torch.ones(2, 5)}, torch.ones(2, 5))
    pipeline.submit({"input": torch.ones(2, 5)}, torch.ones(2, 5), train=False)
    pipeline.step()
    assert (len(waited), without_event()) == (3 + 2 + 1 + 3 + 2 + 1, inside)
    pipeline.control("look", {"x": torch.ones(2)})
    assert (len(waited), without_event()) == (12 + 2 + 2 + 1, inside)
    pipeline.close()
