"""The operator over pairs of adapter and expert, against loops over both in fp64."""

from dataclasses import dataclass

import pytest
import torch
from backends import QUICK, fixture_of
from tolerances import assert_same_up_to_rounding
from torch import Tensor

from mlora_ext.backends.factors import expert_parts
from mlora_ext.frozen.experts import ExpertsWeight, grouped_product
from mlora_ext.layers.experts import ExpertRows, pairs_of
from mlora_ext.ops.autograd import lora_linear_held
from mlora_ext.ops.experts import hold_experts, lora_experts
from mlora_ext.ops.held import UpdateCounts

D, OUT, E, K = 24, 16, 5, 2
RANKS, SCALING = (3, 7, 2), (2.0, 0.5, 1.0)


# Triton's interpreter takes seconds for each of these


backend = fixture_of(QUICK)


@dataclass
class Case:
    """A layer with experts, adapters' Parameters as banks keep them, rows and where they go."""

    x: Tensor
    dy: Tensor
    index: Tensor
    owners: Tensor
    weight: Tensor
    bias: Tensor
    lora_a: list[torch.nn.Parameter]
    lora_b: list[torch.nn.Parameter]

    def rows(self) -> ExpertRows:
        return ExpertRows.sort(self.index, self.owners, E, len(RANKS))

    def plan(self, rows: ExpertRows) -> tuple[Tensor | None, ...]:
        pairs = pairs_of(tuple(range(len(RANKS))), E, self.x.device)
        scaling = torch.tensor(SCALING).repeat_interleave(E)
        return rows.segments(pairs), scaling, None, None, None

    def frozen(self, rows: ExpertRows) -> ExpertsWeight:
        tensors = {"up": self.weight, "up_bias": self.bias}
        return ExpertsWeight(tensors, "up", False, True, rows.groups)

    def results(self, y: Tensor) -> list[Tensor]:
        (y * self.dy).sum().backward()
        leaves = [self.x, *self.lora_a, *self.lora_b]
        found = [y.detach(), *(leaf.grad.clone() for leaf in leaves)]
        for leaf in leaves:
            leaf.grad = None
        return found

    def oracle(self) -> list[Tensor]:
        """By loops over rows, in fp64."""
        leaves = [one.detach().double().requires_grad_() for one in (self.x, *self.lora_a, *self.lora_b)]
        x, lora_a, lora_b = leaves[0], leaves[1 : 1 + len(RANKS)], leaves[1 + len(RANKS) :]
        rows = []
        for row, chosen, owner in zip(x, self.index.tolist(), self.owners.tolist(), strict=True):
            for expert in chosen:
                y = self.weight[expert].double() @ row + self.bias[expert].double()
                if owner < len(RANKS):
                    a = lora_a[owner].reshape(E, -1, D)[expert]
                    b = lora_b[owner].reshape(OUT, -1, E)[:, :, expert]
                    y = y + SCALING[owner] * b @ (a @ row)
                rows.append(y)
        y = torch.stack(rows).view(len(x), K, OUT)
        (y * self.dy.double()).sum().backward()
        return [y.detach(), *(torch.zeros_like(one) if one.grad is None else one.grad for one in leaves)]


def make(dtype: torch.dtype = torch.float32, rows: int = 20) -> Case:
    owners = torch.randint(len(RANKS), (rows,)).sort().values
    owners[owners == len(RANKS) - 1] += 1  # nobody has the last adapter
    lora_a = [torch.nn.Parameter(torch.randn(r * E, D) / 5) for r in RANKS]
    lora_b = [torch.nn.Parameter((torch.randn(r * E, OUT) / 5).t()) for r in RANKS]
    index = torch.stack(
        [torch.randperm(E - 1)[:K] for _ in range(rows)]
    )  # and nobody goes to the last expert
    x, dy = torch.randn(rows, D).to(dtype).requires_grad_(), torch.randn(rows, K, OUT).to(dtype)
    weight, bias = torch.randn(E, OUT, D).to(dtype), torch.randn(E, OUT).to(dtype)
    return Case(x, dy, index, owners, weight, bias, lora_a, lora_b)


