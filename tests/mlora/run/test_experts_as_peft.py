"""Adapters on experts, trained with others, are the same as PEFT's `target_parameters` alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.engine.engine import Engine
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig, PeftModel
from peft_alone import save_initial, train
from tiny_models import samples

from tests.mixtures import MIXTURES, QUERIES, VOCABULARY, mixture
from tests.tolerances import STEADY_EPSILON

STEPS = 25
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
OPTIM = OptimConfig(5e-3, total_steps=STEPS, adam_epsilon=STEADY_EPSILON, max_grad_norm=0.5)
LORAS: dict[str, dict[str, Any]] = {
    "experts": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": EXPERTS},
    "attention": {"r": 4, "target_modules": ["q_proj", "o_proj"]},
    "down": {
        "r": 7,
        "use_rslora": True,
        "target_modules": [],
        "target_parameters": ["down_proj"],
        "rank_pattern": {r".*\.1\.mlp\.experts\.down_proj": 5},
    },
    "all": {"r": 2, "lora_alpha": 3, "target_modules": "all-linear"},
}


def lora_of(family: str, name: str) -> LoraConfig:
    lora = LoraConfig(**LORAS[name])
    if not isinstance(lora.target_modules, str):
        named = {"q_proj": QUERIES.get(family, "q_proj")}
        lora.target_modules = {named.get(one, one) for one in lora.target_modules}
    return lora


@dataclass(frozen=True)
class Trained:
    family: str
    folders: Path
    together: Engine
    alone: Engine
    losses: dict[str, dict[str, list[float]]]
    peft: dict[str, PeftModel]


@pytest.fixture(
    scope="module",
    params=[
        "gpt_oss",
        *(
            pytest.param(one, marks=pytest.mark.nightly)
            for one in MIXTURES
            if one not in ("gpt_oss", "llama4")
        ),
    ],
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """PEFT's adapters one after the other, ours together, and one of ours alone."""
    torch.manual_seed(0)
    family, folders = request.param, tmp_path_factory.mktemp("adapters")
    peft, losses = {}, {"peft": {}, "together": {}, "alone": {}}
    data = {name: batches(index) for index, name in enumerate(LORAS)}
    together, alone = Engine(mixture(family)), Engine(mixture(family))
    for name in LORAS:
        save_initial(mixture(family), lora_of(family, name), folders / name)
        together.create_adapter(name, None, OPTIM, init_from=folders / name)
        peft[name] = PeftModel.from_pretrained(mixture(family), folders / name, is_trainable=True)
        losses["peft"][name] = train(peft[name], OPTIM, [[batch] for batch in data[name]])
    alone.create_adapter("experts", None, OPTIM, init_from=folders / "experts")
    losses["together"] = train_ours(together, data)
    losses["alone"] = train_ours(alone, {"experts": data["experts"]})
    return Trained(family, folders, together, alone, losses, peft)


def batches(seed: int) -> list[list[Any]]:
    drawn = samples(STEPS * 2, 12, seed=seed)
    return [drawn[2 * step : 2 * step + 2] for step in range(STEPS)]


def train_ours(engine: Engine, data: dict[str, list[list[Any]]]) -> dict[str, list[float]]:
    losses: dict[str, list[float]] = {name: [] for name in data}
    for step in range(STEPS):
        for name, result in engine.forward_backward({n: mine[step] for n, mine in data.items()}).items():
            losses[name].append(result.loss_sum / result.tokens)
            engine.optim_step(name)
    return losses


def test_every_steps_loss(trained: Trained) -> None:
    for run in ("together", "alone"):
        for name, ours in trained.losses[run].items():
            theirs = trained.losses["peft"][name]
            assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 1e-5, (run, name)
            assert abs(theirs[0] - theirs[-1]) > 1e-2


def test_every_weights_change(trained: Trained, tmp_path: Path) -> None:
    """Of folders that PEFT loads again."""
    for run, names in (("together", list(LORAS)), ("alone", ["experts"])):
        for name in names:
            getattr(trained, run).save(name, tmp_path / run / name)
            before, ours = (
                weights(PeftModel.from_pretrained(mixture(trained.family), folder / name))
                for folder in (trained.folders, tmp_path / run)
            )
            theirs = weights(trained.peft[name])
            assert ours.keys() == theirs.keys() == before.keys()
            for key, expected in theirs.items():
                change = (expected - before[key]).norm()
                assert (ours[key] - expected).norm() <= 1e-4 * change, (run, name, key)


def weights(model: PeftModel) -> dict[str, torch.Tensor]:
    return {key: p.detach().double() for key, p in model.named_parameters() if "lora_" in key}


def test_saved_folders_have_equal_logits_in_peft(trained: Trained, tmp_path: Path) -> None:
    ids = torch.randint(3, VOCABULARY, (len(LORAS), 11))
    trained.together.model.eval()
    with torch.no_grad():
        got = trained.together.model(input_ids=ids, adapter_names=list(LORAS)).logits
        for row, name in enumerate(LORAS):
            trained.together.save(name, tmp_path / name)
            loaded = PeftModel.from_pretrained(mixture(trained.family), tmp_path / name).eval()
            assert (got[row] - loaded(input_ids=ids[row : row + 1]).logits[0]).abs().max() <= 1e-5
