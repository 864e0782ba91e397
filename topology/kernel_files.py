# SPDX-License-Identifier: Apache-2.0
"""Reads small files of /sys and /proc and their notations. Unreadable values are None."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path


def text(file: Path) -> str | None:
    """Return the content without surrounding blanks; None if unreadable (the speed of a dead link is EINVAL)."""
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return None


def number(file: Path) -> int | None:
    """Return the whole number in a file, decimal or 0x; None if there is none."""
    try:
        return int(text(file) or "", 0)
    except ValueError:
        return None


def names(folder: Path) -> list[str]:
    """Return the sorted entries of a folder; empty if there is no such folder."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def link_target(entry: Path) -> str:
    """Return the target of a link as written (a copy of /sys may lack the targets); "" if it is not a link."""
    try:
        return str(entry.readlink())
    except OSError:
        return ""


def cpu_list(content: str | None) -> tuple[int, ...] | None:
    """Return the CPUs of "0-3,8"; None for any other text."""
    if content is None or not re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", content):
        return None
    ends = [part.split("-") for part in content.split(",")]
    return tuple(cpu for end in ends for cpu in range(int(end[0]), int(end[-1]) + 1))


def ranges(numbers: Collection[int]) -> str:
    """Return a list of CPUs in the kernel's form: "0-3,8"."""
    ordered, members = sorted(numbers), set(numbers)
    starts = [number for number in ordered if number - 1 not in members]
    ends = [number for number in ordered if number + 1 not in members]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def fields(content: str | None) -> dict[str, str]:
    """Return the first value of each "key : value" line."""
    found: dict[str, str] = {}
    for line in (content or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found
