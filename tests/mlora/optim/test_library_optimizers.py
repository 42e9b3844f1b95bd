"""Optimizers of bitsandbytes, Transformers and PEFT: each adapter is as PEFT and Trainer train it alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.config.config_file import resolve_config
from mlora.config.training_fields import TrainingFields
from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from mlora.errors import RunError
from mlora.optim import registry
from mlora.optim.groups import groups_of
from mlora.optim.optim_config import OptimConfig
from mlora.optim.registry import optimizer_kind
from mlora.optim.step_rule import Update
from mlora.run.validation import validate
from peft import LoraConfig, PeftModel
from peft.optimizers import create_lorafa_optimizer, create_loraplus_optimizer
from peft.optimizers.lorafa import LoraFAOptimizer
from peft_alone import save_initial, train
from pydantic import ValidationError
from tiny_models import VOCABULARY, make, samples
from torch import nn
from transformers import Trainer, TrainingArguments

from tests.mlora.seam_runs import data_of, train_and_resume
from tests.mlora.tiny_run import run_data
from tests.tolerances import STEADY_EPSILON

pytest.importorskip("bitsandbytes", reason="`make peers` makes an environment with bitsandbytes")
pytestmark = pytest.mark.peers
STEPS = 25
WIDE = {"r": 128, "lora_alpha": 64, "target_modules": ["q_proj", "down_proj"]}
"""Of at least 4096 elements each, from which on bitsandbytes keeps states in 8 bits."""


@dataclass(frozen=True)
class Case:
    """`coarse`: rounding may move an element by a quantum of 8 bits, of bf16, or by a whole sign."""

    lora: dict[str, Any]
    optim: OptimConfig
    coarse: bool = False


def settings(rate: float, optim: str, **fields: Any) -> OptimConfig:
    return OptimConfig(
        rate,
        optim,
        total_steps=STEPS,
        warmup_steps=3,
        adam_epsilon=STEADY_EPSILON,
        weight_decay=0.1,
        **fields,
    )


ALL = {"r": 7, "target_modules": "all-linear"}
SOME = {"r": 4, "alpha_pattern": {"q_proj": 3}, "target_modules": ["q_proj", "v_proj", "down_proj"]}
CASES = {
    "adafactor": Case(ALL, settings(2e-3, "adafactor")),
    "8-bit": Case(WIDE, settings(2e-4, "adamw_8bit", max_grad_norm=0.5), coarse=True),
    "lion": Case(SOME, settings(2e-4, "lion", adam_beta2=0.98), coarse=True),
    "lion-8bit": Case(WIDE, settings(1e-4, "lion_8bit"), coarse=True),
    "lora-fa": Case(SOME, settings(1e-3, "lora_fa"), coarse=True),
    "loraplus": Case(ALL, settings(2e-4, "adamw_torch", loraplus_lr_ratio=16)),
}


def peers_optimizer(model: PeftModel, config: OptimConfig, folder: Path) -> torch.optim.Optimizer:
    """What Trainer and PEFT make of the same names."""
    name = {"lion": "lion_32bit"}.get(config.optim, config.optim)
    rate, decay = config.learning_rate, config.weight_decay
    if name == "lora_fa":
        optimizer = create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=rate, weight_decay=decay)
        optimizer.param_groups[0]["eps"] = config.adam_epsilon
        return optimizer
    arguments = TrainingArguments(
        str(folder),
        optim=name,
        learning_rate=rate,
        weight_decay=decay,
        adam_beta2=config.adam_beta2,
        adam_epsilon=config.adam_epsilon,
        use_cpu=True,
        report_to=[],
    )
    kind, values = Trainer.get_optimizer_cls_and_kwargs(arguments)
    if config.loraplus_lr_ratio is None:
        return kind([p for p in model.parameters() if p.requires_grad], weight_decay=decay, **values)
    del values["lr"]
    ratio = config.loraplus_lr_ratio
    return create_loraplus_optimizer(
        model, kind, lr=rate, loraplus_lr_ratio=ratio, loraplus_weight_decay=decay, **values
    )


def steps_of(index: int, count: int = STEPS) -> list[list[list[Sample]]]:
    drawn = samples(2 * count, 9, seed=index)
    return [[drawn[2 * step : 2 * step + 1], drawn[2 * step + 1 : 2 * step + 2]] for step in range(count)]


def train_here(engine: Engine, steps: dict[str, list[list[list[Sample]]]]) -> dict[str, list[float]]:
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for step in range(len(next(iter(steps.values())))):
        parts = [
            engine.forward_backward({name: mine[step][part] for name, mine in steps.items()})
            for part in (0, 1)
        ]
        for name in steps:
            assert engine.optim_step(name).finite
            whole = parts[0][name].plus(parts[1][name])
            losses[name].append(whole.loss_sum / whole.tokens)
    return losses


@dataclass(frozen=True)
class Trained:
    engine: Engine
    losses: dict[str, list[float]]
    peft: dict[str, PeftModel]
    peft_losses: dict[str, list[float]]
    folders: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """All adapters in one batch, and PEFT with each of them alone, from the same folders and data."""
    torch.manual_seed(0)
    folders = tmp_path_factory.mktemp("adapters")
    engine, peft, peft_losses = Engine(make("llama")), {}, {}
    steps = {name: steps_of(index) for index, name in enumerate(CASES)}
    for name, case in CASES.items():
        save_initial(make("llama"), LoraConfig(**case.lora), folders / name)
        engine.create_adapter(name, None, case.optim, init_from=folders / name)
        peft[name] = PeftModel.from_pretrained(make("llama"), folders / name, is_trainable=True)
        optimizer = peers_optimizer(peft[name], case.optim, folders)
        peft_losses[name] = train(peft[name], case.optim, steps[name], optimizer)
    return Trained(engine, train_here(engine, steps), peft, peft_losses, folders)


@pytest.mark.parametrize("name", CASES)
def test_every_steps_loss(trained: Trained, name: str) -> None:
    ours, theirs = trained.losses[name], trained.peft_losses[name]
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 1e-5
    assert len(ours) == STEPS


@pytest.mark.parametrize("name", CASES)
def test_every_weights_change(trained: Trained, name: str, tmp_path: Path) -> None:
    trained.engine.save(name, tmp_path / name)
    ours, before = (
        dict(PeftModel.from_pretrained(make("llama"), folder).named_parameters())
        for folder in (tmp_path / name, trained.folders / name)
    )
    for key, expected in trained.peft[name].named_parameters():
        if "lora_" not in key:
            continue
        change, error = (expected - before[key]).detach(), (ours[key] - expected).detach()
        assert (change.norm() == 0) == (name == "lora-fa" and "lora_A" in key), key
        if CASES[name].coarse:
            assert (error.abs() > 1e-4).float().mean() <= 1e-3, key
            assert error.norm() <= 1e-2 * change.norm(), key
        else:
            assert error.norm() <= 1e-4 * change.norm(), key


def test_saved_folders_load_in_peft(trained: Trained, tmp_path: Path) -> None:
    ids = torch.randint(VOCABULARY, (1, 11))
    trained.engine.model.eval()
    for name in CASES:
        trained.engine.save(name, tmp_path / name)
        loaded = PeftModel.from_pretrained(make("llama"), tmp_path / name).eval()
        with torch.no_grad():
            got = trained.engine.model(input_ids=ids, adapter_names=[name]).logits
            assert (got - loaded(input_ids=ids).logits).abs().max() <= 1e-5


def engine_of(cases: dict[str, Case], *, stages: int = 1) -> Engine:
    engine = Engine(make("llama"), seed=3, stages=stages)
    for name, case in cases.items():
        lora = LoraConfig(**case.lora, lora_dropout=0.1, init_lora_weights=False)
        engine.create_adapter(name, lora, case.optim)
    return engine


def end_of(engine: Engine, names: list[str], first: int, last: int) -> dict[str, torch.Tensor]:
    """Weights after these steps, of all adapters."""
    with engine:
        train_here(engine, {name: steps_of(i, last)[first:] for i, name in enumerate(names)})
        return {f"{name} {key}": t for name in names for key, t in engine.weights(name).items()}


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert all(torch.equal(t, expected[key]) for key, t in got.items())


def test_resume_is_bit_equal() -> None:
    names = list(CASES)
    whole = end_of(engine_of(CASES), names, 0, 4)
    cut = engine_of(CASES)
    train_here(cut, {name: steps_of(i, 2) for i, name in enumerate(names)})
    states = {name: cut.state_dict(name) for name in names}
    again = engine_of(dict(reversed(CASES.items())))
    for name in names:
        again.load_state_dict(name, states[name])
    assert_equal(end_of(again, names, 2, 4), whole)
    moments = zip(states["lion-8bit"]["moments"], states["8-bit"]["moments"].values(), strict=True)
    others = states["lion-8bit"] | {"moments": dict(moments)}
    with pytest.raises(ValueError, match="adapter 'lion-8bit': state: the optimizer's moments do not fit"):
        cut.load_state_dict("lion-8bit", others)


def test_a_neighbours_optimizer_changes_no_bit() -> None:
    """A frozen lora_A takes the whole batch another way through the operator."""
    first = {"first": Case(ALL, settings(1e-2, "adamw_torch_fused"))}
    expected = None
    for optim in ("sgd", "lora_fa", "adafactor", "lion", "adamw_8bit"):
        engine = engine_of(first | {"other": Case(SOME, settings(1e-2, optim))})
        found = end_of(engine, ["first", "other"], 0, 3)
        mine = {key: t for key, t in found.items() if key.startswith("first")}
        assert_equal(mine, expected or mine)
        expected = mine


def test_two_stages_are_one() -> None:
    names = list(CASES)
    one, two = (end_of(engine_of(CASES, stages=stages), names, 0, 3) for stages in (1, 2))
    for key, expected in one.items():
        assert (two[key] - expected).abs().max() <= 1e-5, key


def twins() -> tuple[dict[str, nn.Parameter], list[nn.Parameter]]:
    """Parameters as a bank has them, and PEFT's: contiguous. Some have at least 4096 elements."""
    shapes = [(64, 80), (64, 70), (3, 50), (3, 20)]
    tensors = [torch.randn(shape) for shape in shapes]
    names = [f"{layer}.lora_{part}.a.weight" for layer in "xy" for part in "AB"]
    mine = [t.t() if "lora_B" in name else t for name, t in zip(names, tensors, strict=True)]
    theirs = [nn.Parameter(t.clone(memory_format=torch.contiguous_format)) for t in mine]
    return {name: nn.Parameter(t) for name, t in zip(names, mine, strict=True)}, theirs


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "lion_32bit", "lion_8bit", "adafactor", "lora_fa"])
def test_bits_are_the_librarys(optim: str, tmp_path: Path) -> None:
    """Given the same gradients. Blocks, rows and columns run as through PEFT's own lora_B."""
    mine, theirs = twins()
    config = OptimConfig(1e-2, optim, 0.1, adam_beta2=0.95, lr_scheduler_type="constant")
    kind = optimizer_kind(optim)
    ours = kind(mine, config)
    ours.scalings = [2.0, 2.0, 0.5, 0.5]
    group: dict[str, Any] = {"params": theirs, "lr": 1e-2, "weight_decay": 0.1}
    if optim == "lora_fa":
        extra = {"names": list(mine), "scaling_factors": ours.scalings, "eps": 1e-8, "betas": (0.9, 0.95)}
        peer: torch.optim.Optimizer = LoraFAOptimizer([group | extra])
    else:
        arguments = TrainingArguments(str(tmp_path), optim=optim, adam_beta2=0.95, use_cpu=True, report_to=[])
        found, values = Trainer.get_optimizer_cls_and_kwargs(arguments)
        peer = found([group], **values)
    for _ in range(4):
        for p, q in zip(mine.values(), theirs, strict=True):
            q.grad = torch.randn_like(q)
            p.grad = q.grad.clone() if p.requires_grad else None
        before = [p._version for p in mine.values()]
        ours.apply(Update(1e-2, 1.0, True))
        peer.step()
        for p, q, version in zip(mine.values(), theirs, before, strict=True):
            assert torch.equal(p, q)
            assert (p._version > version) == p.requires_grad
    shapes = [p.shape for name, p in mine.items() if kind.trains(name)]
    assert sum(t.nbytes for tensors in ours.state for t in tensors) == kind.state_bytes(shapes)


