"""`mlora export`, `merge`, `evaluate` and `stop --keep`, and `generate` while a run trains."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run, only_line
from limited_runs import Watching, interrupt
from mlora.config.config_file import resolve_config
from mlora.run.run import train
from mlora.store.run_folder import RunFolder
from peft import PeftModel
from tiny_run import run_data, weights, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

SUMS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(3) for b in range(2)]


@pytest.fixture(scope="module")
def begun(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was interrupted: `second` has finished, `first` has not."""
    folder = tmp_path_factory.mktemp("begun")
    data = run_data(tiny_base, folder)
    data["defaults"]["max_steps"] = 40
    write_jsonl(folder / "sums.jsonl", SUMS)
    data["datasets"].append({"name": "sums", "path": "sums.jsonl", "format": "prompt_completion"})
    watching = Watching({("first", 4): interrupt})
    assert train(resolve_config(data, folder=folder), reporter=watching).status == "interrupted"
    return folder / "run"


def test_export_prints_copyable_commands(run: Run, trained: Path, tiny_base: Path, tmp_path: Path) -> None:
    done = run("export", trained, "second", "--portable", "--output", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"exported: {tmp_path}/out (step 9, as it ended)",
        f"vllm serve {tiny_base} --enable-lora --lora-modules second={tmp_path}/out --max-lora-rank 8",
        f"python -m sglang.launch_server --model-path {tiny_base} --enable-lora "
        f"--lora-paths second={tmp_path}/out --max-lora-rank 7",
    ]


def test_an_export_goes_into_the_runs_folder(run: Run, trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained, tmp_path / "run")
    assert run("export", folder, "first").exit_code == 0
    assert run("export", folder, "first", "--portable").exit_code == 0
    assert sorted(path.name for path in (folder / "exports").iterdir()) == ["first", "first-portable"]
    again = only_line(run("export", folder, "first"))
    assert (
        again == f"error: --output: {folder}/exports/first is not empty; remove it, or choose another folder"
    )


