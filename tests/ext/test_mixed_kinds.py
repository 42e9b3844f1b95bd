"""DoRA and lora_bias beside plain LoRA in one batch: PEFT's results, and nothing of the neighbours'."""

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import assert_same, gpt2, llama, token_ids
from peft import LoraConfig, get_peft_model
from tolerances import STEADY_EPSILON, assert_same_up_to_rounding
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mlora_ext as mx
from mlora_ext.ops.dropout import philox_mask

SHARES = {"r": 4, "lora_alpha": 6, "init_lora_weights": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "dora": {**SHARES, "use_dora": True, "use_rslora": True},
    "bias": {**SHARES, "lora_bias": True},
    "plain": {**SHARES, "r": 3},
    "other": {**SHARES, "r": 5, "use_dora": True},
}


def configs_for(targets: list[str], **more: Any) -> dict[str, LoraConfig]:
    return {name: LoraConfig(**fields, target_modules=targets, **more) for name, fields in CONFIGS.items()}


def parameters(model: nn.Module, name: str, of_peft: bool) -> dict[str, nn.Parameter]:
    """An adapter's Parameters under PEFT's names, of its model or of ours."""
    if of_peft:
        found = {key.removeprefix("base_model.model."): p for key, p in model.named_parameters()}
        return {key: p for key, p in found.items() if f".{name}." in key}
    mine = mx.adapter_parameters(model, name)
    return {key.replace(f"lora_bias.{name}.weight", f"lora_B.{name}.bias"): p for key, p in mine.items()}


def put_into(model: nn.Module, peft: nn.Module, name: str) -> None:
    theirs = parameters(peft, name, True)
    mine = parameters(model, name, False)
    assert mine.keys() == theirs.keys()
    with torch.no_grad():
        for key, parameter in mine.items():
            assert parameter.shape == theirs[key].shape, key
            parameter.copy_(theirs[key])


def into_peft(peft: nn.Module, model: nn.Module, name: str) -> None:
    mine = parameters(model, name, False)
    with torch.no_grad():
        for key, parameter in parameters(peft, name, True).items():
            parameter.copy_(mine[key])


@pytest.mark.parametrize("base", [llama, gpt2])
def test_25_steps_of_a_mixed_batch_are_those_of_peft(base: Any) -> None:
    targets = ["q_proj", "down_proj"] if base is llama else ["c_attn", "mlp.c_proj"]
    more = {"fan_in_fan_out": base is gpt2, "rank_pattern": {targets[1]: 2}, "alpha_pattern": {targets[0]: 9}}
    whole, configs = base(), configs_for(targets, **more)
    ids = {name: token_ids(1, 6) for name in configs}
    pefts = {n: get_peft_model(copy.deepcopy(whole), config, adapter_name=n) for n, config in configs.items()}
    model = mx.convert_model(copy.deepcopy(whole), configs)
    for name, peft in pefts.items():
        put_into(model, peft, name)
    adams = [
        torch.optim.AdamW(parameters(one, name, one is not model).values(), lr=2e-3, eps=STEADY_EPSILON)
        for name, peft in pefts.items()
        for one in (peft, model)
    ]
    begin = {name: {k: p.detach().clone() for k, p in parameters(model, name, False).items()} for name in ids}
    for _ in range(25):
        for adam in adams:
            adam.zero_grad()
        expected = {name: peft(input_ids=ids[name], labels=ids[name]).loss for name, peft in pefts.items()}
        logits = model(input_ids=torch.cat([*ids.values()]), adapter_names=[*ids]).logits
        shifted = logits[:, :-1].flatten(0, 1), torch.cat([*ids.values()])[:, 1:].flatten()
        losses = nn.functional.cross_entropy(*shifted, reduction="none").view(len(ids), -1).mean(1)
        for one, loss in zip(losses, expected.values(), strict=True):
            assert abs(one.item() - loss.item()) <= 1e-5 * loss.item()
        (losses.sum() + sum(expected.values())).backward()
        for adam in adams:
            adam.step()
    for name, peft in pefts.items():
        theirs = parameters(peft, name, True)
        for key, mine in parameters(model, name, False).items():
            change, wanted = mine - begin[name][key], theirs[key] - begin[name][key]
            assert_same_up_to_rounding(change.detach(), wanted.detach(), key, 1e-4)


