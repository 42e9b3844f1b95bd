"""Adapters that begin in their own ways: over one stage or two, resumed, and as outside of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlora
import pytest
import torch
from mlora.config.config_file import resolve_config
from mlora.data.preference import Judged, Pair
from mlora.data.record import LabelledSample, Sample
from mlora.engine.dry_run import DryStage
from mlora.engine.engine import Engine
from mlora.engine.stage_group import StageOptions
from mlora.optim.optim_config import OptimConfig
from peft import EvaConfig, LoftQConfig, LoraConfig
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from safetensors.torch import load_file

import mlora_ext as mx
from tests.mlora.seam_runs import data_of, train_and_resume
from tests.mlora.stage_runs import assert_alike
from tests.mlora.tiny_models import make, samples
from tests.mlora.tiny_run import write_jsonl
from tests.tolerances import STEADY_EPSILON, assert_same_up_to_rounding

pytestmark = pytest.mark.filterwarnings("ignore")
STARTS: dict[str, dict[str, Any]] = {
    "eva": {"eva_config": EvaConfig(rho=1.5, tau=0.9)},
    "corda": {"corda_config": CordaConfig()},
    "lora_ga": {"lora_ga_config": LoraGAConfig()},
}


def config_of(how: str, **fields: Any) -> LoraConfig:
    given = {"r": 3, "lora_alpha": 4, "target_modules": "all-linear", **fields}
    return LoraConfig(init_lora_weights=how, **STARTS.get(how, {}), **given)


def test_runs_over_one_stage_and_two_resume_alike(tiny_base: Path, tmp_path: Path) -> None:
    runs = []
    for stages in (1, 2):
        folder = tmp_path / str(stages)
        folder.mkdir()
        block = {"r": 2, "lora_dropout": 0.2, "target_modules": "all-linear", "init_lora_weights": "eva"}
        data = data_of(tiny_base, folder, stages, lora=block)
        data["defaults"] |= {"adam_epsilon": 100 * STEADY_EPSILON, "init_samples": 6}
        data["adapters"][1]["lora"] |= {"init_lora_weights": "lora_ga", "lora_ga_config": {}}
        pissa = {**block, "init_lora_weights": "pissa", "r": 4}
        data["adapters"].append({"name": "third", "dataset": "two", "lora": pissa})
        runs.append(train_and_resume(data, folder))
    assert_alike(runs[1], runs[0])
    tensors = load_file(runs[0] / "adapters" / "third" / "adapter_model.safetensors")
    assert {len(t) for key, t in tensors.items() if "lora_A" in key} == {8}
    assert not any("start" in key for key in tensors)


@pytest.mark.parametrize("how", STARTS)
def test_an_engine_begins_as_a_model_of_ones_own(how: str) -> None:
    """Packed rows without padding, here over two stages, against batches of one sample each."""
    given = [[sample] for sample in samples(4, 14, seed=1) if len(sample.input_ids) > 5]
    with Engine(make("llama"), stages=2, seed=7, gradient_checkpointing=how == "lora_ga") as engine:
        engine.create_adapter("a", config_of(how), OptimConfig(total_steps=9), start_batches=given)
        found = engine.weights("a")
        engine.forward_backward({"a": samples(2, 9, seed=2)})
    model = mx.convert_model(make("llama"), {"a": config_of(how)}, seed=7)
    batches = [
        {"input_ids": torch.tensor([sample.input_ids]), "labels": torch.tensor([sample.labels])}
        for (sample,) in given
    ]
    mx.initialise_from_data(model, "a", batches)
    expected = mx.adapter_parameters(model, "a")
    assert len(found) == len(expected)
    for key, parameter in expected.items():
        tensor = found[f"base_model.model.{key.replace('.a.weight', '.weight')}"]
        if parameter.any():
            assert_same_up_to_rounding(tensor, parameter.detach(), key, 1e-3)


@pytest.mark.parametrize("how", STARTS)
def test_preference_data_counts_as_the_sequences_of_its_lines(how: str) -> None:
    pair = Pair(Sample((1, 2, 3, 4, 5), (-100, -100, 3, 4, 5)), Sample((1, 2, 6, 7), (-100, -100, 6, 7)))
    judged = [Judged((1, 2), (3, 4, 5), True), Judged((1, 2), (6, 7), False)]
    found = []
    for objective, lines in (("dpo", [pair]), ("kto", judged), ("cross_entropy", list(pair.parts))):
        engine = Engine(make("llama"))
        options: dict[str, Any] = {"objective": objective, "start_batches": [lines]}
        engine.create_adapter("a", config_of(how, r=1), OptimConfig(total_steps=9), **options)
        found.append(engine.weights("a"))
    for key, tensor in found[2].items():
        assert torch.equal(found[0][key], tensor), key
        assert torch.equal(found[1][key], tensor), key


def classifier(how: str) -> LoraConfig:
    config = config_of(how, r=1, task_type="SEQ_CLS")
    config.__dict__["num_labels"] = 3
    return config


@pytest.mark.parametrize("how", ["eva", "corda"])
def test_all_tokens_of_a_classifiers_lines_count(how: str) -> None:
    ids = [sample.input_ids for sample in samples(3, 9, seed=1) if len(sample.input_ids) > 3]
    labelled = [LabelledSample(own, (*[-100] * (len(own) - 1), own[0] % 3)) for own in ids]
    found = []
    for config, lines in ((classifier(how), labelled), (config_of(how, r=1), [Sample(o, o) for o in ids])):
        engine = Engine(make("llama"))
        engine.create_adapter("a", config, OptimConfig(total_steps=9), start_batches=[lines])
        found.append({key: t for key, t in engine.weights("a").items() if "score" not in key})
    assert found[0].keys() == found[1].keys()
    for key, tensor in found[1].items():
        assert torch.equal(found[0][key], tensor), key


def test_a_classifier_has_no_loss_for_lora_ga(tiny_base: Path, tmp_path: Path) -> None:
    engine, given = Engine(make("llama")), [[LabelledSample((1, 2, 3), (-100, -100, 1))]]
    reason = "init_lora_weights='lora_ga' needs a loss of the base, which has no head for task_type SEQ_CLS"
    with pytest.raises(ValueError, match=f"^adapter 'a': {reason}; use 'eva' or 'corda'$"):
        engine.create_adapter("a", classifier("lora_ga"), OptimConfig(total_steps=9), start_batches=given)
    assert engine.adapters == []
    data = labelled_run(tiny_base, tmp_path, init_lora_weights="lora_ga", lora_ga_config={})
    (refused, _) = mlora.train(resolve_config(data, folder=tmp_path)).adapters.values()
    assert (refused.state, refused.message) == ("refused", f"lora: {reason}; use 'eva' or 'corda'")


def labelled_run(base: Path, folder: Path, **lora: Any) -> dict[str, Any]:
    """A run whose first adapter is a classifier."""
    rows = [{"input_ids": [1, 2, 3, label], "label": label} for label in (0, 1, 2)]
    write_jsonl(folder / "labels.jsonl", rows)
    block = {"r": 2, "target_modules": ["q_proj"], "task_type": "SEQ_CLS", **lora}
    more: dict[str, Any] = {"num_labels": 3, "dataset": "labels", "eval_dataset": None, "eval_steps": None}
    data = data_of(base, folder, 1, lora=block, **more)
    data["datasets"].append({"name": "labels", "path": "labels.jsonl", "format": "classification"})
    return data


def test_a_classifier_that_looks_at_data_resumes_alike(tiny_base: Path, tmp_path: Path) -> None:
    train_and_resume(labelled_run(tiny_base, tmp_path, init_lora_weights="eva"), tmp_path)


def test_layers_that_data_does_not_start_are_refused() -> None:
    engine, given = Engine(make("llama")), [samples(2, 9, seed=1)]
    config = config_of("eva", target_modules=["embed_tokens", "q_proj"])
    with pytest.raises(ValueError, match=r"^adapter 'a': target model\.embed_tokens: .* linear layers"):
        engine.create_adapter("a", config, OptimConfig(total_steps=9), start_batches=given)
    assert engine.adapters == []


def test_an_adapter_without_its_data_is_not_trained() -> None:
    engine = Engine(make("llama"))
    engine.create_adapter("a", config_of("corda"), OptimConfig(total_steps=9))
    with pytest.raises(ValueError, match="adapter 'a': init_lora_weights='corda' needs the adapter's data"):
        engine.forward_backward({"a": samples(2, 9, seed=2)})
    with pytest.raises(ValueError, match="adapter 'b': expected at least one batch of its data, got none"):
        engine.create_adapter("b", config_of("corda"), OptimConfig(total_steps=9), start_batches=[])
    assert engine.adapters == ["a"]


def test_what_is_not_trained_has_no_optimizer_states(tiny_base: Path) -> None:
    stage = DryStage(str(tiny_base), StageOptions(torch.device("cpu"), torch.float32))
    fields: dict[str, Any] = {"r": 16, "target_modules": ["q_proj"]}
    own = stage.states(config_of("pissa", **fields), OptimConfig())
    plain = stage.states(LoraConfig(**fields), OptimConfig())
    assert (own.gradients, own.moments) == (plain.gradients, plain.moments)
    assert own.weights == 2 * plain.weights
    engine = Engine(make("llama"))
    engine.create_adapter("a", config_of("olora"), OptimConfig(total_steps=9))
    engine.forward_backward({"a": samples(2, 9, seed=2)})
    engine.optim_step("a")
    state = engine.state_dict("a")
    assert {key for key in state["weights"] if ".lora_" in key} == set(state["moments"])
    assert len(state["weights"]) == 2 * len(state["moments"])


def test_loftq_needs_a_quantised_base(tiny_base: Path, tmp_path: Path) -> None:
    """PEFT's own way over a plain base would change the weights of all adapters."""
    block = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "loftq"}
    data = data_of(tiny_base, tmp_path, 1, lora=block)
    (refused, other) = mlora.train(resolve_config(data, folder=tmp_path)).adapters.values()
    assert (refused.state, other.state) == ("refused", "finished")
    assert refused.message.startswith("lora: init_lora_weights='loftq' needs a quantised base: ")
    assert refused.message.endswith("add quantization: {method: bnb-nf4}, or use 'pissa'")
    for stages in (1, 2):
        with Engine(make("llama"), stages=stages) as engine:
            config = LoraConfig(**block, loftq_config=LoftQConfig())
            with pytest.raises(ValueError, match=r"^adapter 'a': .* none of the adapter's layers is"):
                engine.create_adapter("a", config, OptimConfig(total_steps=9), start_weights=tiny_base)
            assert engine.adapters == []


def test_batches_that_nothing_would_look_at_are_refused(tmp_path: Path) -> None:
    given, optim = [samples(1, 9, seed=1)], OptimConfig(total_steps=9)
    plain = LoraConfig(r=2, target_modules=["q_proj"])
    with Engine(make("llama")) as engine:
        engine.create_adapter("a", plain, optim)
        engine.save("a", tmp_path / "a")
        for lora, folder in ((plain, None), (None, tmp_path / "a"), (config_of("eva"), tmp_path / "a")):
            with pytest.raises(ValueError, match="adapter 'b': start_batches: needs lora with an init_lora"):
                engine.create_adapter("b", lora, optim, init_from=folder, start_batches=given)
        assert engine.adapters == ["a"]
