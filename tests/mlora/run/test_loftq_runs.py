"""LoftQ in runs and on engines: each stage reads original weights from the base model's folder."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlora
import pytest
import torch
from command_line import Run
from mlora.config.config_file import resolve_config
from mlora.config.sections import QuantizationConfig
from mlora.engine.dry_run import DryStage
from mlora.engine.engine import Engine
from mlora.engine.stage_group import StageOptions
from mlora.model.checkpoint_tensors import files_of, open_tensors, original_keys
from mlora.model.quantization import transformers_config
from mlora.optim.optim_config import OptimConfig
from mlora.run.validation import validate
from peft import LoftQConfig, LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import mlora_ext as mx
from tests.mlora.seam_runs import data_of, train_and_resume
from tests.mlora.stage_runs import assert_alike
from tests.mlora.tiny_models import samples
from tests.mlora.tiny_run import save_base
from tests.tolerances import STEADY_EPSILON, assert_same_up_to_rounding

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
NF4 = {"method": "bnb-nf4", "double_quant": True}
BLOCK = {"r": 4, "lora_alpha": 4, "target_modules": "all-linear", "init_lora_weights": "loftq"}
OPTIM = OptimConfig(total_steps=9)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("wide"), hidden=64, intermediate_size=128, initializer_range=0.2)


def config_of(**fields: Any) -> LoraConfig:
    return LoraConfig(**{**BLOCK, "loftq_config": LoftQConfig(), **fields})


def test_runs_over_one_stage_and_two_resume_alike(base: Path, tmp_path: Path) -> None:
    """In a batch with plain LoRA and PiSSA; a resumed run reads no original weight."""
    runs = []
    for stages in (1, 2):
        folder = tmp_path / str(stages)
        folder.mkdir()
        ranks = {"lora_dropout": 0.2, "rank_pattern": {"up_proj": 6}, "alpha_pattern": {"q_proj": 9}}
        data = data_of(base, folder, stages, lora={**BLOCK, **ranks})
        data["quantization"] = NF4
        data["defaults"] |= {"adam_epsilon": 100 * STEADY_EPSILON, "max_steps": 4}
        data["adapters"][0] |= {"eval_dataset": None, "eval_steps": None}
        data["adapters"][1]["max_steps"] = 5
        data["adapters"].append({"name": "third", "dataset": "two", "lora": {**BLOCK, "use_rslora": True}})
        data["adapters"].append(
            {"name": "fourth", "dataset": "one", "lora": {**BLOCK, "init_lora_weights": "pissa"}}
        )
        runs.append(train_and_resume(data, folder))
    assert_alike(runs[1], runs[0])
    saved = runs[0] / "adapters" / "first"
    assert '"init_lora_weights": true' in (saved / "adapter_config.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=transformers_config(QuantizationConfig(**NF4), torch.float32)
    )
    model.load_adapter(str(saved))


def test_generate_from_a_folder_uses_the_quantised_base(
    run: Run, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from its run. A folder without the file is over the plain base, as those of earlier versions."""
    data = data_of(base, tmp_path, 1, lora=BLOCK) | {"quantization": NF4}
    data["adapters"] = [data["adapters"][0] | {"max_steps": 1, "eval_dataset": None, "eval_steps": None}]
    data["defaults"]["save_steps"] = None
    assert mlora.train(resolve_config(data, folder=tmp_path)).status == "finished"
    folder = tmp_path / "run" / "adapters" / "first"
    assert json.loads((folder / "quantization.json").read_text()) == NF4
    used: list[Any] = []

    class Noted(Engine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            used.append(kwargs["quantization"])

    monkeypatch.setattr("mlora.engine.engine.Engine", Noted)
    options = ("-p", "7", "--max-new-tokens", "2")
    found = [run("generate", source, *options) for source in (tmp_path / "run", folder)]
    assert found[0].stdout == found[1].stdout
    assert found[0].stderr == ""
    assert found[1].stderr == f"base model: {base}, quantized with bnb-nf4, as {folder} was trained\n"
    assert used == [QuantizationConfig(**NF4)] * 2
    mlora.train(resolve_config(data, folder=tmp_path), overwrite=True)  # the file is the run's own
    (folder / "quantization.json").write_text('{"method": "nf5"}')
    wrong = run("generate", folder, *options)
    assert re.match(r"error: .*quantization\.json: is not as a run writes it: method: ", wrong.stderr)
    (folder / "quantization.json").unlink()
    assert run("generate", folder, *options).stderr == ""
    assert used[2:] == [None]


@pytest.mark.parametrize(("method", "stages"), [("bnb-fp4", 2), ("bnb-int8", 1), ("torchao-int8", 1)])
def test_an_engine_begins_as_a_model_of_ones_own(base: Path, method: str, stages: int) -> None:
    how = QuantizationConfig(method=method)
    with Engine(base, stages=stages, quantization=how) as engine:
        engine.create_adapter("a", config_of(lora_alpha=9), OPTIM, start_weights=base)
        found = engine.weights("a")
        engine.forward_backward({"a": samples(2, 9, seed=2)})
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=transformers_config(how, torch.float32), dtype=torch.float32
    )
    mx.convert_model(model, {"a": config_of(lora_alpha=9)})
    mx.initialise_from_weights(model, "a", base)
    expected = mx.adapter_parameters(model, "a")
    assert len(found) == len(expected)
    for key, parameter in expected.items():
        tensor = found[f"base_model.model.{key.replace('.a.weight', '.weight')}"]
        assert_same_up_to_rounding(tensor, parameter.detach().cpu(), key, 1e-4)


