"""Adapters on preferences in one batch with others: reference rows, gradients, cuts, stages, dropout."""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlora.engine.stage_worker
import pytest
import torch
import torch.nn.functional as F
from mlora.data.preference import Judged, Pair, joined
from mlora.data.record import Sample, sequence_lengths
from mlora.engine.batches import checked_samples
from mlora.engine.dry_run import DryStage
from mlora.engine.engine import Engine
from mlora.engine.stage_group import StageOptions, spans_of
from mlora.objectives.custom import CustomLoss
from mlora.objectives.objective import LogProbs
from mlora.objectives.options import ObjectiveError
from mlora.objectives.registry import objective_of
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from safetensors.torch import load_file
from tiny_models import VOCABULARY, make, samples
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mlora_ext
from mlora_ext import adapter_parameters
from mlora_ext.routing.router import router_of

OPTIM = OptimConfig(1e-2, total_steps=40)
LORA = {"r": 3, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}


def half(draw: random.Random, longest: int) -> tuple[int, ...]:
    return tuple(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, longest)))


def pairs(count: int, seed: int, longest: int = 7) -> list[Pair]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        prompt = half(draw, 5)
        sides = [half(draw, longest) for _ in range(2)]
        found.append(Pair(*(Sample(prompt + side, (-100,) * len(prompt) + side) for side in sides)))
    return found


def judged(count: int, seed: int) -> list[Judged]:
    draw = random.Random(seed)
    return [Judged(half(draw, 5), half(draw, 6), index % 3 != 0) for index in range(count)]


def test_a_malformed_pair_names_its_own_adapter() -> None:
    engine = Engine(make("llama"))
    engine.create_adapter("a", LoraConfig(**LORA), OPTIM, objective="dpo")
    with pytest.raises(ValueError, match="adapter 'a', sample 0: expected 2 labels, got 1"):
        engine.evaluate({"a": [Pair(Sample((5, 6), (5,)), Sample((5, 6), (5, 6)))]})


DATA: dict[str, list[Any]] = {
    "dpo": pairs(4, 1),
    "ipo": pairs(3, 2),
    "cpo": pairs(3, 3),
    "orpo": pairs(4, 4),
    "kto": judged(5, 5),
    "plain": samples(3, 9, seed=6),
}
SPECS: dict[str, Any] = {
    "dpo": {"name": "dpo", "beta": 0.4},
    "ipo": {"name": "dpo", "loss_type": "ipo", "beta": 0.2},
    "cpo": {"name": "cpo", "beta": 0.3},
    "orpo": "orpo",
    "kto": {"name": "kto", "beta": 0.5},
    "plain": "cross_entropy",
}


def engine_of(names: Any = tuple(SPECS), *, lora: Any = LORA, model: Any = None, **more: Any) -> Engine:
    engine = Engine(model or make("llama"), seed=1, **more)
    for name in names:
        torch.manual_seed(2)
        engine.create_adapter(name, LoraConfig(**lora), OPTIM, objective=SPECS[name])
    return engine


def by_hand(engine: Engine, name: str) -> Tensor:
    """The loss of an adapter's data from passes of the plain model, differentiable; a sum over units."""

    def sequences(parts: list[Sample], owner: str) -> list[Tensor]:
        found = []
        for part in parts:
            logits = engine.model(input_ids=torch.tensor([part.input_ids]), adapter_names=[owner]).logits[
                0, :-1
            ]
            log_p, labels = F.log_softmax(logits, -1), torch.tensor(part.labels[1:])
            found.append(log_p[labels != -100].gather(1, labels[labels != -100][:, None]).squeeze(1))
        return found

    objective = objective_of(SPECS[name])
    made = joined(name, DATA[name], objective)
    own = [run for sample in made for run in sequences(list(sample.sequences), name)]
    silent: list[Tensor] = []
    with torch.no_grad():
        for owner, part in (each for sample in made for each in sample.silent):
            silent += sequences([part], owner)
    return objective.loss_of(
        LogProbs(
            torch.cat(own),
            [len(run) for run in own],
            torch.cat(silent) if silent else torch.empty(0),
            [len(run) for run in silent],
            [sample.facts for sample in made],
        )
    ).loss


