"""An engine over several stages gives the losses and weights of one stage."""

from pathlib import Path
from typing import Any

import pytest
import torch
from four_adapters import NAMES, STEPS, TOLERANCE, batch, create, llama
from mlora.engine.batcher import BatchFuture
from mlora.engine.engine import Engine
from mlora.engine.stage_group import spans_of
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from tiny_models import samples
from transformers import LlamaForCausalLM

import mlora_ext
from tests.tolerances import STEADY_EPSILON, assert_same_up_to_rounding


def trained(engine: Engine, accumulation: int = 2) -> dict[str, Any]:
    """Train the adapters, all under way at once; `d` joins late and each ends after its own steps."""
    found: dict[str, Any] = {name: [] for name in NAMES}
    steps = dict.fromkeys(NAMES, 0)
    for name in NAMES[:3]:
        create(engine, name)
    for round_ in range(8):
        futures: dict[str, list[BatchFuture]] = {}
        for name in engine.adapters:
            for half in range(accumulation):
                ends = [name] if half == accumulation - 1 else []
                futures.setdefault(name, []).append(engine.start(batch(name, steps[name], half), ends=ends))
        if round_ == 1:
            create(engine, "d")  # while the others are under way
        for name, parts in futures.items():
            results = [engine.finish(future)[name] for future in parts]
            done = engine.optim_step(name)
            loss = sum(result.loss_sum for result in results) / sum(result.tokens for result in results)
            found[name] += [loss, done.grad_norm]
            steps[name] += 1
            if steps[name] == STEPS[name]:
                found[name] += [engine.evaluate(batch(name, 99, 0))[name].loss_sum]
                found[f"{name} state"] = engine.state_dict(name)
                engine.remove_adapter(name)
    assert not engine.adapters
    engine.close()
    return found


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in NAMES:
        assert len(found[name]) == 2 * STEPS[name] + 1
        assert found[name] == pytest.approx(expected[name], rel=TOLERANCE)
        state, other = found[f"{name} state"], expected[f"{name} state"]
        assert list(state["weights"]) == list(other["weights"])
        for part in ("weights", "gradients"):
            for key, tensor in other[part].items():
                assert_same_up_to_rounding(state[part][key], tensor, f"{name}: {part} {key}", TOLERANCE)
        assert {k: v for k, v in state.items() if isinstance(v, int)} == {
            k: v for k, v in other.items() if isinstance(v, int)
        }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return trained(Engine(llama()))


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2},
        {"stages": 3},
        {"stages": 4},
        {"stages": [3, 1]},
        {"stages": 2, "micro_batches": 3},
        {"stages": 3, "micro_batches": 2, "schedule": "1f1b"},
        {"stages": 2, "micro_batches": 2, "schedule": "gpipe"},
        {"stages": 3, "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_stages_train_as_one(options: dict[str, Any], alone: dict[str, Any]) -> None:
    if options.get("schedule", "lorapp") != "lorapp":
        found = trained_in_turns(Engine(llama(), **options))
    else:
        found = trained(Engine(llama(), **options))
    assert_alike(found, alone)


def trained_in_turns(engine: Engine) -> dict[str, Any]:
    """As `trained`, a batch after the other, as schedules with rounds run them."""
    plain_start, plain_finish = engine.start, engine.finish
    engine.start = lambda batches, ends=(): plain_finish(plain_start(batches, ends=ends))  # type: ignore
    engine.finish = lambda results: results  # type: ignore
    return trained(engine)


def test_low_precision_scalers_step_as_on_one_stage() -> None:
    found = {}
    for stages in (1, 2):
        engine = Engine(llama().half(), fp16=True, stages=stages)
        create(engine, "b")
        losses = []
        for step in range(3):
            losses.append(engine.forward_backward(batch("b", step, 0))["b"].loss_sum)
            losses.append(engine.optim_step("b").grad_norm)
        found[stages] = losses
        engine.close()
    assert found[2] == pytest.approx(found[1], rel=2e-3)


def test_a_step_without_notice_is_the_same(alone: dict[str, Any]) -> None:
    """Without `ends` the norm is asked for, by a journey of its own."""
    engine = Engine(llama(), stages=3)
    create(engine, "a")
    found = []
    for step in range(2):
        results = [engine.forward_backward(batch("a", step, half))["a"] for half in range(2)]
        found += [sum(r.loss_sum for r in results) / sum(r.tokens for r in results)]
        found += [engine.optim_step("a").grad_norm]
    engine.close()
    assert found == pytest.approx(alone["a"][:4], rel=TOLERANCE)


def test_a_folder_is_trained_and_saved_as_on_one_stage(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    first = Engine(tmp_path / "base")
    create(first, "b")
    first.save("b", tmp_path / "begin")
    weights = {}
    for stages in (1, 2, 4):
        engine = Engine(tmp_path / "base", stages=stages, seed=3)
        engine.load("x", tmp_path / "begin", OptimConfig(2e-3, total_steps=9, adam_epsilon=STEADY_EPSILON))
        for step in range(3):
            engine.forward_backward({"x": batch("b", step, 0)["b"]}, ends=["x"])
            engine.optim_step("x")
        engine.save("x", tmp_path / f"{stages}")
        weights[stages] = load_file(tmp_path / f"{stages}" / "adapter_model.safetensors")
        engine.close()
    begin = load_file(tmp_path / "begin" / "adapter_model.safetensors")
    for stages in (2, 4):
        assert list(weights[stages]) == list(weights[1])
        config = (tmp_path / f"{stages}" / "adapter_config.json").read_text()
        assert config == (tmp_path / "1" / "adapter_config.json").read_text()
        for key, tensor in weights[1].items():
            assert_same_up_to_rounding(weights[stages][key], tensor, key, TOLERANCE)
    assert any(not torch.equal(begin[key], tensor) for key, tensor in weights[4].items())
    PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "4")


def test_state_moves_between_numbers_of_stages() -> None:
    """A pause on three stages, in the middle of an accumulation, goes on on one and two as if undisturbed."""
    engine = Engine(llama(), stages=3)
    create(engine, "c")
    for step in range(2):
        engine.forward_backward(batch("c", step, 0), ends=["c"])
        engine.optim_step("c")
    engine.forward_backward(batch("c", 2, 0))
    state = engine.state_dict("c")
    engine.remove_adapter("c")
    assert engine.adapters == []
    found = []
    for stages in (0, 1, 2, 3):
        other = engine if stages == 3 else Engine(llama(), stages=max(stages, 1))
        create(other, "c")
        if stages:
            other.load_state_dict("c", state)
        else:
            for step in range(2):
                other.forward_backward(batch("c", step, 0), ends=["c"])
                other.optim_step("c")
            other.forward_backward(batch("c", 2, 0))
        losses = [other.forward_backward(batch("c", 2, 1), ends=["c"])["c"].loss_sum]
        done = other.optim_step("c")
        losses += [done.grad_norm, done.learning_rate, done.step]
        losses += [other.evaluate(batch("c", 3, 0))["c"].loss_sum]
        found.append(losses)
        other.close()
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], rel=TOLERANCE)


