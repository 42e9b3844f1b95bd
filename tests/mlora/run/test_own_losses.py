"""Losses of one's own in runs: a file beside the YAML, and what becomes of a loss that fails."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlora
import pytest
import torch
from mlora.config.config_file import load_config, resolve_config
from mlora.data.record import Sample
from mlora.engine.engine import Engine
from mlora.errors import RunError
from mlora.objectives import registry
from mlora.objectives.custom import CustomLoss, LossError
from mlora.objectives.objective import LossOfOwner, Objective
from mlora.objectives.registry import register_objective
from mlora.optim.optim_config import OptimConfig
from mlora.run.reporter import PlainLines
from mlora.run.run import resume
from peft import LoraConfig
from torch import Tensor

from tests.mlora.limited_runs import Watching, interrupt
from tests.mlora.tiny_run import lines, run_data, weights, write_run

LOSS = """
import helper_of_{name}

calls = 0

def loss(rows, scale=1.0, fails_at=None):
    global calls
    calls += 1
    if fails_at and calls >= fails_at:
        raise NameError("name 'torhc' is not defined")
    return helper_of_{name}.sign * scale * rows.sums()
"""


def write_loss(folder: Path, name: str) -> None:
    """A loss, and a file that it imports, both with names of their own: a process reads each once."""
    (folder / f"{name}.py").write_text(LOSS.format(name=name))
    (folder / f"helper_of_{name}.py").write_text("sign = -1.0\n")


def test_a_file_beside_the_yaml(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found from another working folder, and by a resume; it comes before a module on Python's path."""
    write_loss(tmp_path, "beside")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "beside.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path / "other")
    monkeypatch.chdir(tmp_path / "other")
    data = run_data(tiny_base, tmp_path)
    data["adapters"] = [data["adapters"][0] | {"objective": {"name": "beside:loss", "scale": 0.5}}]
    data["defaults"]["max_steps"] = 4
    config = load_config(write_run(tmp_path, data))
    objective = config.adapters[0].objective
    assert isinstance(objective, dict)
    assert objective["name"] == f"{tmp_path / 'beside.py'}:loss"
    whole = resolve_config(data | {"output_dir": str(tmp_path / "whole")}, folder=tmp_path)
    assert mlora.train(whole).status == "finished"
    told = Watching({("first", 3): interrupt})
    assert mlora.train(config, reporter=told).status == "interrupted"
    before = (tmp_path / "beside.py").read_text()
    (tmp_path / "beside.py").write_text(before.replace("scale=1.0", "scale=2.0"))
    with pytest.raises(RunError, match=r"first: objective\.name: .*beside\.py has changed or is gone since"):
        resume(tmp_path / "run")
    (tmp_path / "beside.py").write_text(before)
    assert resume(tmp_path / "run").status == "finished"
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "nowhere:loss",
            "nowhere:loss: cannot be imported: No module named 'nowhere'; for a file beside the run's YAML "
            "write nowhere.py:loss",
        ),
        ("losses.mine:loss", "'losses'; for a file beside the run's YAML write losses/mine.py:loss"),
        ("broken:loss", "broken.py:loss: cannot be imported: SyntaxError: '(' was never closed"),
        ("lacking:los", "lacking.py:los: cannot be imported: it has no 'los'; did you mean 'loss'?"),
        ("lacking:other", "it has no 'other'"),
        ("lacking:weighed", "lacks the argument weight; add `weight:` to objective"),
        ("sub/gone.py:loss", "sub/gone.py:loss: cannot be imported: [Errno 2] No such file"),
        ("raising:loss", "raising.py:loss: cannot be imported: NameError: name 'torhc' is not defined"),
    ],
)
def test_a_function_that_cannot_be_imported_is_one_line(
    tiny_base: Path, tmp_path: Path, name: str, expected: str
) -> None:
    (tmp_path / "broken.py").write_text("def loss(rows:\n")
    (tmp_path / "lacking.py").write_text("def loss(rows): ...\ndef weighed(rows, weight): ...\n")
    (tmp_path / "losses").mkdir()
    (tmp_path / "losses" / "mine.py").write_text("def loss(rows): ...\n")
    (tmp_path / "raising.py").write_text("torhc.nn\n")
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0]["objective"] = name
    config = resolve_config(data, folder=tmp_path)  # which runs no code
    with pytest.raises(RunError) as error:
        mlora.train(config)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"first: objective{'' if 'lacks' in expected else '.name'}: ")
    assert expected in line


