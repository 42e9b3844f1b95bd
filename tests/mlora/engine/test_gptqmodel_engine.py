"""Training over GPTQ and AWQ bases, alone and in a mixed batch, against PEFT over the same base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.engine.dry_run import dry_stages
from mlora.engine.engine import Engine
from mlora.engine.stage_group import StageOptions
from peft import LoraConfig
from transformers import PreTrainedModel

pytest.importorskip("gptqmodel", reason="`make gptq` makes an environment with gptqmodel")

from tests.mlora.quantized_training import LORA, check_as_peft
from tests.mlora.tiny_run import save_base
from tests.packed_checkpoints import load_packed, save_packed

pytestmark = pytest.mark.peers
KINDS: dict[str, tuple[Any, ...]] = {
    "gptq": ("gptq", 4, 32, False),
    "gptq, act-order": ("gptq", 8, 32, True),
    "awq": ("awq", 4, 32),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = save_base(tmp_path_factory.mktemp("wide"), hidden=64, intermediate_size=128, initializer_range=0.1)
    return {kind: save_packed(base, tmp_path_factory.mktemp("packed"), *how) for kind, how in KINDS.items()}


def theirs(base: Path, kind: str) -> PreTrainedModel:
    method, bits = KINDS[kind][:2]
    return load_packed(base, method, bits)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_weights_are_those_of_peft(bases: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Together, alone, and with two stages."""
    base = bases[kind]
    check_as_peft(
        lambda: theirs(base, kind), lambda stages: Engine(base, stages=stages), tmp_path, stages=(1, 2)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_dry_run_knows_the_bytes(bases: dict[str, Path], kind: str, stages: int) -> None:
    """Without reading a weight; also from a model that is loaded."""
    options = StageOptions(torch.device("cpu"), torch.float32)
    with Engine(bases[kind], stages=stages) as engine:
        held = engine.base_bytes()
        for source in (bases[kind], engine.model) if stages == 1 else (bases[kind],):
            for stage, base in zip(dry_stages(source, options, stages), held, strict=True):
                assert stage.base.memory == pytest.approx(base.memory, rel=0.01)
    plain = 4 * 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    assert sum(one.memory for one in held) < plain + stages * 4 * 260 * 64 * 2


def test_a_dry_run_knows_the_peak_of_a_step(bases: dict[str, Path], tmp_path: Path) -> None:
    """No more than the same model in plain weights, and one layer's dequantised copy."""
    lora, shape = {"a": LoraConfig(**LORA["a"])}, [{"a": [40]}]
    plain = save_base(tmp_path, hidden=64, intermediate_size=128)
    options = StageOptions(torch.device("cpu"), torch.float32)
    more, less = (dry_stages(one, options)[0].activations(lora, shape)[0] for one in (bases["gptq"], plain))
    assert 0 <= sum(more) - sum(less) <= 2 * 4 * 64 * 128
