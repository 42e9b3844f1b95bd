"""Storage: adapters stay in their bank, and keep their values, through everything a module goes through."""

import copy
import io

import pytest
import torch
from models import llama
from peft import LoraConfig
from torch import nn

import mlora_ext as mx
from mlora_ext.layers.bank import AdapterBank


def bank(transposed: bool = False, **ranks: int) -> AdapterBank:
    made = AdapterBank(12, transposed=transposed)
    made.reserve(sum(ranks.values()))
    for name, rank in ranks.items():
        made.add(name, rank).data.normal_()
    return made


def values(made: AdapterBank) -> dict[str, torch.Tensor]:
    return {name: made.parameter_of(name).detach().clone() for name in made.names()}


def assert_whole(made: AdapterBank, expected: dict[str, torch.Tensor]) -> None:
    """Every Parameter is where the bank put it, nobody overlaps, and values are as expected."""
    assert list(made.names()) == list(expected)
    for name, value in expected.items():
        assert made.owns(name), name
        torch.testing.assert_close(made.parameter_of(name).detach(), value)
    for index, name in enumerate(expected):
        with torch.no_grad():
            made.parameter_of(name).fill_(index)
    for index, name in enumerate(expected):
        assert (made.parameter_of(name) == index).all(), f"{name} shares memory with another adapter"


@pytest.fixture(params=[False, True], ids=["A", "B"])
def full(request: pytest.FixtureRequest) -> AdapterBank:
    return bank(request.param, a=4, b=7, train=1)


def test_shapes_and_keys(full: AdapterBank) -> None:
    shape = (12, 7) if full.transposed else (7, 12)
    assert full.parameter_of("b").shape == shape
    assert list(full.state_dict()) == ["a.weight", "b.weight", "train.weight"]
    assert_whole(full, values(full))


@pytest.mark.parametrize(
    "convert",
    [lambda m: m.half(), lambda m: m.double(), lambda m: m.to(torch.bfloat16), lambda m: m.float()],
    ids=["half", "double", "bfloat16", "float"],
)
def test_conversion(full: AdapterBank, convert) -> None:
    same = full.parameter_of("a")
    full.parameter_of("a").grad = torch.ones_like(same)
    expected = {name: convert(nn.ParameterList([v]))[0].detach() for name, v in values(full).items()}
    convert(full)
    assert full.parameter_of("a") is same
    assert same.grad.dtype == same.dtype
    assert full.add("new", 3).dtype == same.dtype
    full.remove("new")
    assert_whole(full, expected)


def test_deepcopy(full: AdapterBank) -> None:
    expected = values(full)
    clone = copy.deepcopy(full)
    assert_whole(clone, expected)
    assert_whole(full, expected)


def test_pickle(full: AdapterBank) -> None:
    expected, file = values(full), io.BytesIO()
    torch.save(full, file)
    file.seek(0)
    assert_whole(torch.load(file, weights_only=False), expected)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "double", "half then back"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_data_of_ones_own_is_kept(full: AdapterBank, how: str, dtype: torch.dtype) -> None:
    """`p.data = ...` gives a Parameter other memory; its values survive what replaces the pages."""
    data = torch.randn(full.parameter_of("b").shape).to(dtype)
    full.parameter_of("b").data = data.clone()
    if how == "deepcopy":
        full = copy.deepcopy(full)
    elif how == "pickle":
        stored = io.BytesIO()
        torch.save(full, stored)
        stored.seek(0)
        full = torch.load(stored, weights_only=False)
    else:
        full = full.double() if how == "double" else full.to(torch.bfloat16).float()
        data = data.to(torch.bfloat16) if how != "double" else data
    torch.testing.assert_close(full.parameter_of("b").detach(), data.to(full.parameter_of("b").dtype))
    assert_whole(full, values(full))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_load_state_dict(full: AdapterBank, assign: bool, dtype: torch.dtype) -> None:
    other = {key: torch.randn_like(value).to(dtype) for key, value in full.state_dict().items()}
    full.load_state_dict(other, assign=assign)
    stored = dtype if assign else torch.float32
    assert_whole(full, {key.removesuffix(".weight"): value.to(stored) for key, value in other.items()})


