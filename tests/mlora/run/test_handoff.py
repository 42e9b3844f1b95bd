"""Exported, portable and merged folders: PEFT and Transformers give the logits of the adapter in its run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlora
import pytest
import torch
from mlora.config.config_file import resolve_config
from mlora.errors import RunError
from mlora.run.handoff.export import export_adapter
from mlora.run.handoff.merge import merge_adapter
from mlora.run.handoff.model_card import card_text
from mlora.run.handoff.servers import serving_lines
from mlora.store.checkpoint import list_checkpoints
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from tests.mlora.limited_runs import Watching, interrupt
from tests.mlora.tiny_run import random_tokens, save_base, write_jsonl

IDS = torch.tensor([[5, 9, 77, 130, 8, 251]])
MIXED = {
    "r": 4,
    "lora_alpha": 6,
    "use_rslora": True,
    "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 3},
    "alpha_pattern": {"k_proj": 9},
    "target_modules": "all-linear",
}
LORAS: dict[str, dict[str, Any]] = {
    "mixed": MIXED,
    "few": {"r": 3, "target_modules": ["v_proj", "up_proj"], "layers_to_transform": [1]},
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "pissa": {"r": 2, "init_lora_weights": "pissa", "target_modules": ["o_proj", "down_proj"]},
    "dora": {"r": 2, "use_dora": True, "target_modules": ["q_proj", "v_proj"]},
    "bias": {"r": 2, "lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
    "head": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "rows": {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": [5, 77]},
    "mood": {"r": 2, "target_modules": ["q_proj"], "task_type": "SEQ_CLS"},
}


def _adapter(name: str, lora: dict[str, Any]) -> dict[str, Any]:
    if name == "mood":
        return {"name": name, "dataset": "moods", "num_labels": 3, "lora": lora}
    return {"name": name, "dataset": "ids", "eval_dataset": "ids", "lora": lora}


def _config(folder: Path, base: Path, loras: dict[str, dict[str, Any]], **changes: Any) -> dict[str, Any]:
    write_jsonl(folder / "ids.jsonl", random_tokens(6, 1))
    moods = [{"input_ids": one["input_ids"], "label": i % 3} for i, one in enumerate(random_tokens(6, 2))]
    write_jsonl(folder / "moods.jsonl", moods)
    return {
        "base_model": str(base),
        "output_dir": str(folder / "run"),
        "base_gemm": "aten",
        "device": "cpu",
        "save_total_limit": 9,
        "defaults": {
            "max_steps": 2,
            "learning_rate": 2e-2,
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 2,
        },
        "datasets": [
            {"name": "ids", "path": "ids.jsonl", "format": "tokens"},
            {"name": "moods", "path": "moods.jsonl", "format": "classification"},
        ],
        "adapters": [_adapter(name, lora) for name, lora in loras.items()],
    } | changes


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with biases in its attention, whose head is tied to its embedding."""
    folder = tmp_path_factory.mktemp("tied")
    return save_base(folder, tie_word_embeddings=True, attention_bias=True)


@pytest.fixture(scope="module")
def runs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of an adapter's run, by the adapter's name, trained for two steps.

    There are two runs: in one, a head serves either rows or copies.
    """
    found = {}
    for names in ([name for name in LORAS if name != "rows"], ["rows"]):
        folder = tmp_path_factory.mktemp("runs")
        loras = {name: LORAS[name] for name in names}
        result = mlora.train(resolve_config(_config(folder, base, loras), folder=folder))
        assert {one.state for one in result.adapters.values()} == {"finished"}, result
        found |= dict.fromkeys(names, folder / "run")
    return found


@pytest.fixture(scope="module")
def zoo(runs: dict[str, Path]) -> Path:
    """The folder of the run with adapters of most kinds."""
    return runs["plain"]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def in_peft(base: Path, folder: Path, labels: int | None = None) -> torch.Tensor:
    """The logits of an adapter's folder over its base, in PEFT."""
    if labels:
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels, pad_token_id=0)
    else:
        model = AutoModelForCausalLM.from_pretrained(base)
    return logits(PeftModel.from_pretrained(model, str(folder)))


