"""The engine's verbs: accumulation, evaluation, precision, checkpointing, heads, and what it refuses."""

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.data.dataset import Sample
from mlora.data.packing import pack
from mlora.engine.engine import Engine
from mlora.optim.optim_config import OptimConfig
from mlora.optim.step_rule import LossScaler
from peft import LoraConfig, get_peft_model
from tiny_models import VOCABULARY, make, samples
from tiny_run import save_base

import mlora_ext
from mlora_ext.frozen.packed import PackedWeight, packs
from mlora_ext.frozen.plain import PlainWeight

OPTIM = OptimConfig(1e-3, lr_scheduler_type="constant")


def lora(**changes: object) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **changes})


def parameters(engine: Engine, name: str) -> list[torch.nn.Parameter]:
    return list(mlora_ext.adapter_parameters(engine.model, name).values())


def gradients(engine: Engine, name: str) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in parameters(engine, name)]
    engine.discard_gradients(name)
    return found


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() <= tolerance * other.norm()


def test_accumulation_is_one_large_batch() -> None:
    engine = Engine(make("qwen3"))
    for name in ("a", "b"):
        engine.create_adapter(name, lora(), OPTIM)
    batch = samples(6, 15, seed=0)
    whole = engine.forward_backward({"a": batch, "b": batch[:3]})
    expected = {name: gradients(engine, name) for name in ("a", "b")}
    parts = [
        engine.forward_backward({"b": batch[i : i + 1], "a": batch[2 * i : 2 * i + 2]}) for i in range(3)
    ]
    for name in ("a", "b"):
        assert sum(p[name].tokens for p in parts) == whole[name].tokens
        assert sum(p[name].loss_sum for p in parts) == pytest.approx(whole[name].loss_sum, rel=1e-6)
        assert_same(gradients(engine, name), expected[name], 1e-5)


def test_results_are_the_models_own_losses() -> None:
    engine, plain = Engine(make("llama")), make("llama").eval()
    batch = samples(4, 12, seed=3)
    result = engine.evaluate({None: batch})["__base__"]
    with torch.no_grad():
        total = sum(
            float(plain(input_ids=ids, labels=labels).loss) * sample.trained_tokens
            for sample in batch
            for ids, labels in [(torch.tensor([sample.input_ids]), torch.tensor([sample.labels]))]
        )
    assert result.tokens == sum(sample.trained_tokens for sample in batch)
    assert result.loss_sum == pytest.approx(total, rel=1e-5)


def test_evaluation_is_without_dropout_and_leaves_training_alone() -> None:
    engine = Engine(make("llama"), seed=3)
    engine.create_adapter("a", lora(lora_dropout=0.5), OPTIM)
    batch = {"a": samples(3, 12, seed=1)}
    first = engine.forward_backward(batch)["a"].loss_sum
    expected = gradients(engine, "a")
    evaluated = [engine.evaluate(batch)["a"].loss_sum for _ in range(2)]
    assert evaluated[0] == evaluated[1] != first
    assert not any(p.grad.any() for p in parameters(engine, "a"))
    assert engine.forward_backward(batch)["a"].loss_sum == first
    engine.evaluate(batch)
    assert all(torch.equal(a, b) for a, b in zip(gradients(engine, "a"), expected, strict=True))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_activation_checkpointing_gives_the_same_gradients(family: str) -> None:
    results = []
    for checkpointing in (False, True):
        engine = Engine(make(family), gradient_checkpointing=checkpointing, seed=2)
        for name in ("a", "b"):
            engine.create_adapter(name, lora(lora_dropout=0.3), OPTIM)
        engine.forward_backward({"a": samples(3, 12, seed=1), "b": samples(2, 9, seed=2)})
        results.append(gradients(engine, "a") + gradients(engine, "b"))
    assert_same(results[1], results[0], 1e-6)