def test_meta_and_back(full: AdapterBank) -> None:
    state = {key: value.clone() for key, value in full.state_dict().items()}
    full.to("meta").to_empty(device="cpu").load_state_dict(state)
    assert_whole(full, {key.removesuffix(".weight"): value for key, value in state.items()})


def test_joining_and_leaving_move_nobody() -> None:
    made = bank(a=4, b=7, c=3)
    where = {name: made.parameter_of(name).data_ptr() for name in "abc"}
    kept = values(made)
    left = made.parameter_of("b")
    made.remove("b")
    made.add("d", 5).data.normal_()
    made.add("e", 2).data.normal_()
    made.add("f", 40).data.normal_()
    for name in "ac":
        assert made.parameter_of(name).data_ptr() == where[name]
        assert torch.equal(made.parameter_of(name), kept[name])
    assert made.parameter_of("d").data_ptr() == where["b"], "first fit: d takes b's place"
    torch.testing.assert_close(left.detach(), kept["b"])
    with torch.no_grad():
        left.zero_()
    assert_whole(made, values(made))


def test_new_adapter_starts_from_zero() -> None:
    made = bank(a=4)
    made.remove("a")
    assert (made.add("b", 4) == 0).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_step_of_one_leaves_backward_of_another_alone(backend: str) -> None:
    """Adapters share memory pages, not version counters: each has its forward pass, one steps in between."""
    a, b = bank(a=4, b=7), bank(True, a=4, b=7)
    x, weight = {name: torch.randn(5, 12) for name in "ab"}, torch.randn(12, 12)
    layout = mx.SegmentLayout.from_lengths([5])
    with mx.use_backend(backend):
        y = {
            name: mx.multi_lora_linear(
                x[name], weight, None, [a.parameter_of(name)], [b.parameter_of(name)], [1.0], layout
            )
            for name in "ab"
        }
        y["a"].sum().backward()
        with torch.no_grad():
            for one in (a, b):
                one.parameter_of("a").sub_(one.parameter_of("a").grad)
        y["b"].sum().backward()
    expected = (torch.ones(5, 12) @ b.parameter_of("b").detach()).t() @ x["b"]
    torch.testing.assert_close(a.parameter_of("b").grad, expected)


def test_random_joining_and_leaving() -> None:
    made, expected = bank(), {}
    for turn in range(60):
        if expected and torch.rand(()) < 0.45:
            name = list(expected)[int(torch.randint(len(expected), ()))]
            made.remove(name)
            del expected[name]
        else:
            name = f"adapter-{turn}"
            made.add(name, int(torch.randint(1, 24, ()))).data.normal_()
            expected[name] = made.parameter_of(name).detach().clone()
    assert_whole(made, expected)


def test_adapters_may_have_the_names_of_attributes() -> None:
    """PEFT takes most of these names, and its keys are `<layer>.lora_A.<name>.weight` for any name."""
    config = LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], modules_to_save=["norm"])
    layers = mx.convert_model(llama(1), {"a": config}).modules()
    holders = [module for module in layers if type(module).__module__.startswith("mlora_ext")]
    names = sorted({name for module in holders for name in (*dir(module), *vars(module), "__deepcopy__")})
    plain = mx.convert_model(llama(1), dict.fromkeys(names, config))
    mx.add_adapter(plain, "a1", config)
    model = copy.deepcopy(plain).half().float().train().eval().to("cpu")
    keys = {key.replace(".a1.", f".{name}.") for key in mx.adapter_parameters(plain, "a1") for name in names}
    state = {key: torch.randn_like(value) for key, value in plain.state_dict().items() if key in keys}
    assert state.keys() == keys
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    for key, parameter in model.named_parameters():
        assert key not in state or torch.equal(parameter, state[key]), key
    assert mx.merge_and_unload(model, "train") is not model
    for name in ("moves", "training", "train", "_modules", "__class__"):
        mx.remove_adapter(model, name)
        assert not [key for key in model.state_dict() if f".{name}." in key]
