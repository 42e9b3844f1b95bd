"""Packed rows give a model's own logits and gradients; what cannot be packed is refused by name."""

from pathlib import Path

import pytest
import torch
import transformers
from mlora.engine.engine import Engine
from mlora.memory.meter import LiveMemory
from mlora.model import attention
from mlora.model.attention import PackedSequences, packed_attention
from mlora.model.base_info import BaseInfo
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from tiny_models import FAMILIES, VOCABULARY, WINDOW, make, samples
from torch import nn
from torch.nn.attention import varlen
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    MptConfig,
    MptForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    PreTrainedModel,
)

LENGTHS = ((4, 9, 9, 9, 1, 13), (7, 7, 7))


def packed_hidden(engine: Engine, ids: list[torch.Tensor]) -> torch.Tensor:
    base = engine._base
    lengths = tuple(len(row) for row in ids)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    with base.packed():
        return base.hidden(torch.cat(ids).unsqueeze(0), positions, PackedSequences.of(lengths, "cpu"))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_are_the_models_own(family: str, lengths: tuple[int, ...]) -> None:
    assert max(lengths) > WINDOW
    ids = [torch.randint(VOCABULARY, (n,)) for n in lengths]
    plain = make(family).eval()
    with torch.no_grad():
        own = torch.cat([plain(input_ids=row[None]).logits[0] for row in ids])
        engine = Engine(make(family).eval())
        got = engine._base.logits(packed_hidden(engine, ids))
    assert (got - own).abs().max() <= 1e-5 * own.abs().max()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_gradients_through_packed_attention(family: str) -> None:
    ids = [torch.randint(VOCABULARY, (n,)) for n in LENGTHS[0]]
    plain, engine = make(family), Engine(make(family))
    plain.set_attn_implementation("eager")
    got, own = (model.get_input_embeddings().weight.requires_grad_() for model in (engine.model, plain))
    upstream = torch.randn(sum(LENGTHS[0]), 32)
    packed_hidden(engine, ids).backward(upstream)
    torch.cat([plain.base_model(input_ids=row[None])[0][0] for row in ids]).backward(upstream)
    assert (got.grad - own.grad).abs().max() <= 1e-4 * own.grad.abs().max()


