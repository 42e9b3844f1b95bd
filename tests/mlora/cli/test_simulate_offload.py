"""`mlora simulate offload`: its figures, its output, and its error lines."""

import json
from typing import Any

import pytest
from command_line import Run, only_line

GPU = ("--model", "llama-2-7b", "--flops", "165TFLOPS", "--read", "7GB/s", "--to-device", "25GB/s")


def output(run: Run, *arguments: object) -> dict[str, Any]:
    """What `--json` says."""
    result = run("simulate", "offload", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_it_says_that_it_is_a_forecast_and_what_hides_the_streaming(run: Run) -> None:
    result = run("simulate", "offload", *GPU, "--tokens", 4096, "--device-memory", "24GB")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == (
        "forecast, nothing here is measured: llama-2-7b, 6.7 billion parameters, method lora, blocks "
        "streamed from disk"
    )
    assert lines[1].startswith("T*, where computing a block takes as long as bringing it: 23571 tokens by")
    assert lines[2] == "adapters of 1024 tokens that hide the streaming: 21"
    assert lines[3].startswith("plan for 4096 tokens, head included: keep ")
    assert " ".join(lines[5].split()) == "tokens adapters tokens/s step s computing bound by plan"
    assert any(line.split()[:2] == ["4096", "4"] for line in lines[6:])


def test_packed_tokens_are_almost_free_until_the_streaming_is_hidden(run: Run) -> None:
    found = output(run, *GPU)
    rows = {row["tokens"]: row for row in found["rows"]}
    assert found["forecast"] is True
    assert rows[4096]["tokens_per_second"] > 15 * rows[256]["tokens_per_second"]
    assert rows[4096]["bound"] == "read"
    assert rows[32768]["bound"] == "compute"
    assert rows[65536]["tokens_per_second"] < 1.1 * rows[32768]["tokens_per_second"]
    reads = 2 * (32 - 3) * 202_375_168 * 2
    assert rows[4096]["moved_bytes"]["read"] == reads
    assert found["chosen"]["tokens"] == 16384, "the largest power of two below T*"
    assert found["tokens_to_hide"]["rule"] == pytest.approx(2 * 165e12 / (2 * 7e9))


def test_other_machines_models_and_methods(run: Run) -> None:
    quarter = output(run, *GPU, "--bytes-per-parameter", 0.5)
    assert quarter["tokens_to_hide"]["rule"] == pytest.approx(23571 / 4, rel=1e-3)
    host = output(run, "--model", "llama-3-70b", "--flops", "165TFLOPS", "--to-device", "25GB/s")
    assert host["tokens_to_hide"]["rule"] == pytest.approx(6600)
    assert host["chosen"]["moved_bytes"]["read"] == 0
    mixture = output(run, *GPU, "--model", "qwen3-235b-a22b")
    assert mixture["tokens_to_hide"]["rule"] == pytest.approx(23571 * 2487.7 / 222.8, rel=1e-3)
    full = output(run, *GPU, "--method", "full", "--tokens", 512)
    assert full["chosen"]["moved_bytes"]["written"] == 14 * 32 * 202_375_168
    cpu = output(run, "--model", "llama-2-7b", "--flops", "1TFLOPS", "--read", "2GB/s", "--tokens", 64)
    assert cpu["chosen"]["moved_bytes"]["to_device"] == 0
    assert cpu["chosen"]["host_bytes"] == 0


def test_what_does_not_fit_ends_the_table(run: Run) -> None:
    found = output(run, *GPU, "--device-memory", "6GB", "--host-memory", "20GB")
    *fitting, last = found["rows"]
    assert all(row["fits"] and row["device_bytes"] <= 6e9 for row in fitting)
    assert not last["fits"]
    assert last["fault"].startswith("device memory needs at least ")
    table = run("simulate", "offload", *GPU, "--method", "full", "--device-memory", "6GB").stdout.splitlines()
    assert "adapters" not in table[4]
    assert "device memory needs at least" in table[-1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--model", "gpt-5"], "--model: expected one of llama-2-7b, llama-2-13b, llama-3-70b, qwen3-235b"),
        (["--flops", "fast"], "--flops: expected FLOP/s such as 165TFLOPS, got 'fast'"),
        (["--read", "7 mph"], "--read: expected bytes per second such as 7GB/s, got '7 mph'"),
        (["--write", "quick"], "--write: expected bytes per second such as 7GB/s, got 'quick'"),
        (["--to-device", "0"], "--to-device: expected bytes per second such as 7GB/s, got '0'"),
        (["--bytes-per-parameter", "0"], "--bytes-per-parameter: expected a number above 0, got 0.0"),
        (["--device-memory", "big"], "--device-memory: must be a size such as 8GiB or 500MB, got 'big'"),
        (["--method", "qlora"], "--method: expected lora or full, got 'qlora'"),
        (["--device-memory", "1GB"], "tokens do not fit: device memory needs at least"),
        (["--device-memory", "6GB", "--tokens", "99999"], "--tokens: device memory needs at least"),
    ],
)
def test_wrong_options(run: Run, options: list[str], expected: str) -> None:
    assert expected in only_line(run("simulate", "offload", *GPU, *options))


def test_options_that_are_missing_or_in_the_wrong_place(run: Run) -> None:
    plain = ("--model", "llama-2-7b", "--flops", "1TFLOPS")
    assert "--read or --to-device: give at least one" in only_line(run("simulate", "offload", *plain))
    alone = run("simulate", "offload", *plain, "--to-device", "9GB/s", "--write", "1GB/s")
    assert "--write: needs --read" in only_line(alone)
    before = run("simulate", "--bytes", 8, "offload", *GPU)
    assert only_line(before) == (
        "error: --bytes: not an option of `mlora simulate offload`, or give it after `offload`"
    )