def assert_right(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        largest = float(other.abs().max()) or 1.0
        assert float((one.double() - other).abs().max()) <= tolerance * largest, place


TOLERANCES = [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)]


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=["fp32", "bf16"])
def test_values_and_gradients(dtype: torch.dtype, tolerance: float) -> None:
    case = make(dtype)
    rows = case.rows()
    sorted_x = rows.gather(case.x)
    y = lora_experts(sorted_x, case.frozen(rows), case.lora_a, case.lora_b, E, case.plan(rows))
    found = case.results(rows.scatter(y))
    assert_right(found, case.oracle(), tolerance)
    assert not found[2 + len(RANKS) - 1].any()  # of the adapter that has no rows


@pytest.mark.parametrize("transposed", [False, True], ids=["as stored", "transposed"])
def test_held_gradients_are_added_to(transposed: bool) -> None:
    case = make()
    expected = case.oracle()[1 + 1 :]
    for leaf in (*case.lora_a, *case.lora_b):
        leaf.grad = torch.zeros(leaf.shape[::-1]).t() if transposed else torch.zeros_like(leaf)
    written: set[str] = set()
    names = tuple("abc")
    held, rows = hold_experts(names, case.lora_a, case.lora_b, E, written), case.rows()
    assert held is not None
    for _ in range(2):
        x = rows.gather(case.x.detach().requires_grad_())
        found = lora_linear_held(x, [case.frozen(rows)], [None], held, case.plan(rows), UpdateCounts())
        assert found is not None
        (rows.scatter(found[0]) * case.dy).sum().backward()
    assert_right([leaf.grad / 2 for leaf in (*case.lora_a, *case.lora_b)], expected, 1e-5)
    assert written == set(names)


def test_changed_between_forward_and_backward() -> None:
    case = make(rows=4)
    rows = case.rows()
    y = lora_experts(rows.gather(case.x), case.frozen(rows), case.lora_a, case.lora_b, E, case.plan(rows))
    with torch.no_grad():
        case.lora_b[0].mul_(2)
    with pytest.raises(RuntimeError, match="lora_a, lora_b: an adapter on experts was changed in place"):
        y.sum().backward()


def test_a_row_that_is_not_a_number_stays_alone() -> None:
    """The other adapters' results and gradients are the same bits."""
    case = make()
    clean = run(case)
    with torch.no_grad():
        case.x[case.owners == 0] = torch.nan
    dirty = run(case)
    assert dirty[0][case.owners == 0].isnan().all()
    for place in (0, 1):  # y and dx
        others = case.owners != 0
        assert torch.equal(clean[place][others], dirty[place][others])
    for place in (3, 4, 6, 7):
        assert torch.equal(clean[place], dirty[place])


def run(case: Case) -> list[Tensor]:
    rows = case.rows()
    y = lora_experts(rows.gather(case.x), case.frozen(rows), case.lora_a, case.lora_b, E, case.plan(rows))
    return case.results(rows.scatter(y))


def test_batch_mates_change_no_bit_of_a_gradient(backend: str) -> None:
    """Sums over an adapter's rows are cut relative to its own first row."""
    each = 12 if backend == "triton" else 100  # its interpreter is slow
    case = make(rows=2 * each)
    case.owners = torch.tensor([0, 1]).repeat_interleave(each)
    together = run(case)
    alone = Case(
        case.x.detach()[each:].requires_grad_(), case.dy[each:], case.index[each:], case.owners[each:],
        case.weight, case.bias, case.lora_a, case.lora_b,
    )  # fmt: skip
    found = run(alone)
    assert torch.equal(found[3], together[3])
    assert torch.equal(found[6], together[6])
    assert_same_up_to_rounding(found[0], together[0][each:], "y")


def test_parts_are_views_in_pefts_order() -> None:
    a, b = torch.randn(3 * E, D), torch.randn(OUT, 3 * E)
    parts_a, parts_b = expert_parts(a, E, transposed=False), expert_parts(b, E, transposed=True)
    assert len(parts_a) == len(parts_b) == E
    for expert in range(E):
        assert torch.equal(parts_a[expert], a[3 * expert : 3 * expert + 3])
        assert torch.equal(parts_b[expert], b[:, expert::E])
        assert parts_a[expert]._base is not None


@pytest.mark.parametrize("sizes", [(24, 16), (7, 5)], ids=["grouped", "one by one"])
@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 0]], ids=str)
def test_grouped_product(sizes: tuple[int, int], counts: list[int]) -> None:
    x, weights = torch.randn(sum(counts), sizes[0]), torch.randn(3, *sizes)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    expected = [rows @ weight for rows, weight in zip(x.split(counts), weights, strict=True)]
    found = grouped_product(x, weights, ends)
    torch.testing.assert_close(found, torch.cat(expected))
