"""The page of a report: what it says, that it needs nothing else, and that data cannot become markup."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke, only_line
from mlora import report
from mlora.cli.report import read
from mlora.report.history import MOST, AdapterHistory, Curve
from mlora.report.page import POINTS, render
from mlora.store.run_folder import Metrics, RunFolder
from mlora.tasks.result import AdapterResult
from report_runs import START, falling_lines, result, step, write_run_folder

VOID = {"meta", "link", "br", "input", "path", "rect"}


class Page(HTMLParser):
    """What is in a page: tags with attributes, texts, cells of tables, and terms with their values."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.terms: list[tuple[str, str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)
            if "dt" in self.open:
                self.terms.append((data, ""))
            if "dd" in self.open:
                self.terms[-1] = (self.terms[-1][0], data)
            if {"td", "th"} & set(self.open):
                self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())

    def attributes(self, name: str) -> list[str]:
        return [attributes[name] or "" for _, attributes in self.tags if name in attributes]


def page_of(folder: RunFolder) -> str:
    return render(read(folder.path))


def cells(rows: list[list[str]]) -> list[list[str]]:
    return [[" ".join(cell.split()) for cell in row] for row in rows]


def test_results_settings_and_versions(tmp_path: Path) -> None:
    lines = [
        {"adapter": "a", "step": 0, "eval_loss": 2.6, "eval_exact_match": 0.0, "eval_tokens": 50},
        step("a", 1, 2.0, seconds=1.0),
        step("b", 1, 2.2, seconds=1.0),
        step("a", 2, 0.0312, seconds=1.0),
        {"adapter": "a", "step": 2, "eval_loss": 0.1, "eval_exact_match": 0.963, "eval_tokens": 50},
        step("b", 2, 1.9, seconds=1.0),
    ]
    exact = {"before": 0.0, "after": 0.963}
    nothing = {"before": None, "after": None}
    folder = write_run_folder(
        tmp_path / "mine",
        {
            "a": result(2, 0.0312, eval_loss={"before": 2.6, "after": 0.1}, eval_exact_match=exact),
            "b": result(2, 1.9, eval_loss=nothing),
        },
        lines,
        fields={
            "a": {
                "lora": {"r": 64, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], "use_dora": True}
            },
            "b": {"learning_rate": 1e-3, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 8},
        },
        scheduler={"memory_limit": "2GiB"},
    )
    text = page_of(folder)
    page = Page(text)
    assert cells(page.rows) == [
        [
            "Adapter",
            "State",
            "Steps",
            "Training loss",
            "Held-out loss",
            "Exact match",
            "Rank",
            "Learning rate",
        ],
        ["a", "✓ finished", "2", "0.0312", "2.60 before, → 0.100", "0% before, → 96.3%", "64", "0.0002"],
        ["b", "✓ finished", "2", "1.90", "\N{EN DASH}", "\N{EN DASH}", "8", "0.001"],
    ]
    for said in (
        "2 adapters over tiny-base.",
        "Started 27 November 2026, 03:22 UTC, ended ",
        "limit 2 GiB",
        "3 of 40 samples are longer than max_length 64 and were cut",
        "No answers to held-out prompts: no adapter has eval_exact_match: true",
        "No timeline of the pipeline",
    ):
        assert said in page.text
    assert page.terms[:6] == [
        ("adapters", "2"),
        ("optimizer steps", "4"),
        ("trained tokens", "400"),
        ("tokens/s", "4.94"),
        ("time", "1 min 21 s"),
        ("peak memory", "600 MiB"),
    ]
    assert {
        ("targets", "q_proj, v_proj"),
        ("kind", "DoRA"),
        ("batch size", "8 \N{MULTIPLICATION SIGN} 4"),
        ("tokens", "200 in 2 s"),
        ("PyTorch", "2.13.0"),
        ("CPU", "Some CPU, 4 threads on 8 cores"),
    } <= set(page.terms)
    assert "Loss: training from 2 to 0.0312; held out from 2.6 to 0.1" in page.attributes("aria-label")
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    assert {f"#{name}" for name in ids} >= {link for link in page.attributes("href") if link.startswith("#")}


