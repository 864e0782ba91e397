"""What a person reads when an input is refused: one line with the place, the value, the rule and the fix."""

from __future__ import annotations


class TopologyError(ValueError):
    """A file or text that is no topology, or too damaged to be read; the message is one line."""


def shown(value: object, limit: int = 60) -> str:
    """Quote `value` for a message: one printable line of at most about `limit` characters."""
    text = str(value)
    return ascii(text if len(text) <= limit else text[: limit - 3] + "...")
