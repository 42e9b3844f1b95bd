"""Long randomised runs: `mlora train` killed with SIGKILL at random moments, resumed until it is done.

Run by `make soak`. Every resume must succeed and the end must be that of an undisturbed run, bit for bit.
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mlora.tiny_run import run_data, save_base, write_run

KILLS = 30
MLORA = [sys.executable, "-m", "mlora"]


def outcome(run: Path) -> tuple[list[dict], dict[str, bytes]]:
    """Metrics without what a clock or the machine says, and the adapters' bytes."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds", None)
        line.pop("peak_memory_bytes", None)
    adapters = {
        path.parent.name: path.read_bytes() for path in run.glob("adapters/*/adapter_model.safetensors")
    }
    return lines, adapters


def run_to_end(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_killed_at_random_moments(tmp_path: Path) -> None:
    seed = int(time.time())
    rng = random.Random(seed)
    base = save_base(tmp_path / "base")
    data = run_data(base, tmp_path)
    data["defaults"] |= {"max_steps": 120, "save_steps": 3}
    data["adapters"][1]["max_steps"] = 90

    data["output_dir"] = str(tmp_path / "whole")
    start = time.monotonic()
    run_to_end([*MLORA, "train", str(write_run(tmp_path, data))])
    undisturbed = time.monotonic() - start

    kills, rounds = 0, 0
    while kills < KILLS:
        data["output_dir"] = str(tmp_path / f"killed{rounds}")
        command = [*MLORA, "train", str(write_run(tmp_path, data))]
        while kills < KILLS:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            try:
                _, errors = process.communicate(timeout=rng.uniform(0.5, undisturbed))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills += 1
            else:
                assert process.returncode == 0, errors
                break
            if Path(data["output_dir"], "config.yaml").exists():
                command = [*MLORA, "resume", data["output_dir"]]
        if Path(data["output_dir"], "config.yaml").exists():
            run_to_end([*MLORA, "resume", data["output_dir"]])
            assert outcome(Path(data["output_dir"])) == outcome(tmp_path / "whole"), f"seed {seed}"
            rounds += 1
    print(f"kill soak: seed {seed}, {kills} kills in {rounds} runs, every one ended bit-equal")
