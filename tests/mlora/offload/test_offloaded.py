"""A model of one's own trains out of core exactly as in memory."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.offload import offloaded, optimizer_states, saved_tensors
from peft import LoraConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

import mlora_ext
from tests.mlora.offload.families import FAMILIES

MIXED = ["keep", "recompute", "swap", "recompute", "swap"]
IN_MEMORY = {"base": "device", "states": "device"}


@pytest.fixture(autouse=True)
def _small_things_leave_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of tiny models are swapped, and cut into several units, as those of large ones."""
    monkeypatch.setattr(saved_tensors, "SMALLEST", 256)
    monkeypatch.setattr(optimizer_states, "SMALL", 64)
    monkeypatch.setattr(optimizer_states, "UNIT", 2048)


def tiny(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(3)
    model: PreTrainedModel = FAMILIES[family]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.to(dtype).train()


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """With two groups, as users split weight decay."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3)


def train(model: nn.Module, steps: int, **how) -> list:
    """Losses and gradient norms of all steps, and the weights at the end."""
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    found = []
    with offloaded(model, optimizer, **how) as tuned:
        for step in range(steps):
            loss = model(**batch(step)).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            found.append((loss.item(), tuned.optimizer.grad_norm))
    return [found, {name: p.detach() for name, p in model.named_parameters()}]


def assert_same(found: list, expected: list) -> None:
    losses, norms = zip(*found[0], strict=True)
    assert list(losses) == [loss for loss, _ in expected[0]]
    assert list(norms) == pytest.approx([norm for _, norm in expected[0]], rel=1e-6)  # in another order
    for name, weight in expected[1].items():
        assert torch.equal(found[1][name], weight), name


@pytest.mark.pairwise
@pytest.mark.parametrize("active", [True, False], ids=["active", "after backward"])
@pytest.mark.parametrize("places", ["disk-disk", "disk-device", "host-disk"])
@pytest.mark.parametrize("activations", ["keep", "recompute", "swap", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_full_tuning_is_equal_to_the_bit(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    family: str,
    dtype: torch.dtype,
    activations: str,
    places: str,
    active: bool,
) -> None:
    steps = 20 if request.node.get_closest_marker("nightly") else 6  # from the third on, all is used again
    base, states = places.split("-")
    found = train(
        tiny(family, dtype),
        steps,
        base=base,
        states=states,
        activations=MIXED if activations == "mixed" else activations,
        active=active,
        slots=2 if active else 3,
        buffers=3 if active else 1,
        folders=[tmp_path],
        poison=True,
    )
    assert_same(found, in_memory(family, dtype, steps))
    assert not list(tmp_path.iterdir())


@cache
def in_memory(family: str, dtype: torch.dtype, steps: int) -> list:
    """What the same training leaves without offloading, once for all places."""
    return train(tiny(family, dtype), steps, **IN_MEMORY)


def test_it_is_torchs_adamw() -> None:
    model, other = tiny("llama"), tiny("llama")
    optimizer = adamw(other)
    found = train(model, steps=1)
    loss = other(**batch(0)).loss
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in other.parameters()])
    optimizer.step()
    assert found[0][0][0] == loss.item()
    torch.testing.assert_close(torch.tensor(found[0][0][1]), norm, rtol=1e-5, atol=0)
    for name, weight in other.named_parameters():
        torch.testing.assert_close(found[1][name], weight.detach(), rtol=1e-6, atol=1e-6)


def test_gradients_accumulate(tmp_path: Path) -> None:
    def steps(tuned: offloaded, model: nn.Module, optimizer: torch.optim.Optimizer) -> list:
        losses = []
        for step in range(6):
            with tuned.accumulate() if step % 3 < 2 else nullcontext():
                loss = model(**batch(step)).loss
                loss.backward()
            losses.append((loss.item(), 0.0))
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        return losses

    found = []
    for how in (IN_MEMORY | {"active": False}, {"active": True, "poison": True, "folders": [tmp_path]}):
        model = tiny("qwen3, tied head")
        optimizer = adamw(model)
        with offloaded(model, optimizer, **how) as tuned:
            losses = steps(tuned, model, optimizer)
        found.append([losses, {name: p.detach() for name, p in model.named_parameters()}])
    assert_same(found[1], found[0])


def test_the_models_own_checkpointing_and_evaluation_work() -> None:
    def losses(checkpointing: bool, **how) -> list[float]:
        model = tiny("llama")
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer, found = adamw(model), []
        with offloaded(model, optimizer, **how):
            for step in range(3):
                with torch.no_grad():
                    found.append(model(**batch(50)).loss.item())
                model(**batch(step)).loss.backward()
                optimizer.step()
        return found

    expected = losses(False, **IN_MEMORY)
    assert losses(True, slots=2, poison=True) == expected
    assert losses(True, slots=2, activations="swap", poison=True) == expected


def converted(family: str) -> tuple[nn.Module, list[nn.Parameter]]:
    model = tiny(family)
    mlora_ext.convert_model(
        model,
        {
            "a": LoraConfig(r=3, target_modules="all-linear", lora_dropout=0.1, init_lora_weights=False),
            "b": LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False),
        },
        seed=1,
    )
    names = ("a", "b")
    return model, [p for name in names for p in mlora_ext.adapter_parameters(model, name).values()]


@pytest.mark.parametrize("activations", ["keep", "recompute", "swap"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_converted_model_streams_in_ones_own_loop(family: str, activations: str) -> None:
    def losses(out_of_core: bool) -> list[float]:
        model, parameters = converted(family)
        optimizer, found = torch.optim.AdamW(parameters, lr=1e-2), []
        how = {"activations": activations, "slots": 2, "poison": True}
        with offloaded(model, **how) if out_of_core else nullcontext():
            for step in range(3):
                loss = model(**batch(step), adapter_names=["a", "b"]).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return found

    assert losses(True) == losses(False)


def test_weights_are_there_when_asked_for_and_afterwards() -> None:
    model = tiny("gpt2").requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with offloaded(model) as tuned:
        inside = dict(tuned.weights())
        assert all(torch.equal(inside[name], tensor) for name, tensor in model.named_buffers())
        assert model.transformer.h[0].mlp.c_fc.weight.isnan().all()
        with pytest.raises(RuntimeError, match=r"state_dict: weights of this GPT2LMHeadModel are on disk"):
            model.state_dict()
    after = model.state_dict()
    assert set(after) == set(before)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
        assert name not in inside or torch.equal(inside[name], tensor), name


def test_a_saved_state_goes_on_to_the_bit(tmp_path: Path) -> None:
    def run(first: int, last: int, model: nn.Module, load: bool, save: bool) -> list[float]:
        optimizer, losses = adamw(model), []
        with offloaded(model, optimizer, poison=True) as tuned:
            if load:
                tuned.optimizer.load(tmp_path)
            for step in range(first, last):
                loss = model(**batch(step)).loss
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if save:
                    tuned.optimizer.save(tmp_path)
        return losses

    expected = run(0, 6, tiny("llama", torch.bfloat16), load=False, save=False)
    begin = run(0, 3, tiny("llama", torch.bfloat16), load=False, save=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["optimizer-3.bin", "optimizer.json"]
    end = run(3, 6, tiny("llama", torch.bfloat16), load=True, save=False)
    assert begin + end == expected


def broken(action: Callable[[Path], object], folder: Path) -> None:
    model = tiny("llama")
    with offloaded(model, adamw(model)) as tuned:
        tuned.optimizer.save(folder)
        action(folder)
        tuned.optimizer.load(folder)


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    def cut(folder: Path) -> None:
        path = folder / "optimizer-1.bin"
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)

    with pytest.raises(ValueError, match=r"optimizer-1\.bin: expected \d+ bytes, got \d+"):
        broken(cut, tmp_path / "cut")
    with pytest.raises(ValueError, match=r"optimizer\.json: is not an index of optimizer states"):
        broken(lambda folder: (folder / "optimizer.json").write_text("{}"), tmp_path / "index")
    with pytest.raises(FileNotFoundError, match="optimizer-1"):
        broken(lambda folder: (folder / "optimizer-1.bin").unlink(), tmp_path / "gone")
    model = tiny("gpt2")
    broken(lambda folder: None, tmp_path / "llama")
    with offloaded(model, adamw(model)) as tuned, pytest.raises(ValueError, match="is of another model"):
        tuned.optimizer.load(tmp_path / "llama")


@pytest.mark.parametrize("active", [True, False])
def test_a_gradient_that_is_not_finite_stops_the_run(active: bool) -> None:
    model = tiny("llama")
    optimizer = adamw(model)
    hit = model.model.layers[2].mlp.up_proj.weight
    hit.register_hook(lambda gradient: gradient.fill_(float("nan")))
    before = model.model.layers[4].mlp.up_proj.weight.detach().clone()
    with offloaded(model, optimizer, active=active):

        def step() -> None:
            model(**batch(0)).loss.backward()
            optimizer.step()

        with pytest.raises(FloatingPointError, match=r"layers\.2\.mlp\.up_proj\.weight: the gradient is not"):
            step()
        if active:  # half of the weights are of one step, and half of another
            with pytest.raises(FloatingPointError):
                step()
    assert torch.equal(model.model.layers[4].mlp.up_proj.weight, before) is not active


def test_a_plain_loop_may_clip_and_accumulate() -> None:
    found = []
    for out_of_core in (False, True):
        model = tiny("llama")
        optimizer = adamw(model)
        with offloaded(model, optimizer) if out_of_core else nullcontext():
            norms = []
            for step in range(3):
                model(**batch(step)).loss.backward()
                model(**batch(step + 9)).loss.backward()
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
                optimizer.step()
                optimizer.zero_grad()
        found.append((norms, [p.detach().clone() for p in model.parameters()]))
    (plain, weights), (norms, ours) = found
    assert min(plain) > 0.1
    assert norms == pytest.approx(plain, rel=1e-5)
    for one, other in zip(ours, weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("active", [False, True])
def test_a_loop_that_was_saved_goes_on_with_its_learning_rates(tmp_path: Path, active: bool) -> None:
    found = []
    for stops in (False, True):
        torch.manual_seed(3)
        losses: list[float] = []
        kept: dict[str, Any] = {}
        for part in ((0, 3), (3, 6)) if stops else ((0, 6),):
            model = tiny("llama")
            optimizer = adamw(model)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
            with offloaded(model, optimizer, active=active) as tuned:
                if part[0]:
                    tuned.optimizer.load(tmp_path / "saved")
                    schedule.load_state_dict(kept)
                for step in range(*part):
                    loss = model(**batch(step)).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                    losses.append(loss.item())
                tuned.optimizer.save(tmp_path / "saved")
                kept = schedule.state_dict()
        found.append((losses, schedule.get_last_lr(), optimizer.param_groups[0]["lr"]))
    assert found[0] == found[1]


@pytest.mark.parametrize("base", ["disk", "device"])
def test_recomputed_blocks_of_a_converted_model_know_their_adapters(base: str) -> None:
    found = []
    for out_of_core in (False, True):
        torch.manual_seed(3)
        model = mlora_ext.convert_model(
            tiny("llama"),
            {name: LoraConfig(r=4, target_modules=["q_proj", "up_proj"]) for name in "ab"},
        )
        how = {"base": base, "activations": "recompute"}
        with offloaded(model, **how) if out_of_core else nullcontext():
            model(**batch(0), adapter_names=["a", "b"][: len(batch(0)["input_ids"])]).loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) > 4
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_the_weights_are_those_of_the_state_dict() -> None:
    model = tiny("llama")
    with offloaded(model, adamw(model)) as tuned:
        weights = dict(tuned.weights())
    other = tiny("llama")
    missing, unexpected = other.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied


def test_a_second_backward_pass_without_a_step_is_refused() -> None:
    model = tiny("llama")
    with offloaded(model, adamw(model), active=True):
        model(**batch(0)).loss.backward()
        with pytest.raises(RuntimeError, match=r"a second gradient came before optimizer\.step"):
            model(**batch(1)).loss.backward()


def test_what_cannot_be_offloaded_is_refused() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"optimizer: expected a torch\.optim\.AdamW, got SGD"):
        offloaded(model, torch.optim.SGD(model.parameters(), lr=1)).__enter__()
    with pytest.raises(ValueError, match="optimizer: amsgrad is not supported"):
        offloaded(model, torch.optim.AdamW(model.parameters(), amsgrad=True)).__enter__()
    with pytest.raises(ValueError, match="optimizer: 1 of its Parameters are not in the model"):
        offloaded(model, torch.optim.AdamW([nn.Parameter(torch.ones(2))])).__enter__()
    with pytest.raises(ValueError, match="activations: expected one for each of 5 blocks, got 2"):
        offloaded(model, activations=["keep", "swap"])
    with pytest.raises(ValueError, match="base: expected device, host or disk, got 'cloud'"):
        offloaded(model, base="cloud")
    with pytest.raises(ValueError, match="blocks: the model has no module 'layers'"):
        offloaded(model, blocks="layers")
    with pytest.raises(ValueError, match="give the optimizer, or call model"):
        offloaded(model).__enter__()
    with pytest.raises(ValueError, match="name its blocks"):
        offloaded(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"so far, but .* is on meta"):
        offloaded(tiny("llama").to("meta"))
    assert torch.isfinite(model(**batch(0)).loss)


def test_a_removed_folder_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = tiny("llama").requires_grad_(False)
    expected = model(**batch(0)).loss.item()
    with pytest.raises(FileNotFoundError) as error, offloaded(model, folders=[tmp_path / "gone"]):
        pass
    assert error.value.filename == str(tmp_path / "gone")
    assert model(**batch(0)).loss.item() == expected