def test_checkpointing_recomputes() -> None:
    engine = Engine(make("llama"), gradient_checkpointing=True)
    engine.create_adapter("a", lora(), OPTIM)
    calls = []
    engine.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    engine.forward_backward({"a": samples(2, 9, seed=2)})
    assert len(calls) == 2


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_adapter_on_the_head(family: str) -> None:
    """Against PEFT, with a second adapter in the batch that leaves the head alone."""
    config = LoraConfig(r=3, target_modules=["lm_head", "q_proj"], lora_dropout=0.0)
    peer = get_peft_model(make(family), config)
    state = {key: torch.randn_like(p) * 0.2 for key, p in peer.named_parameters() if p.requires_grad}
    peer.load_state_dict(state, strict=False)
    engine = Engine(make(family))
    engine.create_adapter("a", config, OPTIM)
    engine.create_adapter("b", lora(), OPTIM)
    with torch.no_grad():
        for key, p in mlora_ext.adapter_parameters(engine.model, "a").items():
            p.copy_(state[f"base_model.model.{key.replace('.a.weight', '.default.weight')}"])
    batch = samples(3, 12, seed=1)
    result = engine.forward_backward({"b": samples(2, 9, seed=2), "a": batch})["a"]
    total = torch.zeros(())
    for sample in batch:
        ids, labels = torch.tensor([sample.input_ids]), torch.tensor([sample.labels])
        total = total + peer(input_ids=ids, labels=labels).loss * sample.trained_tokens
    total.backward()
    assert result.loss_sum == pytest.approx(total.item(), rel=1e-5)
    theirs = {key: p.grad for key, p in peer.named_parameters() if p.requires_grad}
    for key, p in mlora_ext.adapter_parameters(engine.model, "a").items():
        expected = theirs[f"base_model.model.{key.replace('.a.weight', '.default.weight')}"]
        assert (p.grad - expected).norm() <= 1e-4 * expected.norm(), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_base_with_fp32_adapters(dtype: torch.dtype) -> None:
    """Near the fp32 losses throughout, and they fall."""
    losses = []
    for kind in (torch.float32, dtype):
        engine = Engine(make("llama").to(kind), dtype=kind)
        engine.create_adapter("a", lora(init_lora_weights=True), OptimConfig(2e-2, total_steps=20))
        assert {p.dtype for p in parameters(engine, "a")} == {torch.float32}
        batch, seen = {"a": samples(4, 12, seed=1)}, []
        for _ in range(20):
            result = engine.forward_backward(batch)["a"]
            assert engine.optim_step("a").finite
            seen.append(result.loss_sum / result.tokens)
        losses.append(seen)
    assert losses[0][-1] < 0.7 * losses[0][0]
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) <= 0.05 * losses[0][0]


def test_fp16_overflow_skips_that_adapter_only() -> None:
    engine = Engine(make("llama").half(), fp16=True, dtype=torch.float16)
    for name in ("a", "b"):
        engine.create_adapter(name, lora(), OPTIM)
    scaler = engine._states["a"].scaler
    scaler.scale = 2.0**40
    weights = [p.detach().clone() for p in parameters(engine, "a")]
    batch = {name: samples(2, 9, seed=2) for name in ("a", "b")}
    assert engine.forward_backward(batch)["a"].finite
    first, other = engine.optim_step("a"), engine.optim_step("b")
    assert (first.skipped, first.finite, first.step) == (True, False, 1)
    assert (other.skipped, other.finite) == (False, True)
    assert scaler.scale == 2.0**39
    assert all(torch.equal(p, w) for p, w in zip(parameters(engine, "a"), weights, strict=True))


