"""The example of two machines, which are two network namespaces here: a run of two stages over their link."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import make_tasks
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = Path(make_tasks.__file__).parent


def test_two_machines_train_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    start = import_module("pipeline.start")
    if reason := start.why_no_network():
        pytest.skip(reason)
    settings = [f"output_dir={tmp_path / 'run'}", "defaults.max_steps=2", "defaults.eval_steps=null"]
    settings += ["defaults.eval_exact_match=false"]
    settings += [f"adapters.{name}.eval_dataset=null" for name in make_tasks.TASKS]
    settings += ["adapters.reverse.max_steps=2", "adapters.sort.max_steps=2"]
    more = [word for setting in settings for word in ("--set", setting)]
    # torchrun and mlora of this environment
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        machines = []
        for rank, prefix in enumerate(stack.enter_context(start.joined_namespaces("1gbit"))):
            words = [str(rank), "10.77.0.1", str(EXAMPLES / "quickstart.yaml"), *more]
            machine = subprocess.Popen(
                [*prefix, str(EXAMPLES / "two_machines.sh"), *words],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(machine.kill)
            machines.append(machine)
        said = [machine.communicate(timeout=200)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(said)
    for name in make_tasks.TASKS:
        assert (tmp_path / "run" / "adapters" / name / "adapter_model.safetensors").is_file()
    assert set(re.findall(r"^(\w+) +finished +2/2", said[0], re.M)) == set(make_tasks.TASKS)
    assert "finished" not in said[1]  # only the first machine tells
