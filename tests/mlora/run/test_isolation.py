"""An adapter trained with others follows the adapter trained alone."""

import math

import pytest
import torch
from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from tiny_models import make, samples

import mlora_ext

STEPS = 30
LORAS = {
    "r4": {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]},
    "r7": {"r": 7, "lora_dropout": 0.3, "target_modules": "all-linear"},
    "r16": {"r": 16, "lora_dropout": 0.0, "use_rslora": True, "target_modules": "all-linear"},
    "r24": {"r": 24, "lora_dropout": 0.5, "target_modules": ["up_proj", "down_proj", "k_proj"]},
}


def optim(name: str) -> OptimConfig:
    return OptimConfig(2e-3, "adamw_torch_fused", weight_decay=0.01, total_steps=STEPS, max_grad_norm=0.5)


def batches(name: str) -> list[list[Sample]]:
    """Two micro-batches for every step, of an adapter's own size and lengths."""
    index = list(LORAS).index(name)
    drawn = samples(2 * STEPS * (index + 1), 9 + 6 * index, seed=index)
    return [drawn[i :: 2 * STEPS] for i in range(2 * STEPS)]


def train(names: list[str], family: str = "llama") -> tuple[dict[str, list[float]], Engine]:
    engine = Engine(make(family), seed=5)
    losses: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        engine.create_adapter(name, LoraConfig(**LORAS[name]), optim(name))
    data = {name: batches(name) for name in names}
    for step in range(STEPS):
        totals = {name: [0.0, 0] for name in names}
        for half in (2 * step, 2 * step + 1):
            for name, result in engine.forward_backward({n: data[n][half] for n in names}).items():
                totals[name][0] += result.loss_sum
                totals[name][1] += result.tokens
        for name in names:
            engine.optim_step(name)
            losses[name].append(totals[name][0] / totals[name][1])
    return losses, engine


@pytest.fixture(scope="module")
def together() -> tuple[dict[str, list[float]], Engine]:
    return train(list(LORAS))


@pytest.mark.parametrize("name", LORAS)
def test_together_and_alone_are_the_same(together: tuple[dict[str, list[float]], Engine], name: str) -> None:
    losses, engine = together
    alone, solo = train([name])
    assert max(abs(a / b - 1) for a, b in zip(losses[name], alone[name], strict=True)) <= 1e-5
    mine, other = engine.state_dict(name)["weights"], solo.state_dict(name)["weights"]
    assert mine.keys() == other.keys()
    for key, weight in other.items():
        assert (mine[key] - weight).norm() <= 1e-5 * weight.norm(), key


def test_position_and_order_do_not_matter(together: tuple[dict[str, list[float]], Engine]) -> None:
    losses, _ = together
    backwards, _ = train(list(reversed(LORAS)))
    for name in LORAS:
        assert max(abs(a / b - 1) for a, b in zip(losses[name], backwards[name], strict=True)) <= 1e-5


def test_dropout_is_on_and_differs_by_step_and_micro_batch() -> None:
    """The same rows again, in the same step or in the next, meet other masks; repeated, the same ones."""
    seen = []
    for _ in range(2):
        engine = Engine(make("llama"), seed=5)
        engine.create_adapter(
            "r24", LoraConfig(**LORAS["r24"], init_lora_weights=False), OptimConfig(0.0, total_steps=9)
        )
        batch = {"r24": samples(3, 12, seed=1)}
        for _ in range(2):
            for _ in range(2):
                seen.append(engine.forward_backward(batch)["r24"].loss_sum)
            engine.optim_step("r24")
    assert len(set(seen[:4])) == 4
    assert seen[:4] == seen[4:]


def test_one_adapter_full_of_nan_leaves_the_others_bits() -> None:
    names, results = list(LORAS), []
    for spoil in (False, True):
        engine = Engine(make("llama"), seed=5)
        for name in names:
            engine.create_adapter(name, LoraConfig(**LORAS[name], init_lora_weights=False), optim(name))
        if spoil:
            with torch.no_grad():
                for parameter in mlora_ext.adapter_parameters(engine.model, "r7").values():
                    parameter.fill_(float("nan"))
        result = engine.forward_backward({name: batches(name)[0] for name in names})
        steps = {name: engine.optim_step(name) for name in names}
        results.append((result, steps, {name: engine.state_dict(name)["weights"] for name in names}))
    (clean, _, weights), (spoiled, steps, spoiled_weights) = results
    assert clean["r7"].finite
    assert not spoiled["r7"].finite
    assert math.isnan(spoiled["r7"].loss_sum)
    assert not steps["r7"].finite
    assert not steps["r7"].skipped
    for name in set(names) - {"r7"}:
        assert spoiled[name] == clean[name]
        assert steps[name].finite
        assert all(torch.equal(spoiled_weights[name][k], w) for k, w in weights[name].items())
