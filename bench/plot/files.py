"""What is in a file of results."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from commopt.document import parse, read_text

_PROBE = "probe"
_LAUNCHERS = ("bench.cluster",)


def kind_of(path: Path) -> str | None:
    """Return what made a file: "training", "scaling", "bandwidth" ...; None when its header does not say.

    The header says it under "kind"; before there was that, the command in it does.
    """
    header = _header(path)
    if header is None:
        return None
    if {"format", "links"} <= header.keys():  # of commopt.cost, which knows nothing of benchmarks
        return _PROBE
    header = header.get("environment", header)
    if not isinstance(header, dict):
        return None
    kind = header.get("kind") or _kind_in(header.get("command", ""))
    return kind if isinstance(kind, str) else None


def _header(path: Path) -> dict[str, Any] | None:
    """Return the whole JSON document, or the first of several lines; None when it is neither."""
    text = read_text(path)
    for candidate in (text, text.partition("\n")[0]):
        try:
            found = parse(candidate, str(path))
        except ValueError:
            continue
        return found if isinstance(found, dict) else None
    return None


def _kind_in(command: str) -> str | None:
    modules = [word for word in shlex.split(command) if word.startswith("bench.") and word not in _LAUNCHERS]
    return modules[0].rpartition(".")[2] if modules else None
