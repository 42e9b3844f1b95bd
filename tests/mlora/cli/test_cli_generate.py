"""`mlora generate`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from command_line import Run, only_line
from mlora.engine.engine import Engine
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from tiny_run import run_data, write_jsonl, write_run
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)


def test_generate_is_what_peft_generates(run: Run, trained: Path, tiny_base: Path) -> None:
    from peft import PeftModel

    prompts = ["ab", "a longer one", "xy"]
    result = run(
        "generate", trained, *(x for p in prompts for x in ("-p", p)), "--max-new-tokens", 6, "--json"
    )
    assert result.exit_code == 0, result.stderr
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(a["prompt"], a["adapter"]) for a in answers] == [
        (p, n) for p in prompts for n in ("first", "second")
    ]
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    for name in ("first", "second"):
        base = AutoModelForCausalLM.from_pretrained(tiny_base)
        model = PeftModel.from_pretrained(base, trained / "adapters" / name)
        for prompt in prompts:
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            output = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
            expected = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
            got = [a["completion"] for a in answers if (a["prompt"], a["adapter"]) == (prompt, name)]
            assert got == [expected]


def test_chat_puts_prompts_into_the_template(
    run: Run, trained: Path, tiny_base: Path, tmp_path: Path
) -> None:
    """The same as writing out what the template writes around the message."""
    base = shutil.copytree(tiny_base, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer.save_pretrained(base)
    options = ("--base-model", base, "--max-new-tokens", 4, "--json")
    chat = run("generate", trained, "-p", "ab", "--chat", *options)
    assert chat.exit_code == 0, chat.stderr
    written = run("generate", trained, "-p", "<user>ab;<assistant>", *options)
    answers = [[json.loads(line) for line in result.stdout.splitlines()] for result in (chat, written)]
    assert [a["completion"] for a in answers[0]] == [a["completion"] for a in answers[1]]
    assert [a["prompt"] for a in answers[0]] == ["ab", "ab"]
    line = only_line(run("generate", trained, "-p", "x", "--chat"))
    assert "--chat: the base model's tokenizer has no chat template; give one with --chat-template" in line


def test_the_template_that_an_adapter_was_trained_with(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    """Also from an exported folder, which carries it."""
    turn = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"
    for name in ("one", "two"):
        (tmp_path / f"{name}.jinja").write_text(turn + f"<{name}>")
    write_jsonl(tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": "a"}]}] * 3)
    data = run_data(tiny_base, tmp_path)
    own = {"path": "chats.jsonl", "format": "messages"}
    data["datasets"] = [own | {"name": n, "chat_template": f"{n}.jinja"} for n in ("one", "two")]
    plain = {"eval_dataset": None, "eval_steps": None, "max_steps": 1, "max_length": 60}
    data["adapters"] = [data["adapters"][0] | plain | {"name": n, "dataset": n} for n in ("one", "two")]
    write_run(tmp_path, data)
    folder = tmp_path / "run"
    assert run("train", tmp_path / "run.yaml").exit_code == 0
    assert run("export", folder, "two", "--output", tmp_path / "out").exit_code == 0
    options = ("--max-new-tokens", 4, "--json")
    written = run("generate", folder, "-a", "two", "-p", "<user>ab;<two>", *options)
    wanted = json.loads(written.stdout)["completion"]
    for words in (
        (folder, "-a", "two"),
        (tmp_path / "out",),
        (folder, "-a", "two", "-a", "one", "--chat-template", tmp_path / "two.jinja"),
    ):
        chat = run("generate", *words, "-p", "ab", "--chat", *options)
        assert chat.exit_code == 0, chat.stderr
        assert json.loads(chat.stdout.splitlines()[0])["completion"] == wanted
    message = "--chat: these adapters were trained with different chat templates"
    assert message in only_line(run("generate", folder, "-p", "ab", "--chat"))
    message = "--chat-template is for --chat"
    assert message in only_line(
        run("generate", folder, "-p", "ab", "--chat-template", tmp_path / "one.jinja")
    )


def test_generate_from_one_folder_and_from_the_base(run: Run, trained: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    one = run("generate", trained / "adapters" / "first", "--prompts", prompts, "--max-new-tokens", 3)
    assert one.exit_code == 0, one.stderr
    assert one.stdout.startswith("[first] hello")
    drawn = [
        run("generate", trained, "-a", "__base__", "-p", "x", "--temperature", 1, "--seed", seed).stdout
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert "has no trained adapter 'nope'; it has first, second" in only_line(
        run("generate", trained, "-a", "nope", "-p", "x")
    )
    assert "no prompt: give --prompt TEXT" in only_line(run("generate", trained))
    assert "top_p: must be above 0" in only_line(run("generate", trained, "-p", "x", "--top-p", 0))
    assert "a prompt has no tokens" in only_line(run("generate", trained, "-p", ""))
    assert "is neither a run's output_dir nor a PEFT adapter folder" in only_line(
        run("generate", tmp_path, "-p", "x")
    )


def test_generate_from_odd_folders_and_prompts(run: Run, trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained / "adapters" / "first", tmp_path / "first.v1")
    result = run("generate", folder, "-p", "x" * 62)  # the model has 64 positions
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("[first-v1] x")
    assert "a prompt has 64 tokens, but the base model takes at most 64 with the answer" in only_line(
        run("generate", folder, "-p", "x" * 64)
    )
    saved = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(saved | {"base_model_name_or_path": None}))
    assert only_line(run("generate", folder, "-p", "x")).endswith(
        "names no base model; give it with --base-model"
    )
    (folder / "adapter_config.json").write_text("[1]")
    assert "adapter_config.json: cannot be read: is not a JSON object" in only_line(
        run("generate", folder, "-p", "x")
    )


def test_a_classifier_predicts_its_label(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    """Beside a causal adapter; the label is that of PEFT's model over the base's class for sequences."""
    from peft import PeftModel

    prompts = ["a", "bc", "ddd"]
    rows = [{"text": text, "label": place} for place, text in enumerate(prompts)]
    write_jsonl(tmp_path / "labels.jsonl", rows)
    data = run_data(tiny_base, tmp_path)
    data["datasets"].append({"name": "labels", "path": "labels.jsonl", "format": "classification"})
    lora = {"r": 4, "target_modules": "all-linear", "task_type": "SEQ_CLS"}
    data["adapters"][0] = {"name": "first", "dataset": "labels", "num_labels": 3, "lora": lora}
    data["defaults"]["max_steps"] = 4
    assert run("train", write_run(tmp_path, data)).exit_code == 0
    asked = [word for prompt in prompts for word in ("-p", prompt)]
    result = run("generate", tmp_path / "run", *asked, "--json", "--max-new-tokens", 2)
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [set(answer) - {"adapter", "prompt"} for answer in answers] == [{"label"}, {"completion"}] * 3
    base = AutoModelForSequenceClassification.from_pretrained(tiny_base, num_labels=3)
    model = PeftModel.from_pretrained(base, tmp_path / "run" / "adapters" / "first").eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    expected = [
        int(model(input_ids=torch.tensor([tokenizer(prompt)["input_ids"]])).logits.argmax())
        for prompt in prompts
    ]
    assert [answer["label"] for answer in answers[::2]] == expected
    assert set(expected) != {0}
    own = run("generate", tmp_path / "run", "--prompts", tmp_path / "labels.jsonl", "-a", "first", "--json")
    assert [json.loads(line) for line in own.stdout.splitlines()] == answers[::2]
    plain = run("generate", tmp_path / "run", "-a", "first", *asked)
    assert plain.stdout.splitlines() == [
        f"[first] {prompt} | label {label}" for prompt, label in zip(prompts, expected, strict=True)
    ]
    folder = tmp_path / "run" / "adapters" / "first"
    names = {"id2label": {"0": "sad", "1": "glad", "2": "mad"}}
    (folder / "labels.json").write_text(json.dumps(names))
    named = run("generate", tmp_path / "run", "-a", "first", *asked)
    assert [line.rpartition("label ")[2] for line in named.stdout.splitlines()] == [
        names["id2label"][str(label)] for label in expected
    ]
    (folder / "labels.json").write_text(json.dumps({"problem_type": "regression"}))
    assert "first: problem_type regression predicts no single label; name other adapters" in only_line(
        run("generate", tmp_path / "run", "-p", "x", "-a", "first", "-a", "second")
    )
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"task_type": "TOKEN_CLS"}))
    assert only_line(run("generate", tmp_path / "run", "-p", "x", "-a", "first")) == (
        "error: first: task_type TOKEN_CLS predicts no text; name other adapters with --adapter, and load "
        f"{folder} with PEFT over AutoModelForTokenClassification"
    )
    assert only_line(run("generate", folder, "-p", "x")) == (
        f"error: first: task_type TOKEN_CLS predicts no text; load {folder} with PEFT over "
        "AutoModelForTokenClassification"
    )
    shutil.copytree(folder, folder.with_name("third"))
    others = run("generate", tmp_path / "run", "-p", "x", "--max-new-tokens", 2)
    assert others.exit_code == 0
    assert others.stderr.splitlines() == [
        "warning: first, third: left out: task_type TOKEN_CLS predicts no text; use PEFT over "
        "AutoModelForTokenClassification"
    ]
    assert [line[:8] for line in others.stdout.splitlines()] == ["[second]"]


def test_prompts_of_classifiers_alone(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    """They need no end token and no place for an answer, but tokens, and places for these."""
    engine = Engine(tiny_base)
    for name, task in (("labels", "SEQ_CLS"), ("text", None)):
        lora = LoraConfig(r=2, target_modules=["q_proj"], task_type=task)
        engine.create_adapter(name, lora, OptimConfig(total_steps=1), num_labels=3 if task else None)
        engine.save(name, tmp_path / name)
    base = shutil.copytree(tiny_base, tmp_path / "base")
    PreTrainedTokenizerFast(
        tokenizer_object=AutoTokenizer.from_pretrained(base).backend_tokenizer
    ).save_pretrained(base)
    (base / "special_tokens_map.json").unlink(missing_ok=True)
    (base / "generation_config.json").write_text("{}")
    labels = ("generate", tmp_path / "labels", "--base-model", base)
    ids = [97 - 32] * 64
    expected = engine.next_tokens({"labels": [ids]})["labels"]
    assert run(*labels, "-p", "a" * 64).stdout == f"[labels] {'a' * 64} | label {expected[0]}\n"
    assert only_line(run(*labels, "-p", "a" * 65)) == (
        "error: a prompt has 65 tokens, but the base model takes at most 64"
    )
    assert only_line(run(*labels, "-p", "a", "-p", "")) == "error: a prompt has no tokens; give at least one"
    assert only_line(run("generate", tmp_path / "text", "--base-model", base, "-p", "a")) == (
        f"error: base_model: {base} has no end token in its generation config or tokenizer"
    )
    assert only_line(run("generate", tmp_path / "text", "--base-model", tiny_base, "-p", "")) == (
        "error: a prompt has no tokens; give at least one"
    )


def test_generate_where_there_is_no_such_device(run: Run, trained: Path) -> None:
    line = only_line(run("generate", trained, "-p", "x", "--device", "cuda:99"))
    assert line.startswith("error: device: cuda:99 is not there")
    line = only_line(run("generate", trained, "-p", "x", "--device", "fast"))
    assert line == "error: device: must be cpu, cuda or cuda:<index>, got 'fast'"


@pytest.mark.parametrize(
    ("function", "action"),
    [
        ("cli.generate.load", "loading "),
        ("model.generation.complete", "completing prompts; give fewer prompts"),
    ],
)
@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_out_of_memory_is_one_line(
    run: Run, trained: Path, monkeypatch: pytest.MonkeyPatch, function: str, action: str, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(f"mlora.{function}", fail)
    line = only_line(run("generate", trained, "-p", "x"))
    assert line.startswith(f"error: out of memory while {action}")


def test_prompt_that_is_no_text_is_refused(run: Run, trained: Path) -> None:
    result = run("generate", trained, "-p", "h\udcff")
    assert only_line(result) == "error: --prompt 'h\\udcff': is not UTF-8 at character 1"