def attended(
    heads: tuple[int, int], window: int | None, dtype: torch.dtype, device: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results and gradients of packed attention over random rows, and of eager attention in fp64."""
    lengths = LENGTHS[0]
    sequences = PackedSequences.of(lengths, device)
    rows = [torch.randn(1, h, sum(lengths), 16, device=device).to(dtype) for h in (*heads, heads[1])]
    upstream = torch.randn(1, sum(lengths), heads[0], 16, device=device).to(dtype)
    rows = [row.requires_grad_() for row in rows]
    got, _ = packed_attention(
        nn.Module(), *rows, None, packed_sequences=sequences, scaling=0.3, sliding_window=window
    )
    found = [got, *torch.autograd.grad(got, rows, upstream)]
    wide = [row.detach().double().requires_grad_() for row in rows]
    parts = []
    for q, k, v in zip(*(row.split(lengths, dim=2) for row in wide), strict=True):
        k, v = (x.repeat_interleave(heads[0] // heads[1], dim=1) for x in (k, v))
        seen = sequences.seen(q.shape[2], window)
        parts.append((0.3 * q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ v)
    exact = torch.cat(parts, dim=2).transpose(1, 2)
    return found, [exact, *torch.autograd.grad(exact, wide, upstream.double())]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("groups", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_flash_attention_is_called_as_each_torch_has_it(
    groups: bool, heads: tuple[int, int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in with the signature of PyTorch's function, which needs a GPU."""

    def attend(q, k, v, ends, ends_k, max_q, max_k, scale, window_size, enable_gqa=False):
        assert enable_gqa == (q.shape[1] != k.shape[1])
        assert ends is ends_k
        assert max_q == max_k == max(LENGTHS[0])
        assert window_size == (-1 if window is None else window - 1, 0)
        outs = []
        for each in zip(*(x.split(LENGTHS[0]) for x in (q, k, v)), strict=True):
            query, key, value = (x.transpose(0, 1)[None] for x in each)
            seen = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
            seen = seen if window is None else seen.triu(1 - window)
            how = {"attn_mask": seen, "scale": scale, "enable_gqa": enable_gqa}
            outs.append(nn.functional.scaled_dot_product_attention(query, key, value, **how)[0])
        return torch.cat(outs, dim=1).transpose(0, 1)

    def of_2_11(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
        return_aux=None, scale=None, window_size=(-1, -1),
    ):  # fmt: skip
        return attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)

    def of_2_13(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
        return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False, seqused_k=None,
        block_table=None, num_splits=None,
    ):  # fmt: skip
        return attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, enable_gqa)

    monkeypatch.setattr(varlen, "varlen_attn", of_2_13 if groups else of_2_11)
    monkeypatch.setattr(attention, "_flash_serves", lambda query, value: True)
    for got, exact in zip(*attended(heads, window, torch.float32, "cpu"), strict=True):
        assert (got - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_on_a_gpu(heads: tuple[int, int], window: int | None, dtype: torch.dtype) -> None:
    for got, exact in zip(*attended(heads, window, dtype, "cuda"), strict=True):
        most = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
        assert (got - exact).abs().max() <= most * exact.abs().max()


def test_sinks_equal_transformers_eager_attention() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    length, module = 9, nn.Module()
    module.num_key_value_groups, module.sinks = 2, torch.randn(4)
    q, k, v = torch.randn(1, 4, length, 8), torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8)
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    expected, _ = eager_attention_forward(module, q, k, v, mask, scaling=0.3)
    sequences = PackedSequences.of((length,), "cpu")
    got, _ = packed_attention(
        module, q, k, v, None, packed_sequences=sequences, scaling=0.3, s_aux=module.sinks
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_equal_lengths_are_views() -> None:
    """One batched call, and nothing is copied on the way in or out."""
    rows = torch.randn(1, 12, 2, 8)
    seen = []
    original = attention.F.scaled_dot_product_attention

    def watch(q: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        seen.append(q)
        return original(q, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention.F, "scaled_dot_product_attention", watch)
        q = rows.transpose(1, 2)
        packed_attention(nn.Module(), q, q, q, None, packed_sequences=PackedSequences.of((4, 4, 4), "cpu"))
    assert [list(q.shape) for q in seen] == [[3, 2, 4, 8]]
    assert seen[0].data_ptr() == rows.data_ptr()


def test_layers_share_one_mask() -> None:
    """Autograd keeps what each layer adds to it: as much as without a window."""

    def kept(window: int | None) -> int:
        sequences, memory = PackedSequences.of((8, 24, 24), "cpu"), LiveMemory()
        with memory:
            q = torch.randn(1, 2, 56, 8, requires_grad=True)
            outs = [packed(q, sequences, window)]
            first = memory.live
            outs += [packed(q, sequences, window) for _ in range(3)]
        assert len(outs) == 4
        return memory.live - first

    assert kept(5) == kept(None)


def packed(q: torch.Tensor, sequences: PackedSequences, window: int | None) -> torch.Tensor:
    return packed_attention(nn.Module(), q, q, q, None, packed_sequences=sequences, sliding_window=window)[0]


@pytest.mark.parametrize("window", [None, 1, 5, 30])
def test_a_band_is_what_queries_see(window: int | None) -> None:
    sequences = PackedSequences.of((9, 14), "cpu")
    for length in sequences.lengths:
        distance = torch.arange(length)[:, None] - torch.arange(length)
        seen = (distance >= 0) & (distance < (window or length))
        band = sequences.band(length, window, torch.float32)
        assert torch.equal(band == 0, seen)
        assert torch.equal(band.isinf(), ~seen)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packed_sequences": None}, "does not pass packed_sequences"),
        ({"is_causal": False}, "later tokens"),
        ({"dropout": 0.1}, "dropout"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"attention_mask": torch.zeros(1)}, "mask"),
    ],
)
def test_attention_refuses_what_it_does_not_do(changes: dict[str, object], message: str) -> None:
    q = torch.randn(1, 2, 4, 8)
    arguments = {"attention_mask": None, "packed_sequences": PackedSequences.of((4,), "cpu"), **changes}
    with pytest.raises(ValueError, match=message):
        packed_attention(nn.Module(), q, q, q, **arguments)