@pytest.mark.parametrize(
    ("stages", "lora"),
    [(1, {}), (2, {}), (1, {"target_modules": ["lm_head"]}), (1, {"modules_to_save": ["lm_head"]})],
    ids=["one stage", "two stages", "head", "own head"],
)
def test_one_that_fails_stops_its_own_adapter(
    tiny_base: Path, tmp_path: Path, stages: int, lora: dict[str, Any]
) -> None:
    """As long as they share batches, the other adapter has the bits of a run in which nothing failed."""
    data = run_data(tiny_base, tmp_path, pipeline={"stages": stages})
    first = data["adapters"][0]
    first |= {"eval_dataset": None, "eval_steps": None, "lora": first["lora"] | lora}
    for name, options in (("good", {}), ("bad", {"fails_at": 5})):
        own = f"{name}_{stages}_{''.join(lora)}"
        write_loss(tmp_path, own)
        first["objective"] = {"name": f"{own}:loss", **options}
        config = resolve_config(data | {"output_dir": str(tmp_path / name)}, folder=tmp_path)
        result = mlora.train(config)
    assert result.status == "failed"
    stopped, second = result.adapters["first"], result.adapters["second"]
    where = f"{tmp_path / own}.py:10"
    said = f"objective: loss failed: NameError: name 'torhc' is not defined, in {where}"
    assert (stopped.state, stopped.message, stopped.step) == ("stopped", said, 1)
    assert second.state == "finished"
    together = [
        [line for line in lines(tmp_path / name) if line["adapter"] == "second" and line["step"] <= 5]
        for name in ("good", "bad")
    ]
    assert together[0] == together[1]  # with loss and gradient of the batch in which it failed


@pytest.mark.parametrize(("calls", "state"), [(0, "refused"), (2, "stopped")])
def test_one_that_ends_python_stops_its_own_adapter(
    tiny_base: Path, tmp_path: Path, calls: int, state: str
) -> None:
    name = f"exits_after_{calls}"
    (tmp_path / f"{name}.py").write_text(
        f"import sys\nleft = [None] * {calls}\ndef loss(rows):\n    left.pop() if left else sys.exit(3)\n"
        "    return -rows.sums()\n"
    )
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {"objective": f"{name}:loss", "eval_dataset": None, "eval_steps": None}
    result = mlora.train(resolve_config(data, folder=tmp_path))
    first = result.adapters["first"]
    said = f"objective: loss failed: SystemExit: 3, in {tmp_path / name}.py:4"
    assert (first.state, first.message) == (state, said)
    assert result.adapters["second"].state == "finished"


DISTURBS = {
    "raise MemoryError": "MemoryError: MemoryError",
    "raise GeneratorExit": "GeneratorExit: GeneratorExit",
    "torch.set_num_threads(torch.get_num_threads() + 1)": "it changes torch.set_num_threads for all adapters",
    "torch.set_default_dtype(torch.float64)": "it changes torch.set_default_dtype for all adapters",
    "torch.set_grad_enabled(False)": "it changes torch.set_grad_enabled for all adapters",
    "torch.set_flush_denormal(True)": "it changes torch.set_flush_denormal for all adapters",
}


