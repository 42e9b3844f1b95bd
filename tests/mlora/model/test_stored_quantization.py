"""`quantization.json` in folders: what `save_adapter` writes, and what is said over another base."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import mlora
import pytest
import torch
from command_line import Run
from mlora.config.config_file import resolve_config
from mlora.config.sections import QuantizationConfig
from mlora.engine.engine import Engine
from mlora.model.quantization import transformers_config
from mlora.optim.optim_config import OptimConfig
from mlora.run.validation import validate
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedModel

import mlora_ext as mx
from tests.mlora.limited_runs import Watching
from tests.mlora.tiny_run import run_data, save_base

pytestmark = pytest.mark.peers
NF4 = {"method": "bnb-nf4", "double_quant": True}
FOUR_BITS = {"compute_dtype": "float32"}
LORA = LoraConfig(r=2, target_modules=["q_proj"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("wide"), hidden=64, intermediate_size=128)


def loaded(base: Path, how: Any = None) -> PreTrainedModel:
    if isinstance(how, dict):
        how = transformers_config(QuantizationConfig(**how), torch.float32)
    more = {} if how is None else {"quantization_config": how}
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **more)
    return found


def written(model: PreTrainedModel, folder: Path) -> Any:
    mx.save_adapter(mx.convert_model(model, {"a": LORA}), "a", folder)
    path = folder / "quantization.json"
    return json.loads(path.read_text()) if path.exists() else None


@pytest.mark.parametrize(
    ("method", "more"),
    [
        (NF4, FOUR_BITS),
        ({"method": "bnb-fp4"}, FOUR_BITS),
        ({"method": "bnb-int8"}, {}),
        ({"method": "torchao-int8"}, {}),
        ({"method": "torchao-int8", "group_size": 32}, {}),
        ({"method": "torchao-int4"}, {"group_size": 32}),
        ({"method": "torchao-float8"}, {}),
    ],
)
def test_a_saved_folder_says_how_its_base_is_quantised(
    base: Path, tmp_path: Path, method: dict[str, Any], more: dict[str, Any]
) -> None:
    """Saved again over a plain base, it says nothing."""
    model = loaded(base, method)
    assert written(model, tmp_path / "a") == method | more
    assert written(loaded(base), tmp_path / "a") is None


def test_a_base_that_is_stored_quantised_needs_no_file(base: Path, tmp_path: Path) -> None:
    loaded(base, NF4).save_pretrained(tmp_path / "stored")
    assert written(loaded(tmp_path / "stored"), tmp_path / "a") is None


def test_an_engine_over_such_a_model_writes_it(base: Path, tmp_path: Path) -> None:
    with Engine(loaded(base, NF4)) as engine:
        engine.create_adapter("a", LoraConfig(r=2), OptimConfig(total_steps=1))
        engine.save("a", tmp_path / "a")
    assert json.loads((tmp_path / "a" / "quantization.json").read_text())["method"] == "bnb-nf4"


def test_what_the_file_cannot_say_is_told(base: Path, tmp_path: Path) -> None:
    how = transformers_config(QuantizationConfig(method="bnb-int8"), torch.float32)
    how.llm_int8_skip_modules = ["lm_head", "up_proj"]
    with pytest.warns(UserWarning, match="cannot say how this base is quantised: bnb-int8 with .*up_proj"):
        assert written(loaded(base, how), tmp_path / "a") is None


def test_generate_takes_the_base_that_the_folder_names(run: Run, base: Path, tmp_path: Path) -> None:
    written(loaded(base, NF4), tmp_path / "a")
    done = run("generate", tmp_path / "a", "-p", "7", "--max-new-tokens", "2")
    assert done.stderr == f"base model: {base}, quantized with bnb-nf4, as {tmp_path / 'a'} was trained\n"


def test_another_base_is_warned_of(base: Path, tmp_path: Path) -> None:
    written(loaded(base, NF4), tmp_path / "a")
    said = rf"{tmp_path / 'a'} was trained over bnb-nf4, but this base is "
    for how, name in ((None, "plain"), ({"method": "bnb-int8"}, "bnb-int8")):
        with pytest.warns(UserWarning, match=rf"^adapter 'b': {said}{name}$"):
            mx.load_adapter(loaded(base, how), "b", tmp_path / "a")
    with Engine(base) as engine, pytest.warns(UserWarning, match=rf"^adapter 'b': {said}plain$"):
        engine.load("b", tmp_path / "a", OptimConfig(total_steps=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded(base, NF4).save_pretrained(tmp_path / "stored")
        for model in (loaded(base, NF4), loaded(tmp_path / "stored")):
            mx.load_adapter(model, "b", tmp_path / "a")
        written(loaded(base), tmp_path / "plain")  # as PEFT's own, it says nothing of its base
        mx.load_adapter(loaded(base, NF4), "b", tmp_path / "plain")


@pytest.mark.parametrize("quantization", [None, NF4, {"method": "bnb-int8"}])
def test_runs_warn_of_an_adapter_from_another_base(
    base: Path, tmp_path: Path, quantization: dict[str, Any] | None
) -> None:
    written(loaded(base, NF4), tmp_path / "a")
    data = run_data(base, tmp_path, quantization=quantization)
    data["adapters"] = [{"name": "on", "dataset": "one", "init_from": str(tmp_path / "a"), "max_steps": 1}]
    config = resolve_config(data, folder=tmp_path)
    validate(config, before := Watching())
    mlora.train(config, reporter=(told := Watching()))
    here = quantization["method"] if quantization else "plain"
    expected = f"on: init_from: {tmp_path / 'a'} was trained over bnb-nf4, but this base is {here}"
    for lines in (before.lines, told.lines):
        found = [line for line in lines if "was trained over" in line]
        assert [line.removeprefix("warning: ") for line in found] == (
            [] if quantization == NF4 else [expected]
        )
