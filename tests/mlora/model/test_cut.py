"""A model cut into stages: what they compute together is what the whole model computes."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deep_models import BLOCKS, CPU, DEEP, cut, deep, spans
from mlora.data.micro_batch import MicroBatch
from mlora.data.packing import pack
from mlora.engine.stage_worker import StageWorker
from mlora.model.base_model import BaseModel
from mlora.model.cut import BlockSpan, cut_model
from mlora.model.load import load_base
from mlora.objectives.token_losses import Owners, chunked_losses
from peft import LoraConfig
from tiny_models import VOCABULARY, make, samples
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
)

import mlora_ext
from tests.tolerances import assert_same_up_to_rounding


def run_stage(
    base: BaseModel, batch: MicroBatch, steps: Sequence[int], received: torch.Tensor | None = None
) -> torch.Tensor:
    """Run a micro-batch through a stage."""
    given = [] if received is None else [received]
    output = StageWorker(base, CPU).forward(given, replace(batch, steps=steps))
    assert isinstance(output, torch.Tensor)
    return output


def lora(family: str) -> dict[str, LoraConfig]:
    """Two adapters of different ranks, targets and dropouts."""
    every = {"opt": ["q_proj", "fc2"], "mixtral": ["q_proj", "o_proj"]}.get(family, "all-linear")
    some = {"gpt2": ["c_attn"], "phi3": ["qkv_proj"]}.get(family, ["q_proj", "v_proj"])
    options = {"init_lora_weights": False}
    return {
        "a": LoraConfig(r=4, target_modules=every, lora_dropout=0.3, **options),
        "b": LoraConfig(r=3, target_modules=some, lora_dropout=0.1, **options),
    }


def prepared(base: BaseModel, family: str, checkpointing: bool = False) -> BaseModel:
    """With its adapters, in training mode."""
    for name, config in lora(family).items():
        mlora_ext.add_adapter(base.model, name, config, seed=3)
    base.model.train()
    if checkpointing:
        base.checkpoint_activations()
    return base


def micro_batch() -> MicroBatch:
    data = {"a": samples(3, 15, seed=1), "b": samples(2, 9, seed=2), None: samples(1, 7, seed=3)}
    return pack(data, row0={"a": 7})


def run(stages: list[BaseModel], batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward, loss and backward over a chain of stages; returns the last output and the loss."""
    received, ends = None, []
    for base in stages:
        if received is not None:
            received = received.detach().requires_grad_()
        with base.packed():
            output = run_stage(base, batch, (2, 5), received)
        ends.append((received, output))
        received = output
    head = stages[-1].frozen_head()
    assert head is not None
    owners = Owners(batch.counts, [1.0] * len(batch.names))
    total = chunked_losses(ends[-1][1], head, batch.rows.long(), batch.targets.long(), owners).total
    gradient = None
    for base, (given, output) in reversed(list(zip(stages, ends, strict=True))):
        with base.packed():
            torch.autograd.backward(total if gradient is None else output, gradient)
        gradient = None if given is None else given.grad
    return ends[-1][1].detach(), total.detach()


def gradients(stages: list[BaseModel]) -> dict[str, torch.Tensor]:
    """Every adapter's, by name; each from exactly one stage."""
    found: dict[str, torch.Tensor] = {}
    for base in stages:
        for name in ("a", "b"):
            for key, p in mlora_ext.adapter_parameters(base.model, name).items():
                if not p.is_meta:
                    assert key not in found
                    assert p.grad is not None, key
                    found[key] = p.grad
                else:
                    assert p.grad is None
    return found


def cuts() -> list[object]:
    """Every family at every number of stages; each at one of them before each change."""
    found = []
    for place, family in enumerate(DEEP):
        for turn, (stages, checkpointing) in enumerate([(2, False), (3, True), (4, False)]):
            marks = () if turn == place % 3 else pytest.mark.nightly
            name = f"{family}-{stages}{'-checkpointed' * checkpointing}"
            found.append(pytest.param(family, stages, checkpointing, marks=marks, id=name))
    return found