@pytest.mark.parametrize(("state", "ends"), [("finished", 2), ("running", 1000)])
def test_charts_of_an_adapter_that_has_ended_end_with_it(tmp_path: Path, state: str, ends: int) -> None:
    entry = replace(result(2), state=state, max_steps=1000, message="stopped on request at step 2")
    lines = [step("a", 1, 2.0), step("a", 2, 1.0)]
    page = Page(page_of(write_run_folder(tmp_path / "run", {"a": entry}, lines)))
    assert f"step {ends:,}" in page.text
    (line, *_) = [path for path in page.attributes("d") if path.count("L") == 1]
    first, last = (int(place.split()[0]) for place in line.removeprefix("M").split("L"))
    assert (first, last) == (round(1000 / ends), round(2000 / ends))


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)> & </details>{{ 7 * 7 }}'


def test_data_cannot_become_markup(tmp_path: Path) -> None:
    sample = {"prompt": HOSTILE, "expected": HOSTILE, "answer": HOSTILE, "exact": False}
    folder = write_run_folder(
        tmp_path / "run<b>",
        {HOSTILE: result(1, state="stopped", message=HOSTILE)},
        [step(HOSTILE, 1, 1.0, **{HOSTILE: 0.5})],
        status="failed",
        fields={HOSTILE: {"dataset": HOSTILE, "lora": {"r": 8, "target_modules": HOSTILE}}},
        samples=[{"adapter": HOSTILE, "step": 0, "samples": [sample]}],
        starts=[{**START, "warnings": [HOSTILE], "versions": {"torch": HOSTILE}}],
    )
    page = Page(page_of(folder))
    tags = [tag for tag, _ in page.tags]
    assert (tags.count("script"), tags.count("img")) == (1, 0)
    assert not [name for name in {n for _, each in page.tags for n in each} if name.startswith("on")]
    assert page.text.count(HOSTILE) >= 9
    assert "49" not in page.text


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    text = page_of(write_run_folder(tmp_path / "run", {"a": result(3)}, falling_lines(["a"], 3)))
    page = Page(text)
    assert page.attributes("src") == []
    assert [link for link in page.attributes("href") if not link.startswith("#")] == ["data:,"]
    assert not re.search(r"https?:|//\w|@import|url\(", text.split("<pre>")[0].split("</style>")[0])
    assert "://" not in text
    assert any(each.startswith("default-src 'none'; ") for each in page.attributes("content"))


def luminance(color: str) -> float:
    """WCAG's relative luminance of ``#rgb`` or ``#rrggbb``."""
    digits = color.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_can_be_told_from_the_paper() -> None:
    """As WCAG AA asks: 4.5 for text, 3 for lines of charts; in light and in dark."""
    styles = (Path(report.__file__).parent / "page.css").read_text()
    palettes = [dict(re.findall(r"--(\w+): (#\w+);", part)) for part in styles.split("@media", 2)[:2]]
    assert len(palettes) == 2
    for palette in palettes:
        for name, least in (("ink", 4.5), ("soft", 4.5), ("accent", 4.5), ("bad", 4.5), ("quiet", 3.0)):
            for paper in ("paper", "tint"):
                lights = sorted((luminance(palette[name]), luminance(palette[paper])), reverse=True)
                if (name, paper) != ("quiet", "tint"):  # no chart is on it
                    assert (lights[0] + 0.05) / (lights[1] + 0.05) >= least, (name, paper)


def test_blank_lines_of_prompts_and_config_stay(tmp_path: Path) -> None:
    prompt = "one\n\n\n  two\n"
    sample = {"prompt": prompt, "expected": "x", "answer": "x", "exact": True}
    line = {"adapter": "a", "step": 0, "samples": [sample]}
    folder = write_run_folder(tmp_path / "run", {"a": result(1)}, [step("a", 1, 1.0)], samples=[line])
    folder.config.write_text(folder.config.read_text() + "\n\n# end\n")
    text = page_of(folder)
    assert prompt in Page(text).texts
    assert "\n\n# end\n" in text


def answers(*texts: str) -> list[dict[str, Any]]:
    return [{"prompt": "p = ", "expected": "right", "answer": t, "exact": t == "right"} for t in texts]


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (20, [["p =", "right", "✕ not exact wrong", "✓ exact right"]]),
        (10, [["p =", "right", "✕ not exact wrong", "✕ not exact nothing"]]),
        (None, [["p =", "right", "✕ not exact wrong", "✓ exact right"]]),
    ],
)
def test_answers_before_and_after(tmp_path: Path, saved: int | None, expected: list[list[str]]) -> None:
    given = [(0, "wrong"), (10, ""), (20, "right")]
    lines = [{"adapter": "a", "step": at, "samples": answers(text)} for at, text in given]
    folder = write_run_folder(
        tmp_path / "run", {"a": result(20, saved_step=saved)}, falling_lines(["a"], 20), samples=lines
    )
    rows = cells(Page(page_of(folder)).rows)
    assert rows[-2] == ["Prompt", "Expected", "Before training", f"After step {saved or 20}"]
    assert rows[-1:] == expected