def test_merge_writes_a_model(run: Run, trained: Path, tmp_path: Path) -> None:
    done = run("merge", trained, "first", "--output", tmp_path / "merged")
    assert (done.exit_code, done.stdout) == (0, f"merged: {tmp_path}/merged (step 6, as it ended)\n"), (
        done.stderr
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config.model_type == "llama"


@pytest.mark.parametrize("command", ["export", "merge", "evaluate"])
def test_what_is_not_there(run: Run, trained: Path, tmp_path: Path, command: str) -> None:
    more = ["--output", tmp_path / "out"] if command == "merge" else []
    there_is_none = f"error: {tmp_path}/no: there is no such folder; give the run's output_dir"
    assert only_line(run(command, tmp_path / "no", "first", *more)) == there_is_none
    (tmp_path / "empty").mkdir()
    is_none = f"error: {tmp_path}/empty: is not a run folder: it has no config.yaml"
    assert only_line(run(command, tmp_path / "empty", "first", *more)) == is_none
    wrong = f"error: {trained}: has no adapter 'frst'; did you mean 'first'?"
    assert only_line(run(command, trained, "frst", *more)) == wrong
    line = only_line(run(command, trained, "first", "--checkpoint", 1, *more))
    assert line.startswith(f"error: {trained}: has no checkpoint 1; its checkpoints: ")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_full_disk_during_a_merge_leaves_nothing(
    run: Run, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    def full(*args: Any, **more: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    line = only_line(run("merge", trained, "first", "--output", tmp_path / "merged"))
    assert line == f"error: --output: {tmp_path}/merged cannot be written: No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_noticed_before_anything_is_written(
    run: Run, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    line = only_line(run("merge", trained, "first", "--output", tmp_path / "merged"))
    assert line.startswith(f"error: --output: {tmp_path}/merged cannot be written: it needs 0.")
    assert line.endswith(" MiB, and 0.0 MiB are free")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys
from transformers import PreTrainedModel
import mlora.cli.app, time
def slow(self, folder, **more):
    print("ready", flush=True)
    time.sleep(600)
PreTrainedModel.save_pretrained = slow
sys.argv = ["mlora", "merge", *sys.argv[1:]]
mlora.cli.app.main()
"""


def test_a_killed_merge_leaves_no_folder_and_can_be_repeated(run: Run, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    words = [sys.executable, "-c", KILLED, str(trained), "first", "--output", str(out)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    assert [path.name for path in tmp_path.iterdir()] == [".merged.unfinished"]
    assert run("merge", trained, "first", "--output", out).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_generate_takes_the_newest_weights_of_adapters_in_training(
    run: Run, begun: Path, tiny_base: Path, tmp_path: Path
) -> None:
    done = run("generate", begun, "-p", "ab", "--max-new-tokens", 4, "--json")
    assert done.exit_code == 0, done.stderr
    assert "first: weights of step 4 of 40, checkpoint 12\n" in done.stderr
    assert "second: weights" not in done.stderr
    answers = {one["adapter"]: one["completion"] for one in map(json.loads, done.stdout.splitlines())}
    assert answers.keys() == {"first", "second"}
    assert run("export", begun, "first", "--output", tmp_path / "out").exit_code == 0
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_base), tmp_path / "out")
    ids = torch.tensor([tokenizer("ab")["input_ids"]])
    output = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert answers["first"] == tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    only = run("generate", begun, "-p", "ab", "-a", "second", "--max-new-tokens", 1)
    assert (only.exit_code, only.stderr) == (0, "")


def test_generate_says_which_adapters_have_no_weights_yet(run: Run, begun: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(begun, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    no_weights = f"first: has no weights yet: {folder} has no checkpoint; save_steps says when"
    done = run("generate", folder, "-p", "ab", "--max-new-tokens", 1)
    assert (done.exit_code, done.stderr) == (0, f"warning: left out: {no_weights}\n")
    assert only_line(run("generate", folder, "-p", "ab", "-a", "first")) == f"error: {no_weights}"


def test_evaluate_measures_what_the_run_measured(run: Run, trained: Path) -> None:
    done = run("evaluate", trained, "first", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    base, first = found["results"]
    assert (base["adapter"], first["adapter"], first["step"], found["notes"]) == ("__base__", "first", 6, [])
    summary = RunFolder(trained).read_summary()
    assert summary is not None
    losses = summary["adapters"]["first"]["eval_loss"]
    assert first["loss"] == pytest.approx(losses["after"], abs=1e-5)
    assert base["loss"] == pytest.approx(losses["before"], abs=1e-5)  # B is 0 before the first step
    assert (base["samples"], base["dataset"], base["exact_match"]) == (7, "two", None)


def test_evaluate_on_other_data_and_checkpoints(run: Run, begun: Path, tmp_path: Path) -> None:
    done = run("evaluate", begun, "--dataset", "sums")
    assert done.exit_code == 0, done.stderr
    told, titles, *rows = [line.split() for line in done.stdout.splitlines()]
    assert " ".join(told) == "first: weights of step 4 of 40, checkpoint 12"
    assert titles == ["adapter", "dataset", "step", "samples", "loss", "exact", "match"]
    assert [row[:3] for row in rows] == [
        ["__base__", "sums", "6"],
        ["first", "sums", "4"],
        ["second", "sums", "9"],
    ]
    assert rows[0][-1].endswith("%")
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": "some text"}) + "\n")
    words = ("--data", tmp_path / "more.jsonl", "--format", "text", "--checkpoint", 12, "--json")
    other = json.loads(run("evaluate", begun, "second", *words).stdout)
    assert [one["dataset"] for one in other["results"]] == ["more.jsonl", "more.jsonl"]
    assert [one["exact_match"] for one in other["results"]] == [None, None]


def test_adapters_without_fitting_data_are_left_out_unless_named(run: Run, begun: Path) -> None:
    done = run("evaluate", begun, "--no-exact-match")
    assert done.exit_code == 0, done.stderr
    left = "left out: second: has no eval_dataset; give --dataset NAME (one, two, sums) or --data FILE"
    assert left in done.stdout.splitlines()
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["__base__", "first"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["second"], "second: has no eval_dataset; give --dataset NAME (one, two, sums) or --data FILE"),
        (
            ["second", "--data", __file__, "--format", "preference"],
            "second: objective cross_entropy ",
        ),
        (["--dataset", "on"], "--dataset: no dataset is named 'on'; did you mean 'one'?"),
        (["--dataset", "one", "--data", "x"], "give --dataset or --data, not both"),
        (["--format", "text"], "--format is of the file in --data; datasets of the run have theirs"),
        (["--data", "nowhere.jsonl"], "--data: there is no file "),
    ],
)
def test_wrong_data_of_evaluate(run: Run, begun: Path, words: list[str], expected: str) -> None:
    assert only_line(run("evaluate", begun, *words)).startswith(f"error: {expected}")


def test_stop_needs_keep(run: Run, begun: Path) -> None:
    assert only_line(run("stop", begun, "first")) == (
        f"error: stop keeps the weights: give --keep; to end without them, use `mlora cancel {begun} first`"
    )


def test_a_stopped_task_keeps_its_weights(run: Run, begun: Path, tmp_path: Path) -> None:
    """Those of its last step, whether a run takes the request at once or after a resume."""
    folder = shutil.copytree(begun, tmp_path / "run")
    assert run("export", folder, "first", "--output", tmp_path / "now").exit_code == 0
    done = run("stop", folder, "first", "--keep")
    assert done.stdout.splitlines() == [
        "first: will be stopped",
        f"the run is not active; `mlora resume {folder}` applies this",
    ]
    assert "first: stop was already requested" in run("stop", folder, "first", "--keep").stdout
    assert only_line(run("cancel", folder, "first")) == (
        "error: first: cannot be cancelled: stop was already requested"
    )
    resumed = run("resume", folder)
    assert resumed.exit_code == 0, resumed.stderr
    assert "first: finished at step 4" in resumed.stdout
    summary = RunFolder(folder).read_summary()
    assert summary is not None
    first = summary["adapters"]["first"]
    told = first["state"], first["message"], first["step"], first["max_steps"], first["saved_step"]
    assert told == ("finished", "stopped on request at step 4", 4, 40, 4)
    stored = (tmp_path / "now" / "adapter_model.safetensors").read_bytes()
    assert weights(folder)["first"] == stored
    assert "first: is already finished" in run("stop", folder, "first", "--keep").stdout


def test_a_task_without_a_step_has_nothing_to_keep(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["defaults"]["save_steps"] = 1
    data["adapters"][0]["gradient_accumulation_steps"] = 30
    watching = Watching({("second", 3): interrupt})
    train(resolve_config(data, folder=tmp_path), reporter=watching)
    run("stop", tmp_path / "run", "first", "--keep")
    assert run("resume", tmp_path / "run").exit_code == 0
    summary = RunFolder(tmp_path / "run").read_summary()
    assert summary is not None
    first = summary["adapters"]["first"]
    assert (first["state"], first["message"]) == ("cancelled", "stopped on request before its first step")
    assert list(weights(tmp_path / "run")) == ["second"]


def test_a_run_at_work_is_read_without_disturbing_it(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    """While it trains: generate, export, stop --keep. Its weights are those of a run that nobody asked."""
    data = run_data(tiny_base, tmp_path)
    data["defaults"] |= {"max_steps": 3000, "save_steps": 5, "logging_steps": 1000}
    data["defaults"]["lr_scheduler_type"] = "constant"
    first, second = data["adapters"]
    del first["gradient_accumulation_steps"], first["eval_dataset"], first["eval_steps"], second["max_steps"]
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(data))
    with open(tmp_path / "log", "w") as log:
        words = [sys.executable, "-m", "mlora", "train", str(path)]
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 120
        while not list((tmp_path / "run" / "checkpoints").glob("step-*.pt")):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < end
            time.sleep(0.05)
        done = run("generate", tmp_path / "run", "-p", "ab", "--max-new-tokens", 2)
        assert (done.exit_code, len(done.stdout.splitlines())) == (0, 2), done.stderr
        assert "first: weights of step " in done.stderr
        assert run("export", tmp_path / "run", "second", "--output", tmp_path / "out").exit_code == 0
        assert run("stop", tmp_path / "run", "first", "second", "--keep").exit_code == 0
        assert process.wait(timeout=120) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
    summary = RunFolder(tmp_path / "run").read_summary()
    assert summary is not None
    ended = {(entry["state"], entry["step"]) for entry in summary["adapters"].values()}
    ((state, step),) = ended  # both at the same iteration
    assert (state, 0 < step < 3000) == ("finished", True)
    data["defaults"]["max_steps"] = step
    train(resolve_config(data | {"output_dir": str(tmp_path / "alone")}, folder=tmp_path))
    assert weights(tmp_path / "run") == weights(tmp_path / "alone")


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def chatting(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose dataset has other column names and a chat template of its own."""
    folder = tmp_path_factory.mktemp("chatting")
    data = run_data(tiny_base, folder)
    (folder / "chat.jinja").write_text(CHAT)
    dialog = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    write_jsonl(folder / "chats.jsonl", [{"dialog": dialog}] * 4)
    chats = {"name": "chats", "path": "chats.jsonl", "format": "messages", "chat_template": "chat.jinja"}
    data["datasets"] = [chats | {"columns": {"messages": "dialog"}}]
    lora = {"r": 2, "target_modules": ["q_proj"]}
    data["adapters"] = [{"name": "chat", "dataset": "chats", "max_steps": 1, "lora": lora}]
    data["adapters"] += [data["adapters"][0] | {"name": "short", "max_length": 12}]
    assert train(resolve_config(data, folder=folder)).status == "finished"
    return folder / "run"


def test_what_leaves_a_run_has_the_chat_template_of_its_data(
    run: Run, chatting: Path, tmp_path: Path
) -> None:
    assert run("export", chatting, "chat", "--output", tmp_path / "adapter").exit_code == 0
    assert run("merge", chatting, "chat", "--output", tmp_path / "merged").exit_code == 0
    for folder in ("adapter", "merged"):
        assert AutoTokenizer.from_pretrained(tmp_path / folder).chat_template == CHAT


def test_a_file_is_measured_as_the_adapters_dataset_is_read(run: Run, chatting: Path, tmp_path: Path) -> None:
    as_trained, plain = chatting.parent / "chats.jsonl", tmp_path / "plain.jsonl"
    by_name = run("evaluate", chatting, "--dataset", "chats", "--json")
    by_file = run("evaluate", chatting, "--data", as_trained, "--json")
    assert by_file.exit_code == 0, by_file.stderr
    losses = [[row["loss"] for row in json.loads(done.stdout)["results"]] for done in (by_name, by_file)]
    assert losses[0] == losses[1]
    names = [row["adapter"] for row in json.loads(by_name.stdout)["results"]]
    assert names == ["__base__", "__base__", "chat", "short"]
    assert json.loads(by_name.stdout)["notes"][1:] == [
        "chats: adapters read it with other settings, so __base__ has a row for each"
    ]
    write_jsonl(plain, [{"prompt": "ab", "completion": "ba"}])
    other = run("evaluate", chatting, "--data", plain, "--format", "prompt_completion")
    assert other.exit_code == 0, other.stderr