def test_the_loss_scale_does_not_change_gradients() -> None:
    results = []
    for scale in (1.0, 256.0):
        engine = Engine(make("llama"))
        engine.create_adapter("a", lora(), OPTIM, seed=1)
        engine.create_adapter("b", lora(), OPTIM, seed=1)
        engine._states["a"].scaler = LossScaler(True, scale)
        engine.forward_backward({"a": samples(2, 9, seed=2), "b": samples(2, 9, seed=3)})
        results.append([g / scale for g in gradients(engine, "a")] + gradients(engine, "b"))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_scaler_grows_and_shrinks() -> None:
    scaler = LossScaler.for_dtype(torch.float16)
    begin = scaler.scale
    assert [scaler.update(overflow=False) for _ in range(2000)] == [False] * 2000
    assert scaler.scale == 2 * begin
    assert scaler.update(overflow=True)
    assert scaler.scale == begin
    scaler.scale = 1.0
    assert not scaler.update(overflow=True)
    assert not LossScaler.for_dtype(torch.bfloat16).update(overflow=True)


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    def weights(names: list[str], seed: int) -> dict[str, list[torch.Tensor]]:
        engine = Engine(make("llama"), seed=seed)
        for name in names:
            engine.create_adapter(name, lora(), OPTIM)
        return {name: [p.detach().clone() for p in parameters(engine, name)] for name in names}

    one, two, three = weights(["a", "b"], 1), weights(["c", "b", "a"], 1), weights(["a"], 2)
    for name in ("a", "b"):
        assert all(torch.equal(p, q) for p, q in zip(one[name], two[name], strict=True))
    assert not torch.equal(one["a"][0], one["b"][0])
    assert not torch.equal(one["a"][0], three["a"][0])


def test_adapters_join_and_leave_while_others_train() -> None:
    engine = Engine(make("llama"))
    engine.create_adapter("a", lora(), OPTIM)
    batch = samples(2, 9, seed=2)
    engine.forward_backward({"a": batch})
    engine.create_adapter("b", lora(r=9), OPTIM)
    engine.forward_backward({"b": batch, "a": batch})
    engine.remove_adapter("b")
    expected = 2 * sum(sample.trained_tokens for sample in batch)
    assert engine._states["a"].units == expected
    assert engine.optim_step("a").finite
    assert engine.adapters == ["a"]


def test_untrained_rows_alone_do_nothing() -> None:
    engine = Engine(make("llama"))
    engine.create_adapter("a", lora(), OPTIM)
    result = engine.forward_backward({"a": [Sample((5, 6, 7), (5, -100, -100))]})["a"]
    assert (result.loss_sum, result.tokens, result.finite) == (0.0, 0, True)
    with pytest.raises(ValueError, match="'a': has no gradient"):
        engine.optim_step("a")


def test_generation_uses_the_models_own_attention() -> None:
    engine, plain = Engine(make("mistral")), make("mistral")
    engine.create_adapter("a", lora(), OPTIM)
    engine.forward_backward({"a": samples(2, 9, seed=2)})
    ids = torch.randint(3, VOCABULARY, (2, 9))
    engine.model.eval()
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    ours = engine.model.generate(ids, adapter_names=["__base__", "a"], **options)
    assert torch.equal(ours[0], plain.generate(ids, **options)[0])
    assert engine.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample((), ()), "adapter 'a', sample 1: expected at least one token"),
        (Sample((3, 4), (3,)), "adapter 'a', sample 1: expected 2 labels, got 1"),
        (Sample((3, VOCABULARY), (3, 4)), f"adapter 'a', sample 1: id {VOCABULARY} is outside"),
        (Sample((3, -1), (3, 4)), "adapter 'a', sample 1: id -1 is outside"),
        (Sample((3, 4), (3, -7)), "adapter 'a', sample 1: label -7 is outside"),
    ],
)
def test_malformed_samples_are_named(sample: Sample, message: str) -> None:
    engine = Engine(make("llama"))
    engine.create_adapter("a", lora(), OPTIM)
    with pytest.raises(ValueError, match=message):
        engine.forward_backward({"a": [Sample((3,), (3,)), sample]})


