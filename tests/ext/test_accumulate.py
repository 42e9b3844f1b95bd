"""Adding to gradients that exist, in place: the same numbers as autograd's own accumulation."""

import pytest
import torch
from backends import BACKENDS, serving
from cases import Case, make
from models import assert_same, converted, gradients, token_ids
from peft import LoraConfig
from tolerances import assert_same_up_to_rounding

import mlora_ext as mx
from mlora_ext.ops.functional import lora_linear_rows


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    with serving(request.param, monkeypatch) as name:
        yield name


def backward(case: Case, accumulates: bool) -> None:
    operands = case.operator_arguments()
    lora_linear_rows(*operands, accumulates=accumulates).backward(case.dy)


def leaves(case: Case) -> list[torch.Tensor]:
    return [*case.lora_a, *case.lora_b]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [[6, 5, 9], [1100, 0, 3]], ids=["one run", "several runs"])
def test_same_as_autograd(dtype: torch.dtype, lengths: list[int]) -> None:
    case = make(
        [4, 7, 20], lengths, [0, 1, 2], d_in=24, d_out=16, dtype=dtype, adapter_dtype=torch.float32, p=0.2
    )
    backward(case, False)
    once = [leaf.grad for leaf in leaves(case)]
    expected = [2 * grad for grad in once]
    places = [grad.data_ptr() for grad in once]
    backward(case, True)
    for leaf, twice, place in zip(leaves(case), expected, places, strict=True):
        assert leaf.grad.data_ptr() == place
        assert_same_up_to_rounding(leaf.grad, twice, "gradient")


def test_gradients_anywhere_in_memory() -> None:
    """`.grad` apart from each other, in either order of dimensions, as a foreign loop may have set it."""
    case = make([4, 7], [6, 5], [0, 1])
    backward(case, False)
    once = [leaf.grad.clone() for leaf in leaves(case)]
    for index, leaf in enumerate(leaves(case)):
        leaf.grad = torch.zeros(leaf.shape) if index % 2 else torch.zeros(leaf.shape[::-1]).t()
    places = [leaf.grad.data_ptr() for leaf in leaves(case)]
    versions = [leaf.grad._version for leaf in leaves(case)]
    backward(case, True)
    for leaf, grad, place, version in zip(leaves(case), once, places, versions, strict=True):
        assert leaf.grad.data_ptr() == place
        assert leaf.grad._version > version, "saved copies of it are out of date"
        assert_same_up_to_rounding(leaf.grad, grad, "gradient")


def test_a_gradient_without_memory_of_its_own_is_not_written_through() -> None:
    case = make([4, 7], [6, 5], [0, 1])
    backward(case, False)
    case.lora_a[0].grad = torch.zeros(1, 1).expand(case.lora_a[0].shape)
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        backward(case, True)


def test_a_mates_phase_changes_no_bit_of_16_bit_adapters() -> None:
    """Whether all have a gradient depends on batch-mates; so adapters that round add by autograd alone."""
    found = []
    for mate_has_one in (True, False):
        torch.manual_seed(5)
        case = make([4, 7], [6, 5], [0, 1], dtype=torch.bfloat16)
        backward(case, False)
        if not mate_has_one:
            case.lora_a[1].grad = None
        backward(case, True)
        found.append(case.lora_a[0].grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("why", ["one has none", "one has a hook", "one is frozen", "post-accumulate hook"])
def test_autograd_accumulates_where_somebody_listens(why: str) -> None:
    case = make([4, 7], [6, 5], [0, 1])
    heard = []
    backward(case, False)
    once = [leaf.grad.clone() for leaf in leaves(case)]
    parameter = case.lora_a[1]
    if why == "one has none":
        parameter.grad = None
    elif why == "one has a hook":
        parameter.register_hook(lambda grad: heard.append(grad) or grad)
    elif why == "post-accumulate hook":
        parameter.register_post_accumulate_grad_hook(heard.append)
    else:
        parameter.requires_grad_(False)
    backward(case, True)
    assert len(heard) == why.endswith("hook")
    for leaf, grad in zip(leaves(case), once, strict=True):
        times = 1 if leaf is parameter and why in ("one has none", "one is frozen") else 2
        assert_same_up_to_rounding(leaf.grad, times * grad, "gradient")


def test_whole_model() -> None:
    """Two micro-batches of a model whose router allows it."""
    configs = {name: LoraConfig(r=r, target_modules="all-linear") for name, r in (("a", 3), ("b", 5))}
    model = converted(1, **configs).train()
    batches = [token_ids(2, 5) for _ in range(2)]
    found = []
    for accumulates in (False, True):
        model.mlora_router.accumulates = accumulates
        for ids in batches:
            model(input_ids=ids, adapter_names=["a", "b"], labels=ids).loss.backward()
        found.append(gradients(model))
    assert_same(*found)


def test_batch_without_an_adapter() -> None:
    """An adapter that has a gradient and no rows keeps it."""
    case = make([4, 7], [6, 5], [0, 1])
    backward(case, False)
    kept = case.lora_a[1].grad.clone()
    case.layout = mx.SegmentLayout.from_lengths([11], [0])
    backward(case, True)
    assert torch.equal(case.lora_a[1].grad, kept)