@pytest.mark.parametrize(("statement", "said"), DISTURBS.items())
@pytest.mark.parametrize("calls", [0, 2])
def test_one_that_disturbs_others_stops_its_own_adapter(
    tiny_base: Path, tmp_path: Path, statement: str, said: str, calls: int
) -> None:
    """In its trial call and in training; the other adapter's batches of the same rows have the same bits."""
    threads, found = torch.get_num_threads(), {}
    for name, more in (("good", ""), ("bad", "    left.pop() if left else f()\n")):
        own = f"{name}_{calls}_{list(DISTURBS).index(statement)}"
        (tmp_path / f"{own}.py").write_text(
            f"import torch\nleft = [0] * {calls}\ndef f():\n    {statement}\ndef loss(rows):\n{more}"
            "    return -rows.sums()\n"
        )
        data = run_data(tiny_base, tmp_path, output_dir=str(tmp_path / name))
        data["adapters"][0] |= {"objective": f"{own}:loss", "eval_dataset": None, "eval_steps": None}
        data["adapters"][1]["max_steps"] = 3
        found[name] = mlora.train(resolve_config(data, folder=tmp_path)).adapters
    first = found["bad"]["first"]
    assert (first.state, said in first.message) == ("stopped" if calls else "refused", True), first.message
    assert found["bad"]["second"].state == "finished"
    second = [[r for r in lines(tmp_path / n) if r["adapter"] == "second"][: calls - 1] for n in found]
    assert calls == 0 or second[0] == second[1] != []
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, torch.float32)
    assert torch.is_grad_enabled()


def test_a_file_that_changes_torch_when_it_is_imported(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "faster.py").write_text(
        "import torch\ntorch.set_default_dtype(torch.bfloat16)\ndef loss(rows): ...\n"
    )
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {"objective": "faster:loss"}
    with pytest.raises(RunError, match=r"faster\.py:loss: .* it changes torch.set_default_dtype for all"):
        mlora.train(resolve_config(data, folder=tmp_path))


