"""The page of a report in a browser: no errors, no requests, nothing beyond the window, and its script.

Needs Chromium (on Debian: `apt-get install chromium`) and the package playwright, without its browsers.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlora.cli.report import read
from mlora.report.page import render
from mlora.tasks.result import AdapterResult
from report_runs import falling_lines, result, step, write_run_folder

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield started
        started.close()


def one_run(path: Path) -> Path:
    """An adapter with metrics of its own, a long name, answers, and a limit."""
    name = "customer_support_in_german_with_a_name_that_does_not_want_to_end_0123456789"
    sample = {"prompt": "p" * 300, "expected": "e" * 300, "answer": "a b " * 80, "exact": False}
    samples = [{"adapter": name, "step": at, "samples": [sample] * 4} for at in (0, 50)]
    metrics = [{**line, "rewards/margins": 0.5} for line in falling_lines([name], 50)]
    exact = {"before": 0.0, "after": 0.5}
    results = {name: result(50, eval_exact_match=exact)}
    limit = {"memory_limit": "1GiB"}
    return write_run_folder(path, results, metrics, samples=samples, scheduler=limit).path


def many_runs(path: Path) -> Path:
    names = [f"customer-{number:02}" for number in range(40)]
    results = {name: result(30, 0.5 - 0.01 * place) for place, name in enumerate(names)}
    return write_run_folder(path, results, falling_lines(names, 30)).path


def failed_run(path: Path) -> Path:
    message = "the loss of step 3 is not a number; try a lower learning_rate " + "x" * 200
    adapters = {
        "bad": result(2, state="stopped", message=message, saved_step=None),
        "large": AdapterResult("refused", message),
    }
    return write_run_folder(path, adapters, [step("bad", 1, 3.0), step("bad", 2, 9.0)], status="failed").path


def write_page(folder: Path, path: Path) -> str:
    path.write_text(render(read(folder)))
    return path.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("make", [one_run, many_runs, failed_run])
def test_a_page_without_errors_within_the_window(
    browser: Any, tmp_path: Path, make: Any, width: int, scheme: str
) -> None:
    said: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url))
    url = write_page(make(tmp_path / "run"), tmp_path / "page.html")
    page.goto(url)
    page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
    assert [line for line in said if not line.startswith(("data:", url))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # text that is cut off, or beside the window, but for what a table scrolls to
    beside = """[...document.querySelectorAll('main *, header *')]
        .filter(e => !e.closest('.table, pre, svg, .unseen'))
        .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
        .map(e => e.className + ': ' + e.textContent.slice(0, 40))"""
    assert page.evaluate(beside) == []
    page.close()


def test_the_table_is_sorted_and_adapters_are_found(browser: Any, tmp_path: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(write_page(many_runs(tmp_path / "run"), tmp_path / "page.html"))
    first = "document.querySelector('#table tbody tr:not([hidden]) th').textContent"
    assert page.evaluate(first) == "customer-00"
    head = page.get_by_role("columnheader", name="Held-out loss")
    head.get_by_role("button").click()
    assert (page.evaluate(first), head.get_attribute("aria-sort")) == ("customer-39", "ascending")
    head.get_by_role("button").click()
    assert (page.evaluate(first), head.get_attribute("aria-sort")) == ("customer-00", "descending")
    page.get_by_label("Find an adapter").fill("MER-17")
    shown = "[...document.querySelectorAll('[data-name]')].filter(e => e.checkVisibility()).length"
    assert page.evaluate(shown) == 3  # its row, its chart and its part
    page.locator(".panel:visible").click()
    assert page.evaluate("document.getElementById('adapter-18').open")
    page.close()
