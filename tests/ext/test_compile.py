"""A converted decoder layer, compiled whole: new layouts, steps and layers recompile nothing."""

import pytest
import torch
from models import llama
from peft import LoraConfig
from tolerances import assert_same_up_to_rounding
from transformers import T5Config, T5ForConditionalGeneration

import mlora_ext as mx

NAMES = ["a", "b", "c"]


@pytest.fixture
def model() -> torch.nn.Module:
    torch._dynamo.reset()
    configs = {
        "a": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, init_lora_weights=False),
        "b": LoraConfig(r=7, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
        "c": LoraConfig(r=8, target_modules=["up_proj", "q_proj"], lora_dropout=0.3, init_lora_weights=False),
    }
    return mx.convert_model(llama(), configs).train()


def random_layout(rows: int) -> mx.SegmentLayout:
    """The first row is the base's: it attends to itself only, so its query has no gradient but rounding."""
    cuts = sorted(torch.randint(1, rows + 1, (int(torch.randint(1, 9, ())),)).tolist())
    lengths = [1, *(b - a for a, b in zip([1, *cuts], [*cuts, rows], strict=True))]
    return mx.SegmentLayout.from_lengths(lengths, [-1, *torch.randint(-1, 3, (len(lengths) - 1,)).tolist()])


def run(part: torch.nn.Module, model: torch.nn.Module, x: torch.Tensor, **more: tuple) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = part(x, **more)
    wanted = [x, *(p for p in model.model.layers.parameters() if p.requires_grad)]
    return [
        y.detach(),
        *(g for g in torch.autograd.grad(y.sum(), wanted, allow_unused=True) if g is not None),
    ]


def test_layouts_steps_and_layers_recompile_nothing(model: torch.nn.Module) -> None:
    rows = 24
    position = torch.arange(rows).unsqueeze(0)
    blocks = [torch.compile(layer, fullgraph=True, backend="aot_eager") for layer in model.model.layers]
    for step in range(20):
        x = torch.randn(1, rows, 32)
        rotary = model.model.rotary_emb(x, position)
        with (
            mx.route(model, random_layout(rows), NAMES, steps=[step, 2 * step, 7]),
        ):
            for index, (layer, block) in enumerate(zip(model.model.layers, blocks, strict=True)):
                expected = run(layer, model, x, position_embeddings=rotary)
                with torch._dynamo.config.patch(error_on_recompile=step + index > 0):
                    got = run(block, model, x, position_embeddings=rotary)
                for one, other in zip(got, expected, strict=True):
                    torch.testing.assert_close(one, other)


def test_row_counts_recompile_nothing(model: torch.nn.Module) -> None:
    layer = model.model.layers[0]
    block = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for step, rows in enumerate([12, 17, 33, 20, 50]):
        x = torch.randn(1, rows, 32)
        rotary = model.model.rotary_emb(x, torch.arange(rows).unsqueeze(0))
        with (
            mx.route(model, random_layout(rows), NAMES),
            torch._dynamo.config.patch(error_on_recompile=step > 0),
        ):
            for one, other in zip(
                run(block, model, x, position_embeddings=rotary),
                run(layer, model, x, position_embeddings=rotary),
                strict=True,
            ):
                torch.testing.assert_close(one, other)