class Counting(TorchDispatchMode):
    """Counts PyTorch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.found[str(function)] += 1
        return function(*arguments, **(named or {}))


class OurDropout(nn.Module):
    """Drops what the operator drops in the rows of one adapter."""

    def __init__(self, p: float, seed: int, step: int, layer: int) -> None:
        super().__init__()
        self.p, self.place = p, {"seed": seed, "step": step, "layer": layer}

    def forward(self, x: Tensor) -> Tensor:
        keep = philox_mask(*x.shape, p=self.p, **self.place, device=x.device)
        return torch.where(keep, x / (1 - round(self.p * 65536) / 65536), 0)


LENGTHS, OWNERS = [7, 4, 0, 5, 3, 6], ["dora", "plain", "bias", None, "other", "bias"]
DROPOUT = {"dora": 0.3, "bias": 0.2, "plain": 0.5, "other": 0.1}


def packed(
    x: Tensor,
    model: nn.Module,
    names: list[str],
    lengths: list[int],
    owners: list[Any],
    forward: Callable[[Tensor], Tensor] | None = None,
    step: int = 5,
) -> Tensor:
    layout = mx.SegmentLayout.from_lengths(
        lengths, [-1 if owner is None else names.index(owner) for owner in owners]
    )
    with mx.route(model, layout, names=names, steps=[step] * len(names)):
        return (forward or model)(x)


def net_of(dtype: torch.dtype = torch.float32, layers: int = 2) -> tuple[nn.Module, nn.Module]:
    """A converted net with an adapter of each kind and dropout, and its base."""
    base = nn.Sequential(nn.Linear(20, 24), nn.Tanh(), nn.Linear(24, 10, bias=False)).to(dtype)
    targets = ["0", "2"][:layers]
    configs = {
        name: LoraConfig(**CONFIGS[name], target_modules=targets, lora_dropout=DROPOUT[name])
        for name in CONFIGS
    }
    return mx.convert_model(copy.deepcopy(base), configs, seed=int(torch.randint(2**31, ()))), base


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_that_of_peft(dtype: torch.dtype) -> None:
    """Values, dx and all gradients, with our masks in PEFT's formula; fp32 adapters over either base."""
    model, base = net_of(dtype)
    x = torch.randn(sum(LENGTHS), 20).to(dtype).requires_grad_()
    y = packed(x, model, [*CONFIGS], LENGTHS, OWNERS)
    weights = torch.randn(y.shape).to(dtype)
    (y * weights).sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    assert y.dtype == dtype
    for name in CONFIGS:
        rows = torch.cat([torch.full((n,), o == name) for n, o in zip(LENGTHS, OWNERS, strict=True)])
        peft = get_peft_model(copy.deepcopy(base), model.mlora_router.adapters[name].config, name).train()
        into_peft(peft, model, name)
        for index, layer in ((0, peft.base_model.model[0]), (1, peft.base_model.model[2])):
            seed = model.mlora_router.adapters[name].seed
            layer.lora_dropout[name] = OurDropout(DROPOUT[name], seed, 5, index)
        given = x.detach()[rows].requires_grad_()
        expected = peft(given)
        (expected * weights[rows]).sum().backward()
        assert_same_up_to_rounding(y[rows].detach(), expected.detach(), name, tolerance)
        assert_same_up_to_rounding(x.grad[rows], given.grad, f"dx of {name}", tolerance)
        theirs = parameters(peft, name, True)
        for key, mine in parameters(model, name, False).items():
            assert mine.dtype == theirs[key].dtype == torch.float32
            assert_same_up_to_rounding(mine.grad, theirs[key].grad, key, tolerance)


def states(model: nn.Module, name: str) -> list[Tensor]:
    return [p.grad.clone() for p in mx.adapter_parameters(model, name).values()]


def test_alone_as_beside_others() -> None:
    """Bit for bit beside adapters full of NaN: the rows are the same ones.

    Alone, DoRA's rows with dropout are fewer, and on some processors a product's rounding depends on that.
    """
    model, _ = net_of()
    x = torch.randn(sum(LENGTHS), 20)
    y = packed(x, model, [*CONFIGS], LENGTHS, OWNERS)
    y.square().sum().backward()
    expected = {name: states(model, name) for name in CONFIGS}
    for name in CONFIGS:
        for ruined in (False, True):
            model.zero_grad()
            rows = torch.cat([torch.full((n,), o == name) for n, o in zip(LENGTHS, OWNERS, strict=True)])
            if ruined:
                saved = copy.deepcopy(model.state_dict())
                for other in set(CONFIGS) - {name}:
                    for parameter in mx.adapter_parameters(model, other).values():
                        nn.init.constant_(parameter, float("nan"))
                alone = packed(x, model, [*CONFIGS], LENGTHS, OWNERS)
            else:
                alone = packed(x, model, [name], LENGTHS, [o if o == name else None for o in OWNERS])
            alone[rows].square().sum().backward()
            pairs = zip([alone[rows].detach(), *states(model, name)], [y[rows], *expected[name]], strict=True)
            for one, other in pairs:
                if ruined:
                    assert torch.equal(one, other), name
                else:
                    assert_same_up_to_rounding(one, other.detach(), name)
            if ruined:
                model.load_state_dict(saved)