@pytest.mark.parametrize("stages", [1, 2])
def test_each_stage_looks_at_the_source_once(
    base: Path, monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    """And opens each of its files once, and closes them; also where a layer is missing."""
    asked, opened = [], []

    def counted(source: str, named: str | None) -> dict[str, str]:
        asked.append(source)
        return files_of(source, named)

    def watched(source: str, wanted: Any, files: Any, stack: ExitStack) -> dict[str, Any]:
        opened.append(stack.enter_context(Closing()))
        return open_tensors(source, wanted, files, stack)

    monkeypatch.setattr("mlora.model.original_weights.files_of", counted)
    monkeypatch.setattr("mlora.model.original_weights.open_tensors", watched)
    with Engine(base, stages=stages, quantization=NF4) as engine:
        engine.create_adapter("a", config_of(), OPTIM, start_weights=base)
        assert (len(asked), [one.closed for one in opened]) == (stages, [True] * stages)
        monkeypatch.setattr(
            "mlora.model.original_weights.original_keys",
            lambda *given: dict(list(original_keys(*given).items())[1:]),
        )
        with pytest.raises(ValueError, match="has no weight of it"):
            engine.create_adapter("b", config_of(), OPTIM, start_weights=base)
        assert [one.closed for one in opened] == [True] * 2 * stages


class Closing:
    """Notes that it was closed."""

    closed = False

    def __enter__(self) -> Closing:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


@pytest.mark.parametrize("stages", [1, 2])
def test_a_weight_that_is_missing_takes_no_other_adapter_along(
    base: Path, tmp_path: Path, stages: int
) -> None:
    """It is one of the last block, which is on the second stage."""
    key = "model.layers.1.mlp.down_proj.weight"
    weights = load_file(base / "model.safetensors")
    for folder in (tmp_path / "lacking", tmp_path / "empty"):
        folder.mkdir()
        (folder / "config.json").write_text((base / "config.json").read_text())
    save_file({k: t for k, t in weights.items() if k != key}, tmp_path / "lacking" / "model.safetensors")
    with Engine(base, stages=stages, quantization=NF4) as engine:
        engine.create_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]), OPTIM)
        with pytest.raises(ValueError, match=r"^adapter 'a': layer .*1\.mlp\.down_proj: .*lacking has no"):
            engine.create_adapter("a", config_of(), OPTIM, start_weights=tmp_path / "lacking")
        with pytest.raises(ValueError, match=r"^base_model: cannot load .*no model\.safetensors"):
            engine.create_adapter("a", config_of(), OPTIM, start_weights=tmp_path / "empty")
        assert engine.adapters == ["other"]
        engine.forward_backward({"other": samples(2, 9, seed=2)})