def of_run(base: Path, run: Path, name: str) -> torch.Tensor:
    return in_peft(base, run / "adapters" / name, 3 if name == "mood" else None)


@pytest.mark.parametrize("name", ["mixed", "dora", "rows", "mood"])
def test_an_export_is_the_runs_folder_with_tokenizer_and_card(
    runs: dict[str, Path], base: Path, tmp_path: Path, name: str
) -> None:
    done = export_adapter(runs[name], name, output=tmp_path / "out")
    assert (done.folder, done.weights.step, done.weights.checkpoint) == (tmp_path / "out", 2, None)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "out" / file).read_bytes() == (runs[name] / "adapters" / name / file).read_bytes()
    assert torch.equal(
        in_peft(base, tmp_path / "out", 3 if name == "mood" else None), of_run(base, runs[name], name)
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<end>"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_the_card_of_a_run_says_how_to_load_its_adapter(zoo: Path, base: Path) -> None:
    from huggingface_hub import ModelCard

    card = ModelCard.load(zoo / "adapters" / "mixed" / "README.md")
    assert card.data.to_dict() == {
        "base_model": str(base),
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": [f"base_model:adapter:{base}", "lora", "mlora-ext", "transformers"],
    }
    assert f"from_pretrained({str(base)!r})" in card.text
    assert "| r | 4 |\n| lora_alpha | 6 |\n" in card.text
    assert "| use_rslora | True |" in card.text
    assert "| Optimizer steps | 2 |" in card.text
    mood = (zoo / "adapters" / "mood" / "README.md").read_text()
    assert "pipeline_tag: text-classification" in mood
    assert f"AutoModelForSequenceClassification.from_pretrained({str(base)!r}, num_labels=3)" in mood


def test_a_card_of_a_merged_model_names_transformers() -> None:
    text = card_text("a", "owner/base", "merged", None, {"Dataset": "a|b"})
    assert "library_name: transformers" in text
    assert "base_model:finetune:owner/base" in text
    assert "| Dataset | a\\|b |" in text
    assert "PeftModel" not in text


@pytest.mark.parametrize(
    ("name", "rank", "filled"),
    [
        ("mixed", 4, set()),
        ("few", 3, {"q_proj", "gate_proj"}),
        ("plain", 4, set()),
        ("pissa", 4, set()),
    ],
)
def test_a_portable_folder_has_one_rank_and_the_same_logits(
    zoo: Path, base: Path, tmp_path: Path, name: str, rank: int, filled: set[str]
) -> None:
    """By what the servers read: vLLM 0.33.0 and SGLang 0.5.23; `docs/runs.md` names their files."""
    out = export_adapter(zoo, name, portable=True, output=tmp_path / "out").folder
    config = json.loads((out / "adapter_config.json").read_text())
    state = load_file(out / "adapter_model.safetensors")
    assert config["r"] == config["lora_alpha"] == rank
    assert not any(config[key] for key in ("rank_pattern", "alpha_pattern", "use_rslora", "use_dora"))
    assert not any(config[key] for key in ("modules_to_save", "exclude_modules", "layers_to_transform"))
    assert (config["bias"], config["init_lora_weights"], config["task_type"]) == ("none", True, "CAUSAL_LM")
    assert isinstance(config["target_modules"], list)
    ends = {tuple(key.split(".")[-2:]) for key in state}
    assert ends == {("lora_A", "weight"), ("lora_B", "weight")}
    layers = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in state}
    named = {one.rpartition(".")[2] for one in config["target_modules"]}
    assert {layer.rpartition(".")[2] for layer in layers} == named
    for key, tensor in state.items():
        assert tensor.shape[0 if "lora_A" in key else 1] == rank, key
        assert tensor.dtype == torch.float32
    zeros = {
        key.split(".")[-3] for key, tensor in state.items() if "lora_B" in key and not tensor.count_nonzero()
    }
    assert zeros == filled
    for block in {layer.rpartition(".self_attn")[0] for layer in layers if "self_attn" in layer}:
        found = {layer.rpartition(".")[2] for layer in layers if layer.startswith(f"{block}.self_attn")}
        assert not found & {"q_proj", "k_proj", "v_proj"} or {"q_proj", "v_proj"} <= found
    torch.testing.assert_close(in_peft(base, out), of_run(base, zoo, name), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dora", "use_dora: neither vLLM nor SGLang serves DoRA"),
        ("bias", "lora_bias: vLLM refuses it, SGLang does not read it"),
        ("head", "modules_to_save: lm_head: servers read the low-rank parts of linear layers only"),
        ("rows", "trainable_token_indices: servers read the low-rank parts of linear layers only"),
        ("mood", "task_type SEQ_CLS: servers read the low-rank parts of linear layers only"),
    ],
)
def test_what_cannot_be_portable_is_refused_and_leaves_nothing(
    runs: dict[str, Path], tmp_path: Path, name: str, expected: str
) -> None:
    with pytest.raises(RunError) as caught:
        export_adapter(runs[name], name, portable=True, output=tmp_path / "out")
    first, advice = str(caught.value).splitlines()
    assert first == f"{name}: cannot be portable: {expected}"
    assert advice == "merge it instead (`mlora merge`), or export it without --portable for PEFT"
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_on_embeddings_cannot_be_portable(tiny_base: Path, tmp_path: Path) -> None:
    loras = {"wide": {"r": 2, "target_modules": ["embed_tokens", "lm_head", "q_proj", "v_proj"]}}
    mlora.train(resolve_config(_config(tmp_path, tiny_base, loras), folder=tmp_path))
    with pytest.raises(RunError) as caught:
        export_adapter(tmp_path / "run", "wide", portable=True)
    told = "not every server reads LoRA on embeddings and the output head"
    for layer, line in zip(("model.embed_tokens", "lm_head"), str(caught.value).splitlines(), strict=False):
        assert line == f"wide: cannot be portable: {layer}: {told}"
    merge_adapter(tmp_path / "run", "wide", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected = of_run(tiny_base, tmp_path / "run", "wide")
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=0)