def test_answers_before_training_only(tmp_path: Path) -> None:
    lines = [{"adapter": "a", "step": 0, "samples": answers("wrong")}]
    folder = write_run_folder(tmp_path / "run", {"a": result(20)}, falling_lines(["a"], 20), samples=lines)
    assert cells(Page(page_of(folder)).rows)[-1] == ["p =", "right", "✕ not exact wrong"]


def test_metrics_of_the_objective(tmp_path: Path) -> None:
    lines = [step("a", n, 0.6, **{"rewards/margins": 0.1 * n, "logps/chosen": -40.0}) for n in (1, 2, 3)]
    lines.append(
        {"adapter": "a", "step": 3, "eval_loss": 0.5, "eval_rewards/margins": 0.25, "eval_tokens": 5}
    )
    pair = {"rewards/margins": {"before": 0.0, "after": 0.25}}
    entry = result(3, 0.6, metrics={"rewards/margins": 0.3}, eval_metrics=pair)
    page = Page(page_of(write_run_folder(tmp_path / "run", {"a": entry}, lines)))
    assert cells(page.rows)[0][5] == "Reward margin"
    assert cells(page.rows)[1][5] == "0 before, → 0.25"
    told = page.attributes("aria-label")
    assert "rewards/margins: training from 0.1 to 0.3; held out 0.25" in told
    assert "logps/chosen: training from -40 to -40" in told


@pytest.mark.parametrize(
    ("status", "begins"),
    [
        ("finished", ""),
        ("failed", ""),
        ("paused", "Paused: "),
        ("interrupted", "Not running; `mlora resume "),
    ],
)
def test_every_state_of_a_run(tmp_path: Path, status: str, begins: str) -> None:
    adapters = {
        "good": result(4),
        "bad": result(2, state="stopped", message="the loss of step 3 is not a number", saved_step=None),
        "large": AdapterResult("refused", "needs at least 3.2 GiB"),
        "later": AdapterResult("paused", max_steps=4),
    }
    folder = write_run_folder(tmp_path / "run", adapters, falling_lines(["good"], 4), status=status)
    page = Page(page_of(folder))
    assert begins in page.text
    assert ("resume" in page.text) == (status in ("paused", "interrupted"))
    assert [row[1] for row in cells(page.rows)[1:5]] == [
        "✓ finished",
        "✕ stopped",
        "✕ refused",
        "\u2161 paused",
    ]
    assert "bad stopped: the loss of step 3 is not a number" in page.text
    assert "large refused: needs at least 3.2 GiB" in page.text


def test_a_run_at_work_and_one_that_was_killed(tmp_path: Path) -> None:
    lines = falling_lines(["a"], 4)
    folder = write_run_folder(
        tmp_path / "run", {"a": AdapterResult("running", max_steps=10)}, lines, status="running"
    )
    with Metrics(folder.metrics):
        page = Page(page_of(folder))
    assert [row[1:3] for row in cells(page.rows)[1:]] == [["● running", "4 of 10"]]
    assert "read " in page.text
    assert ("time", "1 s") in page.terms  # its summary is older than its lines
    assert "no checkpoint" in Page(page_of(folder)).text


def test_a_run_without_any_lines(tmp_path: Path) -> None:
    folder = write_run_folder(
        tmp_path / "run", {"a": AdapterResult("running", max_steps=10)}, [], status="running", starts=()
    )
    for path in (folder.metrics, folder.summary):
        path.unlink()
    page = Page(page_of(folder))
    assert "Versions and machine are unknown" in page.text
    assert "Nothing was evaluated" in page.text
    assert ("peak memory", "\N{EN DASH}") in page.terms


