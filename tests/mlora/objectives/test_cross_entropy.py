"""The chunked loss equals cross-entropy on whole logits, and never holds them."""

from types import SimpleNamespace

import mlora.objectives.token_losses
import pytest
import torch
import torch.nn.functional as F
from mlora.objectives.token_losses import Head, LogitRule, Owners, chunked_losses, plain_losses
from tolerances import assert_as_exact
from torch.utils._python_dispatch import TorchDispatchMode

from mlora_ext.frozen.plain import PlainWeight

COUNTS = [37, 0, 90, 3]
RULES = [LogitRule(), LogitRule(scale=0.25), LogitRule(softcap=3.0), LogitRule(scale=0.5, softcap=2.0)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlora.objectives.token_losses, "_SMALLEST_CHUNK", 16)
    monkeypatch.setattr(mlora.objectives.token_losses, "_CHUNK_ELEMENTS", {"cpu": 16 * 301, "cuda": 16 * 301})


def case(dtype: torch.dtype, rule: LogitRule, bias: bool = True) -> tuple[torch.Tensor, Head, torch.Tensor]:
    hidden = torch.randn(160, 24).to(dtype).requires_grad_()
    weight, offset = torch.randn(301, 24).to(dtype), torch.randn(301).to(dtype)
    rows = torch.randperm(160)[: sum(COUNTS)].sort().values
    return hidden, Head(PlainWeight.of(weight), offset if bias else None, rule), rows


def whole(
    hidden: torch.Tensor,
    head: Head,
    rows: torch.Tensor,
    targets: torch.Tensor,
    scales: list[float],
    wide: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and gradient by autograd from whole logits; in fp64 if `wide`."""
    as_wide = (lambda t: t.double()) if wide else (lambda t: t)
    leaf = as_wide(hidden.detach()).requires_grad_()
    bias = None if head.bias is None else as_wide(head.bias)
    logits = head.rule.apply(F.linear(leaf[rows], as_wide(head.frozen.dense()), bias))
    logits = logits if wide else logits.float()
    losses = F.cross_entropy(logits, targets, reduction="none").split(COUNTS)
    sum(part.sum() * scale for part, scale in zip(losses, scales, strict=True)).backward()
    return torch.cat(losses).detach(), leaf.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_values_and_gradients(dtype: torch.dtype, rule: LogitRule) -> None:
    hidden, head, rows = case(dtype, rule)
    targets = torch.randint(301, (len(rows),))
    scales = [1.0, 1.0, 8.0, 0.5]
    found = chunked_losses(hidden, head, rows, targets, Owners(COUNTS, scales))
    total, sums = found.total, found.sums
    total.backward()
    exact_losses, exact_grad = whole(hidden, head, rows, targets, scales, wide=True)
    plain_losses, plain_grad = whole(hidden, head, rows, targets, scales, wide=False)
    assert_as_exact(hidden.grad, plain_grad, exact_grad, "gradient")
    # every row its own owner: the policy is about many numbers, and there are only four sums
    each = [1] * len(rows)
    owners = Owners(each, [1.0] * len(rows))
    losses = chunked_losses(hidden.detach(), head, rows, targets, owners).sums
    assert_as_exact(losses, plain_losses, exact_losses, "losses")
    torch.testing.assert_close(sums, torch.stack([part.sum() for part in losses.split(COUNTS)]))


def summed(hidden: torch.Tensor, head: Head, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sums of all owners, after a backward pass."""
    found = chunked_losses(hidden, head, rows, targets, Owners(COUNTS, [1.0] * 4))
    found.total.backward()
    return found.sums


def test_plain_losses_are_the_same() -> None:
    hidden, head, rows = case(torch.float32, LogitRule())
    targets = torch.randint(301, (len(rows),))
    scales = [2.0, 1.0, 1.0, 0.5]
    found = chunked_losses(hidden, head, rows, targets, Owners(COUNTS, scales))
    total, sums = found.total, found.sums
    total.backward()
    chunked, hidden.grad = hidden.grad, None
    logits = F.linear(hidden.index_select(0, rows), head.frozen.dense(), head.bias)
    plain = plain_losses(logits, targets, Owners(COUNTS, scales))
    plain.total.backward()
    torch.testing.assert_close(sums, plain.sums, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(chunked, hidden.grad, rtol=1e-5, atol=1e-5)


def test_rows_that_are_not_finite_stay_alone() -> None:
    """The sums and gradients of the other owners keep their bits."""
    hidden, head, rows = case(torch.float32, LogitRule())
    targets = torch.randint(301, (len(rows),))
    sums = summed(hidden, head, rows, targets)
    spoiled = hidden.detach().clone()
    bad = rows[5]
    spoiled[bad] = float("nan")
    spoiled.requires_grad_()
    spoiled_sums = summed(spoiled, head, rows, targets)
    assert not spoiled_sums[0].isfinite()
    assert torch.equal(spoiled_sums[1:], sums[1:])
    others = torch.arange(160) != bad
    assert torch.equal(spoiled.grad[others], hidden.grad[others])
    assert not spoiled.grad[bad].isfinite().any()


class _LargestResult(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_whole_logits_are_never_held() -> None:
    hidden, head, rows = case(torch.float32, LogitRule())
    targets = torch.randint(301, (len(rows),))
    with _LargestResult() as seen:
        summed(hidden, head, rows, targets)
    assert seen.largest <= max(16 * 301, hidden.numel(), head.frozen.dense().numel())
    assert seen.largest < len(rows) * 301 / 4


def test_no_gradient_without_grad_mode() -> None:
    hidden, head, rows = case(torch.float32, LogitRule())
    targets = torch.randint(301, (len(rows),))
    owners = Owners(COUNTS, [1.0] * 4)
    expected = chunked_losses(hidden, head, rows, targets, owners).sums
    with torch.no_grad():
        found = chunked_losses(hidden, head, rows, targets, owners)
    assert not found.total.requires_grad
    assert torch.equal(found.sums, expected)


def test_rule_of_a_config() -> None:
    assert LogitRule.of(SimpleNamespace()) == LogitRule()
    config = SimpleNamespace(logit_scale=0.5, logits_scaling=4.0, final_logit_softcapping=30.0)
    assert LogitRule.of(config) == LogitRule(0.125, 30.0)