def test_only_folders_that_servers_read_come_with_their_commands(
    zoo: Path, base: Path, tmp_path: Path
) -> None:
    told = export_adapter(zoo, "plain", output=tmp_path / "plain").served
    assert told == [
        f"vllm serve {base} --enable-lora --lora-modules plain={tmp_path}/plain --max-lora-rank 8",
        f"python -m sglang.launch_server --model-path {base} --enable-lora "
        f"--lora-paths plain={tmp_path}/plain --max-lora-rank 4",
    ]
    (told,) = export_adapter(zoo, "mixed", output=tmp_path / "mixed").served
    assert told == "not every server reads this folder as it is; --portable writes one that they do"
    (told,) = export_adapter(zoo, "mood", output=tmp_path / "mood").served
    assert told.startswith("servers do not read adapters of task_type SEQ_CLS")


@pytest.mark.parametrize(("rank", "vllm"), [(1, 1), (2, 8), (8, 8), (257, 320), (512, 512)])
def test_vllm_gets_the_next_rank_that_it_takes(rank: int, vllm: int) -> None:
    first, second = serving_lines("a/base", "x", Path("/out"), rank)
    assert first.endswith(f" --max-lora-rank {vllm}")
    assert second.endswith(f" --max-lora-rank {rank}")


def test_commands_of_ranks_and_names_that_are_unusual() -> None:
    first, _ = serving_lines("a/base", "x", Path("/out"), 513)
    assert first == "vLLM serves no rank above 512, and this adapter has 513; use `mlora merge`"
    first, second = serving_lines("/my base", "a=b", Path("/o,ut"), 8)
    assert first == (
        "vllm serve '/my base' --enable-lora "
        """--lora-modules '{"name": "a=b", "path": "/o,ut"}' --max-lora-rank 8"""
    )
    assert """--lora-paths '{"lora_name": "a=b", "lora_path": "/o,ut"}'""" in second


