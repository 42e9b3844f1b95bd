"""Section `choose`: triton against cuda, shape by shape, and the table that the package carries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from shared.shapes import MODELS

from microbench.layers import case, pick, shapes
from microbench.settings import Case, Findings, Settings
from mlora_ext.backends import measured as choice

RANKS = (16, 64)
BACKENDS = ("triton", "cuda")


def missing(settings: Settings) -> str | None:
    """Why the section cannot run: it needs a GPU and both backends; None where it can."""
    if settings.device.type == "cuda" and set(BACKENDS) <= set(settings.backends):
        return None
    found = ", ".join(settings.backends) or "no backend"
    return f"expected a CUDA device and the backends triton and cuda, got {settings.device.type} with {found}"


def choose(settings: Settings, findings: Findings) -> Iterator[Case]:
    """Every shape of the models, ranks 16 and 64, by both backends; see `missing` first."""
    chosen = pick(settings, "ours")
    seen = set()
    for model in settings.models:
        for linear in MODELS[model].linears:
            for rank in RANKS:
                key = (linear.d_in, linear.d_out, rank)
                if key in seen:
                    continue
                seen.add(key)
                ranks = [rank] * settings.numbers[0]
                for shape in shapes(settings, findings, model, linear, ranks, "balanced"):
                    yield case(shape, chosen, settings, findings)


def architecture(device: torch.device) -> str:
    """`sm_90` and the like."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def entries(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Entries of the table from the section's rows; one that lacks a backend is none."""
    found = []
    for row in rows:
        times = {name: row["contenders"].get(f"ours, {name}") for name in BACKENDS}
        if row["section"] != "choose" or None in times.values():
            continue
        found.append(
            {key: row[key] for key in ("dtype", "d_in", "d_out")}
            | {"rank": max(row["ranks"]), "rows": row["rows"]}
            | {f"{name}_seconds": times[name]["seconds"] for name in BACKENDS}  # type: ignore[index]
        )
    return found


def result_of(path: Path) -> dict[str, Any]:
    """A result that the suite wrote.

    Args:
        path: `suite.json`.

    Raises:
        ValueError: if it is no such file, or cannot be read; names it.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        entries(result["rows"])
        _ = result["machine"]["architecture"]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--from: {path}: expected JSON, got: {error}") from error
    except OSError as error:
        raise ValueError(f"--from: {path}: expected a suite.json: {error.strerror}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--from: {path}: expected the suite.json of a run of the section choose on a GPU"
        ) from error
    return result  # type: ignore[no-any-return]


def write(result: Mapping[str, Any], path: Path = choice.PATH) -> int:
    """Put a result's entries into a table, in place of those that its architecture had.

    Args:
        result: what the suite wrote as `suite.json`.
        path: the table.

    Returns:
        How many entries.

    Raises:
        ValueError: if the result has none; nothing is written then.
    """
    found = entries(result["rows"])
    if not found:
        raise ValueError("choose --write: expected rows with both triton and cuda, got none")
    data = json.loads(path.read_text())
    machine = result["machine"]
    measured = {key: machine.get(key) for key in ("gpu", "torch", "triton", "cuda", "commit", "date")}
    data["architectures"][machine["architecture"]] = {"measured": measured, "entries": found}
    checked = path.with_suffix(".new")
    checked.write_text(json.dumps(data, indent=2) + "\n")
    try:
        choice.load(checked)
        checked.replace(path)
    finally:
        checked.unlink(missing_ok=True)
    return len(found)


def table(path: Path = choice.PATH) -> list[str]:
    """The table as lines of text."""
    measured = json.loads(path.read_text())["architectures"]
    lines = []
    for name, found in choice.load(path).items():
        about = ", ".join(f"{key} {value}" for key, value in measured[name].get("measured", {}).items())
        lines += [f"{name}: {about}", f"{'dtype':9} {'d_in':>6} {'d_out':>6} {'rank':>4} {'rows':>6} "]
        lines[-1] += f"{'triton ms':>10} {'cuda ms':>10}  faster"
        lines += [
            f"{e.dtype:9} {e.d_in:6} {e.d_out:6} {e.rank:4} {e.rows:6} "
            f"{1e3 * e.triton_seconds:10.3f} {1e3 * e.cuda_seconds:10.3f}  {e.winner}"
            for e in found
        ]
    return lines or [f"{path.name}: nothing has been measured yet; every shape goes to {choice.UNMEASURED}"]