@pytest.mark.parametrize("head", ["frozen", "with an adapter on it", "of each adapter's own"])
def test_losses_and_gradients_are_those_of_separate_passes(head: str) -> None:
    more: dict[str, Any] = {
        "frozen": {},
        "with an adapter on it": {"target_modules": [*LORA["target_modules"], "lm_head"]},
        "of each adapter's own": {"modules_to_save": ["lm_head"]},
    }[head]
    engine = engine_of(lora=LORA | more)
    for name in SPECS if "modules_to_save" in more else ():
        with torch.no_grad():
            parameters = mlora_ext.adapter_parameters(engine.model, name)
            parameters[f"lm_head.modules_to_save.{name}.weight"].mul_(1.5)
    result = engine.forward_backward(DATA)
    named = {name: mlora_ext.adapter_parameters(engine.model, name) for name in SPECS}
    found = {name: {key: p.grad.clone() for key, p in own.items()} for name, own in named.items()}
    router_of(engine.model).accumulates = False  # torch.autograd.grad is used
    engine.model.eval()
    for name, own in named.items():
        total = by_hand(engine, name)
        expected = torch.autograd.grad(total, list(own.values()))
        assert result[name].loss_sum == pytest.approx(float(total.detach()), rel=1e-5), name
        assert result[name].units == (result[name].tokens if name == "plain" else len(DATA[name]))
        for key, gradient in zip(own, expected, strict=True):
            torch.testing.assert_close(found[name][key], gradient, rtol=1e-3, atol=2e-5, msg=f"{name} {key}")


def test_alone_is_together_and_in_pieces_and_over_stages() -> None:
    """Also with dropout, whose masks count the adapter's own rows with gradient only."""
    lora = LORA | {"lora_dropout": 0.3}

    def trained(names: Any, steps: int = 2, **more: Any) -> dict[str, list[float]]:
        engine = engine_of(names, lora=lora, model=make("llama"), **more)
        losses: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(steps):
            totals = dict.fromkeys(names, 0.0)
            for _ in range(2):
                for name, found in engine.forward_backward({n: DATA[n] for n in names}).items():
                    totals[name] += found.loss_sum
            for name in names:
                engine.optim_step(name)
                losses[name].append(totals[name])
        engine.close()
        return losses

    together = trained(list(SPECS))
    others = {f"{name} alone": trained([name]) for name in SPECS}
    others |= {"pieces": trained(list(SPECS), micro_batches=3), "stages": trained(list(SPECS), stages=2)}
    for what, losses in others.items():
        for name, own in losses.items():
            assert own == pytest.approx(together[name], rel=1e-5), (what, name)


def test_a_batch_of_judged_completions_is_never_cut() -> None:
    engine = engine_of(["kto", "dpo"], micro_batches=4)
    future = engine.start({name: DATA[name] for name in ("kto", "dpo")})
    owners = [batch.names for batch, _ in future.parts]
    assert len(owners) > 2
    assert sum("kto" in names for names in owners) == 1
    for batch, _ in future.parts:  # a pair's two sequences and the reference's two are together
        if "dpo" in batch.names:
            assert len(batch.reads[batch.names.index("dpo")]) == 2 * batch.units["dpo"]
    engine.finish(future)