@pytest.mark.parametrize("how", ["state", "discard"])
def test_a_decided_step_is_never_lost(how: str) -> None:
    """Over stages a step is made with the next forward; what comes before that must bring it."""
    found = {}
    for stages in (1, 3):
        engine = Engine(llama(), stages=stages)
        create(engine, "a")
        for step in range(3):  # the first learning rate is zero, and so is the first gradient of A
            before = engine.state_dict("a")["weights"]
            engine.forward_backward(batch("a", step, 0), ends=["a"])
            engine.optim_step("a")
        if how == "discard":
            engine.discard_gradients("a")
        found[stages] = engine.state_dict("a")
        for key, tensor in found[stages]["weights"].items():
            assert not torch.equal(tensor, before[key]), key
        engine.close()
    for key, tensor in found[1]["weights"].items():
        assert_same_up_to_rounding(found[3]["weights"][key], tensor, key, TOLERANCE)
    for key, moments in found[1]["moments"].items():
        for one, other in zip(found[3]["moments"][key], moments, strict=True):
            assert_same_up_to_rounding(one, other, f"a moment of {key}", TOLERANCE)


def test_evaluation_under_way_draws_no_masks() -> None:
    """Between a forward and its backward the model evaluates, and is in training again for the backward."""
    found = {}
    for stages in (1, 2):
        engine = Engine(llama(), stages=stages, gradient_checkpointing=True)
        create(engine, "a")
        create(engine, "b")
        losses = []
        for step in range(3):
            future = engine.start(batch("b", step, 0), ends=["b"])
            losses.append(engine.evaluate(batch("a", step, 0))["a"].loss_sum)
            losses.append(engine.finish(future)["b"].loss_sum)
            losses.append(engine.optim_step("b").grad_norm)
        found[stages] = losses
        engine.close()
    assert found[2] == pytest.approx(found[1], rel=TOLERANCE)