def test_compiled_layers_leave_held_gradients_to_autograd(model: torch.nn.Module) -> None:
    """A graph has no place for additions behind autograd's back."""
    layer, rows = model.model.layers[0], 12
    x, rotary = (
        torch.randn(1, rows, 32),
        model.model.rotary_emb(torch.zeros(1), torch.arange(rows).unsqueeze(0)),
    )
    block = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with mx.route(model, random_layout(rows), NAMES, steps=[1, 2, 3]):
        expected = run(layer, model, x, position_embeddings=rotary)
        model.mlora_router.accumulates = True
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        model.mlora_router.moved()
        for one, other in zip(run(block, model, x, position_embeddings=rotary), expected, strict=True):
            torch.testing.assert_close(one, other)
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("part", ["mlp", pytest.param("block", marks=pytest.mark.nightly)])
def test_inductor(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """The default backend: compiled to C++, once for all layouts, steps and layers."""
    # The cache on the disk takes no note of ATEN_CPU_CAPABILITY: it returns code for another instruction set
    # than the one that the compiler is then told.
    monkeypatch.setattr(torch._inductor.config, "fx_graph_cache", False)
    rows = 24
    parts = [layer if part == "block" else layer.mlp for layer in model.model.layers]
    compiled = [torch.compile(one, fullgraph=True) for one in parts]
    for step in range(3):
        x = torch.randn(1, rows, 32)
        rotary = model.model.rotary_emb(x, torch.arange(rows).unsqueeze(0))
        more = {"position_embeddings": rotary} if part == "block" else {}
        with mx.route(model, random_layout(rows), NAMES, steps=[step, 2 * step, 7]):
            for index, (one, other) in enumerate(zip(compiled, parts, strict=True)):
                with torch._dynamo.config.patch(error_on_recompile=step + index > 0):
                    got = run(one, model, x, **more)
                for place, (mine, theirs) in enumerate(zip(got, run(other, model, x, **more), strict=True)):
                    assert_same_up_to_rounding(mine, theirs, f"step {step}, layer {index}, result {place}")


@pytest.mark.parametrize("how", ["adapter_names", pytest.param("route", marks=pytest.mark.nightly)])
def test_whole_model_is_one_graph(model: torch.nn.Module, how: str) -> None:
    """Its own forward builds the route outside of the graph."""
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    parameters = [p for p in model.parameters() if p.requires_grad]
    ids = torch.randint(2, 61, (3, 8))

    def gradients(forward: torch.nn.Module, step: int) -> tuple[torch.Tensor, ...]:
        model.mlora_router.step = step
        if how == "route":
            with mx.route(model, layout, NAMES):
                loss = forward(input_ids=ids, labels=ids).loss
        else:
            loss = forward(input_ids=ids, labels=ids, adapter_names=names).loss
        assert model.mlora_router.step == step + 1
        return (loss, *torch.autograd.grad(loss, parameters))

    for step in range(4):
        layout, names = random_layout(24), [NAMES[(step + i) % 3] for i in range(3)]
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            got = gradients(compiled, step)
        for one, other in zip(got, gradients(model, step), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.nightly
def test_an_encoder_and_a_decoder_of_other_lengths() -> None:
    """The graph that one made does not serve the other: it ran along its route, and was wrong."""
    torch._dynamo.reset()
    config = T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    targets = {"target_modules": ["q", "v", "wi"], "init_lora_weights": False}
    configs = {"a": LoraConfig(r=4, **targets), "b": LoraConfig(r=7, **targets)}
    model = mx.convert_model(T5ForConditionalGeneration(config), configs).eval()
    compiled = torch.compile(model, backend="eager")
    for read, written in [(9, 5), (5, 9)]:
        batch = {"input_ids": torch.randint(2, 61, (3, read)), "labels": torch.randint(2, 61, (3, written))}
        names = ["a", "b", "__base__"]
        expected = model(**batch, adapter_names=names).logits
        torch.testing.assert_close(compiled(**batch, adapter_names=names).logits, expected)


def test_layers_that_the_backend_cuda_serves_together_are_compiled_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The choice of the backend is replaced; the compiled operator goes by the tensors' device."""
    from mlora_ext.layers import fused_projections, linear
    from mlora_ext.ops import functional

    torch._dynamo.reset()
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, init_lora_weights=False)
    model = mx.convert_model(llama(), dict.fromkeys(NAMES, config)).train()
    x, position = torch.randn(1, 12, 32), torch.arange(12).unsqueeze(0)
    more = {"position_embeddings": model.model.rotary_emb(x, position)}
    with mx.route(model, random_layout(12), NAMES, steps=[1, 2, 3]):
        expected = run(model.model.layers[0], model, x, **more)
        for part in (fused_projections, functional):
            monkeypatch.setattr(part, "backend_for", lambda *_: "cuda")
        monkeypatch.setattr(linear, "chosen_backend", lambda: "cuda")
        block = torch.compile(model.model.layers[0], fullgraph=True, backend="aot_eager")
        for one, other in zip(run(block, model, x, **more), expected, strict=True):
            torch.testing.assert_close(one, other)
