"""Losses and metrics of preference objectives on given log-probabilities, against formulas written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from mlora.data.preference import Pair, joined
from mlora.data.record import Sample
from mlora.objectives.custom import CustomLoss, LossError
from mlora.objectives.objective import LogProbs, LossOfOwner
from mlora.objectives.options import ObjectiveError
from mlora.objectives.registry import metrics_of, objective_of, resolved, takes

LENGTHS = [3, 5, 1, 2, 4, 4]  # of three pairs, or six completions
FACTS = [(3.0, 5.0, 3 / 8), (1.0, 2.0, 3 / 8), (4.0, 4.0, 3 / 8)]
LABELS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def drawn(lengths: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return -4 * torch.rand(sum(lengths), generator=generator) - 0.05


def per_sequence(values: torch.Tensor, lengths: list[int]) -> list[list[float]]:
    return [run.tolist() for run in values.split(lengths)]


def of_pairs(spec: Any) -> tuple[LossOfOwner, list[list[float]], list[list[float]]]:
    """The result, and the log-probabilities of each sequence, by the adapter and by the reference."""
    log_p, base = drawn(LENGTHS, 1), drawn(LENGTHS, 2)
    rows = LogProbs(log_p, LENGTHS, base, LENGTHS, FACTS)
    return objective_of(spec).loss_of(rows), per_sequence(log_p, LENGTHS), per_sequence(base, LENGTHS)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def number(metric: Any) -> float:
    return float(metric[0]) / metric[1] if isinstance(metric, tuple) else float(metric)


DPO = {
    "sigmoid": lambda c, r, nc, nr, b: -log_sigmoid(b * (c - r)),
    "hinge": lambda c, r, nc, nr, b: max(0.0, 1 - b * (c - r)),
    "ipo": lambda c, r, nc, nr, b: (c / nc - r / nr - 1 / (2 * b)) ** 2,
    "robust": lambda c, r, nc, nr, b: (
        (-0.8 * log_sigmoid(b * (c - r)) + 0.2 * log_sigmoid(-b * (c - r))) / 0.6
    ),
}


@pytest.mark.parametrize("loss_type", DPO)
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_dpo(loss_type: str, beta: float) -> None:
    smoothing = {"label_smoothing": 0.2} if loss_type == "robust" else {}
    spec = {"name": "dpo", "beta": beta, "loss_type": loss_type, **smoothing}
    found, log_p, base = of_pairs(spec)
    ratios = [sum(own) - sum(other) for own, other in zip(log_p, base, strict=True)]
    pairs = list(zip(ratios[0::2], ratios[1::2], LENGTHS[0::2], LENGTHS[1::2], strict=True))
    assert float(found.loss) == pytest.approx(sum(DPO[loss_type](*pair, beta) for pair in pairs), rel=1e-5)
    expected = {
        "rewards/chosen": sum(beta * c for c, *_ in pairs),
        "rewards/rejected": sum(beta * r for _, r, *_ in pairs),
        "rewards/margins": sum(beta * (c - r) for c, r, *_ in pairs),
        "rewards/accuracies": sum(c > r for c, r, *_ in pairs),
        "logps/chosen": sum(map(sum, log_p[0::2])),
        "logps/rejected": sum(map(sum, log_p[1::2])),
    }
    assert {name: number(value) for name, value in found.metrics.items()} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        # chosen (-1, -3), rejected (-2): means -2 and -2, so (0 - 1 / (2 * 0.1))^2 = 25 for ipo
        ({"name": "dpo", "loss_type": "ipo", "beta": 0.1}, 25.0),
        ({"name": "cpo", "loss_type": "ipo", "beta": 0.1, "cpo_alpha": 0.0}, 25.0),
        ({"name": "simpo", "beta": 1.0, "simpo_gamma": 0.0}, math.log(2)),
        ({"name": "orpo", "beta": 1.0}, 2 + math.log(2)),  # equal odds, and the loss of the chosen one, 2
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_a_token_that_no_other_precedes_is_not_counted(spec: dict[str, Any], expected: float) -> None:
    """Without a prompt and a start token, a completion's first token has no log-probability.

    By hand; TRL's ``DPOTrainer`` counts it for ipo, its ``CPOTrainer`` and ``ORPOTrainer`` do not.
    """
    pair = Pair(Sample((5, 6, 7), (5, 6, 7)), Sample((8, 9), (8, 9)))
    (sample,) = joined("a", [pair], objective_of(spec))
    lengths = [sequence.trained_tokens for sequence in sample.sequences]
    log_p = torch.tensor([-1.0, -3.0, -2.0])
    rows = LogProbs(log_p, lengths, torch.zeros(3), lengths, [sample.facts])
    assert float(objective_of(spec).loss_of(rows).loss) == pytest.approx(expected)


CPO = {
    "sigmoid": lambda d, b: -0.9 * log_sigmoid(b * d) - 0.1 * log_sigmoid(-b * d),
    "hinge": lambda d, b: max(0.0, 1 - b * d),
    "ipo": lambda d, b: (d - 1 / (2 * b)) ** 2,
    "simpo": lambda d, b: -0.9 * log_sigmoid(b * d - 0.8) - 0.1 * log_sigmoid(0.8 - b * d),
}


@pytest.mark.parametrize("loss_type", CPO)
def test_cpo_and_simpo(loss_type: str) -> None:
    beta, alpha, more = 0.3, 0.25, {}
    if loss_type in ("sigmoid", "simpo"):
        more = {"label_smoothing": 0.1}
    if loss_type == "simpo":
        more["simpo_gamma"] = 0.8
    found, log_p, _ = of_pairs(
        {"name": "cpo", "loss_type": loss_type, "beta": beta, "cpo_alpha": alpha, **more}
    )
    means = loss_type in ("ipo", "simpo")
    values = [sum(own) / (len(own) if means else 1) for own in log_p]
    chosen, rejected = values[0::2], values[1::2]
    nll = -sum(map(sum, log_p[0::2])) / sum(LENGTHS[0::2])  # the mean over tokens of chosen completions
    losses = [CPO[loss_type](c - r, beta) for c, r in zip(chosen, rejected, strict=True)]
    assert float(found.loss) == pytest.approx(sum(losses) + alpha * nll * 3, rel=1e-5)
    assert number(found.metrics["nll_loss"]) / 3 == pytest.approx(nll, rel=1e-5)
    assert number(found.metrics["rewards/margins"]) == pytest.approx(
        beta * (sum(chosen) - sum(rejected)), rel=1e-4
    )
    if loss_type == "simpo":
        short, *_ = of_pairs({"name": "simpo", "beta": beta, "cpo_alpha": alpha, **more})
        assert float(short.loss) == float(found.loss)


def test_orpo_trains_the_prompts_of_chosen_sequences() -> None:
    lengths = [5, 5, 3, 2, 6, 4]  # two tokens of each prompt before the chosen completions
    log_p = drawn(lengths, 3)
    share = 3 / (5 + 3 + 6)
    facts = [(3.0, 5.0, share), (1.0, 2.0, share), (4.0, 4.0, share)]
    found = objective_of({"name": "orpo", "beta": 0.2}).loss_of(
        LogProbs(log_p, lengths, torch.empty(0), (), facts)
    )
    runs = per_sequence(log_p, lengths)
    nll = -sum(map(sum, runs[0::2])) / 14
    chosen = [sum(run[2:]) / (len(run) - 2) for run in runs[0::2]]
    rejected = [sum(run) / len(run) for run in runs[1::2]]

    def odds(x: float) -> float:
        return x - math.log(1 - math.exp(x))

    apart = [odds(c) - odds(r) for c, r in zip(chosen, rejected, strict=True)]
    ratios = [log_sigmoid(each) for each in apart]
    assert float(found.loss) == pytest.approx(3 * nll - 0.2 * sum(ratios), rel=1e-5)
    assert number(found.metrics["log_odds_chosen"]) == pytest.approx(sum(apart), rel=1e-5)
    assert number(found.metrics["log_odds_ratio"]) == pytest.approx(sum(ratios), rel=1e-5)
    assert number(found.metrics["logps/chosen"]) == pytest.approx(sum(chosen), rel=1e-5)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("shift", [-9.0, 9.0], ids=["no divergence", "a divergence"])
def test_kto(loss_type: str, shift: float) -> None:
    spec = {
        "name": "kto",
        "beta": 0.4,
        "loss_type": loss_type,
        "desirable_weight": 1.5,
        "undesirable_weight": 0.5,
    }
    log_p, base, own, other = (drawn(LENGTHS, seed) for seed in (1, 2, 3, 4))
    other = other - shift
    silent = [base, own, other] if loss_type == "kto" else [base]
    rows = LogProbs(log_p, LENGTHS, torch.cat(silent), LENGTHS * len(silent), [LABELS])
    found = objective_of(spec).loss_of(rows)
    sums = [[sum(run) for run in per_sequence(each, LENGTHS)] for each in (log_p, base, own, other)]
    ratios = [a - b for a, b in zip(sums[0], sums[1], strict=True)]
    z = max(0.0, sum(a - b for a, b in zip(sums[2], sums[3], strict=True)) / 6) if loss_type == "kto" else 0.0
    assert (z > 0) == (loss_type == "kto" and shift > 0)
    total = 0.0
    for ratio, label in zip(ratios, LABELS, strict=True):
        toward = 0.4 * (ratio - z) if label else 0.4 * (z - ratio)
        total += (1.5 if label else 0.5) * (1 - 1 / (1 + math.exp(-toward)))
    assert float(found.loss) == pytest.approx(total, rel=1e-5)
    assert number(found.metrics["kl"]) == pytest.approx(z, rel=1e-5)
    good = [0.4 * ratio for ratio, label in zip(ratios, LABELS, strict=True) if label]
    bad = [0.4 * ratio for ratio, label in zip(ratios, LABELS, strict=True) if not label]
    assert number(found.metrics["rewards/chosen"]) == pytest.approx(sum(good) / 3, rel=1e-5)
    assert number(found.metrics["rewards/margins"]) == pytest.approx((sum(good) - sum(bad)) / 3, rel=1e-4)


@pytest.mark.parametrize("name", ["cross_entropy", "dpo", "cpo", "simpo", "orpo", "kto"])
def test_the_names_of_metrics_are_known_without_a_run(name: str) -> None:
    log_p, silent = drawn(LENGTHS, 1), drawn(LENGTHS * 3, 2)
    facts = [LABELS] if name == "kto" else [(1.0, 2.0, 3 / 8)] * 3
    rows = LogProbs(log_p, LENGTHS, silent, LENGTHS * 3, facts)
    if name == "dpo":
        rows = LogProbs(log_p, LENGTHS, drawn(LENGTHS, 2), LENGTHS, facts)
    assert set(objective_of(name).loss_of(rows).metrics) == set(metrics_of(resolved(name)) or ())


def test_kto_reports_no_mean_of_completions_that_the_batch_lacks() -> None:
    rows = LogProbs(drawn([2, 2], 1), [2, 2], drawn([2] * 6, 2), [2] * 6, [[1.0, 1.0]])
    assert set(objective_of("kto").loss_of(rows).metrics) == {"kl", "rewards/chosen", "logps/chosen"}


def test_names_and_defaults_are_trls() -> None:
    assert resolved("cross_entropy") == "cross_entropy"
    assert resolved("dpo") == {
        "name": "dpo",
        "beta": 0.1,
        "loss_type": "sigmoid",
        "label_smoothing": 0.0,
        "reference": "__base__",
    }
    assert resolved("cpo")["cpo_alpha"] == 1.0
    assert resolved("simpo")["cpo_alpha"] == 0.0
    assert resolved({"name": "kto", "beta": 1})["desirable_weight"] == 1.0
    assert [takes(name) for name in ("cross_entropy", "orpo", "kto")] == ["sequences", "pairs", "judged"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "dpo", "betta": 0.1}, r"objective\.betta: unknown option of dpo; did you mean 'beta'\?"),
        ({"name": "orpo", "gamma": 1}, r"objective\.gamma: unknown option of orpo; its options: beta"),
        ({"name": "cross_entropy", "beta": 1}, r"unknown option of cross_entropy; its options: none"),
        ({"beta": 1}, r"objective\.name: must be one of cross_entropy, dpo"),
        ({"name": "dpo", "beta": -1}, r"objective\.beta: must be greater than 0, got -1"),
        ({"name": "dpo", "beta": True}, r"objective\.beta: must be a valid number, got True"),
        (
            {"name": "dpo", "loss_type": "ippo"},
            r"loss_type: 'ippo' is unknown; did you mean 'ipo'\?",
        ),
        (
            {"name": "dpo", "loss_type": "sft"},
            r"must be one of sigmoid, hinge, ipo or robust, got",
        ),
        ("dpoo", r"objective: 'dpoo' is unknown; did you mean 'dpo'\?"),
        ("sft", r"objective: 'sft' is unknown; did you mean 'cross_entropy'\?"),
        (
            {"name": "dpo", "label_smoothing": 0.1},
            "label_smoothing is read by loss_type robust only, got sigmoid",
        ),
        ({"name": "cpo", "simpo_gamma": 1}, "simpo_gamma is read by loss_type simpo only, got sigmoid"),
        (
            {"name": "nowhere:loss", "takes": "pear"},
            r"takes: 'pear' is unknown; did you mean 'pairs'",
        ),
        (
            {"name": "nowhere:loss", "reference": 3},
            "reference: must be __base__ or an adapter",
        ),
        ({"name": "nowhere:loss", "trains_prompts": 1}, r"trains_prompts: must be true or false, got 1"),
        (7, "objective: must be a name, or keys and values with the key name, got 7"),
    ],
)
def test_wrong_options_are_refused(spec: Any, message: str) -> None:
    with pytest.raises(ObjectiveError, match=message):
        resolved(spec)
    assert resolved("nowhere:loss")["takes"] == "sequences"  # runs no code
    with pytest.raises(ObjectiveError, match=r"objective\.name: nowhere:loss: cannot be imported"):
        objective_of("nowhere:loss")


def margins(rows: LogProbs, margin: float = 1.0) -> Any:
    """A loss of pairs, with a metric."""
    sums, base = rows.sums(), rows.silent_sums()
    apart = (sums - base)[0::2] - (sums - base)[1::2]
    return torch.relu(margin - apart), {"margin": apart}


def test_a_custom_loss_by_its_function_and_by_its_name() -> None:
    name = f"{__name__}:margins"
    spec = {"name": name, "takes": "pairs", "reference": "__base__", "margin": 30.0}
    found, log_p, base = of_pairs(spec)
    ratios = [sum(own) - sum(other) for own, other in zip(log_p, base, strict=True)]
    apart = [c - r for c, r in zip(ratios[0::2], ratios[1::2], strict=True)]
    assert float(found.loss) == pytest.approx(sum(max(0.0, 30 - each) for each in apart), rel=1e-5, abs=1e-6)
    assert number(found.metrics["margin"]) == pytest.approx(sum(apart), rel=1e-5)
    assert takes(resolved(spec)) == "pairs"
    assert resolved(resolved(spec)) == resolved(spec)
    same = objective_of(CustomLoss(margins, takes="pairs", reference="__base__", margin=2.0))
    assert (same.takes, same.reference) == ("pairs", "__base__")
    with pytest.raises(
        ObjectiveError, match=r"objective\.marign: unknown option of margins; did you mean 'margin'"
    ):
        objective_of({"name": name, "marign": 1})
    with pytest.raises(ObjectiveError, match=r"objective\.takes: must be one of sequences, pairs or judged"):
        CustomLoss(margins, takes="triples")  # type: ignore[arg-type]
    wrong = CustomLoss(lambda rows: rows.log_p)
    with pytest.raises(
        LossError, match=r"must return the losses of each of 6 samples, a tensor \[6\], got \[19\]"
    ):
        wrong.loss_of(LogProbs(drawn(LENGTHS, 1), LENGTHS, torch.empty(0)))
    lacks = CustomLoss(margins, takes="pairs")
    with pytest.raises(LossError, match=r"margins failed: ValueError: .*set `reference: __base__`"):
        lacks.loss_of(LogProbs(drawn(LENGTHS, 1), LENGTHS, torch.empty(0)))