def test_random_numbers_depend_on_the_rows_alone(tiny_base: Path, tmp_path: Path) -> None:
    """Neither the other adapter's random loss, nor the process's random numbers, nor a resume change them."""
    (tmp_path / "noisy.py").write_text(
        "import torch\ndef loss(rows, more=0):\n    sums = rows.sums()\n    torch.rand(more)\n"
        "    return -sums * (1 + 0.1 * torch.rand(len(sums)))\n"
    )
    data = run_data(tiny_base, tmp_path)
    for place, adapter in enumerate(data["adapters"]):
        adapter |= {"objective": {"name": "noisy:loss", "more": place}}
    mlora.train(resolve_config(data | {"output_dir": str(tmp_path / "whole")}, folder=tmp_path))
    torch.rand(7)
    told = Watching({("first", 2): interrupt})
    assert mlora.train(resolve_config(data, folder=tmp_path), reporter=told).status == "interrupted"
    torch.rand(3)
    assert resume(tmp_path / "run").status == "finished"
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_a_file_that_ends_python_when_it_is_imported(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nsys.exit('usage: script DATA')\n")
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {"objective": "script:loss"}
    with pytest.raises(RunError, match=r"script\.py:loss: cannot be imported: SystemExit: usage: script"):
        mlora.train(resolve_config(data, folder=tmp_path))


def test_errors_name_modules_as_their_files_are_called(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "beside_late.py").write_text("")
    (tmp_path / "late.py").write_text(
        "import beside_late\nleft = [None] * 3\ndef loss(rows):\n"
        "    left.pop() if left else beside_late.g()\n    return -rows.sums()\n"
    )
    data = run_data(tiny_base, tmp_path)
    data["adapters"] = [data["adapters"][0] | {"objective": "late:loss"}]
    message = mlora.train(resolve_config(data, folder=tmp_path)).adapters["first"].message
    assert "module 'beside_late' has no attribute 'g'" in message


class OfShape(Objective):
    def loss(self, log_p: Tensor, lengths: Sequence[int]) -> LossOfOwner:
        return LossOfOwner(-log_p.sum().reshape(1))


class Bare(Objective):
    def loss(self, log_p: Tensor, lengths: Sequence[int]) -> Any:
        return -log_p.sum()


class OwnUnits(Objective):
    def units(self, samples: Sequence[Any], trained: int) -> Any:
        raise KeyError("weights")

    def loss(self, log_p: Tensor, lengths: Sequence[int]) -> LossOfOwner:
        return LossOfOwner(-log_p.double().sum())


class HalfUnits(OwnUnits):
    def units(self, samples: Sequence[Any], trained: int) -> Any:
        return trained / 2


OWN = {
    OfShape: "OfShape failed: ValueError: expected a loss of shape [], a sum over units, got [1]",
    Bare: "Bare failed: TypeError: expected LossOfOwner with a tensor of shape [], got Tensor",
    OwnUnits: "OwnUnits failed: KeyError: 'weights'",
    HalfUnits: "HalfUnits failed: TypeError: 'float' object cannot be interpreted as an integer",
}


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_objectives_with_odd_results_stop_their_own_adapters(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int, evaluated: bool
) -> None:
    monkeypatch.setattr(registry, "_OBJECTIVES", dict(registry._OBJECTIVES))
    data = run_data(tiny_base, tmp_path, pipeline={"stages": stages})
    first, second = data["adapters"]
    first |= {} if evaluated else {"eval_dataset": None, "eval_steps": None}
    for kind in OWN:
        register_objective(kind.__name__, kind)
    owns = [first | {"name": kind.__name__, "objective": kind.__name__} for kind in OWN]
    result = mlora.train(resolve_config(data | {"adapters": [*owns, second]}, folder=tmp_path))
    assert result.adapters["second"].state == "finished"
    for kind, message in OWN.items():
        found = result.adapters[kind.__name__]
        assert (found.state, found.step, found.message) == ("stopped", 0, f"objective: {message}")


@pytest.mark.parametrize(("call", "state"), [(1, "refused"), (2, "stopped")])
def test_one_that_fails_at_once(tiny_base: Path, tmp_path: Path, call: int, state: str) -> None:
    """In the trial call before training, or in its first evaluation."""
    data = run_data(tiny_base, tmp_path)
    write_loss(tmp_path, f"at_once_{call}")
    data["adapters"][0]["objective"] = {"name": f"at_once_{call}:loss", "fails_at": call}
    result = mlora.train(resolve_config(data, folder=tmp_path))
    first = result.adapters["first"]
    assert (first.state, first.message[:29]) == (state, "objective: loss failed: NameE")
    assert result.adapters["second"].state == "finished"


def test_no_folder_where_all_losses_fail_at_once(tiny_base: Path, tmp_path: Path) -> None:
    write_loss(tmp_path, "alone")
    data = run_data(tiny_base, tmp_path)
    data["adapters"] = [data["adapters"][0] | {"objective": {"name": "alone:loss", "fails_at": 1}}]
    with pytest.raises(RunError, match="every adapter was refused"):
        mlora.train(resolve_config(data, folder=tmp_path))
    assert not (tmp_path / "run").exists()


def test_a_loss_of_made_up_numbers_that_is_none_is_a_warning(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "nan_once.py").write_text(
        "def loss(rows):\n    return -rows.sums() * (float('nan') if rows.log_p.max() > -0.2 else 1.0)\n"
    )
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0]["objective"] = "nan_once:loss"
    result = mlora.train(resolve_config(data, folder=tmp_path), reporter=(told := Watching()))
    assert result.adapters["first"].state == "finished"
    assert "first: objective: the loss of made-up log-probabilities is nan" in told.lines


STATE = """
import random_of_{name}

mean, calls = None, []

def loss(rows):
    global mean
    sums = rows.sums()
    mean = sums.detach().mean() if mean is None else 0.9 * mean + 0.1 * sums.detach().mean()
    calls.append((float(mean), random_of_{name}.draw()))
    return mean - sums
"""


