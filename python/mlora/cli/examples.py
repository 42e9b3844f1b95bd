"""The command ``mlora examples``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from mlora.cli.common import command
from mlora.errors import RunError

_IN_PACKAGE = Path(__file__).resolve().parents[1] / "examples"
_IN_CHECKOUT = Path(__file__).resolve().parents[3] / "examples"


def examples(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="a new folder; default: examples")] = Path(
        "examples"
    ),
) -> None:
    """Write the examples into a new folder.

    Their data and their tiny base model are among them.
    """
    with command():
        copy_examples(folder)
        print(f"{folder}: written; its README.md lists the examples")
        print(f"to begin: mlora train {folder / 'quickstart.yaml'}")


def copy_examples(folder: Path) -> None:
    """Copies the examples of the package, or of the source checkout, into a new or empty folder.

    Raises RunError if the folder holds files or cannot be written.
    """
    source = _IN_PACKAGE if _IN_PACKAGE.is_dir() else _IN_CHECKOUT
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise RunError(f"{folder}: is not empty; give a new folder")
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    except shutil.Error as error:
        raise RunError(f"{folder}: cannot be written: {error.args[0][0][2]}") from error
    except OSError as error:
        raise RunError(f"{folder}: cannot be written: {error.strerror}") from error