def test_ignored_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose attention layers do not hand their window on is refused, however long the window."""
    model = make("mistral")
    model.config.sliding_window = 4096
    original = attention.packed_attention

    def forgetful(*args: object, **kwargs: object) -> object:
        kwargs.pop("sliding_window", None)
        return original(*args, **kwargs)

    monkeypatch.setattr(
        "mlora.model.base_model.register_packed_attention",
        lambda: transformers.AttentionInterface.register(attention.PACKED_ATTENTION, forgetful),
    )
    with pytest.raises(ValueError, match="MistralForCausalLM, layer 0: the config says sliding window 4096"):
        Engine(model)


def test_other_layers_are_refused_by_name() -> None:
    config = transformers.MambaConfig(
        hidden_size=16, num_hidden_layers=1, vocab_size=VOCABULARY, state_size=4
    )
    with pytest.raises(
        ValueError, match="MambaForCausalLM has layers of type linear_attention; mlora trains"
    ):
        Engine(transformers.MambaForCausalLM(config))


def test_other_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gemma2")
    model.config.final_logit_softcapping = None
    original = model.forward
    monkeypatch.setattr(model, "forward", lambda **kwargs: _doubled(original(**kwargs)))
    with pytest.raises(ValueError, match="unknown step after the head"):
        Engine(model)


def _doubled(output: transformers.modeling_outputs.CausalLMOutput) -> object:
    output.logits = output.logits * 2
    return output


SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def jittering() -> PreTrainedModel:
    """Its router multiplies the whole batch by random numbers in training."""
    config = MixtralConfig(
        **SHAPE,
        num_key_value_heads=2,
        intermediate_size=48,
        num_local_experts=4,
        router_jitter_noise=0.3,
        initializer_range=0.2,
    )
    return MixtralForCausalLM(config)


def skipping() -> PreTrainedModel:
    """It leaves out whole layers at random in training."""
    return OPTForCausalLM(
        OPTConfig(**SHAPE, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64, layerdrop=0.9)
    )


@pytest.mark.parametrize("make", [jittering, skipping])
def test_noise_for_a_whole_batch_is_off(make) -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="layerdrop or router jitter of the base model was set to 0"):
        engine = Engine(make())
    engine.create_adapter(
        "a", LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), OptimConfig(total_steps=9)
    )
    batch = {"a": samples(3, 9, seed=1)}
    losses = {engine.forward_backward(batch)["a"].loss_sum for _ in range(4)}
    assert losses == {engine.evaluate(batch)["a"].loss_sum}


def test_a_model_that_breaks_on_packed_rows_is_refused_in_one_line() -> None:
    model = MptForCausalLM(
        MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=VOCABULARY, max_seq_len=64)
    )
    with pytest.raises(ValueError, match=r"^base_model: MptForCausalLM cannot run packed rows: .*$"):
        Engine(model)


def test_weights_that_are_no_numbers_are_named() -> None:
    model = skipping()
    next(model.parameters()).data.fill_(float("nan"))
    with pytest.raises(
        ValueError, match="OPTForCausalLM: its own logits contain NaN or infinity; check its weights"
    ):
        Engine(model)


def test_long_rope_is_trained_below_its_extension(tmp_path: Path) -> None:
    """Past the original length, one long sample would turn the rows of every adapter by other angles."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 32,
    }
    config = Phi3Config(
        **SHAPE,
        pad_token_id=0,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_parameters=rope,
    )
    config.save_pretrained(tmp_path)
    assert BaseInfo(str(tmp_path)).max_positions == 32


def test_a_copy_that_needs_whole_samples_is_refused_in_one_line() -> None:
    model = OPTForCausalLM(OPTConfig(**SHAPE, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64))
    model.model.decoder.layers[0].add_module("smooth", torch.nn.Conv1d(4, 4, 3))
    engine = Engine(model)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["smooth"])
    with pytest.raises(ValueError, match=r"layers\.0\.smooth has convolutions or batch norm.*packs the rows"):
        engine.create_adapter("a", config, OptimConfig(total_steps=9))
    engine.create_adapter("a", LoraConfig(r=2, target_modules=["q_proj"]), OptimConfig(total_steps=9))