def test_training_sees_a_loss_as_if_it_had_not_been_tried(tiny_base: Path, tmp_path: Path) -> None:
    """Its own state, that of files that it imports, and random numbers; one that cannot be is warned of."""
    draw = "import torch\ncalls = 0\ndef draw():\n    global calls\n    calls += 1\n"
    ops = "OPS = torch.library.Library('mlora_test_tried', 'DEF')\n"
    runs = {}
    for name, more, own in (("pure", "", True), ("tried", "", False), ("once", ops, False)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "mine.py").write_text(STATE.format(name=name))
        (folder / f"random_of_{name}.py").write_text(f"{draw}    return calls, float(torch.rand(()))\n{more}")
        data = run_data(tiny_base, folder)
        data["defaults"]["max_steps"] = 2
        data["adapters"] = [data["adapters"][0] | {"objective": "mine:loss", "eval_dataset": None}]
        data["adapters"][0] |= {"eval_steps": None}
        config = resolve_config(data, folder=folder)
        torch.manual_seed(3)
        told = Watching()
        with pytest.MonkeyPatch.context() as patch:
            if own:
                patch.setattr("mlora.run.prepare.faults_of_own_losses", lambda *_, **__: {})
            assert mlora.train(config, reporter=told).status == "finished"
        runs[name] = registry.function_of(registry.name_of(config.adapters[0].objective)).__globals__["calls"]
        assert any("which counts as its first call" in line for line in told.lines) == bool(more)
    assert runs["pure"] == runs["tried"]
    assert len(runs["once"]) == len(runs["pure"]) + 1


@pytest.mark.parametrize(("rest", "warns"), [("+ 1", True), ("", False)])
def test_an_adapter_without_gradient_is_told_of_once(
    tiny_base: Path, tmp_path: Path, rest: str, warns: bool
) -> None:
    """Over a resume, too, but not where the loss is 0, as that of a margin that all pairs keep."""
    own = f"flat_{warns}"
    (tmp_path / f"{own}.py").write_text(f"def loss(rows):\n    return 0 * rows.sums() {rest}\n")
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {"objective": f"{own}:loss", "eval_dataset": None, "eval_steps": None}
    told = Watching({("first", 2): interrupt})
    assert mlora.train(resolve_config(data, folder=tmp_path), reporter=told).status == "interrupted"
    result = resume(tmp_path / "run", reporter=(later := Watching()))
    said = "its gradient is exactly 0 since step 1, so it no longer learns; try a lower learning_rate"
    assert result.adapters["first"].message == (said if warns else "")
    assert [one.state for one in result.adapters.values()] == ["finished", "finished"]
    assert result.adapters["second"].message == ""
    assert [each for each in told.lines + later.lines if "gradient" in each] == [f"first: {said}"] * warns


def test_a_loss_that_becomes_nan_is_pointed_to(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "nan_later.py").write_text(
        "calls = []\n\n"
        "def loss(rows):\n"
        "    calls.append(1)\n"
        "    return -rows.sums() * (1.0 if len(calls) < 8 else float('nan'))\n"
    )
    data = run_data(tiny_base, tmp_path)
    data["adapters"] = [data["adapters"][0] | {"objective": "nan_later:loss"}]
    first = mlora.train(resolve_config(data, folder=tmp_path)).adapters["first"]
    hint = f"try a lower learning_rate, and look at the objective loss, in {tmp_path}/nan_later.py:3"
    assert first.message.endswith(f" is not a number; {hint}")


def test_an_attribute_that_is_misspelt_leads_to_the_nearest(tiny_base: Path) -> None:
    with Engine(tiny_base) as engine:
        loss = CustomLoss(lambda rows: -rows.sum())
        engine.create_adapter("a", LoraConfig(r=2), OptimConfig(total_steps=1), objective=loss)
        with pytest.raises(LossError, match=r"no attribute 'sum'; did you mean 'sums'\?, in /"):
            engine.forward_backward({"a": [Sample((5, 6, 7), (5, 6, 7))]})