class _Products(TorchDispatchMode):
    """Counts the rows of `[*, 32]` that products with frozen weights take, and whether autograd was on."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("mlora_ext::"):
            self.rows.append((name, args[0].shape[0]))
        return func(*args, **(kwargs or {}))


def test_reference_rows_have_no_backward() -> None:
    engine, data = engine_of(["dpo"]), pairs(4, 9)
    live = sum(part.rows for pair in data for part in pair.parts)
    with _Products() as seen:
        engine.forward_backward({"dpo": data})
    back = [rows for name, rows in seen.rows if "backward" in name or name.endswith("_dx")]
    trained = sum(part.trained_tokens for pair in data for part in pair.parts)
    assert set(back) == {live, trained}  # through the blocks, and through the head
    forward = len([rows for _, rows in seen.rows if rows == live]) - back.count(live)
    assert 0 < back.count(live) <= forward // 2


def test_reference_rows_keep_nothing() -> None:
    """Far less memory than the same rows with gradient: twice as many rows take twice as much."""
    data = pairs(6, 9)
    own = [part for pair in data for part in pair.parts]

    def peak(name: str, samples: Any) -> int:
        engine = engine_of([name])
        for _ in range(2):  # the first one makes what is kept
            future = engine.start({name: samples}, measure=True)
            engine.finish(future)
        assert sum(future.measured[0].lengths) == (1 if samples is own else 2) * sum(p.rows for p in own)
        return max(future.measured[0].phases[0])

    once, twice, with_reference = peak("plain", own), peak("plain", own + own), peak("dpo", data)
    assert with_reference < once + 0.3 * (twice - once)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_dry_run_counts_reference_rows(stages: int) -> None:
    """Also where there are many more of them than rows with gradient."""
    options, lora = StageOptions(torch.device("cpu"), torch.float32), LoraConfig(**LORA)
    engine = engine_of(["dpo"], stages=stages)
    for longest in (40, 3):
        drawn = pairs(3, 9, longest)  # a dry run trains all rows
        data = [Pair(*(replace(part, labels=part.input_ids) for part in pair.parts)) for pair in drawn]
        made = joined("dpo", data, objective_of("dpo"))
        shape = {"dpo": sequence_lengths(made)}
        spans = spans_of(stages, 2)
        dry = [
            DryStage(make("llama"), options, span).activations({"dpo": lora}, [shape])[0] for span in spans
        ]
        for _ in range(2):
            future = engine.start({"dpo": data}, measure=True)
            engine.finish(future)
        for predicted, real in zip(dry, future.measured[0].phases, strict=True):
            assert max(predicted) == pytest.approx(max(real), rel=0.02, abs=1024)
    engine.close()


def test_equal_reference_sequences_are_run_once() -> None:
    engine = Engine(make("llama"), seed=1)
    for name in "ab":
        engine.create_adapter(name, LoraConfig(**LORA), OPTIM, objective={"name": "dpo", "beta": 0.3})
    data = pairs(3, 1)
    future = engine.start({"a": data, "b": data})
    ((batch, _),) = future.parts
    assert batch.silent is not None
    assert batch.silent.names == ("__base__",)
    assert len(batch.silent.sequences) == len({part for pair in data for part in pair.parts})
    assert batch.reads[0] == batch.reads[1]
    engine.finish(future)


def test_another_adapter_is_the_reference() -> None:
    engine = Engine(make("llama"), seed=1)
    engine.create_adapter("old", LoraConfig(**LORA, lora_dropout=0.5), OPTIM)
    spec = {"name": "dpo", "beta": 0.3, "reference": "old"}
    engine.create_adapter("new", LoraConfig(**LORA), OPTIM, objective=spec)
    data = pairs(3, 1)
    result = engine.forward_backward({"new": data})["new"]
    assert engine.forward_backward({"new": data})["new"] == result  # no dropout
    SPECS["new"], DATA["new"] = spec, data
    engine.model.eval()
    try:
        router_of(engine.model).accumulates = False
        assert result.loss_sum == pytest.approx(float(by_hand(engine, "new").detach()), rel=1e-5)
    finally:
        del SPECS["new"], DATA["new"]
    future = engine.start({"new": data})
    with pytest.raises(ValueError, match="adapter 'old': a batch of it is under way"):
        engine.remove_adapter("old")
    engine.finish(future)
    engine.remove_adapter("old")
    with pytest.raises(
        ValueError, match=r"adapter 'new': objective\.reference: no adapter 'old' on this engine"
    ):
        engine.forward_backward({"new": data})


def test_the_start_is_the_reference(tmp_path: Path) -> None:
    """As another adapter with the same weights is; it goes when its adapter goes, and nobody sees it."""
    engine = Engine(make("llama"), seed=1)
    engine.create_adapter("old", LoraConfig(**LORA), OPTIM)
    engine.save("old", tmp_path)
    for name, reference in (("named", "old"), ("own", "init_from")):
        spec = {"name": "dpo", "beta": 0.3, "reference": reference}
        engine.create_adapter(name, None, OPTIM, objective=spec, init_from=tmp_path, seed=4)
    data = pairs(3, 1)
    assert engine.evaluate({"own": data})["own"].loss == pytest.approx(math.log(2))
    for step in range(3):
        found = engine.forward_backward({name: data for name in ("named", "own")})
        if step:
            assert found["own"].metrics["rewards/margins"] > 0
        assert found["own"].loss == pytest.approx(found["named"].loss, rel=1e-6)
        for name in found:
            engine.optim_step(name)
    assert engine.adapters == ["old", "named", "own"]
    assert len(router_of(engine.model).adapters) == 4
    state = engine.state_dict("own")
    engine.remove_adapter("own")
    assert list(router_of(engine.model).adapters) == ["old", "named"]
    spec = {"name": "dpo", "beta": 0.3, "reference": "init_from"}
    engine.save("named", tmp_path / "other")
    engine.create_adapter("own", None, OPTIM, objective=spec, init_from=tmp_path / "other", seed=4)
    with pytest.raises(
        ValueError, match="'own': init_from holds other weights than those that it began with"
    ):
        engine.load_state_dict("own", state)
    engine.remove_adapter("own")
    engine.create_adapter("own", None, OPTIM, objective=spec, init_from=tmp_path, seed=4)
    engine.load_state_dict("own", state)
    again = engine.evaluate({name: data for name in ("named", "own")})
    assert again["own"].loss == pytest.approx(again["named"].loss, rel=1e-6)
    with pytest.raises(ObjectiveError, match=r"objective\.reference: init_from: give init_from"):
        engine.create_adapter("new", LoraConfig(**LORA), OPTIM, objective=spec)
    assert engine.adapters == ["old", "named", "own"]


def test_adapters_share_their_start(tmp_path: Path) -> None:
    """One for each folder's content, without gradients; it stays as long as an adapter needs it."""
    engine = Engine(make("llama"), seed=1)
    for place, name in enumerate(("old", "other")):
        engine.create_adapter(name, LoraConfig(**LORA), OPTIM, seed=place)
        engine.save(name, tmp_path / name)
    spec = {"name": "dpo", "beta": 0.3, "reference": "init_from"}
    for name, folder in (("a", "old"), ("b", "old"), ("c", "other")):
        engine.create_adapter(name, None, OPTIM, objective=spec, init_from=tmp_path / folder, seed=4)
    known = router_of(engine.model).adapters
    shared, own = [name for name in known if name.startswith("init_from ")]
    frozen = [p for name in (shared, own) for p in adapter_parameters(engine.model, name).values()]
    assert frozen
    assert not any(p.requires_grad or p.grad is not None for p in frozen)
    data = pairs(3, 1)
    packed = engine._pack(checked_samples(engine._states, {"a": data, "b": data, "c": data}), None)
    assert packed.silent is not None
    assert packed.silent.names == (shared, own)
    assert len(packed.silent.sequences) == 4 * len(data)
    assert packed.reads[0] == packed.reads[1]

    alone = Engine(make("llama"), seed=1)
    alone.create_adapter("b", None, OPTIM, objective=spec, init_from=tmp_path / "old", seed=4)
    for names in (("a", "b", "c"), ("b", "c"), ("b", "c")):
        found = engine.forward_backward(dict.fromkeys(names, data))
        wanted = alone.forward_backward({"b": data})["b"]
        assert found["b"].loss == pytest.approx(wanted.loss, rel=1e-5)
        assert found["b"].metrics == pytest.approx(wanted.metrics, rel=1e-4, abs=1e-5)
        for name in names:
            engine.optim_step(name)
        alone.optim_step("b")
        if "a" in engine.adapters:
            engine.remove_adapter("a")
            assert {shared, own} < set(known)
    state = engine.state_dict("b")
    engine.remove_adapter("b")
    assert list(known) == ["old", "other", "c", own]
    engine.create_adapter("a", None, OPTIM, objective=spec, init_from=tmp_path / "old", seed=4)
    engine.create_adapter("b", None, OPTIM, objective=spec, init_from=tmp_path / "old", seed=4)
    engine.load_state_dict("b", state)
    assert engine.evaluate({"b": data})["b"].loss == pytest.approx(
        alone.evaluate({"b": data})["b"].loss, rel=1e-5
    )
    assert engine.adapters == ["old", "other", "c", "a", "b"]


