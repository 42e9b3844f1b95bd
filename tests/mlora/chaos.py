"""Random work over an engine's stages: joins, leaves, pauses, evaluation, and at times a fault."""

from __future__ import annotations

import copy
import random
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from mlora.engine.stage_group import StageGroup, StageOptions, make_worker, spans_of
from mlora.engine.stage_worker import StageWorker
from mlora.optim.optim_config import OptimConfig
from mlora.pipeline import Pipeline, PipelineError
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from tests.mlora.tiny_models import VOCABULARY

BLOCKS = 4
WATCHDOG = 120.0  # seconds
TARGETS: list[Any] = [["q_proj", "v_proj"], "all-linear", ["o_proj", "lm_head"], ["down_proj"]]


@dataclass
class Plan:
    """What a run does, as plain data: events of each round, drawn once, so that every engine does the same.

    Attributes:
        seed: of everything.
        adapters: fields of `LoraConfig` and `OptimConfig` and the number of steps, by name.
        joins: the round in which each adapter joins.
        groups: names that are batched together.
        pauses: rounds after which adapters leave, keep their state, and come back some rounds later.
        evaluations: adapters that are evaluated after a round.
    """

    seed: int
    adapters: dict[str, dict[str, Any]]
    joins: dict[str, int]
    groups: list[list[str]]
    pauses: dict[str, tuple[int, int]]
    evaluations: dict[int, list[str]] = field(default_factory=dict)


def draw(rng: random.Random) -> Plan:
    """A plan of two to six adapters, each for two to six steps."""
    names = [f"a{i}" for i in range(rng.randint(2, 6))]
    adapters = {}
    for name in names:
        lora: dict[str, Any] = {
            "r": rng.choice([1, 3, 4, 8, 13]),
            "lora_alpha": rng.choice([4, 16]),
            "lora_dropout": rng.choice([0.0, 0.1, 0.5]),
            "use_rslora": rng.random() < 0.3,
            "target_modules": rng.choice(TARGETS),
        }
        if rng.random() < 0.2:
            lora |= {"target_modules": ["v_proj"], "layers_to_transform": [rng.randrange(BLOCKS)]}
        adapters[name] = {
            "lora": lora,
            "optim": {
                "learning_rate": rng.choice([1e-3, 1e-4]),
                "weight_decay": rng.choice([0.0, 0.1]),
                "max_grad_norm": rng.choice([0.0, 0.3, 1.0]),
                "optim": rng.choice(["adamw_torch", "sgd"]),
            },
            "steps": rng.randint(2, 6),
            "accumulation": rng.randint(1, 3),
            "longest": rng.choice([3, 8, 20, 40]),
            "count": rng.randint(1, 5),
        }
    shuffled = rng.sample(names, len(names))
    groups: list[list[str]] = []
    while shuffled:
        size = rng.randint(1, 3)
        groups.append(shuffled[:size])
        shuffled = shuffled[size:]
    joins = {name: rng.choice([0, 0, 1, 3]) for name in names}
    pauses = {
        name: (joins[name] + rng.randint(1, 3), rng.randint(1, 3)) for name in names if rng.random() < 0.4
    }
    evaluations = {
        round_: rng.sample(names, rng.randint(1, len(names))) for round_ in range(12) if rng.random() < 0.3
    }
    return Plan(rng.randrange(2**31), adapters, joins, groups, pauses, evaluations)


class Chaos:
    """A plan at work on an engine.

    Args:
        plan: what it does.
        engine: where.
    """

    def __init__(self, plan: Plan, engine: Engine) -> None:
        self.plan, self.engine = plan, engine
        self.batches = dict.fromkeys(plan.adapters, 0)
        self.states: dict[str, dict[str, Any]] = {}
        self.found: dict[str, list[float]] = {name: [] for name in plan.adapters}
        self.away: dict[str, int] = {}
        self.done: set[str] = set()

    def run(self) -> dict[str, list[float]]:
        """Losses, norms and sums of weights of every adapter."""
        round_ = 0
        while len(self.done) < len(self.plan.adapters):
            self._join(round_)
            self._train()
            self._evaluate(round_)
            self._leave(round_)
            round_ += 1
        self.engine.close()
        return self.found

    def _create(self, name: str) -> None:
        spec = self.plan.adapters[name]
        optim = OptimConfig(**spec["optim"], warmup_steps=1, total_steps=spec["steps"])
        self.engine.create_adapter(name, LoraConfig(**spec["lora"]), optim, seed=self.plan.seed)

    def _join(self, round_: int) -> None:
        for name, at in self.plan.joins.items():
            if at == round_:
                self._create(name)
        for name in [name for name, back in self.away.items() if back == round_]:
            del self.away[name]
            self._create(name)
            self.engine.load_state_dict(name, self.states.pop(name))

    def _samples(self, name: str, key: int) -> list[Sample]:
        spec = self.plan.adapters[name]
        draw = random.Random(f"{self.plan.seed} {name} {key}")
        ids = [
            tuple(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(2, spec["longest"])))
            for _ in range(spec["count"])
        ]
        return [Sample(row, row) for row in ids]

    def _ends(self, name: str) -> bool:
        return (self.batches[name] + 1) % self.plan.adapters[name]["accumulation"] == 0

    def _train(self) -> None:
        """A batch of each group, all under way at once."""
        under_way = []
        for group in self.plan.groups:
            names = [name for name in group if name in self.engine.adapters]
            if names:
                batch = {name: self._samples(name, self.batches[name]) for name in names}
                ends = [name for name in names if self._ends(name)]
                under_way.append((ends, self.engine.start(batch, ends=ends)))
        for ends, future in under_way:
            for name, result in self.engine.finish(future).items():
                self.found[name].append(result.loss_sum)
                self.batches[name] += 1
            for name in ends:
                self.found[name].append(self.engine.optim_step(name).grad_norm)

    def _evaluate(self, round_: int) -> None:
        names = [n for n in self.plan.evaluations.get(round_, []) if n in self.engine.adapters]
        if names:
            batch: dict[str | None, list[Sample]] = {name: self._samples(name, -1) for name in names}
            for name, result in self.engine.evaluate(batch).items():
                self.found[name].append(result.loss_sum)

    def _leave(self, round_: int) -> None:
        for name in list(self.engine.adapters):
            spec = self.plan.adapters[name]
            ended = self.batches[name] == spec["steps"] * spec["accumulation"]
            at, rounds = self.plan.pauses.get(name, (-1, 0))
            if not ended and at != round_:
                continue
            state = self.engine.state_dict(name)
            self.engine.remove_adapter(name)
            if ended:
                self.done.add(name)
                total = sum(w.double().square().sum().item() for w in state["weights"].values())
                self.found[name].append(total**0.5)
            else:
                self.states[name] = state
                self.away[name] = round_ + rounds