def test_versions_that_changed_and_parts_of_a_run(tmp_path: Path) -> None:
    later = {**START, "began": "2026-11-28T10:00:00+00:00", "versions": {"torch": "2.14.0"}}
    folder = write_run_folder(tmp_path / "run", {"a": result(1)}, [step("a", 1, 1.0)], starts=[START, later])
    page = Page(page_of(folder))
    text = page.text
    assert ("PyTorch", "2.14.0 (before: 2.13.0)") in page.terms
    assert "Started 27 November 2026, 03:22 UTC, resumed once, ended " in text


def test_a_traced_run_has_a_timeline(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path / "run", {"a": result(1)}, [step("a", 1, 1.0)])
    track = {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "compute"}}
    spans = [("forward a", 0, 1000), ("backward a", 3000, 1000)]
    events = [track, *({"name": n, "ph": "X", "pid": 0, "tid": 1, "ts": t, "dur": d} for n, t, d in spans)]
    (folder.path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    page = Page(page_of(folder))
    assert "stage 0 computed for 50% of this window" in page.attributes("aria-label")
    drawn = [(a["class"], a["x"], a["width"]) for tag, a in page.tags if tag == "rect"]
    assert drawn == [("forward", "0.0", "1.0"), ("backward", "3.0", "1.0")]


def test_a_large_run_is_a_small_page(tmp_path: Path) -> None:
    """Of 200 adapters and 10,000 steps: the curves are made once, and the adapters share them."""
    keys = ("loss", "learning_rate", "grad_norm", "eval_loss")
    shared = AdapterHistory({key: Curve() for key in keys})
    for number in range(1, 10_001):
        for key in keys:
            shared.curves[key].add(number, 1.0 + (number * 7919 % 1000) / 1000)
    names = [f"customer-{number}" for number in range(200)]
    folder = write_run_folder(tmp_path / "run", {name: result(10_000) for name in names}, [])
    run = read(folder.path)
    text = render(replace(run, adapters=[replace(each, history=shared) for each in run.adapters]))
    page = Page(text)
    assert len(text) < 2_000_000
    lines = [a["d"] or "" for tag, a in page.tags if tag == "path" and "line train" in (a["class"] or "")]
    assert len(lines) > 3 * 200
    assert max(line.count("L") for line in lines) < max(32, min(2 * MOST, POINTS // 200))
    assert sum(tag == "details" for tag, _ in page.tags) == 201
    assert not any("open" in attributes for tag, attributes in page.tags if tag == "details")


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path / "run", {"a": result(3)}, falling_lines(["a"], 3))
    found = invoke("report", folder.path)
    assert found.exit_code == 0, found.output
    assert found.stdout == f"report: {folder.report}\n"
    assert "<!doctype html>" in folder.report.read_text()
    folder.check_contents(overwrite=True, inputs=[])  # a new run may replace it
    (tmp_path / "victim").write_text("precious")
    folder.report.unlink()
    folder.report.symlink_to(tmp_path / "victim")
    assert invoke("report", folder.path).stdout == f"report: {folder.report}\n"
    assert (tmp_path / "victim").read_text() == "precious"
    assert not folder.report.is_symlink()
    folder.clear()
    left = {path.name for path in folder.path.iterdir()}
    assert left == {"config.yaml", "metrics.jsonl"}
    other = tmp_path / "other.html"
    assert invoke("report", folder.path, "--output", other).stdout == f"report: {other}\n"
    assert other.read_text().startswith("<!doctype html>")


def test_what_the_command_cannot_read_or_write(tmp_path: Path) -> None:
    assert "there is no such folder" in only_line(invoke("report", tmp_path / "none"))
    folder = write_run_folder(tmp_path / "run", {"a": result(1)}, [step("a", 1, 1.0)])
    missing = tmp_path / "no" / "page.html"
    line = only_line(invoke("report", folder.path, "--output", missing))
    assert line == f"error: {missing}: cannot be saved: No such file or directory"
    whole = folder.metrics.read_text()
    for key, value, told in (
        ("tokens", "null", "nothing"),
        ("seconds", "NaN", "nan"),
        ("loss", '"<b>"', "'<b>'"),
    ):
        line = json.loads(whole) | {key: "VALUE"}
        folder.metrics.write_text(json.dumps(line).replace('"VALUE"', value) + "\n")
        said = only_line(invoke("report", folder.path))
        assert said == f"error: {folder.metrics}:1: is not a line of metrics: {key} is {told}, not a number"
    folder.metrics.write_text(whole)
    folder.environment.write_text("[]")
    assert "environment.json: holds no starts of a run" in only_line(invoke("report", folder.path))
