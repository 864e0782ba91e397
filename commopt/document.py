# SPDX-License-Identifier: Apache-2.0
"""Reads and writes commopt's JSON documents, with exact messages about invalid ones."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import is_dataclass
from itertools import repeat
from pathlib import Path
from secrets import token_hex
from typing import Any, get_args, get_origin, get_type_hints

from commopt.errors import ConfigurationError

FLIGHT_RECORD = "commopt_flight"
"""The entry of a flight record with the number of its format."""
FLIGHT_FORMAT = 1

_MOST_BYTES = 1 << 28
_MOST_DIGITS = 300  # of a whole number, so that a float can hold it


def path_of(path: str | Path) -> Path:
    """Return a path that a user gave. Raises ConfigurationError for what is none, as a number."""
    try:
        return Path(path)
    except TypeError:
        raise ConfigurationError(f"path {path!r:.80} is a {type(path).__name__}; pass text or a pathlib.Path") from None


def plain_file(path: str | Path) -> Path:
    """Return the path of a plain file, or of a new one. Raises ValueError for others: a pipe would block."""
    path = path_of(path)
    if path.exists() and not path.is_file():
        raise ValueError("it is not a plain file")
    return path


def reason_of(error: OSError | ValueError) -> object:
    """Return the reason why a file could not be opened (a zero byte in its name is a ValueError)."""
    return error.strerror if isinstance(error, OSError) else error


def read_text(path: str | Path) -> str:
    """Return the content of a text file. Raises ConfigurationError if it is absent, huge, binary or not a file."""
    path = path_of(path)
    try:
        with plain_file(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} cannot be read: it is a binary file; pass the JSON file") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {reason_of(error)}; check the path") from None


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file as a whole: whoever is killed meanwhile, or finds the disk full, leaves the one before."""
    path = path_of(path).resolve()  # of a link the file
    if path.exists() and not path.is_file():  # as /dev/stdout, which nothing can take the place of
        path.write_bytes(content)
        return
    unfinished = path.with_name(f"{path.name}.{token_hex(4)}.unfinished")
    try:
        with unfinished.open("wb") as target:
            target.write(content)
            target.flush()
            os.fsync(target.fileno())
        unfinished.replace(path)
    finally:  # on a full disk it would take the place of the next one
        unfinished.unlink(missing_ok=True)


def parse(text: str | bytes, what: str, fix: str = "write the file again") -> Any:
    """Return the JSON value in `text`. Raises ConfigurationError, which ends with `fix`, for invalid JSON."""
    try:
        return json.loads(text, parse_int=_whole)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{what}: not JSON ({error}); {fix}") from None


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def one_line_each(content: Mapping[str, Any]) -> str:
    """Return JSON text with a line for each entry and for each item of a list, easy to read and compare."""
    lines = []
    for name, value in content.items():
        if isinstance(value, list):
            inner = ",\n  ".join(json.dumps(each) for each in value)
            lines.append(f"{json.dumps(name)}: [\n  {inner}\n ]" if value else f"{json.dumps(name)}: []")
        else:
            lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def load(text: str, what: str, format_number: int) -> Mapping[str, Any]:
    """Return the JSON object in `text`. Raises ConfigurationError unless it has this format number."""
    document = parse(text, what, "it must be what to_json() returned")
    if not isinstance(document, dict):
        raise ConfigurationError(f"{what}: a {type(document).__name__} instead of an object, as to_json() returns")
    if document.get("format") != format_number:
        raise ConfigurationError(
            f"{what}: format {document.get('format')!r}, but this commopt reads format {format_number}; "
            f"make it again with this version"
        )
    return document


def read_as(kind: Any, value: Any, where: str) -> Any:
    """Return `value`, a part of a JSON document, as a `kind`.

    An object may lack fields that have a default in its dataclass, and may have unknown ones. Raises
    ConfigurationError, which names the place, for a value of another kind.

    kind: a dataclass or NamedTuple, a tuple, X | None, Any, text, a number or a bool.
    where: the place of the value, for messages.
    """
    inner = get_args(kind)
    if kind is Any:
        return value
    if type(None) in inner:
        return None if value is None else read_as(inner[0], value, where)
    if get_origin(kind) is tuple:
        any_number = inner[-1] is ...
        fits = isinstance(value, list) and (any_number or len(value) == len(inner))
        _require(fits, value, where, "a list" if any_number else f"a list of {len(inner)}")
        kinds = repeat(inner[0]) if any_number else inner
        return tuple(
            read_as(each, item, f"{where}[{n}]") for n, (each, item) in enumerate(zip(kinds, value, strict=False))
        )
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        _require(isinstance(value, dict), value, where, "an object")
        given = {}
        for name, each in get_type_hints(kind).items():
            if name in value:
                given[name] = read_as(each, value[name], f"{where}, {name}")
            elif name not in vars(kind) or hasattr(kind, "_fields"):  # a dataclass has its defaults as attributes
                raise ConfigurationError(f'{where}: "{name}" is missing; it must be what to_json() returned')
        return kind(**given)
    number = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
    _require(isinstance(value, bool) if kind is bool else number, value, where, _CALLED[kind])
    return value


_CALLED = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _require(holds: bool, value: object, where: str, what: str) -> None:
    if not holds:
        raise ConfigurationError(f"{where} is {value!r:.80}; it must be {what}")


def require_text(value: object, what: str) -> None:
    """Raise ConfigurationError unless `value` is non-empty text."""
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{what} is {value!r}; it must be non-empty text")


def require_whole(value: object, least: int, what: str) -> None:
    """Raise ConfigurationError unless `value` is an int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{what} is {value!r}; it must be a whole number >= {least}")


def require_flags(options: object, *names: str) -> None:
    """Raise ConfigurationError unless these fields are True or False: the text "false" would count as true."""
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise ConfigurationError(f"{type(options).__name__}({name}={value!r}) must be True or False")


def require_time(value: object, what: str) -> None:
    """Raise ConfigurationError unless `value` is a finite number of at least 0."""
    # NaN fails both comparisons.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ConfigurationError(f"{what} is {value!r}; it must be a finite number >= 0")
