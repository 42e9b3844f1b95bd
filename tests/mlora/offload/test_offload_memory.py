"""What a base on disk takes of memory: predicted before the run, and measured."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dry_models import CPU, OPTIM, llama, loras, of
from mlora.engine.dry_run import DryStage, dry_stages
from mlora.engine.engine import Engine
from mlora.engine.stage_group import StageOptions, make_worker, spans_of
from mlora.offload.options import OffloadOptions
from mlora.planning.partition import Cost, Table, partition
from mlora.planning.profile_stage import profile_base
from tiny_models import make

BLOCKS, SLOTS = 6, 3
ON_DISK = OffloadOptions(base="disk", slots=SLOTS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of 1.5 MB, in fp32."""
    folder = tmp_path_factory.mktemp("base")
    llama(hidden_size=192, intermediate_size=416, vocab_size=500).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stages", [1, 2])
def test_the_base_takes_its_slots_and_what_stays(base: Path, dtype: torch.dtype, stages: int) -> None:
    """Weights of another dtype in the files are converted into scratch files."""
    options = StageOptions(CPU, dtype, offload=ON_DISK)
    for span in spans_of(stages, BLOCKS):
        foreseen = DryStage(str(base), options, span).base
        real = make_worker(str(base), span if stages > 1 else None, options).base.nbytes
        assert foreseen.memory == pytest.approx(real.memory, rel=0.01)
        assert foreseen.streamed == real.streamed
        assert foreseen.resident == pytest.approx(real.resident, abs=1024)
        assert foreseen.slots == pytest.approx(SLOTS * real.streamed * stages / BLOCKS)
        assert real.converted == (0 if dtype is torch.float32 else real.streamed)


def test_without_offloading_all_of_it_stays(base: Path) -> None:
    options = StageOptions(CPU, torch.float32)
    whole, on_disk = (
        make_worker(str(base), None, StageOptions(CPU, torch.float32, offload=offload)).base.nbytes
        for offload in (options.offload, ON_DISK)
    )
    assert (whole.streamed, whole.slots) == (0, 0)
    assert whole.resident == on_disk.resident + on_disk.streamed
    assert DryStage(str(base), options).base.memory == pytest.approx(whole.memory, abs=1024)


@pytest.mark.parametrize(
    ("dtype", "stages", "checkpointing"), [(torch.float32, 1, False), (torch.bfloat16, 2, True)], ids=str
)
def test_a_dry_run_says_what_is_measured(
    base: Path, dtype: torch.dtype, stages: int, checkpointing: bool
) -> None:
    shape = {"a": [70, 31], "b": [40]}
    how: dict[str, Any] = {"gradient_checkpointing": checkpointing, "offload": ON_DISK}
    dry = dry_stages(str(base), StageOptions(CPU, dtype, **how), stages)
    foreseen = [stage.activations(loras("ab"), [shape])[0] for stage in dry]
    with Engine(base, dtype=dtype, stages=stages, **how) as engine:
        for name, lora in loras("ab").items():
            engine.create_adapter(name, lora, OPTIM)
        for _ in range(2):  # the first one makes constants
            future = engine.start({name: of(own) for name, own in shape.items()}, measure=True)
            engine.finish(future)
    for one, real in zip(foreseen, future.measured[0].phases, strict=True):
        assert max(one) == pytest.approx(max(real), rel=0.01)


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_profile_tells_streamed_weights_from_those_that_stay(family: str, tmp_path: Path) -> None:
    model = make(family)
    model.config.save_pretrained(tmp_path)
    plain, streamed = (
        profile_base(tmp_path, (4, 5), CPU, torch.float32, streamed=streamed, repeats=1)
        for streamed in (False, True)
    )
    dry = DryStage(str(tmp_path), StageOptions(CPU, torch.float32, offload=ON_DISK)).base
    assert sum(block.streamed_bytes for block in streamed.blocks) == dry.streamed
    for one, other in zip(plain.blocks, streamed.blocks, strict=True):
        assert one.streamed_bytes == 0
        assert one.weight_bytes == other.weight_bytes + other.streamed_bytes
    assert plain.head.weight_bytes == streamed.head.weight_bytes


def test_a_cut_counts_slots_in_place_of_the_blocks() -> None:
    """Three blocks need 30 bytes in memory, and 22 in two slots."""
    part = Cost(0.0, 0)

    def table(resident: int, streamed: int) -> Table:
        return Table(part, tuple(Cost(1.0, resident, 0, streamed) for _ in range(6)), part)

    in_memory, on_disk = table(10, 0), table(2, 8)
    with pytest.raises(ValueError, match=r"^memory: no partition of 6 blocks over 2 stages fits"):
        partition([in_memory] * 2, [22, 22], [1, 1])
    assert partition([on_disk] * 2, [22, 22], [1, 1], slots=2) == ((0, 3), (3, 6))
    with pytest.raises(ValueError, match=r"^memory: no partition of 6 blocks over 2 stages fits"):
        partition([on_disk] * 2, [21, 21], [1, 1], slots=2)
