"""Lets the site show the section `Example:` of a docstring as code, as it shows `Examples:`."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section before the docstring is parsed."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Changes the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