def test_own_metrics_are_in_the_lines_of_steps_and_evaluations(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "apart.py").write_text(
        "def loss(rows):\n    return -rows.sums(), {'apart': rows.sums() * 0 + 7}\n"
    )
    data = run_data(tiny_base, tmp_path)
    data["defaults"]["logging_steps"] = 1
    data["adapters"] = [data["adapters"][0] | {"objective": "apart:loss"}]
    out = io.StringIO()
    mlora.train(resolve_config(data, folder=tmp_path), reporter=PlainLines(out))
    assert re.search(r"first: step 1/6 loss \S+ apart 7 learning_rate ", out.getvalue())
    assert re.search(r"first: step 3/6 eval_loss \S+ apart 7\n", out.getvalue())


def test_a_metric_that_is_not_a_number_is_left_out(tiny_base: Path, tmp_path: Path) -> None:
    """JSON cannot hold it, and it is never the best. A metric `step` does not replace the step of a line."""
    (tmp_path / "odd.py").write_text(
        "def loss(rows):\n"
        "    sums = rows.sums()\n"
        "    return -sums, {'odd': sums * float('nan'), 'endless': sums * float('-inf'), 'step': sums}\n"
    )
    data = run_data(tiny_base, tmp_path)
    data["adapters"] = [data["adapters"][0] | {"objective": "odd:loss", "metric_for_best_model": "endless"}]
    told = Watching()
    first = mlora.train(resolve_config(data, folder=tmp_path), reporter=told).adapters["first"]
    assert (first.state, first.best) == ("finished", None)
    assert [line for line in told.lines if "metric_for_best_model" in line] == [
        "first: metric_for_best_model: eval_endless is inf at step 3; an evaluation without a finite value "
        "is never the best"
    ]
    assert first.eval_metrics["odd"] == {"before": None, "after": None}
    records = lines(tmp_path / "run")
    assert [record["step"] for record in records] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    assert not {"odd", "eval_odd", "endless", "eval_endless"} & {key for record in records for key in record}


def test_an_engine_raises_and_the_others_keep_their_gradients(tiny_base: Path) -> None:
    """The bits of a batch of the same rows in which nothing failed."""
    fails = [False]

    def loss(rows: Any) -> Any:
        if fails[0]:
            raise KeyError("beta")
        return -rows.sums()

    def engine() -> Engine:
        made = Engine(str(tiny_base))
        for place, name in enumerate(("good", "own")):
            more = {"objective": CustomLoss(loss)} if name == "own" else {}
            lora = LoraConfig(r=2, target_modules=["q_proj"])
            made.create_adapter(name, lora, OptimConfig(lr_scheduler_type="constant"), seed=place, **more)
        return made

    sample = Sample((5, 6, 7, 8), (5, 6, 7, 8))
    batch = {"good": [sample], "own": [sample]}
    with engine() as failing, engine() as whole:
        whole.forward_backward(batch)
        fails[0] = True
        for verb in (failing.forward_backward, failing.evaluate):
            with pytest.raises(LossError, match=r"adapter 'own': objective: loss failed: KeyError: 'beta'"):
                verb(batch)
        assert failing.optim_step("good").grad_norm == whole.optim_step("good").grad_norm > 0
        fails[0] = False
        assert failing.forward_backward(batch)["own"].finite
        assert failing.optim_step("own").grad_norm > 0


def test_a_loss_that_its_backward_refuses_names_it(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "unhooked.py").write_text("def loss(rows):\n    return -rows.sums().detach()\n")
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {"objective": "unhooked:loss", "eval_dataset": None, "eval_steps": None}
    result = mlora.train(resolve_config(data, folder=tmp_path))
    assert result.adapters["second"].state == "finished"
    assert result.adapters["first"].message.startswith(
        "objective: loss failed: RuntimeError: element 0 of tensors does not require grad"
    )