@pytest.mark.parametrize("name", [name for name in LORAS if name != "mood"])
def test_a_merged_model_has_the_adapters_logits(
    runs: dict[str, Path], base: Path, tmp_path: Path, name: str
) -> None:
    done = merge_adapter(runs[name], name, tmp_path / "merged")
    assert (done.weights.step, done.notes) == (2, [])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected = of_run(base, runs[name], name)
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(base)), expected, atol=1e-3)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token == "<end>"
    assert (tmp_path / "merged" / "generation_config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]


def test_a_merged_classifier_keeps_its_head(zoo: Path, base: Path, tmp_path: Path) -> None:
    merge_adapter(zoo, "mood", tmp_path / "merged")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert model.config.num_labels == 3
    torch.testing.assert_close(logits(model), of_run(base, zoo, "mood"), atol=1e-5, rtol=0)


@pytest.mark.parametrize("layer", ["embed_tokens", "lm_head"])
def test_merging_a_low_rank_part_of_one_of_two_tied_weights_leaves_the_other(
    base: Path, tmp_path: Path, layer: str
) -> None:
    config = _config(tmp_path, base, {"one": {"r": 2, "target_modules": [layer]}})
    mlora.train(resolve_config(config, folder=tmp_path))
    merge_adapter(tmp_path / "run", "one", tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert not torch.equal(embedding, head)
    torch.testing.assert_close(logits(model), of_run(base, tmp_path / "run", "one"), atol=1e-5, rtol=0)


def test_a_bias_that_no_layer_can_take_is_not_merged(tiny_base: Path, tmp_path: Path) -> None:
    config = _config(tmp_path, tiny_base, {"bias": LORAS["bias"]})
    mlora.train(resolve_config(config, folder=tmp_path))
    with pytest.raises(
        RunError, match=r"bias: cannot be merged: layer model.layers.0.self_attn.q_proj has no"
    ):
        merge_adapter(tmp_path / "run", "bias", tmp_path / "merged")
    assert not list(tmp_path.glob("*merged*"))


def test_merging_loads_the_base_once_and_copies_no_model(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import copy

    loaded, plain = [], PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def counted(kind: Any, *args: Any, **more: Any) -> Any:
        loaded.append(kind.__name__)
        return plain(kind, *args, **more)

    def refuse(model: Any, memo: Any) -> Any:
        raise AssertionError(f"a copy of {type(model).__name__}")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(counted))
    monkeypatch.setattr(PreTrainedModel, "__deepcopy__", refuse, raising=False)
    merge_adapter(zoo, "mixed", tmp_path / "merged")
    assert loaded == ["LlamaForCausalLM"]
    with pytest.raises(AssertionError, match="a copy of"):
        copy.deepcopy(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))


@pytest.fixture(scope="module")
def begun(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was interrupted, with a checkpoint after each iteration."""
    folder = tmp_path_factory.mktemp("begun")
    loras = {name: LORAS[name] for name in ("mixed", "pissa", "mood")}
    config = _config(folder, base, loras)
    config["defaults"] |= {"max_steps": 8, "save_steps": 1}
    config["adapters"][1] |= {"max_steps": 2, "priority": 1}
    result = mlora.train(resolve_config(config, folder=folder), reporter=Watching({("mixed", 4): interrupt}))
    assert result.status == "interrupted"
    return folder / "run"


def test_any_checkpoint_is_what_a_shorter_run_ends_with(begun: Path, zoo: Path, tmp_path: Path) -> None:
    """Both took the same batches; only the number of steps differs."""
    for name in ("mixed", "mood"):
        done = export_adapter(begun, name, checkpoint=2, output=tmp_path / name)
        assert (done.weights.step, done.weights.checkpoint) == (2, 2)
        stored = load_file(done.folder / "adapter_model.safetensors")
        expected = load_file(zoo / "adapters" / name / "adapter_model.safetensors")
        assert stored.keys() == expected.keys()
        for key, tensor in expected.items():  # the other adapters of the batch round products otherwise
            torch.testing.assert_close(stored[key], tensor, atol=1e-5, rtol=0)
        for file in ("adapter_config.json", "labels.json"):
            there = zoo / "adapters" / name / file
            assert (done.folder / file).is_file() == there.is_file()
            if there.is_file():
                assert (done.folder / file).read_bytes() == there.read_bytes()


def test_without_a_checkpoint_the_newest_one_counts(begun: Path, base: Path, tmp_path: Path) -> None:
    done = export_adapter(begun, "mixed", output=tmp_path / "newest")
    assert done.weights.told == "step 4 of 8, checkpoint 4"
    merged = merge_adapter(begun, "mixed", tmp_path / "merged").folder
    expected = in_peft(base, done.folder)
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(merged)), expected, atol=1e-5, rtol=0
    )
    assert export_adapter(begun, "pissa", output=tmp_path / "ended").weights.told == "step 2, as it ended"


def test_a_checkpoint_of_an_adapter_that_had_ended_has_its_last_weights(begun: Path, tmp_path: Path) -> None:
    done = export_adapter(begun, "pissa", checkpoint=3, output=tmp_path / "ended")
    assert (done.weights.step, done.weights.checkpoint) == (2, 3)
    ours, theirs = (
        folder / "adapter_model.safetensors" for folder in (done.folder, begun / "adapters/pissa")
    )
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_checkpoint_needs_neither_data_nor_weights_of_the_base(
    begun: Path, base: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(begun, tmp_path / "run")
    bare = shutil.copytree(base, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(str(base), str(bare)))
    done = export_adapter(run, "mixed", checkpoint=2, output=tmp_path / "out")
    expected = export_adapter(begun, "mixed", checkpoint=2, output=tmp_path / "expected").folder
    assert (done.folder / "adapter_model.safetensors").read_bytes() == (
        expected / "adapter_model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("name", "checkpoint", "expected"),
    [
        ("mixd", None, "has no adapter 'mixd'; did you mean 'mixed'?"),
        ("mixed", 77, "has no checkpoint 77; its checkpoints: 1, 2, 3, 4"),
    ],
)
def test_what_a_run_does_not_have(begun: Path, name: str, checkpoint: int | None, expected: str) -> None:
    with pytest.raises(RunError) as caught:
        export_adapter(begun, name, checkpoint=checkpoint)
    assert str(caught.value) == f"{begun}: {expected}"
    assert not (begun / "exports").exists()


def test_a_run_without_a_checkpoint_has_no_weights_yet(begun: Path, tmp_path: Path) -> None:
    run = shutil.copytree(begun, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(
        RunError, match=r"mixed: has no weights yet: .* has no checkpoint; save_steps says when"
    ):
        export_adapter(run, "mixed")
    (run / "summary.json").unlink()
    with pytest.raises(RunError, match="mixed: has no weights yet"):
        export_adapter(run, "mixed")


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(begun: Path, tmp_path: Path) -> None:
    run = shutil.copytree(begun, tmp_path / "run")
    newest = list_checkpoints(run / "checkpoints")[-1]
    newest.write_bytes(newest.read_bytes()[:100])
    assert export_adapter(run, "mixed").weights.told == "step 3 of 8, checkpoint 3"
    with pytest.raises(RunError, match="is damaged or incomplete"):
        export_adapter(run, "mixed", checkpoint=4)


def test_an_output_that_holds_something_is_refused(zoo: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    for write in (
        lambda: export_adapter(zoo, "plain", output=tmp_path / "out"),
        lambda: merge_adapter(zoo, "plain", tmp_path / "out"),
    ):
        with pytest.raises(RunError, match=r"--output: .*/out is not empty; remove it, or choose another"):
            write()
    assert (tmp_path / "out" / "mine").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
