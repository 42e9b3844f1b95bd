"""The documentation: every file that it names exists, and every link leads somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(
    r"^(?:python )?((?:[\w.*-]+/)*[\w.*-]+\.(?:py|cpp|cuh|cu|h|sh|md|json|yaml|png|toml))\b(?:::([\w*]+))?"
)
FOLDERS = ("mlora_ext/", "python/", "csrc/", "tests/", "bench/", "docs/", "examples/", ".ci/")
NAME_IN_FILE = re.compile(r"`(?:\w+\.)*([A-Za-z_]\w*)(?:\(\))?` (?:\(|in )`([\w/]+\.(?:py|cpp|h|cuh|cu))`")
BASES = ("", "python/mlora", "mlora_ext")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchor(title: str) -> str:
    """Returns the anchor of a heading, as GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", title.strip().lower())
    return kept.replace(" ", "-")


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page."""
    return {
        anchor(line.lstrip("#"))
        for line in page.read_text(encoding="utf-8").split("\n")
        if line.startswith("#")
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    missing = []
    for code in CODE.findall(page.read_text(encoding="utf-8")):
        match = FILE.match(code)
        if match is None or not match[1].startswith(FOLDERS):
            if code.startswith(FOLDERS) and code.endswith("/") and not (ROOT / code).is_dir():
                missing.append(code)
            continue
        files = [path for path in ROOT.glob(match[1]) if path.is_file()]
        name = (match[2] or "").rstrip("*")
        if not files or (
            name and not any(f"def {name}" in file.read_text(encoding="utf-8") for file in files)
        ):
            missing.append(code)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_are_in_the_files_that_they_are_said_to_be_in(page: Path) -> None:
    wrong = []
    for name, path in NAME_IN_FILE.findall(page.read_text(encoding="utf-8")):
        file = next((ROOT / base / path for base in BASES if (ROOT / base / path).is_file()), None)
        if file is None or not re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")):
            wrong.append((name, path))
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        target, _, part = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (part and part not in headings(file)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_page_is_listed(page: Path) -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    if page.parent.name == "decisions":
        assert f"decisions/{page.name}" in design
    elif page.is_relative_to(ROOT / "docs") and page.name != "index.md":
        assert f"({page.relative_to(ROOT / 'docs')})" in index