def test_one_stage_goes_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(llama())
    create(engine, "a")

    def no_memory(*arguments: object, **named: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine._part, "forward", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            engine.forward_backward(batch("a", 0, 0))
    with pytest.raises(ValueError, match="has no gradient"):
        engine.optim_step("a")
    other = Engine(llama())
    create(other, "a")
    results = [e.forward_backward(batch("a", 0, 0))["a"].loss_sum for e in (engine, other)]
    assert results[0] == results[1]
    assert engine.optim_step("a") == other.optim_step("a")


def test_next_tokens_are_those_of_generation() -> None:
    prompts = [(5, 6, 7), (9, 3, 8, 4)]
    found = {}
    for stages in (1, 2):
        engine = Engine(llama(), stages=stages)
        create(engine, "d")
        weights = engine.state_dict("d")
        for key, tensor in weights["weights"].items():
            torch.manual_seed(len(key))
            weights["weights"][key] = torch.randn_like(tensor)
        engine.load_state_dict("d", weights)
        found[stages] = engine.next_tokens({None: prompts, "d": prompts})
        if stages == 1:
            for name, ids in ((name, ids) for name in ("__base__", "d") for ids in prompts):
                out = engine.model.generate(
                    torch.tensor([ids]), adapter_names=[name], max_new_tokens=1, pad_token_id=0
                )
                assert out[0, -1].item() == found[1][name][prompts.index(ids)]
        engine.close()
    assert found[1] == found[2]
    assert found[1]["d"] != found[1]["__base__"]


def test_only_a_stages_part_is_there() -> None:
    engine = Engine(llama(), stages=2)
    create(engine, "b")
    real = {key for key, p in engine.model.named_parameters() if not p.is_meta}
    assert "model.embed_tokens.weight" in real
    assert "lm_head.weight" not in real
    assert {key.split(".")[2] for key in real if key.startswith("model.layers")} == {"0", "1"}
    parameters = mlora_ext.adapter_parameters(engine.model, "b")
    assert {key.split(".")[2] for key, p in parameters.items() if not p.is_meta} == {"0", "1"}
    engine.close()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="stages: expected 1 to 4, as many as the model has blocks, got 5"):
        Engine(llama(), stages=5)
    with pytest.raises(ValueError, match=r"blocks of each that add up to 4, got \[1, 2\]"):
        Engine(llama(), stages=[1, 2])
    with pytest.raises(ValueError, match="micro_batches: expected at least 1, got 0"):
        Engine(llama(), micro_batches=0)
    engine = Engine(llama(), stages=2)
    with pytest.raises(ValueError, match="match"):
        engine.create_adapter("x", LoraConfig(target_modules=["nothing"]), OptimConfig(total_steps=1))
    create(engine, "a")
    with pytest.raises(ValueError, match="no adapter 'b'"):
        engine.start({"b": samples(1, 5, seed=0)})
    with pytest.raises(ValueError, match=r"ends: expected adapters of the batch \(a\), got 'b'"):
        engine.start(batch("a", 0, 0), ends=["b"])
    future = engine.start(batch("a", 0, 0), ends=["a"])
    with pytest.raises(ValueError, match="'a': a batch that ends its accumulation is under way"):
        engine.start(batch("a", 0, 1))
    calls = (engine.optim_step, engine.discard_gradients, engine.state_dict, engine.remove_adapter)
    for call in calls:
        with pytest.raises(ValueError, match="adapter 'a': a batch of it is under way; call finish"):
            call("a")
    engine.finish(future)
    evaluation = engine.evaluate_each([batch("a", 0, place) for place in range(2)])
    next(evaluation)
    for call in calls:
        with pytest.raises(ValueError, match=r"under way; .* take all results of evaluate_each, first"):
            call("a")
    evaluation.close()
    engine.optim_step("a")
    engine.close()


def test_spans() -> None:
    assert [(s.first, s.last) for s in spans_of(3, 7)] == [(0, 3), (3, 5), (5, 7)]
    assert [(s.first, s.last) for s in spans_of([1, 4], 5)] == [(0, 1), (1, 5)]
