"""Dry runs on fake tensors say what a micro-batch will take, and seed the memory model."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from dry_models import CPU, LORAS, OPTIM, llama, loras, of
from mlora.engine.dry_run import DryStage, _period
from mlora.engine.engine import Engine
from mlora.engine.stage_group import StageOptions, spans_of
from mlora.memory.adapter_memory import AdapterMemory
from mlora.memory.model import PeakModel
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from tiny_models import FAMILIES, make
from transformers import PreTrainedModel

from tests.mixtures import mixture


@pytest.fixture(autouse=True)
def dry_runs_once() -> None:
    """Here each is made anew."""


SHAPES = [{"a": [70, 31], "b": [40]}, {"a": [5], "b": [90, 90]}]


def measured(engine: Engine, shape: dict[str, list[int]]) -> tuple[tuple[int, ...], ...]:
    future = engine.start({name: of(lengths) for name, lengths in shape.items()}, measure=True)
    engine.finish(future)
    return future.measured[0].phases


def assert_measured_alike(
    source: PreTrainedModel, names: Any, shapes: Any, stages: int = 1, *, exact: bool = True, **more: Any
) -> None:
    options = StageOptions(CPU, next(source.parameters()).dtype, more.get("gradient_checkpointing", False))
    spans = spans_of(stages, source.config.num_hidden_layers)
    dry = [DryStage(source, options, span).activations(loras(names), shapes) for span in spans]
    engine = Engine(source, stages=stages, dtype=options.dtype, **more)
    for name, lora in loras(names).items():
        engine.create_adapter(name, lora, OPTIM)
    measured(engine, shapes[0])  # constants are made
    for index, shape in enumerate(shapes):
        for predicted, real in zip((stage[index] for stage in dry), measured(engine, shape), strict=True):
            assert max(predicted) == pytest.approx(max(real), rel=1e-3 if exact else 0.02, abs=512)
    engine.close()


@pytest.mark.pairwise
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("window", [None, 16], ids=["llama", "window"])
def test_a_dry_run_says_what_is_measured(stages: int, checkpointing: bool, window: int | None) -> None:
    source = llama() if window is None else llama(sliding_window=window)
    assert_measured_alike(source, "ab", SHAPES, stages, gradient_checkpointing=checkpointing)


def test_in_bf16() -> None:
    assert_measured_alike(llama().to(torch.bfloat16), "ab", SHAPES)


def test_with_a_head_that_is_trained() -> None:
    assert_measured_alike(llama(vocab_size=300), "ac", [{"a": [20, 9], "c": [30]}])


def test_with_dora_and_lora_bias() -> None:
    """Beside plain LoRA, also with dropout, for which DoRA has a second base product."""
    shapes = [{"b": [20, 31], "dora": [40], "bias": [9]}]
    assert_measured_alike(llama(num_hidden_layers=2, vocab_size=300), ["b", "dora", "bias"], shapes)


def test_with_adapters_on_experts_and_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows go depends on numbers, which a dry run has not; what a row takes does not."""
    experts = {"r": 3, "target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}
    monkeypatch.setitem(LORAS, "experts", experts)
    monkeypatch.setitem(LORAS, "all", {"r": 2, "target_modules": "all-linear"})
    shape = {"vocab_size": 500, "hidden_size": 64, "num_local_experts": 8, "num_hidden_layers": 6}
    shapes = [{"experts": [70, 31], "b": [40], "all": [9]}, {"b": [20, 20]}]
    assert_measured_alike(mixture("mixtral", **shape), ("experts", "b", "all"), shapes, exact=False)
    stage = DryStage(mixture("mixtral", **shape), StageOptions(CPU, torch.float32))
    states = stage.states(LoraConfig(**experts), OPTIM)
    own = 6 * 4 * 3 * (8 * (64 + 2 * 48) + 8 * (48 + 64) + 64 + 64)
    assert states.gradients == own
    assert states.moments == 2 * own


def test_what_torch_cannot_fake_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that depends on the data is not there in a dry run."""
    source = llama()
    monkeypatch.setattr(type(source.model.layers[0].mlp), "forward", lambda self, x: x * x.sum().item())
    stage = DryStage(source, StageOptions(CPU, torch.float32))
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot be run dry"):
        stage.activations({"a": LoraConfig(r=4, target_modules=["q_proj"])}, [{"a": [9]}])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_that_can_be_trained(family: str) -> None:
    source, options = make(family), StageOptions(CPU, torch.float32)
    targets = ["c_attn"] if family == "gpt2" else ["qkv_proj"] if family == "phi3" else ["q_proj", "v_proj"]
    lora = LoraConfig(r=4, target_modules=targets)
    shape = {"a": [30, 11, 20]}
    predicted = DryStage(source, options).activations({"a": lora}, [shape])
    engine = Engine(source)
    engine.create_adapter("a", lora, OPTIM)
    measured(engine, shape)
    assert max(predicted[0]) == pytest.approx(max(measured(engine, shape)[0]), rel=0.02, abs=4096)


def test_a_folder_is_as_good_as_the_model_and_nothing_of_it_is_read(tmp_path: Path) -> None:
    source, options = llama(), StageOptions(CPU, torch.float32)
    source.config.save_pretrained(tmp_path)  # a config alone: there are no weights
    folder, given = DryStage(str(tmp_path), options), DryStage(source, options)
    assert folder.activations(loras("ab"), SHAPES) == given.activations(loras("ab"), SHAPES)
    assert folder.base == given.base
    weights = sum(p.nbytes for p in source.parameters())
    assert weights <= given.base.memory < weights + 1024
    assert all(p.is_meta for p in given._model.parameters())


def test_blocks_left_out_make_no_difference() -> None:
    stage = DryStage(llama(num_hidden_layers=5), StageOptions(CPU, torch.float32))
    short = stage.activations(loras("ab"), SHAPES)
    for one, other in zip(stage.activations(loras("ab"), SHAPES, whole=True), short, strict=True):
        assert one == pytest.approx(other, abs=512)  # constants are made by the first run


def test_the_period_of_blocks() -> None:
    assert _period("aaaaaa") == 1
    assert _period("aaa") == 0  # one and two blocks are three
    assert _period("abababababab") == 2
    assert _period("aaaaab") == 0
    assert _period("aabaabaabaabaa") == 3
    assert _period("") == 0


def test_states_are_those_of_a_created_adapter() -> None:
    source = llama()
    stage = DryStage(source, StageOptions(CPU, torch.float32))
    engine = Engine(source)
    for name, lora in loras(["a", "b", "c", "dora", "bias"]).items():
        states = stage.states(lora, OPTIM)
        engine.create_adapter(name, lora, OPTIM)
        engine.forward_backward({name: of([9, 4])})
        assert states.gradients == sum(t.nbytes for t in engine.state_dict(name)["gradients"].values())
        engine.optim_step(name)
        state = engine.state_dict(name)
        assert states.moments == sum(t.nbytes for pair in state["moments"].values() for t in pair)
        assert states.weights >= sum(t.nbytes for t in state["weights"].values())
        assert states.total == states.weights + states.gradients + states.moments
        engine.remove_adapter(name)
    sgd = stage.states(LoraConfig(**LORAS["a"]), OptimConfig(1e-3, total_steps=1, optim="sgd"))
    assert (sgd.moments, sgd.update) == (0, 0)


def test_states_of_stages_add_up() -> None:
    source, options = llama(), StageOptions(CPU, torch.float32)
    whole = DryStage(source, options)
    parts = [DryStage(source, options, span) for span in spans_of(2, 6)]
    for lora in loras("abc").values():
        assert sum(part.states(lora, OPTIM).total for part in parts) == whole.states(lora, OPTIM).total


def test_mixtures_are_equal_where_memory_is() -> None:
    stage = DryStage(llama(num_hidden_layers=1), StageOptions(CPU, torch.float32))
    memory = AdapterMemory([stage])
    known = loras("ab")
    shape = {"x": [40, 20], "y": [30]}

    def of_pair(x: LoraConfig, y: LoraConfig) -> tuple[Any, Any]:
        memory.know("x", x, OPTIM, 60)
        memory.know("y", y, OPTIM, 60)
        return memory._mixture(["x", "y"]), stage.activations({"x": x, "y": y}, [shape])

    one, other = of_pair(known["a"], known["b"]), of_pair(known["b"], known["a"])
    assert one == other
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    spelled = LoraConfig(r=4, target_modules=names, lora_alpha=3)
    assert of_pair(spelled, known["b"]) == one
    for x, y in (("a", "a"), ("b", "b")):
        different = of_pair(known[x], known[y])
        assert different[0] != one[0]
        assert different[1] != one[1]


@pytest.mark.parametrize(
    "fields",
    [
        {"use_dora": True, "lora_dropout": 0.1},
        pytest.param({"use_dora": True}, marks=pytest.mark.nightly),
        pytest.param({"lora_bias": True}, marks=pytest.mark.nightly),
    ],
)
def test_a_kind_is_predicted_from_its_own_samples(fields: dict[str, Any]) -> None:
    """What was sampled of plain LoRA, or of DoRA without dropout, says nothing of it."""
    stage = DryStage(llama(num_hidden_layers=1, vocab_size=300), StageOptions(CPU, torch.float32))
    plain: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
    found = []
    for names in (["own"], ["lora", "dora", "own"]):
        memory = AdapterMemory([stage])
        for name in names:
            more = {"own": fields, "dora": {"use_dora": True}}.get(name, {})
            memory.know(name, LoraConfig(**plain, **more), OPTIM, 40)
            found.append(memory.estimate.predict({name: [40] * 3}, [name]))
    assert found[-1] == found[0] != found[1]


def mape(model: PeakModel, samples: list[tuple[list[int], int]]) -> float:
    """The mean error of predictions, in percent."""
    return sum(100 * abs(model.predict(lengths) / size - 1) for lengths, size in samples) / len(samples)


def test_seeds_alone_are_close_and_ten_measurements_closer() -> None:
    source = llama(sliding_window=24, vocab_size=2000, num_hidden_layers=4)
    stage = DryStage(source, StageOptions(CPU, torch.float32))
    draw = random.Random(0)
    engine = Engine(source)
    for name, lora in loras("ab").items():
        engine.create_adapter(name, lora, OPTIM)

    def shape(longest: int) -> dict[str, list[int]]:
        return {n: [draw.randint(8, longest) for _ in range(draw.randint(1, 3))] for n in "ab"}

    def lengths(given: dict[str, list[int]]) -> list[int]:
        return [length for each in given.values() for length in each]

    model = PeakModel(stage.knees)
    dry = [{"a": [n], "b": [m]} for n, m in ((16, 8), (48, 24), (80, 120), (150, 30), (90, 90), (120, 300))]
    for given, phases in zip(dry, stage.activations(loras("ab"), dry), strict=True):
        model.seed(lengths(given), phases)
    data = [(given, measured(engine, given)[0]) for given in (shape(150) for _ in range(24))]
    unseen = [(lengths(given), max(phases)) for given, phases in data[10:]]
    assert mape(model, unseen) < 2.0
    for given, phases in data[:10]:
        model.observe(lengths(given), phases)
    assert mape(model, unseen) < 0.25
    assert max(each.error for each in model.models) < 0.02


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_equally_long_sequences_behind_a_window_are_predicted(checkpointing: bool) -> None:
    """All blocks share one mask, of which no law of the rows and their squares knows."""
    engine = Engine(
        llama(sliding_window=24, vocab_size=300, num_hidden_layers=2), gradient_checkpointing=checkpointing
    )
    for name, lora in loras("ab").items():
        engine.create_adapter(name, lora, OPTIM)
    draw = random.Random(0)
    data = []
    for _ in range(34):
        length = draw.randint(8, 150)
        shape = {name: [length] * draw.randint(1, 3) for name in "ab"}
        data.append(([length] * sum(map(len, shape.values())), measured(engine, shape)[0]))
    model = PeakModel([None] * 3)
    for lengths, phases in data[:10]:
        model.observe(lengths, phases)
    assert mape(model, [(lengths, max(phases)) for lengths, phases in data[10:]]) < 0.25


def test_a_gpu_is_refused() -> None:
    stage = DryStage(llama(), StageOptions(torch.device("cuda"), torch.float32))
    assert stage.states(loras("a")["a"], OPTIM).weights > 0
    with pytest.raises(ValueError, match="dry runs serve the CPU, got cuda"):
        stage.activations(loras("a"), [{"a": [9]}])
