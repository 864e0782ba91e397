"""Read JSON documents of commopt's own, and say exactly what is wrong with one that is not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from commopt.errors import ConfigurationError


def load(text: str, what: str, format_number: int) -> Mapping[str, Any]:
    """Return the JSON object in `text`; raises ConfigurationError unless it has this format number."""
    try:
        document = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{what}: not JSON ({error}); write it with to_json()") from None
    if not isinstance(document, dict):
        raise ConfigurationError(f"{what}: a {type(document).__name__} instead of an object; write it with to_json()")
    if document.get("format") != format_number:
        raise ConfigurationError(
            f"{what}: format {document.get('format')!r}, but this commopt reads format {format_number}; "
            f"make it again with this version"
        )
    return document


def field(document: Any, name: str, kind: type, where: str) -> Any:
    """Return `document[name]`, which must be a `kind` (an int counts as a float, a bool as neither)."""
    if not isinstance(document, dict) or name not in document:
        raise ConfigurationError(f'{where}: "{name}" is missing; write it with to_json()')
    value = document[name]
    number = kind in (int, float) and isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not number and (kind in (int, float) or not isinstance(value, kind)):
        raise ConfigurationError(f'{where}: "{name}" is {value!r}; it must be of type {kind.__name__}')
    return value


def require_text(value: object, what: str) -> None:
    """Raise ConfigurationError unless `value` is text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{what} is {value!r}; it must be text that is not empty")


def require_whole(value: object, least: int, what: str) -> None:
    """Raise ConfigurationError unless `value` is an int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{what} is {value!r}; it must be a whole number >= {least}")


def require_time(value: object, what: str) -> None:
    """Raise ConfigurationError unless `value` is a finite number of at least 0."""
    # NaN fails both comparisons.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ConfigurationError(f"{what} is {value!r}; it must be a finite number >= 0")
