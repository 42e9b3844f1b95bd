"""Long randomised runs over stages: whatever joins, leaves, pauses or fails, the results are one stage's.

Run by `make soak`; `tests/mlora/test_chaos.py` makes a few of them.
"""

import random
import signal
import time
from pathlib import Path

import pytest
from mlora.store.checkpoint import list_checkpoints

from tests.mlora.chaos import attempt
from tests.mlora.stage_runs import assert_equal, commands, error_lines, many_kinds, run_stages, save_deep_base
from tests.mlora.tiny_run import write_run

RUNS = 50
KILLS = 20
STAGES = 3


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_random_work_over_stages() -> None:
    seed = int(time.time())
    rng = random.Random(seed)
    outcomes = [attempt(rng.randrange(2**31)) for _ in range(RUNS)]
    faults = sum(met_fault for met_fault, _ in outcomes)
    print(f"pipeline soak: seed {seed}, {RUNS} runs, of which {faults} met a fault")
    assert [problem for _, problem in outcomes if problem] == []
    assert 0 < faults < RUNS


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_stages_killed_at_random_moments(tmp_path: Path) -> None:
    seed = int(time.time())
    rng = random.Random(seed)
    data = many_kinds(save_deep_base(tmp_path / "base"), tmp_path, pipeline={"stages": STAGES})
    data["pipeline"]["partition"] = [1, 1, 2]
    data["adapters"] = [
        adapter | {"max_steps": 3 * adapter.get("max_steps", 6)} for adapter in data["adapters"][:4]
    ]
    run = tmp_path / "run"
    begin = time.monotonic()
    codes, _, errors = run_stages(["train", write_run(tmp_path, data), "--set", f"output_dir={run}0"], STAGES)
    undisturbed = time.monotonic() - begin
    assert codes == [0] * STAGES, errors
    kills, rounds = 0, 0
    while kills < KILLS:
        rounds += 1
        folder = tmp_path / f"run{rounds}"
        command: list[object] = ["train", tmp_path / "run.yaml", "--set", f"output_dir={folder}"]
        codes = []
        while codes != [0] * STAGES:
            number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            stage = rng.randrange(STAGES)
            with commands(command, STAGES) as running:
                running.processes[0].join(rng.uniform(0.3, undisturbed))
                disturbed = running.processes[stage].is_alive() and kills < KILLS
                if disturbed:
                    running.signal(stage, number)
                    kills += 1
                began = time.monotonic()
                # before its first sign of life only a launcher notices the end of a process
                early = not (folder / "metrics.jsonl").exists()
                if early and disturbed:
                    time.sleep(10)
                    for process in running.processes.values():
                        process.kill()
                codes, _, errors = running.end(timeout=120)
            if disturbed and not early and any(codes):
                assert time.monotonic() - began < 12, f"seed {seed}"
                assert len(error_lines(errors)) == 1, (seed, errors)
            if list_checkpoints(folder / "checkpoints") or (folder / "config.yaml").exists():
                command = ["resume", folder]
        assert_equal(folder, tmp_path / "run0")
    print(f"pipeline soak: seed {seed}, {kills} kills in {rounds} runs, every one ended bit-equal")