def break_stage(part: StageWorker, rng: random.Random) -> str:
    """Let a stage meet a fault in one of its next forwards, backwards or controls; returns in which."""
    name = rng.choice(["forward", "after_backward", "control"])
    plain, left = getattr(part, name), rng.randrange(12)

    def broken(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ArithmeticError("chaos")
        return plain(*arguments, **options)

    setattr(part, name, broken)
    return name


def model(seed: int) -> LlamaForCausalLM:
    """A random model of four blocks."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": BLOCKS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**shape, **heads, vocab_size=VOCABULARY, initializer_range=0.2)
    return LlamaForCausalLM(config)


def random_engine(rng: random.Random, base: LlamaForCausalLM, broken: bool) -> tuple[Engine, str]:
    """An engine over two to four stages that are threads, with links of any kind, and what breaks."""
    options = StageOptions(torch.device("cpu"), torch.float32, rng.random() < 0.2)
    spans = spans_of(rng.randint(2, BLOCKS), BLOCKS)
    parts = [make_worker(copy.deepcopy(base), span, options) for span in spans]
    breaks = break_stage(rng.choice(parts), rng) if broken else ""
    schedule = rng.choice(["lorapp", "lorapp", "gpipe", "1f1b"])
    driver = Pipeline(
        parts,
        schedule,
        in_flight=rng.choice([None, 1, 2, 7]),
        credit_bytes=rng.choice([1, 1000, 10**6, 1 << 30]),
        delay=rng.choice([0.0, 0.0, 0.002]),
    )
    stage_group = StageGroup(driver, parts[0], [span.last - span.first for span in spans])
    return Engine(base, stage_group=stage_group, micro_batches=rng.choice([1, 1, 2, 3])), breaks


@dataclass
class Outcome:
    """What a random run over stages came to.

    Attributes:
        seed: of all of it.
        breaks: the method of a stage that was made to fail; empty if none was.
        found: losses, norms and sums of weights by adapter; empty if it did not reach its end.
        error: what ended it.
        ended: whether it ended, with or without an error, while the watchdog waited.
        refused: whether calls after the error were refused, as they have to be.
    """

    seed: int
    breaks: str = ""
    found: dict[str, list[float]] = field(default_factory=dict)
    error: BaseException | None = None
    ended: bool = False
    refused: bool = False

    def problem(self, expected: dict[str, list[float]]) -> str:
        """What is wrong with it; empty if nothing is.

        Args:
            expected: `found` of the same work on one stage.
        """
        if not self.ended:
            return f"seed {self.seed}: hangs"
        if self.error and not (self.breaks and "chaos" in str(self.error)):
            return f"seed {self.seed}: {self.error!r}"
        # what the first stage refuses of a control is raised where it was asked, and nothing was sent
        goes_on = self.breaks == "control" and isinstance(self.error, ArithmeticError)
        if self.error:
            return "" if self.refused != goes_on else f"seed {self.seed}: refused: {self.refused}"
        unequal = [
            name for name, values in expected.items() if self.found[name] != pytest.approx(values, rel=1e-5)
        ]
        return f"seed {self.seed}: other results for {unequal}" if unequal else ""


def over_stages(seed: int, plan: Plan, base: LlamaForCausalLM, rng: random.Random) -> Outcome:
    """Do a plan over stages; three in ten meet a fault, if they live that long."""
    engine, breaks = random_engine(rng, base, rng.random() < 0.3)
    outcome = Outcome(seed, breaks)

    def work() -> None:
        try:
            outcome.found = Chaos(plan, engine).run()
        except Exception as error:  # noqa: BLE001 - `problem` judges
            outcome.error = error
            try:
                engine.evaluate({None: [Sample((3, 4), (3, 4))]})
            except PipelineError as after:
                outcome.refused = "the pipeline has failed: " in str(after)
            engine.close()
        outcome.ended = True

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(WATCHDOG)
    return outcome


def attempt(seed: int) -> tuple[bool, str]:
    """A random run over stages, and the same on one stage.

    Args:
        seed: of all of it.

    Returns:
        Whether a fault ended it, and what is wrong: empty if nothing is.
    """
    rng = random.Random(seed)
    plan, base = draw(rng), model(seed)
    before = set(threading.enumerate())
    outcome = over_stages(seed, plan, base, rng)
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    expected = {} if outcome.error or not outcome.ended else Chaos(plan, Engine(base)).run()
    return bool(outcome.error), outcome.problem(expected) or (
        f"seed {seed}: threads {left} are left" if left else ""
    )
