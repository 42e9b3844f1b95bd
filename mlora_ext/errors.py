"""Errors with fields: which adapter or argument is at fault, and what is wrong with it."""

from __future__ import annotations


class NamedError(ValueError):
    """A fault of an argument or a thing with a name; printed as `what: message`.

    A caller that names the thing in its own words takes `message` alone.
    """

    def __init__(self, what: str, message: str) -> None:
        super().__init__(what, message)
        self.what, self.message = what, message

    def __str__(self) -> str:
        return f"{self.what}: {self.message}"


class AdapterError(NamedError):
    """A fault of an adapter, or of the base without one (None); printed as `adapter 'name': message`."""

    def __init__(self, name: str | None, message: str) -> None:
        super().__init__(f"adapter {name!r}", message)
        self.name, self.args = name, (name, message)
