"""Trained rows of a tied embedding, where the embedding is on the first stage and the head on the last."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from equal_states import assert_equal
from four_adapters import llama
from mlora.data.preference import Pair
from mlora.data.record import Sample
from mlora.engine.dry_run import DryStage
from mlora.engine.engine import Engine
from mlora.engine.stage_group import StageOptions, spans_of
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from tiny_models import samples
from torch import nn
from transformers import PreTrainedModel

from tests.tolerances import STEADY_EPSILON, assert_same_up_to_rounding

TOLERANCE = 1e-5
OPTIM = OptimConfig(2e-3, total_steps=9, max_grad_norm=0.3, adam_epsilon=STEADY_EPSILON)
LOW: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.1}
LORA = {
    "rows": LoraConfig(**LOW, trainable_token_indices=[3, 7, 11, 20, 21]),
    "prefers": LoraConfig(**LOW, trainable_token_indices=[9, 3]),
    "plain": LoraConfig(**LOW),
}
NAMES = list(LORA)
ROWS = "model.embed_tokens.trainable_tokens_delta.rows.weight"


def tied(**changes: Any) -> PreTrainedModel:
    model = llama(tie_word_embeddings=True, **changes)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


def create(engine: Engine, names: list[str] = NAMES) -> None:
    for name in names:
        dpo = {"name": "dpo", "beta": 0.3, "reference": "rows"}
        objective = dpo if name == "prefers" else "cross_entropy"
        engine.create_adapter(name, LORA[name], OPTIM, objective=objective, seed=7)


def batch(step: int, names: list[str] = NAMES) -> dict[str, Any]:
    found: dict[str, Any] = {name: samples(3, 12, seed=10 * step + len(name)) for name in names}
    if "prefers" in names:
        sides = [(Sample(s.input_ids, s.input_ids), Sample((5, 3), (5, 3))) for s in found["prefers"]]
        found["prefers"] = [Pair(*both) for both in sides]
    return found


def step(engine: Engine, number: int, names: list[str] = NAMES) -> list[float]:
    """Trains two batches a step; returns losses and norms."""
    parts = [engine.start(batch(2 * number + i, names), ends=names if i else ()) for i in range(2)]
    losses = [result.loss_sum for part in parts for result in engine.finish(part).values()]
    return losses + [engine.optim_step(name).grad_norm for name in names]


def trained(**options: Any) -> dict[str, Any]:
    engine = Engine(tied(), **options)
    create(engine)
    before = engine.state_dict("rows")["weights"][ROWS]
    found: dict[str, Any] = {"losses": [step(engine, number) for number in range(3)]}
    found["losses"].append([result.loss_sum for result in engine.evaluate(batch(9)).values()])
    prompts = {name: [(5, 6, 7), (11, 20, 3)] for name in NAMES}
    found["tokens"] = engine.next_tokens(prompts)
    found["states"] = {name: engine.state_dict(name) for name in NAMES}
    assert not torch.equal(found["states"]["rows"]["weights"][ROWS], before)
    engine.close()
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return trained()


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2},
        {"stages": 3, "micro_batches": 2},
        {"stages": 2, "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_stages_train_as_one(options: dict[str, Any], alone: dict[str, Any]) -> None:
    found = trained(**options)
    for losses, expected in zip(found["losses"], alone["losses"], strict=True):
        assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert found["tokens"] == alone["tokens"]
    for name, state in alone["states"].items():
        own = found["states"][name]
        assert {key: list(own[key]) for key in ("weights", "moments")} == {
            key: list(state[key]) for key in ("weights", "moments")
        }
        for key, tensor in state["weights"].items():
            assert_same_up_to_rounding(own["weights"][key], tensor, f"{name} {key}", TOLERANCE)
        for key, moments in state["moments"].items():
            for one, other in zip(own["moments"][key], moments, strict=True):
                assert_same_up_to_rounding(one, other, f"{name} moment of {key}", TOLERANCE)


def test_a_state_in_the_middle_of_an_accumulation_goes_on_bit_for_bit() -> None:
    found = []
    for moves in (False, True):
        engine = Engine(tied(), stages=2)
        create(engine)
        step(engine, 0)
        engine.forward_backward(batch(8))
        if moves:
            states = {name: engine.state_dict(name) for name in NAMES}
            assert states["rows"]["gradients"][ROWS].count_nonzero()
            engine.close()
            engine = Engine(tied(), stages=2)
            create(engine)
            for name in NAMES:
                engine.load_state_dict(name, states[name])
        losses = step(engine, 1)
        found.append((losses, {name: engine.state_dict(name) for name in NAMES}))
        engine.close()
    assert_equal(*found)


def test_an_overflow_skips_the_step_on_all_stages() -> None:
    found = []
    for stages in (1, 2):
        engine = Engine(tied().half(), fp16=True, stages=stages)
        create(engine, ["rows"])
        step(engine, 0, ["rows"])
        state = engine.state_dict("rows")
        before, scale = state["weights"], 2.0**40
        engine.load_state_dict("rows", state | {"scaler": state["scaler"] | {"scale": scale}})
        engine.forward_backward(batch(5, ["rows"]), ends=["rows"])
        done = engine.optim_step("rows")
        assert not math.isfinite(done.grad_norm)
        assert done.skipped
        state = engine.state_dict("rows")
        assert_equal(state["weights"], before)
        assert state["scaler"]["scale"] == scale / 2
        engine.load_state_dict("rows", state | {"scaler": state["scaler"] | {"scale": 8.0}})
        found.append(step(engine, 3, ["rows"]))
        engine.close()
    assert found[1] == pytest.approx(found[0], rel=2e-3)


def test_only_the_first_stage_holds_the_rows() -> None:
    engine = Engine(tied(), stages=2)
    create(engine, ["rows"])
    assert engine._last is not None
    assert ROWS in engine._part._own_parameters("rows")
    assert not any("tokens" in key for key in engine._last._own_parameters("rows"))
    step(engine, 0, ["rows"])
    assert not engine._last.base.head.received  # nothing of a batch is kept
    engine.close()


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_dry_run_counts_the_rows(is_tied: bool) -> None:
    """Hundreds of them, so that they take more than the hidden states."""
    model = llama(tie_word_embeddings=is_tied, vocab_size=640)
    config = LoraConfig(**{**LOW, "lora_dropout": 0.0}, trainable_token_indices=list(range(600)))
    options = StageOptions(torch.device("cpu"), torch.float32)
    engine = Engine(model, stages=3)
    engine.create_adapter("rows", config, OPTIM)
    drawn = samples(2, 9, seed=1, untrained=0.0)
    for _ in range(2):
        future = engine.start({"rows": drawn}, measure=True)
        engine.finish(future)
    engine.close()
    shape = {"rows": [sample.rows for sample in drawn]}
    for span, real in zip(spans_of(3, 4), future.measured[0].phases, strict=True):
        stage = DryStage(model, options, span)
        has_rows = stage.states(config, OPTIM).gradients > 600 * 32 * 4
        assert has_rows is span.is_first
        (dry,) = stage.activations({"rows": config}, [shape])
        assert max(real) > 600 * 32 * 4 or not is_tied
        assert max(dry) == pytest.approx(max(real), rel=0.1), span


def test_other_tied_layers_on_another_stage_are_refused() -> None:
    model = tied()
    model.extra = nn.Linear(32, model.config.vocab_size, bias=False)
    model.extra.weight = model.model.embed_tokens.weight
    model._tied_weights_keys = {**model._tied_weights_keys, "extra.weight": "model.embed_tokens.weight"}
    engine = Engine(model, stages=2)
    with pytest.raises(ValueError, match=r"extra is tied to model\.embed_tokens, and they are on different"):
        create(engine, ["rows"])
    create(engine, ["plain"])
    engine.close()
