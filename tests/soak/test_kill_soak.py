"""Long randomised runs: `mlora train` killed with SIGKILL at random moments, resumed until it is done.

Run by `make soak`. Every resume must succeed, from the last checkpoint that was whole, and the end must be
that of an undisturbed run, bit for bit.
"""

import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from mlora.store.checkpoint import list_checkpoints, load_checkpoint
from mlora.store.run_folder import read_metrics

from tests.mlora.limited_runs import ask, decisions, five_tasks, submission
from tests.mlora.stage_runs import ENVIRONMENT
from tests.mlora.sweep_data import sweep_data
from tests.mlora.tiny_run import lines, run_data, save_base, weights, write_run

KILLS = 30
ROOT = Path(__file__).resolve().parents[2]
UNBUFFERED = {**ENVIRONMENT, "PYTHONUNBUFFERED": "1"}
LIMITED = [sys.executable, str(ROOT / "tests" / "soak" / "limited.py")]
SLOW = [sys.executable, str(ROOT / "tests" / "soak" / "slow_disk.py")]
PATIENCE = 300.0  # seconds


class Killed:
    """A run that is killed again and again.

    Args:
        folder: its `output_dir`.
        command: of `mlora` or something like it.
        config: its YAML.
        save_steps: of its adapters.
        begin: the command of `mlora` that begins it.
    """

    def __init__(
        self, folder: Path, command: list[str], config: Path, save_steps: int, begin: str = "train"
    ) -> None:
        self.folder, self.save_steps = folder, save_steps
        self._mlora, self._config, self._begin = command, config, begin
        self._at: int | None = None

    def start(self) -> subprocess.Popen[str]:
        """Start or resume it."""
        command = [self._begin, str(self._config), "--set", f"output_dir={self.folder}"]
        if (self.folder / "config.yaml").exists():
            command = ["resume", str(self.folder)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen([*self._mlora, *command], text=True, env=UNBUFFERED, **pipes)

    def kill_after(self, seconds: float, last: Callable[[], object] = lambda: None) -> bool:
        """Start or resume it, and kill it; return whether it came to that, or had ended before.

        Args:
            seconds: how long it lives.
            last: is done before it dies.
        """
        process = self.start()
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            last()
            process.kill()
            self.check_end(process.communicate()[0])
            self.check_files()
            return True
        assert process.returncode == 0, output
        return False

    def check_end(self, output: str) -> None:
        """Check that it went on where it had to; `output` is what it has printed."""
        found = re.search(r"resuming \S+ at iteration (\d+)", output)
        assert not found or int(found[1]) == self._at, output

    def check_files(self) -> None:
        """Check what a kill has left: the newest checkpoint can be read, and few steps are lost."""
        told: list[str] = []
        checkpoint = load_checkpoint(self.folder / "checkpoints", told.append)
        assert not told
        assert bool(checkpoint) == bool(list_checkpoints(self.folder / "checkpoints"))
        self._at = checkpoint["iteration"] if checkpoint else None
        made = {line["adapter"]: line["step"] for line in read_metrics(self.folder / "metrics.jsonl")}
        for name, step in made.items():
            saved = checkpoint["tasks"].get(name, {"step": 0})["step"] if checkpoint else 0
            # one checkpoint may be on its way to the disk, and the next one almost due
            assert step - saved <= 2 * self.save_steps, name


def undisturbed(folder: Path, save_steps: int) -> tuple[Path, float]:
    """Make a config, run it into the folder `whole`, and return it with the seconds that it took."""
    data = run_data(save_base(folder / "base"), folder)
    data["defaults"] |= {"max_steps": 120, "save_steps": save_steps}
    data["adapters"][1]["max_steps"] = 90
    config = write_run(folder, data)
    start = time.monotonic()
    whole = Killed(folder / "whole", [sys.executable, "-m", "mlora"], config, save_steps)
    run_to_end(whole)
    return config, time.monotonic() - start


def run_to_end(run: Killed) -> None:
    """Leave a run alone until it has ended."""
    process = run.start()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    run.check_end(output)


def assert_equal(run: Path, whole: Path, seed: int) -> None:
    """Metrics have neither gaps nor repeats, and the adapters' bytes are the same."""
    assert lines(run) == lines(whole), f"seed {seed}"
    assert weights(run) == weights(whole), f"seed {seed}"
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    assert not list(run.rglob("*.tmp"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_killed_at_random_moments(tmp_path: Path) -> None:
    seed = int(time.time())
    rng = random.Random(seed)
    config, whole = undisturbed(tmp_path, save_steps=3)
    kills, rounds = 0, 0
    while kills < KILLS:
        run = Killed(tmp_path / f"killed{rounds}", [sys.executable, "-m", "mlora"], config, 3)
        while kills < KILLS and run.kill_after(rng.uniform(0.5, whole)):
            kills += 1
        run_to_end(run)
        assert_equal(run.folder, tmp_path / "whole", seed)
        rounds += 1
    print(f"kill soak: seed {seed}, {kills} kills in {rounds} runs, every one ended bit-equal")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_sweeps_killed_at_random_moments(tmp_path: Path) -> None:
    """Metrics, weights and the ranking are those of a sweep that nothing has disturbed."""
    seed = int(time.time())
    rng = random.Random(seed)
    rates = {"low": 1e-4, "high": 5e-2, "log": True}
    search = {"learning_rate": rates, "lora": {"r": {"choice": [2, 4, 8]}}}
    pruner = {"pruner": "median", "pruner_kwargs": {"n_startup_trials": 3}}
    data = sweep_data(save_base(tmp_path / "base"), tmp_path, search=search, trials=24, **pruner)
    data["defaults"] |= {"max_steps": 60, "save_steps": 10}
    data["sweep"]["adapter"]["eval_steps"] = 5
    config = write_run(tmp_path, data)
    mlora = [sys.executable, "-m", "mlora"]
    begin = time.monotonic()
    whole = Killed(tmp_path / "whole", mlora, config, 10, "sweep")
    run_to_end(whole)
    seconds = time.monotonic() - begin
    kills, rounds = 0, 0
    while kills < KILLS:
        run = Killed(tmp_path / f"killed{rounds}", mlora, config, 10, "sweep")
        while kills < KILLS and run.kill_after(rng.uniform(0.5, seconds)):
            kills += 1
        run_to_end(run)
        assert_equal(run.folder, whole.folder, seed)
        tables = [(each.folder / "sweep.csv").read_text().splitlines() for each in (run, whole)]
        ranked = [[line.split(",")[:5] for line in table] for table in tables]
        assert ranked[0] == ranked[1], f"seed {seed}"
        rounds += 1
    pruned = (whole.folder / "sweep.csv").read_text().count(",pruned,")
    assert pruned
    print(f"kill soak: seed {seed}, {kills} kills in {rounds} sweeps, {pruned} of 24 trials pruned in each")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_killed_while_checkpoints_are_written(tmp_path: Path) -> None:
    """Each step asks for a checkpoint, and the disk is slow, so that there is hardly a moment without one."""
    seed = int(time.time())
    rng = random.Random(seed)
    config, _ = undisturbed(tmp_path, save_steps=1)
    moments: Counter[str] = Counter()
    rounds = 0
    while moments.total() < KILLS:
        log = tmp_path / f"log{rounds}"
        log.touch()
        run = Killed(tmp_path / f"killed{rounds}", [*SLOW, str(log)], config, 1)
        ended = False
        while moments.total() < KILLS and not ended:
            before = log.stat().st_size
            with run.start() as process:
                while log.stat().st_size == before and process.poll() is None:
                    time.sleep(0.01)
                time.sleep(rng.uniform(0.0, 4.0))
                ended = process.poll() is not None
                process.kill()
                output = process.communicate()[0]
            run.check_end(output)
            if ended:
                assert process.returncode == 0, output
            else:
                moments[log.read_text().splitlines()[-1]] += 1
                run.check_files()
        run_to_end(run)
        assert_equal(run.folder, tmp_path / "whole", seed)
        rounds += 1
    print(f"kill soak: seed {seed}, {KILLS} kills in {rounds} runs, every one ended bit-equal; while waiting")
    print(f"to {dict(moments)}")
    assert len(moments) >= 3


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_killed_while_tasks_wait_and_give_way(tmp_path: Path) -> None:
    """Two of six tasks fit. One that goes before all others is submitted at a random moment.

    The end is that of a run of the same requests and decisions that nothing has disturbed.
    """
    seed = int(time.time())
    rng = random.Random(seed)
    data = five_tasks(save_base(tmp_path / "base"), tmp_path)
    data["defaults"]["save_steps"] = 5
    for adapter in data["adapters"]:
        adapter["max_steps"] *= 8
    config = write_run(tmp_path, data)
    content = submission(data, tmp_path, "urgent", priority=9, max_steps=20)
    begin = time.monotonic()
    run_to_end(Killed(tmp_path / "undisturbed", LIMITED, config, 5))
    seconds = time.monotonic() - begin
    kills, rounds, gave_way = 0, 0, 0
    while kills < KILLS:
        run = Killed(tmp_path / f"killed{rounds}", LIMITED, config, 5)

        def submit(folder: Path = run.folder) -> None:
            if (folder / "queue.sqlite").exists():
                ask(folder, "submit", "urgent", content)  # once
                time.sleep(rng.uniform(0.0, 0.4))

        while kills < KILLS and run.kill_after(rng.uniform(0.3, 1.0) * seconds, submit):
            kills += 1
        run_to_end(run)
        gave_way += sum("urgent" in names for names in decisions(run.folder).values()) > 0
        whole = Killed(tmp_path / f"whole{rounds}", LIMITED, config, 5)
        whole.folder.mkdir()
        for name in ("config.yaml", "queue.sqlite"):
            shutil.copy(run.folder / name, whole.folder / name)
        run_to_end(whole)
        assert_equal(run.folder, whole.folder, seed)
        assert decisions(run.folder) == decisions(whole.folder)
        assert not (run.folder / "states").exists()
        rounds += 1
    print(
        f"kill soak: seed {seed}, {kills} kills in {rounds} runs under a limit, in {gave_way} of them tasks"
    )
    print("gave way to one that was submitted, every one ended bit-equal to one of the same decisions")
    assert gave_way