@pytest.mark.parametrize(("family", "stages", "checkpointing"), cuts())
def test_stages_are_the_whole_model(family: str, stages: int, checkpointing: bool) -> None:
    whole = [prepared(load_base(deep(family), CPU, torch.float32), family, checkpointing)]
    parts = [prepared(base, family, checkpointing) for base in cut(deep(family), stages)]
    batch = micro_batch()
    expected, got = run(whole, batch), run(parts, batch)
    for one, other, what in zip(got, expected, ["hidden", "loss"], strict=True):
        assert_same_up_to_rounding(one, other, what, 1e-6)
    mine, theirs = gradients(parts), gradients(whole)
    assert mine.keys() == theirs.keys()
    for key in theirs:
        assert_same_up_to_rounding(mine[key], theirs[key], key, 1e-6)
    assert all(float(theirs[key].norm()) > 0 for key in theirs if "lora_B" in key)


def test_dropout_counts_the_layers_of_the_whole_model() -> None:
    whole = load_base(deep("llama"), CPU, torch.float32)
    parts = cut(deep("llama"), 3)
    expected = {key: m.index for key, m in whole.model.named_modules() if hasattr(m, "lora_A")}
    assert len(set(expected.values())) == len(expected) == 7 * BLOCKS
    for base in parts:
        assert {key: m.index for key, m in base.model.named_modules() if hasattr(m, "lora_A")} == expected


def test_a_checkpointed_stage_recomputes_its_own_blocks_only() -> None:
    base = prepared(cut(deep("llama"), 3)[1], "llama", checkpointing=True)
    calls: list[int] = []
    for index, block in enumerate(base.model.model.layers):
        block.mlp.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    received = torch.randn(micro_batch().input_ids.numel(), base.hidden_size, requires_grad=True)
    with base.packed():
        run_stage(base, micro_batch(), (0, 0), received).sum().backward()
    assert calls == [2, 2]
    assert received.grad is not None


def test_a_stage_holds_its_own_tensors_only() -> None:
    for base in cut(deep("gpt2"), 3):
        span = base.span
        assert span is not None
        real = {name for name, p in base.model.named_parameters(remove_duplicate=False) if not p.is_meta}
        blocks = {int(name.split(".")[2]) for name in real if name.startswith("transformer.h.")}
        assert blocks == set(range(span.first, span.last))
        outer = {name.rpartition(".")[0] for name in real if not name.startswith("transformer.h.")}
        first, last = {"transformer.wte", "transformer.wpe"}, {"transformer.ln_f", "lm_head"}
        assert outer == (first if span.is_first else set()) | (last if span.is_last else set())
        assert base.is_last is span.is_last


def test_outside_of_a_pass_the_blocks_are_an_ordinary_list() -> None:
    base = cut(deep("llama"), 2)[1]
    layers = base.model.model.layers
    assert len(layers) == BLOCKS
    assert list(layers) == [base.model.get_submodule(f"model.layers.{i}") for i in range(BLOCKS)]
    assert layers[1:3][0] is layers[1]