def test_refusals(tmp_path: Path) -> None:
    engine = Engine(make("llama"))
    engine.create_adapter("a", lora(), OPTIM)
    for call, message in [
        (lambda: engine.create_adapter("a", lora(), OPTIM), "'a': the engine has an adapter"),
        (lambda: engine.create_adapter("b", {"r": 8}, OPTIM), "'b': expected a peft.LoraConfig, got dict"),
        (lambda: engine.create_adapter("b", None, OPTIM), "'b': expected lora or init_from"),
        (lambda: engine.create_adapter("b", lora(), OPTIM, init_from=tmp_path), "adapter_config.json"),
        (lambda: engine.create_adapter("b", lora(target_modules=["nothing"]), OPTIM), "nothing"),
        (lambda: engine.create_adapter("b", lora(), OptimConfig(lr_scheduler_type="x")), "lr_scheduler"),
        (lambda: engine.forward_backward({"b": samples(1, 5, seed=0)}), "no adapter 'b' .*: a"),
        (lambda: engine.forward_backward({"__base__": samples(1, 5, seed=0)}), "no adapter '__base__'"),
        (lambda: engine.optim_step("b"), "no adapter 'b'"),
        (lambda: Engine(make("llama"), dtype=torch.bfloat16), "expected weights of dtype torch.bfloat16"),
        (
            lambda: engine.forward_backward({"a": [((3, 4), (3, 4))]}),
            "'a': .* takes Sample samples, got tuple",
        ),
        (lambda: Engine(make("llama"), dtype="bf17"), "dtype: expected a torch.dtype .*, got 'bf17'"),
        (lambda: Engine(make("llama"), device="gpu"), "device: must be cpu, cuda or cuda:<index>, got 'gpu'"),
        (lambda: Engine(make("llama"), device="cuda:99"), "device: cuda:99 is not there"),
        (lambda: Engine(make("llama"), quantization="bnb-nf4"), "quantization: expected keys .* 'bnb-nf4'$"),
        (
            lambda: Engine(make("llama"), quantization={"method": "nf4"}),
            "^quantization.method: 'nf4' is unknown; did you mean 'bnb-nf4'[?]$",
        ),
        (
            lambda: Engine(make("llama"), quantization={"method": "bnb-nf4", "duoble_quant": True}),
            "^quantization.duoble_quant: unknown key; did you mean 'double_quant'[?]$",
        ),
        (lambda: Engine(tmp_path), "has no config.json; give a model's folder"),
        (lambda: Engine(tmp_path / "missing"), "no such folder"),
        (lambda: Engine(make("llama"), fp16=True, dtype=torch.bfloat16), "fp16"),
        (lambda: setattr(engine, "base_gemm", "cublas"), "float32"),
        (
            lambda: Engine(make("llama").half(), fp16=True, frozen_weight="packed"),
            "pack_base: .*: oneDNN does not",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert engine.adapters == ["a"]
    engine.create_adapter("b", lora(), OPTIM)


def _arguments(call: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = list(inspect.signature(call).parameters.values())
    return {one.name: given.get(one.name) for one in parameters if one.default is one.empty}


_VERBS = [name for name, _ in inspect.getmembers(Engine, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("verb", _VERBS)
def test_an_argument_of_a_wrong_kind_is_named(verb: str) -> None:
    """Each argument but switches; of a name the message says that there is no such adapter."""
    with Engine(make("llama")) as engine:
        call = getattr(engine, verb)
        if verb != "limit_memory":
            engine.create_adapter("a", lora(), OPTIM)
        given = {"name": "a", "names": ["a"], "lora": lora(), "optim": OPTIM, "folder": "gone", "state": {}}
        given |= {"batches": {"a": samples(2, 5, seed=0)}, "limit": "1TiB"}
        switches = {"raises", "measure", "whole", "enforce", "measured", "held", "earlier", "objective"}
        told = "no adapter <object|expected a peft.LoraConfig, got object|adapter 'b': num_labels: "
        names = set(inspect.signature(call).parameters) - switches - ({"name"} if verb[0] == "l" else set())
        for name in names:
            arguments = _arguments(call, given) | ({"name": "b"} if verb == "create_adapter" else {})
            with pytest.raises(ValueError, match=rf"^(memory_)?{name}: (expected|must be)|{told}"):
                list(call(**arguments | {name: object()}))


@pytest.mark.parametrize("name", ["base_model", "device", "seed", "stages", "offload", "memory_limit"])
def test_an_argument_of_an_engine_of_a_wrong_kind_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: (expected|must be) "):
        Engine(**{"base_model": make("llama"), name: object()})


@pytest.mark.parametrize("verb", ["forward_backward", "start", "evaluate", "next_tokens", "forecast"])
@pytest.mark.parametrize("given", [samples(2, 5, seed=0)[0], 3, None, "text"], ids=str)
def test_a_sample_in_place_of_a_list_is_named(verb: str, given: Any) -> None:
    with Engine(make("llama")) as engine:
        engine.create_adapter("a", lora(), OPTIM)
        with pytest.raises(
            ValueError, match=rf"^adapter 'a': expected a list of .*, got {type(given).__name__}$"
        ):
            getattr(engine, verb)({"a": given})


def test_base_gemm_is_a_record() -> None:
    engine = Engine(make("llama"))
    record = engine.base_gemm
    try:
        engine.base_gemm = "aten"
        assert engine.base_gemm == "aten"
    finally:
        engine.base_gemm = record
    assert engine.base_gemm == record


@pytest.mark.skipif(not packs(torch.empty(1, 1)), reason="this torch has no oneDNN: pack_base is refused")
def test_pack_base_changes_nothing_but_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head, which the chunked loss reads, is packed too; products are large enough to use it."""
    base, batch = save_base(tmp_path / "base", hidden=256), samples(12, 20, seed=4)
    products = []
    for kind in (PlainWeight, PackedWeight):
        for name in ("matmul", "matmul_dx"):
            product = getattr(kind, name)

            def record(self: PlainWeight, *tensors: torch.Tensor, call: Callable = product) -> torch.Tensor:
                products.append(isinstance(self, PackedWeight))
                return call(self, *tensors)

            monkeypatch.setattr(kind, name, record)
    found = {}
    for packed in (False, True):
        engine = Engine(base, frozen_weight="packed" if packed else "plain", seed=1)
        engine.create_adapter("a", lora(target_modules=["q_proj", "up_proj", "down_proj"]), OPTIM)
        products.clear()
        result = engine.forward_backward({"a": batch})["a"]
        assert set(products) == {packed}
        layers = [
            module for module in engine.model.modules() if isinstance(module, mlora_ext.MultiLoRALinear)
        ]
        assert layers
        assert all(isinstance(layer.frozen, PackedWeight) == packed for layer in layers)
        found[packed] = result.loss_sum, gradients(engine, "a")
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-6)
    assert_same(found[True][1], found[False][1], 1e-5)


def test_packing() -> None:
    data = {"b": [Sample((5, 6, 7), (5, 6, 7)), Sample((8,), (8,))], None: [Sample((9, 4), (-100, 4))]}
    batch = pack({**data, "a": []}, row0={"b": 11})
    positions, sequences = batch.places("cpu")
    assert batch.names == ("b", "__base__", "a")
    assert batch.adapters == ["b", "a"]
    assert batch.layout.lengths == batch.lengths == (4, 2, 0)
    assert batch.layout.adapters == (0, -1, 1)
    assert batch.layout.row0 == (11, 0, 0)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 4]]
    assert positions.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert batch.rows.tolist() == [0, 1, 4]
    assert batch.targets.tolist() == [6, 7, 4]
    assert (batch.trained, batch.counts) == ([[2, 0], [1], []], [2, 1, 0])
    assert sequences.cu_seq_lens.tolist() == [0, 3, 4, 6]


@pytest.mark.parametrize("stages", [1, 2])
def test_another_default_device_is_not_the_engines(stages: int) -> None:
    model, found = make("llama"), []
    for context in (nullcontext(), torch.device("meta")):
        with context, Engine(copy.deepcopy(model), seed=1, stages=stages) as engine:
            lora = LoraConfig(r=3, target_modules="all-linear", lora_dropout=0.3)
            engine.create_adapter("a", lora, OptimConfig(1e-2, total_steps=3))
            for step in range(2):
                found.append(engine.forward_backward({"a": samples(3, 9, seed=step)})["a"].loss_sum)
                engine.optim_step("a")
    assert found[:2] == found[2:]