def test_an_adapter_without_its_weights_is_not_trained(base: Path) -> None:
    engine = Engine(base, quantization=NF4)
    engine.create_adapter("a", config_of(), OPTIM)
    with pytest.raises(ValueError, match=r"needs the original weights; .*create_adapter\(start_weights="):
        engine.forward_backward({"a": samples(2, 9, seed=2)})


def test_layers_that_are_not_quantised_are_refused_on_any_stage(base: Path) -> None:
    """The head is on the last stage."""
    for stages in (1, 2):
        with Engine(base, stages=stages, quantization=NF4) as engine:
            with pytest.raises(ValueError, match=r"^adapter 'a': .* none of the adapter's layers is"):
                engine.create_adapter("a", config_of(target_modules=["lm_head"]), OPTIM, start_weights=base)
            assert engine.adapters == []


def test_memory_is_that_of_plain_lora(base: Path) -> None:
    options = StageOptions(torch.device("cpu"), torch.float32, quantization=QuantizationConfig(**NF4))
    stage, plain = DryStage(str(base), options), LoraConfig(r=4, lora_alpha=4, target_modules="all-linear")
    assert stage.states(config_of(), OPTIM) == stage.states(plain, OPTIM)
    shape = [{"a": [40]}]
    assert stage.activations({"a": config_of()}, shape) == stage.activations({"a": plain}, shape)


def refused(data: dict[str, Any], folder: Path) -> str:
    (told, _) = mlora.train(resolve_config(data, folder=folder)).adapters.values()
    assert told.state == "refused"
    assert "\n" not in told.message
    return str(told.message)


def test_a_base_that_is_stored_quantised_is_refused(base: Path, tmp_path: Path) -> None:
    config = transformers_config(QuantizationConfig(**NF4), torch.float32)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "stored")
    data = data_of(tmp_path / "stored", tmp_path, 1, lora=BLOCK)
    message = refused(data, tmp_path)
    assert message.startswith("lora: init_lora_weights='loftq' needs the original weights, and ")
    assert re.search(r"stored holds quantised ones only \(bitsandbytes\); name the original", message)
    with Engine(tmp_path / "stored") as engine:
        with pytest.raises(ValueError, match=r"needs the original weights, and .* holds quantised ones only"):
            engine.create_adapter("a", config_of(), OPTIM, start_weights=tmp_path / "stored")
        engine.create_adapter("a", config_of(), OPTIM, start_weights=base)


def test_settings_that_are_refused(base: Path, tmp_path: Path) -> None:
    data = data_of(base, tmp_path, 1, lora={**BLOCK, "loftq_config": {"loftq_iter": 3}})
    data |= {"quantization": NF4}
    data["defaults"]["max_steps"] = data["adapters"][1]["max_steps"] = 1
    message = refused(data, tmp_path)
    assert message.startswith("loftq_config={'loftq_bits': 4, 'loftq_iter': 3} is not supported: the base's")


@pytest.mark.nightly
def test_validate_and_a_memory_limit(base: Path, tmp_path: Path) -> None:
    data = data_of(base, tmp_path, 1, lora=BLOCK) | {"quantization": NF4}
    data["scheduler"] = {"memory_limit": "8GiB"}
    config = resolve_config(data, folder=tmp_path)
    found = validate(config)
    assert found.quantized is not None
    assert [task.name for task in found.prepared.table.tasks] == ["first", "second"]
    assert mlora.train(config).status == "finished"


def test_an_engine_whose_memory_is_measured(base: Path) -> None:
    """As on a GPU: adapters that stand in for it are measured, and need no weights."""
    with Engine(base, quantization=NF4) as engine:
        engine.limit_memory("8GiB", measured=True)
        engine.create_adapter("a", config_of(), OPTIM, start_weights=base)
        assert engine.forward_backward({"a": samples(2, 9, seed=1)})["a"].finite
        with pytest.raises(ValueError, match="start_weights: needs lora with init_lora_weights='loftq'"):
            engine.create_adapter("b", LoraConfig(target_modules=["q_proj"]), OPTIM, start_weights=base)