def test_an_adapter_on_the_head_belongs_to_the_last_stage() -> None:
    config = LoraConfig(r=3, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    outputs = []
    for stages in ([load_base(deep("llama"), CPU, torch.float32)], cut(deep("llama"), 2)):
        received = None
        for base in stages:
            mlora_ext.add_adapter(base.model, "a", config, seed=3)
            with base.packed():
                received = run_stage(base, pack({"a": samples(3, 9, seed=1)}), (0,), received)
        outputs.append(received.detach())
    assert outputs[0].shape[1] == VOCABULARY
    assert_same_up_to_rounding(outputs[1], outputs[0], "logits", 1e-6)


def test_one_stage_is_the_whole_model() -> None:
    base = load_base(deep("llama"), CPU, torch.float32, BlockSpan(0, 1, 0, BLOCKS))
    assert (base.cut, base.span, base.is_last, base.hidden_size) == (None, None, True, 32)


@pytest.mark.parametrize(
    "span",
    [
        BlockSpan(2, 2, 2, 4),
        BlockSpan(0, 2, 1, 2),
        BlockSpan(0, 2, 0, 4),
        BlockSpan(1, 2, 2, 3),
        BlockSpan(1, 3, 2, 2),
        BlockSpan(1, 2, 2, 9),
    ],
    ids=str,
)
def test_spans_that_no_stage_can_have(span: BlockSpan) -> None:
    with pytest.raises(
        ValueError, match=r"^span: stage . of . cannot have blocks . to -?\d: LlamaForCausalLM has 4 blocks"
    ):
        cut_model(deep("llama"), span)


def per_layer_inputs() -> PreTrainedModel:
    """Every block adds a projection of the token's own embedding."""
    config = AutoConfig.for_model(
        "gemma4_text",
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=48,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=8,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=5,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config)


def several_streams() -> PreTrainedModel:
    """Blocks hand on two versions of the hidden state."""
    config = AutoConfig.for_model(
        "gemma3n_text",
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=[48] * BLOCKS,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_kv_shared_layers=0,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * BLOCKS,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=5,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config)


def looking_back() -> PreTrainedModel:
    """Without any error, every block adds the embedding that the model began with."""
    model, seen = deep("llama"), []

    def begin(body: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        embedded = kwargs.get("inputs_embeds")
        seen[:] = [body.embed_tokens(kwargs["input_ids"]) if embedded is None else embedded]

    model.model.register_forward_pre_hook(begin, with_kwargs=True)
    for block in model.model.layers:
        block.register_forward_hook(lambda module, args, output: output + 0.1 * seen[0])
    return model


@pytest.mark.parametrize(
    ("build", "stage", "message"),
    [
        (per_layer_inputs, 1, "Gemma4ForCausalLM .*: block 2 or a later one uses more than the hidden state"),
        (several_streams, 0, "Gemma3nForCausalLM .*: expected its blocks to return 32 values"),
        (several_streams, 1, "Gemma3nForCausalLM .*: block 2 or a later one uses more than the hidden state"),
        (looking_back, 1, "LlamaForCausalLM .*: block 2 or a later one uses more than the hidden state"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(build, stage: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^base_model: {message}.*$"):
        load_base(build(), CPU, torch.float32, spans(2)[stage])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_stage_checks_its_packed_rows(stage: int) -> None:
    """A block that looks at all rows of a batch is found by the stage that has it, and by no other."""
    model = deep("llama")
    model.model.layers[2].register_forward_hook(lambda module, args, output: output + output.mean(1, True))
    if stage == 1:
        with pytest.raises(ValueError, match="packed and unpacked sequences give different hidden states"):
            load_base(model, CPU, torch.float32, spans(3)[stage])
    else:
        load_base(model, CPU, torch.float32, spans(3)[stage])


def test_the_last_stage_checks_its_head() -> None:
    model = deep("llama")
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] + (args[0].dim() > 2),))
    load_base(copy.deepcopy(model), CPU, torch.float32, spans(2)[0])
    with pytest.raises(ValueError, match="unknown step after the head"):
        load_base(model, CPU, torch.float32, spans(2)[1])


def test_weights_of_a_stage_that_are_no_numbers_are_named() -> None:
    model = deep("llama")
    model.model.layers[2].mlp.up_proj.weight.data.fill_(float("nan"))
    load_base(copy.deepcopy(model), CPU, torch.float32, spans(4)[1])
    with pytest.raises(
        ValueError, match="LlamaForCausalLM: its hidden states contain NaN or infinity; check its weights"
    ):
        load_base(model, CPU, torch.float32, spans(4)[2])


def test_no_list_of_blocks() -> None:
    model = make("llama")
    model.model.layers = torch.nn.ModuleDict({str(i): block for i, block in enumerate(model.model.layers)})
    with pytest.raises(ValueError, match="expected one list of decoder blocks, found none"):
        cut_model(model, BlockSpan(0, 2, 0, 1))


def test_two_lists_of_blocks() -> None:
    model = make("llama")
    model.model.others = copy.deepcopy(model.model.layers)
    with pytest.raises(ValueError, match=r"found model\.layers, model\.others"):
        cut_model(model, BlockSpan(0, 2, 0, 1))


def test_blocks_are_found_without_the_models_word(tmp_path: Path) -> None:
    """By the longest list of modules of one class; lists inside of blocks, as of experts, do not count."""
    model = MptForCausalLM(
        MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=VOCABULARY, max_seq_len=64)
    )
    model._no_split_modules = None
    assert cut_model(model, BlockSpan(1, 2, 1, 2)).blocks == "transformer.blocks"