def result_of(model: nn.Module, ids: Tensor, names: list[str]) -> dict[str, Tensor]:
    model.zero_grad()
    model.mlora_router.step = 3
    logits = model(input_ids=ids, adapter_names=names).logits
    logits.float().square().mean().backward()
    grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach().float(), **grads}


def language_model(dropout: float = 0.3) -> tuple[nn.Module, Tensor, list[str]]:
    configs = configs_for(["q_proj", "k_proj", "v_proj", "down_proj"], lora_dropout=dropout)
    names = ["dora", "plain", "bias", "__base__", "other", "dora"]
    return mx.convert_model(llama(), configs).train(), token_ids(len(names), 5), names


def results(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
    lengths: list[int] = LENGTHS,
    step: int = 5,
) -> list[Tensor]:
    given = x.clone().requires_grad_()
    for name in CONFIGS:
        for parameter in mx.adapter_parameters(model, name).values():
            if parameter.grad is not None:
                parameter.grad.zero_()
    y = packed(given, model, [*CONFIGS], lengths, OWNERS, forward, step)
    y.square().sum().backward()
    return [y.detach(), given.grad, *(g for name in CONFIGS for g in states(model, name))]


def hold_gradients(model: nn.Module) -> None:
    model.mlora_router.accumulates = True
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    model.mlora_router.moved()


@pytest.mark.parametrize("way", ["reference", "triton", "packed", "held"])
def test_other_ways_to_the_same_numbers(way: str) -> None:
    model, _ = net_of()
    x = torch.randn(sum(LENGTHS), 20)
    expected = results(model, model, x)
    if way == "packed":
        mx.pack_base(model)
    elif way == "held":
        hold_gradients(model)
    with mx.use_backend(way) if way in ("reference", "triton") else nullcontext():
        got = results(model, model, x)
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert_same_up_to_rounding(one, other, f"result {index}")


def test_compiled_for_other_layouts_and_steps() -> None:
    torch._dynamo.reset()
    model, _ = net_of(layers=1)
    forward = torch.compile(model.forward, fullgraph=True, dynamic=True, backend="aot_eager")
    for step, lengths in enumerate([LENGTHS, [5, 0, 3, 6, 2, 9], [1, 8, 8, 2, 3, 3]]):
        x = torch.randn(sum(lengths), 20)
        expected = results(model, model, x, lengths, step)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            got = results(model, forward, x, lengths, step)
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_same_up_to_rounding(one, other, f"step {step}, result {index}")


def test_recomputed_in_backward() -> None:
    model, ids, names = language_model()
    expected = result_of(model, ids, names)
    model.gradient_checkpointing_enable()
    assert_same(result_of(model, ids, names), expected)


@pytest.mark.nightly
def test_a_whole_compiled_model() -> None:
    model, ids, names = language_model()
    expected = result_of(model, ids, names)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = result_of(compiled, ids, names)
    assert_same({key.removeprefix("_orig_mod."): value for key, value in got.items()}, expected)


def test_autocast_and_a_bf16_base_are_near_fp32() -> None:
    model, _ = net_of()
    x = torch.randn(sum(LENGTHS), 20)
    expected = results(model, model, x)
    with torch.autocast(x.device.type, torch.bfloat16):
        got = results(model, model, x)
    assert got[0].dtype == torch.bfloat16
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert_same_up_to_rounding(one.float(), other, f"result {index}", 0.03)
    _, ids, names = language_model()
    half = mx.convert_model(llama().bfloat16(), configs_for(["q_proj", "down_proj"]))
    logits = half(input_ids=ids, adapter_names=names).logits
    assert logits.dtype == torch.bfloat16
    logits.float().square().mean().backward()
    assert {p.grad.dtype for p in mx.adapter_parameters(half, "dora").values()} == {torch.float32}


def test_no_call_for_each_adapter() -> None:
    """Where adapters keep their gradients, as in a run: after the first micro-batch of an optimizer step."""

    def operations(adapters: int) -> Counter[str]:
        names = [f"a{i}" for i in range(adapters)]
        fields = {"r": 2, "lora_dropout": 0.2, "target_modules": ["0"]}
        kinds = [{"use_dora": True}, {"lora_bias": True}]
        configs = {name: LoraConfig(**fields, **kinds[i % 2]) for i, name in enumerate(names)}
        model = mx.convert_model(nn.Sequential(nn.Linear(8, 8)), configs)
        hold_gradients(model)
        x = torch.randn(6 * adapters, 8, requires_grad=True)
        layout = mx.SegmentLayout.from_lengths([6] * adapters)
        with mx.route(model, layout, names=names, steps=[1] * adapters):
            model(x).sum().backward()
            with Counting() as counting:
                model(x).sum().backward()
        return counting.found

    two, six = operations(2), operations(6)
    assert two["aten._foreach_add_.List"] == 2
    views = {"aten.detach.default"}
    assert {key for key in six if six[key] != two[key]} <= views
