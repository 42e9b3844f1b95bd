"""Long randomised runs of `method: full` out of core, killed with SIGKILL, resumed until they are done.

Run by `make soak`. The folder holds a whole checkpoint at any time, and the end is that of an undisturbed
run.
"""

import random
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from mlora.store.checkpoint import load_checkpoint
from mlora.store.run_folder import RunFolder
from mlora.store.state_files import lost_file

from tests.mlora.offload.full_runs import assert_same, full_data
from tests.mlora.tiny_run import save_base, write_run
from tests.soak.test_kill_soak import Killed, run_to_end

KILLS = 30
SEED = 22
SAVE_STEPS = 1
LONGEST = 1.5  # seconds from the first step of a process to its end


class KilledFull(Killed):
    """A run out of core that is killed some time after its first step."""

    def kill_at_work(self, seconds: float) -> bool:
        """Starts or resumes it, and kills it; returns False if it had ended before."""
        metrics = self.folder / "metrics.jsonl"
        before = metrics.stat().st_size if metrics.exists() else 0
        with self.start() as process:
            while process.poll() is None and not (metrics.exists() and metrics.stat().st_size > before):
                time.sleep(0.005)
                before = min(before, metrics.stat().st_size if metrics.exists() else 0)  # it was cut
            time.sleep(seconds)
            ended = process.poll() is not None
            process.kill()
            output = process.communicate()[0]
        self.check_end(output)
        assert not ended or process.returncode == 0, output
        self.check_files()
        return not ended

    def check_files(self) -> None:
        """Checks that the newest checkpoint and its file of weights are whole, and that no scratch stays."""
        super().check_files()
        told: list[str] = []
        states = self.folder / "states"
        load_checkpoint(self.folder / "checkpoints", told.append, partial(lost_file, RunFolder(self.folder)))
        assert not told
        assert not list((self.folder.parent / "scratch").iterdir())
        assert len(list(states.glob("*"))) <= 4  # two checkpoints, one on its way, and one cut short


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_full_tuning_killed_at_random_moments(tmp_path: Path, accumulation: int) -> None:
    rng = random.Random(SEED + accumulation)
    (tmp_path / "scratch").mkdir()
    offload = {"base": "disk", "optimizer": "disk", "slots": 2, "folders": [str(tmp_path / "scratch")]}
    # wide enough for matrices whose states leave memory
    base = save_base(tmp_path / "base", layers=4, hidden=96, intermediate_size=384)
    data = full_data(base, tmp_path, offload=offload)
    data["defaults"] |= {"max_steps": 60, "save_steps": SAVE_STEPS}
    data["adapters"][0] |= {"gradient_accumulation_steps": accumulation, "eval_steps": 30}
    config = write_run(tmp_path, data)
    mlora = [sys.executable, "-m", "mlora"]
    begin = time.monotonic()
    run_to_end(KilledFull(tmp_path / "whole", mlora, config, SAVE_STEPS))
    kills, rounds = 0, 0
    while kills < KILLS // 2:
        run = KilledFull(tmp_path / f"killed{rounds}", mlora, config, SAVE_STEPS)
        while kills < KILLS // 2 and run.kill_at_work(rng.uniform(0.0, LONGEST)):
            kills += 1
        run_to_end(run)
        assert_same(run.folder, tmp_path / "whole")
        run.check_files()
        rounds += 1
    seconds = time.monotonic() - begin
    print(f"full kill soak: accumulation {accumulation}, {kills} kills in {rounds} runs, {seconds:.0f} s")