def test_loraplus_groups_are_pefts() -> None:
    """Also of Parameters that other kinds of adapters have."""
    names = {
        "x.lora_A.a.weight": (1.0, 0.1),
        "x.lora_B.a.weight": (4.0, 0.1),
        "x.lora_B.a.bias": (4.0, 0.0),
        "x.lora_magnitude_vector.a.weight": (4.0, 0.1),
        "x.lora_embedding_A.a": (0.5, 0.1),
        "head.modules_to_save.a.weight": (1.0, 0.1),
        "head.modules_to_save.a.bias": (4.0, 0.0),
    }
    parameters = {
        name: torch.ones(2, 2)
        if "_A" in name or name.endswith(("B.a.weight", "save.a.weight"))
        else torch.ones(2)
        for name in names
    }
    config = OptimConfig(2e-2, "sgd", 0.1, loraplus_lr_ratio=4.0, loraplus_lr_embedding=1e-2)
    found = {
        list(names)[i]: group for group, members in groups_of(parameters, config).items() for i in members
    }
    assert {name: (group.factor, group.weight_decay) for name, group in found.items()} == names


class Pages:
    """Stands for bitsandbytes' paged memory, which needs a GPU."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def get(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device.type == "cuda"
        self.sizes.append(math.prod(shape))
        return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize(
    "optim", ["paged_adamw_8bit", "paged_adamw_32bit", "paged_lion_32bit", "paged_lion_8bit"]
)
def test_large_moments_are_paged(optim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, waits = Pages(), []
    monkeypatch.setattr("bitsandbytes.functional.get_paged", pages.get)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    kind = optimizer_kind(optim)
    mine = {"A": nn.Parameter(torch.ones(400, 256)), "B": nn.Parameter(torch.ones(64, 64))}
    ours = kind(mine, OptimConfig(1e-2, optim, lr_scheduler_type="constant"))
    for p in mine.values():
        p.grad = torch.ones_like(p)
    ours.apply(Update(1e-2, 1.0, True))
    assert all(torch.allclose(p, torch.tensor(0.99)) for p in mine.values())
    assert pages.sizes == [102400] * kind.moments
    assert len(waits) == 1
    kept = sum(t.nbytes for tensors in ours.state for t in tensors)
    paged = sum(t.nbytes for t in ours.state[0][: kind.moments])
    assert kind.state_bytes([p.shape for p in mine.values()]) == kept - paged


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"optim": "paged_adamw_8bit"}, "optim: 'paged_adamw_8bit' needs a GPU: .* on cpu; use adamw_8bit"),
        ({"optim": "paged_adamw_32bit"}, "'paged_adamw_32bit' needs a GPU: .*; use adamw_torch_fused"),
        ({"optim": "paged_lion_32bit"}, "'paged_lion_32bit' needs a GPU: .*; use lion_32bit"),
        ({"optim": "adamw_torch_8bit"}, "optim: 'adamw_torch_8bit' is unknown; did you mean 'adamw_torch'"),
        ({"loraplus_lr_ratio": 0}, "loraplus_lr_ratio: must be above 0, got 0"),
        ({"loraplus_lr_embedding": 1e-5}, "loraplus_lr_embedding: needs loraplus_lr_ratio beside it"),
        ({"loraplus_lr_ratio": 4, "learning_rate": 0}, "loraplus_lr_ratio: needs a learning_rate > 0"),
        (
            {"loraplus_lr_ratio": 1e30, "learning_rate": 10},
            "loraplus_lr_ratio: the learning rate 1e.31 is",
        ),
        ({"loraplus_weight_decay": 0.1}, "loraplus_weight_decay: .*weight_decay"),
    ],
)
def test_what_does_not_serve_is_refused_in_one_line(
    tiny_base: Path, tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= fields
    with pytest.raises(RunError, match=reason) as error:
        validate(resolve_config(data, folder=tmp_path))
    assert "\n" not in str(error.value)


def test_packages_and_kernels_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(make("llama"))
    with monkeypatch.context() as patched:
        patched.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda operator, key: False)
        with pytest.raises(ValueError, match=r"'lion': bitsandbytes .* has no kernel for it on cpu"):
            engine.create_adapter("a", LoraConfig(), OptimConfig(optim="lion", total_steps=1))
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match="optim: 'lion' needs the package bitsandbytes: pip install bitsandb"
    ):
        OptimConfig(optim="lion")
    assert OptimConfig(optim="adafactor").optim == "adafactor"
    with pytest.raises(ValidationError, match="'adamw_8bit' needs the package bitsandbytes"):
        TrainingFields(optim="adamw_8bit")


def test_lora_fa_serves_plain_lora_only() -> None:
    names = {
        "x.lora_A.a.weight": nn.Parameter(torch.ones(2, 3)),
        "x.lora_B.a.bias": nn.Parameter(torch.ones(4)),
    }
    with pytest.raises(ValueError, match=r"'lora_fa' serves .* only, got x\.lora_B\.a\.bias"):
        optimizer_kind("lora_fa")(names, OptimConfig(optim="lora_fa", total_steps=1))


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_run_trains_and_resumes(tiny_base: Path, tmp_path: Path, stages: int) -> None:
    """Killed between two steps; states of 8 bits and factored ones come from the checkpoint."""
    data = data_of(tiny_base, tmp_path, stages, optim="adamw_8bit", loraplus_lr_ratio=4.0)
    data["adapters"][1] |= {"optim": "adafactor"}
    train_and_resume(data, tmp_path)