def test_the_digest_of_a_start_is_that_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints hold it, so it stays as it is. It is computed once for each adapter."""
    engine = Engine(make("llama"), seed=1)
    engine.create_adapter("old", LoraConfig(**LORA), OPTIM)
    engine.save("old", tmp_path)
    spec = {"name": "dpo", "reference": "init_from"}
    gathered: list[str] = []
    weights = engine.weights
    monkeypatch.setattr(engine, "weights", lambda name: gathered.append(name) or weights(name))
    for name in ("own", "shares"):
        engine.create_adapter(name, None, OPTIM, objective=spec, init_from=tmp_path)
    assert gathered == ["own", "shares"]
    (start,) = (name for name in router_of(engine.model).adapters if name.startswith("init_from "))
    assert all(torch.equal(one, weights("own")[key]) for key, one in weights(start).items())
    found = hashlib.sha256()
    for key, tensor in sorted(load_file(tmp_path / "adapter_model.safetensors").items()):
        found.update(key.encode() + tensor.contiguous().numpy().tobytes())
    for name in ("own", "shares"):
        assert engine.state_dict(name)["start_digest"] == found.hexdigest()


def test_a_start_takes_no_other_adapters_place(tmp_path: Path) -> None:
    """And under a memory limit it counts as what nobody trains, once for all that share it."""
    engine = Engine(make("llama"), seed=1, memory_limit="8GiB")
    engine.create_adapter("old", LoraConfig(**LORA), OPTIM)
    engine.save("old", tmp_path)
    spec = {"name": "dpo", "reference": "init_from"}
    engine.create_adapter("own", None, OPTIM, objective=spec, init_from=tmp_path)
    (start,) = (name for name in router_of(engine.model).adapters if name.startswith("init_from "))
    with pytest.raises(ValueError, match=f"'{start}': the engine has an adapter of this name"):
        engine.create_adapter(start, LoraConfig(**LORA), OPTIM)
    assert engine.memory is not None
    known = engine.memory.adapters
    (own,) = known._known["own"].states
    assert own.gradients > 0
    assert known.at_rest([start]) == (own.weights,)
    assert known.at_rest(["own"]) == (own.weights + own.gradients + own.moments,)
    for name in ("one", "two", "three"):
        config = LoraConfig(**LORA)
        known.know(name, config, OPTIM, 9, silent=True, start=None if name == "three" else "folder")
    assert known.at_rest(["one"]) == (own.total + own.weights,)
    assert known.at_rest(["one", "two", "three"]) == (3 * own.total + own.weights,)
    engine.forward_backward({"own": pairs(3, 1)})
    engine.optim_step("own")
    engine.remove_adapter("own")
    with pytest.raises(ValueError, match=r"no adapter 'own' in this engine; its adapters: old$"):
        engine.remove_adapter("own")
    assert not known.knows(start)
    engine.create_adapter(start, LoraConfig(**LORA), OPTIM)
    before = engine.weights(start)
    with pytest.raises(ValueError, match=f"'{start}': the engine has an adapter of this name"):
        engine.create_adapter("own", None, OPTIM, objective=spec, init_from=tmp_path)
    assert engine.adapters == ["old", start]
    assert all(torch.equal(tensor, before[key]) for key, tensor in engine.weights(start).items())


def test_evaluation_reports_the_same() -> None:
    engine = engine_of()
    trained = engine.forward_backward(DATA)
    found = engine.evaluate(DATA)
    for name in SPECS:
        assert found[name].loss_sum == pytest.approx(trained[name].loss_sum, rel=1e-6)
        assert found[name].mean_metrics() == pytest.approx(trained[name].mean_metrics(), rel=1e-5, abs=1e-6)
    assert {"rewards/chosen", "rewards/accuracies", "logps/rejected"} <= found["dpo"].metrics.keys()


def test_samples_of_the_wrong_kind_are_refused() -> None:
    engine = engine_of(["dpo", "plain", "kto"])
    with pytest.raises(ValueError, match="adapter 'dpo': its objective takes Pair samples, got Sample"):
        engine.forward_backward({"dpo": DATA["plain"]})
    with pytest.raises(ValueError, match="adapter 'kto': its objective takes Judged samples, got Pair"):
        engine.evaluate({"kto": DATA["dpo"]})
    with pytest.raises(ValueError, match="adapter 'plain': its objective takes single sequences, got"):
        engine.forward_backward({"plain": DATA["dpo"]})
    with pytest.raises(ValueError, match="unknown option of dpo; did you mean 'beta'"):
        engine.create_adapter("x", LoraConfig(**LORA), OPTIM, objective={"name": "dpo", "bata": 1})
    assert engine.idle
    engine.forward_backward({"dpo": DATA["dpo"]})


def test_a_function_of_log_probabilities_as_an_objective() -> None:
    """Sequences with a reference: the mean difference to the base model, squared."""

    def near(rows: LogProbs) -> Tensor:
        return (rows.sums() - rows.silent_sums()).square()

    engine = Engine(make("llama"), seed=1, stages=2)
    engine.create_adapter("a", LoraConfig(**LORA), OPTIM, objective=CustomLoss(near, reference="__base__"))
    engine.create_adapter("b", LoraConfig(**LORA), OPTIM, objective=lambda rows: -rows.sums())
    data = samples(4, 9, seed=1)
    losses = []
    for _ in range(12):
        result = engine.forward_backward({"a": data, "b": data})
        assert result["a"].units == result["b"].units == 4
        losses.append(result["a"].loss_sum)
        engine.optim_step("a")
    assert losses[-1] < 0.2 * losses[0]
    engine.close()


def test_the_chunked_pass_gives_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of reference rows hold no whole logits either."""
    seen: list[int] = []
    whole = mlora.engine.stage_worker.log_probabilities

    def noted(hidden: Tensor, heads: Any, rows: Tensor, *rest: Any) -> Tensor:
        assert not torch.is_grad_enabled() or not hidden.requires_grad
        seen.append(len(rows))
        return whole(hidden, heads, rows, *rest)

    monkeypatch.setattr(mlora.engine.stage_worker, "log_probabilities", noted)
    engine = engine_of(["dpo"])
    engine.forward_backward({"dpo": DATA["dpo"]})
    assert seen == [sum(part.trained_tokens for pair in DATA["dpo"] for part in pair.parts)]
