"""Long randomised runs: adapters of random configs trained together and alone must agree.

Run by `make soak`.
"""

import random
import time

import pytest
import torch
from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

import mlora_ext as mx

MINUTES = 5.0
TARGETS = [["q_proj"], ["q_proj", "v_proj"], ["gate_proj", "down_proj"], "all-linear"]
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def base(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))


def random_adapter(rng: random.Random) -> dict:
    """One adapter's config, optimizer and batches."""
    lora = {
        "r": rng.choice([1, 3, 4, 8, 13, 16, 32]),
        "lora_alpha": rng.choice([4, 16, 32]),
        "lora_dropout": rng.choice([0.0, 0.1, 0.5]),
        "use_rslora": rng.random() < 0.3,
        "target_modules": rng.choice(TARGETS),
        "init_lora_weights": "gaussian",
    }
    optim = {"learning_rate": rng.choice([1e-3, 1e-4]), "weight_decay": rng.choice([0.0, 0.1])}
    samples = [tuple(rng.randrange(97) for _ in range(rng.randint(2, 30))) for _ in range(rng.randint(1, 9))]
    return {"lora": lora, "optim": optim, "samples": samples, "accumulate": rng.randint(1, 3)}


def train(adapters: dict[str, dict], iterations: int, seed: int) -> dict[str, list[float]]:
    """Losses of every adapter, and at the end the norm of all its weights."""
    engine = Engine(base(seed), seed=seed)
    for name, spec in adapters.items():
        optim = OptimConfig(**spec["optim"], total_steps=iterations)
        engine.create_adapter(name, LoraConfig(task_type="CAUSAL_LM", **spec["lora"]), optim)
    losses: dict[str, list[float]] = {name: [] for name in adapters}
    for iteration in range(iterations):
        batch = {
            name: [Sample(ids, ids) for ids in spec["samples"][iteration % len(spec["samples"]) :][:3]]
            for name, spec in adapters.items()
        }
        for name, result in engine.forward_backward(batch).items():
            losses[name].append(result.loss_sum)
            if (iteration + 1) % adapters[name]["accumulate"] == 0:
                engine.optim_step(name)
    for name in adapters:
        weights = mx.adapter_parameters(engine.model, name).values()
        losses[name].append(sum(w.detach().double().square().sum().item() for w in weights) ** 0.5)
    engine.close()
    return losses


@pytest.mark.soak
@pytest.mark.timeout(int(MINUTES * 60) + 300)
def test_together_and_alone_agree() -> None:
    start, cases, seed = time.monotonic(), 0, int(time.time())
    rng = random.Random(seed)
    while time.monotonic() - start < MINUTES * 60:
        adapters = {f"a{i}": random_adapter(rng) for i in range(rng.randint(2, 6))}
        model_seed = rng.randrange(2**31)
        together = train(adapters, 12, model_seed)
        name = rng.choice(list(adapters))
        alone = train({name: adapters[name]}, 12, model_seed)
        assert together[name] == pytest.approx(alone[name], rel=1e-5), (seed, adapters[name])
        cases += 1
    print(f"isolation soak: seed {seed}, {cases} random sets of adapters in {MINUTES:g} minutes")
