# SPDX-License-Identifier: Apache-2.0
"""Small files of /sys and /proc, and the notations in them. What cannot be read is None."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path


def text(file: Path) -> str | None:
    """The content without surrounding blanks; None when absent or unreadable (the speed of a dead link is EINVAL)."""
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return None


def number(file: Path) -> int | None:
    """The whole number in a file, decimal or 0x."""
    try:
        return int(text(file) or "", 0)
    except ValueError:
        return None


def names(folder: Path) -> list[str]:
    """The entries of a folder, sorted; empty when there is no such folder."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def link_target(entry: Path) -> str:
    """Where a link leads, as it is written (a copy of /sys keeps its links but may lack their ends); "" for no link."""
    try:
        return str(entry.readlink())
    except OSError:
        return ""


def cpu_list(content: str | None) -> tuple[int, ...] | None:
    """The CPUs of "0-3,8"; None when it is no such list."""
    if content is None or not re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", content):
        return None
    ends = [part.split("-") for part in content.split(",")]
    return tuple(cpu for end in ends for cpu in range(int(end[0]), int(end[-1]) + 1))


def ranges(numbers: Collection[int]) -> str:
    """The list of some CPUs as the kernel writes it: "0-3,8"."""
    ordered, members = sorted(numbers), set(numbers)
    starts = [number for number in ordered if number - 1 not in members]
    ends = [number for number in ordered if number + 1 not in members]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def fields(content: str | None) -> dict[str, str]:
    """The first value of each "key : value" line."""
    found: dict[str, str] = {}
    for line in (content or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found
