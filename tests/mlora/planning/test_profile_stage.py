"""Costs of a model's parts, against the model itself, and the cut that processes agree on."""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlora.planning.profile_stage
import pytest
import torch
from deep_models import BLOCKS, CPU, DEEP, deep
from mlora.config.sections import PipelineConfig
from mlora.engine.stage_group import StageOptions
from mlora.model.cut import outer_modules
from mlora.planning.partition import Cost, Table, partition
from mlora.planning.profile_stage import held_by, measured_cut, profile_base
from peft import LoraConfig
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

LENGTHS = (20, 30)


def save(model: nn.Module, folder: Path) -> str:
    """The config alone: weights are not read."""
    model.config.save_pretrained(folder)
    return str(folder)


def size(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


@pytest.mark.parametrize("family", DEEP)
def test_every_family_has_costs(family: str, tmp_path: Path) -> None:
    model = deep(family)
    table = profile_base(save(model, tmp_path), LENGTHS, CPU, torch.float32, repeats=1)
    assert len(table.blocks) == BLOCKS
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    assert [cost.weight_bytes for cost in table.blocks] == [size(block) for block in blocks]
    assert all(cost.seconds > 0 for cost in (table.embedding, *table.blocks, table.head))
    assert partition([table, table], [None] * 2, [1] * 2)[1][1] == BLOCKS


def test_weights_of_embedding_and_head(tmp_path: Path) -> None:
    """A tied weight counts at both ends: first and last stage each hold it."""
    model = deep("gpt2")
    table = profile_base(save(model, tmp_path), LENGTHS, CPU, torch.float32, repeats=1)
    body = model.transformer
    assert table.embedding.weight_bytes == size(body.wte) + size(body.wpe)
    assert table.head.weight_bytes == size(body.ln_f) + size(model.lm_head)
    half = profile_base(tmp_path, LENGTHS, CPU, torch.bfloat16, repeats=1)
    assert half.embedding.weight_bytes * 2 == table.embedding.weight_bytes


def test_activations_are_what_autograd_keeps(tmp_path: Path) -> None:
    """Against the same model, whole: what all its blocks save, each tensor once."""
    folder = save(deep("llama"), tmp_path)
    plain = profile_base(folder, LENGTHS, CPU, torch.float32, repeats=1)
    rows, width = sum(LENGTHS), 32
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model = deep("llama").requires_grad_(False)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    states = torch.randn(1, rows, width, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block = model.model.layers[0]
        rope = model.model.rotary_emb(states, torch.arange(rows).unsqueeze(0))
        output = block(states, position_embeddings=rope)
    expected = sum(size for place, size in seen.items() if place not in own)
    assert output.shape == states.shape
    assert plain.blocks[0].activation_bytes == pytest.approx(expected, rel=0.25)
    kept = profile_base(folder, LENGTHS, CPU, torch.float32, gradient_checkpointing=True, repeats=1)
    assert kept.blocks[0].activation_bytes == rows * width * 4
    config = LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.1)
    adapted = profile_base(folder, LENGTHS, CPU, torch.float32, lora=config, repeats=1)
    assert adapted.blocks[0].activation_bytes >= plain.blocks[0].activation_bytes + 7 * rows * 16 * 4
    assert adapted.blocks[0].weight_bytes == plain.blocks[0].weight_bytes


def test_kinds_of_blocks_are_measured_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture of experts behind two dense blocks."""
    config = Qwen3MoeConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=80,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[0, 1],
    )
    measured: list[int] = []
    block = mlora.planning.profile_stage._Profile.block

    def record(self: mlora.planning.profile_stage._Profile, index: int) -> object:
        measured.append(index)
        return block(self, index)

    monkeypatch.setattr(mlora.planning.profile_stage._Profile, "block", record)
    table = profile_base(save(Qwen3MoeForCausalLM(config), tmp_path), LENGTHS, CPU, torch.float32, repeats=1)
    assert measured == [0, 2]
    assert [cost == table.blocks[0] for cost in table.blocks] == [True, True, False, False, False, False]


def test_one_part_at_a_time_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    largest = max(size(model.model.layers[0]), size(model.lm_head) + size(model.model.norm))
    here: list[int] = []
    measure = mlora.planning.profile_stage._Profile._measure

    def record(self: mlora.planning.profile_stage._Profile, *args: object) -> object:
        parameters = self.base.model.parameters()
        here.append(sum(p.numel() * p.element_size() for p in parameters if not p.is_meta))
        return measure(self, *args)

    monkeypatch.setattr(mlora.planning.profile_stage._Profile, "_measure", record)
    profile_base(save(model, tmp_path), LENGTHS, CPU, torch.float32, repeats=1)
    assert len(here) == 3
    assert 0 < max(here) <= largest


def test_an_adapter_on_the_head(tmp_path: Path) -> None:
    """Whole logits are then kept for backward."""
    folder = save(deep("llama"), tmp_path)
    config = LoraConfig(r=4, target_modules=["lm_head", "q_proj"])
    table = profile_base(folder, LENGTHS, CPU, torch.float32, lora=config, repeats=1)
    plain = profile_base(folder, LENGTHS, CPU, torch.float32, repeats=1)
    assert table.head.activation_bytes > sum(LENGTHS) * 61 * 4 > plain.head.activation_bytes > 0


def test_a_classifier(tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS")
    config.__dict__["num_labels"] = 3
    table = profile_base(save(deep("llama"), tmp_path), LENGTHS, CPU, torch.float32, lora=config, repeats=1)
    assert table.blocks[0].activation_bytes > 0


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^base_model: no such folder"):
        profile_base(tmp_path / "missing", LENGTHS, CPU, torch.float32)


def test_outer_modules_are_told_apart_by_their_calls() -> None:
    """OPT registers project_out before project_in."""
    found = outer_modules(deep("opt"), "model.decoder.layers")
    behind = {name.rpartition(".")[2] for name, places in found.items() if places == {"behind"}}
    assert behind == {"project_out", "final_layer_norm", "lm_head"}
    assert {name.rpartition(".")[2] for name, places in found.items() if places == {"before"}} == {
        "embed_tokens",
        "embed_positions",
        "project_in",
    }


def config(adapters: int = 4, **pipeline: Any) -> Any:
    return SimpleNamespace(
        base_model="", pipeline=PipelineConfig(**pipeline), at_once=adapters, output_dir=""
    )


def table(seconds: float, weight_bytes: int = 100, activation_bytes: int = 10) -> Table:
    part = Cost(0.0, 0)
    return Table(part, (Cost(seconds, weight_bytes, activation_bytes),) * 6, part)


def cut(
    monkeypatch: pytest.MonkeyPatch,
    config: Any,
    tables: list[Table],
    memory: list[tuple[str, str, int | None]],
) -> list[int]:
    """The cut of the first of some processes that have measured these tables."""
    found = [
        {"kind": str(rank), "table": asdict(table), "memory": list(place)}
        for rank, (table, place) in enumerate(zip(tables, memory, strict=True))
    ]
    monkeypatch.setattr(mlora.planning.profile_stage, "profile_base", lambda *arguments, **options: tables[0])
    world: Any = SimpleNamespace(gather=lambda *_: found, process=SimpleNamespace(host="here"))
    return measured_cut(config, world, StageOptions(CPU, torch.float32), [8])


def test_the_slowest_of_each_stage_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    free: list[tuple[str, str, int | None]] = [("here", "cpu", None)] * 4
    both = config(stages=2, replicas=2)
    assert cut(monkeypatch, both, [table(1.0), table(1.0), table(1.0), table(1.0)], free) == [3, 3]
    assert cut(monkeypatch, both, [table(1.0), table(1.0), table(2.0), table(1.0)], free) == [2, 4]


def test_memory_moves_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    two = config(stages=2)  # 4 and 1 micro-batches at once: 140 and 110 bytes a block
    alike = [table(1.0), table(1.0)]
    assert held_by(two) == [4, 1]
    assert cut(monkeypatch, two, alike, [("a", "cuda:0", 10_000), ("b", "cuda:0", 10_000)]) == [3, 3]
    assert cut(monkeypatch, two, alike, [("a", "cuda:0", 300), ("b", "cuda:0", 10_000)]) == [2, 4]
    shared = [("a", "cpu", 2 * 450)] * 2
    assert cut(monkeypatch, two, alike, [*shared]) == [3, 3]
    expected = r"stage \d with blocks \d to \d needs .*; name pipeline.partition to try one all the same"
    with pytest.raises(ValueError, match=expected):
        cut(monkeypatch, two, alike, [("a", "cpu", 2 * 300)] * 2)


@pytest.mark.parametrize(
    ("pipeline", "adapters", "expected"),
    [
        ({"stages": 4}, 2, [2, 2, 2, 1]),
        ({"stages": 3, "replicas": 2}, 4, [2, 2, 1]),
        ({"stages": 3, "schedule": "1f1b", "micro_batches": 8}, 5, [3, 2, 1]),
        ({"stages": 3, "schedule": "gpipe", "micro_batches": 8}, 5, [8, 8, 8]),
    ],
)
def test_micro_batches_that_a_stage_holds(pipeline: Any, adapters: int, expected: list[int]) -> None:
    assert held_by(config(adapters, **pipeline)) == expected
