"""An adapter that is put away and taken up again continues bit for bit."""

import io
from pathlib import Path

import pytest
import torch
from mlora.engine.engine import Engine, StepResult
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from tiny_models import make, samples

LORA = LoraConfig(r=5, lora_dropout=0.2, target_modules="all-linear")


def optim(name: str) -> OptimConfig:
    return OptimConfig(5e-3, name, weight_decay=0.1, warmup_steps=2, total_steps=10, max_grad_norm=0.3)


def steps(engine: Engine, begin: int, end: int) -> list[tuple[float, StepResult]]:
    """Steps of two micro-batches each."""
    seen = []
    for step in range(begin, end):
        losses = [
            engine.forward_backward({"a": samples(3, 14, seed=2 * step + half)})["a"].loss_sum
            for half in (0, 1)
        ]
        seen.append((sum(losses), engine.optim_step("a")))
    return seen


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_resume_is_bit_equal(name: str) -> None:
    whole = Engine(make("llama"), seed=1)
    whole.create_adapter("a", LORA, optim(name))
    expected = steps(whole, 0, 8)
    first = Engine(make("llama"), seed=1)
    first.create_adapter("a", LORA, optim(name))
    assert steps(first, 0, 4) == expected[:4]
    buffer = io.BytesIO()
    torch.save(first.state_dict("a"), buffer)
    steps(first, 4, 6)
    buffer.seek(0)
    second = Engine(make("llama"), seed=77)
    second.create_adapter("other", LoraConfig(r=3, target_modules=["q_proj"]), optim(name))
    second.create_adapter("a", LORA, optim(name), seed=99)
    second.load_state_dict("a", torch.load(buffer, weights_only=True))
    assert steps(second, 4, 8) == expected[4:]
    ours, theirs = second.state_dict("a"), whole.state_dict("a")
    assert all(torch.equal(ours["weights"][key], w) for key, w in theirs["weights"].items())
    assert ours["steps"] == theirs["steps"] == 8


def test_state_is_a_copy() -> None:
    engine = Engine(make("llama"))
    engine.create_adapter("a", LORA, optim("adamw_torch_fused"))
    steps(engine, 0, 1)
    state = engine.state_dict("a")
    weights = {key: w.clone() for key, w in state["weights"].items()}
    moments = {key: [m.clone() for m in pair] for key, pair in state["moments"].items()}
    steps(engine, 1, 3)
    assert all(torch.equal(state["weights"][key], w) for key, w in weights.items())
    for key, kept in moments.items():
        assert all(torch.equal(a, b) for a, b in zip(state["moments"][key], kept, strict=True))


def test_resume_in_the_middle_of_an_accumulation() -> None:
    engines = [Engine(make("llama"), seed=1) for _ in range(2)]
    for engine in engines:
        engine.create_adapter("a", LORA, optim("adamw_torch_fused"))
    first, second = (samples(2, 14, seed=half) for half in (0, 1))
    engines[0].forward_backward({"a": first})
    engines[1].load_state_dict("a", engines[0].state_dict("a"))
    results = [(engine.forward_backward({"a": second}), engine.optim_step("a")) for engine in engines]
    assert results[0] == results[1]
    weights = [engine.state_dict("a")["weights"] for engine in engines]
    assert all(torch.equal(weights[1][key], w) for key, w in weights[0].items())


def test_state_of_another_adapter_is_refused() -> None:
    engine = Engine(make("llama"))
    engine.create_adapter("a", LORA, optim("sgd"))
    engine.create_adapter("b", LoraConfig(r=6, target_modules="all-linear"), optim("sgd"))
    state = engine.state_dict("a")
    with pytest.raises(ValueError, match="adapter 'b': the state is that of an adapter with other"):
        engine.load_state_dict("b", state)


def test_discarded_gradients_leave_no_trace() -> None:
    seen = []
    for discard in (False, True):
        engine = Engine(make("llama"), seed=4)
        engine.create_adapter("a", LORA, optim("adamw_torch"))
        if discard:
            engine.forward_backward({"a": samples(2, 30, seed=50)})
            engine.discard_gradients("a")
        seen.append(steps(engine, 0, 3))
    assert seen[0] == seen[1]


def test_save_and_load(tmp_path: Path) -> None:
    engine = Engine(make("llama"))
    engine.create_adapter("a", LORA, optim("adamw_torch"))
    steps(engine, 0, 2)
    engine.save("a", tmp_path / "a")
    engine.load("b", tmp_path / "a", optim("sgd"))
    assert engine.adapters == ["a", "b"]
    batch = samples(3, 12, seed=3)
    results = engine.evaluate({"a": batch, "b": batch})
    assert results["a"] == results["b"]
