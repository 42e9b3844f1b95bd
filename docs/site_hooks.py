"""What the site does beside MkDocs: navigation from index.md, files outside docs/, docstrings.

MkDocs calls the functions `on_...`. GitHub shows the same Markdown without them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)(?=[)#])")
ROW = re.compile(r"^\| \[(.+?)\]\(([^)]+)\) \|", re.MULTILINE)
HIGHLIGHTED = {".py": "python", ".yaml": "yaml"}


def on_config(config: Any) -> Any:
    """Reads the navigation from the tables of index.md; decisions follow at the end."""
    sections = re.split(r"^## (.+)$", (DOCS / "index.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    nav: list[Any] = [{"Home": "index.md"}]
    for title, text in zip(sections[1::2], sections[2::2], strict=True):
        nav.append({title: [{label: page} for label, page in ROW.findall(text)]})
    decisions = sorted(str(page.relative_to(DOCS)) for page in (DOCS / "decisions").glob("*.md"))
    nav[-1][sections[-2]].append({"Decisions": decisions})
    config.nav = nav
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the files outside docs/ that pages link to: Markdown and source as pages, pictures as they are."""
    waiting = sorted(DOCS.rglob("*.md"))
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            if path in seen or path.is_relative_to(DOCS) or not path.is_file() or page.name == "python.md":
                continue
            seen.add(path)
            files.append(_added(path, config))
            if path.suffix == ".md":
                waiting.append(path)
    return files


def _added(path: Path, config: Any) -> File:
    if path.suffix in HIGHLIGHTED:
        text = path.read_text(encoding="utf-8")
        content = f"# {path.relative_to(ROOT)}\n\n````{HIGHLIGHTED[path.suffix]}\n{text}````\n"
        return File.generated(config, _place(path), content=content)
    return File.generated(config, _place(path), abs_src_path=str(path))


def _place(path: Path) -> str:
    """Returns where a file is on the site, from its root."""
    if path.is_relative_to(DOCS):
        return str(path.relative_to(DOCS))
    return f"source/{path.relative_to(ROOT)}" + (".md" if path.suffix in HIGHLIGHTED else "")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Points links to where files are on the site, and lets docstrings follow the table of names."""
    place = page.file.src_uri
    if place == "reference/python.md":
        return _docstrings(markdown)
    if place.startswith("source/"):
        page.meta["search"] = {"exclude": True}
    original = ROOT / place.removeprefix("source/") if place.startswith("source/") else DOCS / place
    up = "../" * place.count("/")

    def moved(match: re.Match[str]) -> str:
        path = (original.parent / match[1]).resolve()
        outside = not path.is_relative_to(DOCS) or place.startswith("source/")
        return up + _place(path) if outside and path.is_file() else match[1]

    return markdown if original.suffix != ".md" else LINK.sub(moved, markdown)


def _docstrings(markdown: str) -> str:
    """Returns the page of names with each name's docstring below the table of its package."""
    parts = re.split(r"^## (\S+)$", markdown, flags=re.MULTILINE)
    text = parts[0]
    for package, part in zip(parts[1::2], parts[2::2], strict=True):
        names = re.findall(r"^\| \[`(\w+)`\]", part, re.MULTILINE)
        linked = re.sub(r"\[`(\w+)`\]\(\S+\)", rf"[`\1`](#{package}.\1)", part)
        text += f"## {package}\n{linked}\n" + "".join(f"::: {package}.{name}\n\n" for name in names)
    return text
