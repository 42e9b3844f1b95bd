"""The quickstart's data, base model and scripts are what they claim to be."""

import itertools
import json
import math
import re
from datetime import datetime
from pathlib import Path

import drop_in
import engine_loop
import make_preferences
import make_tasks
import pretrain_base
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlora.config.config_file import load_config
from transformers import AutoModelForCausalLM, AutoTokenizer

import mlora_ext as mx

EXAMPLES = Path(make_tasks.__file__).parent
BASE = EXAMPLES / "tiny-base"
PROMPTS = {
    "sums": r"(\d+) \+ (\d+) = ",
    "reverse": r"reverse ([a-z]+) = ",
    "sort": r"sort ([a-z]{4}) = ",
    "dates": r"(\d{4}-\d\d-\d\d) = ",
}


def lines(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLES / "data" / f"{name}.jsonl").read_text().splitlines()]


def answer(name: str, parts: tuple[str, ...]) -> str:
    if name == "sums":
        return str(int(parts[0]) + int(parts[1]))
    if name == "dates":
        moment = datetime.strptime(parts[0], "%Y-%m-%d")
        return f"{moment.day} {moment:%B %Y}"
    return "".join(reversed(parts[0])) if name == "reverse" else "".join(sorted(parts[0]))


def corpus_text(steps: int) -> str:
    """All text that the base model was trained on in its first steps."""
    options = pretrain_base.options().parse_args(["--output", "unused"])
    stream = pretrain_base.rows(options.seed + 2, options.length)
    ids = itertools.chain.from_iterable(itertools.islice(stream, steps * options.batch_size))
    return "".join("\n" if token == pretrain_base.END_ID else chr(token) for token in ids)


def test_scripts_reproduce_the_committed_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in make_tasks.TASKS:
        make_tasks.write_task(name, tmp_path)
    monkeypatch.setattr(make_preferences, "DATA", tmp_path)
    make_preferences.main()
    for path in sorted(tmp_path.iterdir()):
        assert path.read_bytes() == (EXAMPLES / "data" / path.name).read_bytes(), path.name
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (EXAMPLES / "data").iterdir()}


@pytest.mark.parametrize("name", make_tasks.TASKS)
def test_answers_are_right_and_held_out_prompts_are_new(name: str) -> None:
    training, held_out = lines(name), lines(f"{name}-held-out")
    prompts = [line["prompt"] for line in training + held_out]
    assert len(set(prompts)) == len(prompts) == make_tasks.TRAINING_LINES[name] + make_tasks.HELD_OUT_LINES
    for line in training + held_out:
        match = re.fullmatch(PROMPTS[name], line["prompt"])
        assert match is not None, line
        assert line["completion"] == answer(name, match.groups())


def test_split_refuses_a_held_out_prompt_that_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_tasks, "examples", lambda name, count, seed: [("1 + 1 = ", "2")] * count)
    with pytest.raises(ValueError, match=r"task sums: .*1 \+ 1 = "):
        make_tasks.split("sums")


@pytest.mark.parametrize("steps", [250, pytest.param(2500, marks=pytest.mark.nightly)])
def test_no_task_is_in_the_pre_training(steps: int) -> None:
    """Each document is drawn by itself, so a few are like all of them; all of them are nightly."""
    text = corpus_text(steps)
    assert len(text) > 2000 * steps
    for name, pattern in PROMPTS.items():
        found = re.search(pattern, text)
        assert found is None, f"{name}: {found}"
        prompt = lines(name)[0]["prompt"]
        assert re.search(pattern, f"{text[:1000]}{prompt}") is not None


@given(st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=40))
@settings(max_examples=50, deadline=None)
def test_token_ids_are_bytes(text: str) -> None:
    tokenizer = pretrain_base.byte_level_tokenizer()
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_base_model_is_small_and_models_the_corpus() -> None:
    assert sum(path.stat().st_size for path in BASE.glob("*.safetensors")) <= 6e6
    tokenizer, model = AutoTokenizer.from_pretrained(BASE), AutoModelForCausalLM.from_pretrained(BASE)
    assert tokenizer("é\n").input_ids == list("é\n".encode())
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (pretrain_base.END_ID, pretrain_base.PAD_ID)
    assert model.generation_config.eos_token_id == pretrain_base.END_ID
    assert model.dtype == torch.float32
    ids = next(pretrain_base.batches(pretrain_base.VALIDATION_SEED, 16, 128))
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss < 1.2


def test_pretraining_learns_and_saves_what_it_trained(tmp_path: Path) -> None:
    command = (
        f"--output {tmp_path} --steps 40 --batch-size 4 --length 64 --hidden 32 --intermediate 64 --layers 1"
    )
    options = pretrain_base.options().parse_args(command.split())
    model = pretrain_base.pretrain(options)
    assert pretrain_base.validation_loss(model, options) < math.log(258) - 1
    pretrain_base.save(model, tmp_path)
    stored = AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, value), other in zip(model.state_dict().items(), stored.state_dict().values(), strict=True):
        assert torch.equal(value.bfloat16().float(), other), name


def test_quickstart_trains_four_different_adapters() -> None:
    config = load_config(EXAMPLES / "quickstart.yaml")
    loras = [adapter.lora for adapter in config.adapters]
    assert {adapter.dataset for adapter in config.adapters} == set(make_tasks.TASKS)
    for values in (
        [adapter.learning_rate for adapter in config.adapters],
        [lora["r"] for lora in loras],
        [str(lora["target_modules"]) for lora in loras],
    ):
        assert len(set(values)) == 4, values
    assert any(lora.get("use_rslora") for lora in loras)
    assert any(lora.get("lora_dropout") for lora in loras)
    assert all(adapter.eval_exact_match for adapter in config.adapters)
    assert all(adapter.eval_dataset == f"{adapter.dataset}-held-out" for adapter in config.adapters)


def test_the_loop_over_the_engine_trains_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["engine_loop.py", "--output", str(tmp_path), "--steps", "50", "--batch-size", "4"]
    monkeypatch.setattr("sys.argv", command)
    engine_loop.main()
    found = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", capsys.readouterr().out)]
    assert len(found) == 4
    assert max(found) < 3
    base = AutoModelForCausalLM.from_pretrained(BASE)
    for name in engine_loop.TASKS:
        mx.load_adapter(base, name, tmp_path / name)


def test_drop_in_loop_trains_both_adapters() -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(BASE, padding_side="left")
    model = mx.convert_model(AutoModelForCausalLM.from_pretrained(BASE), drop_in.CONFIGS)
    first = drop_in.train(model, tokenizer, steps=1, batch_size=4)
    last = drop_in.train(model, tokenizer, steps=30, batch_size=4)
    for name in drop_in.CONFIGS:
        assert last[name] < 0.7 * first[name], (name, first[name], last[name])
