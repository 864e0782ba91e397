"""Single lines of the matrix of `nvidia-smi topo -m`: the header with its columns, and a device's row.

People paste the matrix into scripts, logs and issues: it comes with comment signs, host names or times in front, and
with labels that ran into each other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_DEVICES = 256
MOST_GPUS = 64
LONGEST_LINE = 65_536

_AFFINITY_COLUMN = re.compile(r"(?<![A-Za-z])(?:[A-Z][A-Za-z]{1,9}[ \t]{1,3}){1,2}(?:Affinity|ID)\b")
_LABEL = re.compile(r"(?:GPU|NIC)[0-9]{1,4}|mlx[0-9]_[0-9]{1,3}")
_FUSED_LABELS = re.compile(rf"(?:{_LABEL.pattern})+")
_NIC_NAME = re.compile(
    r"(?!GPU|NIC)[A-Za-z][\w.-]{0,40}[0-9][\w.-]{0,40}"
)  # old drivers head a column by the device itself
_CELL = re.compile(r"X|NV[1-9][0-9]{0,2}|PIX|PXB|PHB|NODE|SYS|SOC")
_FUSED_CELLS = re.compile(rf"(?:{_CELL.pattern})+")
_CUT_AFFINITY = frozenset({"CPU", "NUMA", "GPU"})
_AFFINITY = re.compile(r"[0-9,-]+|N/A")
_STRANGE_CELL = re.compile(r"[A-Z0-9?/-]{1,16}")


@dataclass(frozen=True)
class Header:
    """The line with the names of the columns."""

    line: int
    """Counted from 1."""
    prefix: str
    """What stands before the first column ("#", "node01:", a time), without blanks at its end.

    Before a row the same may stand, or as many other words, or nothing.
    """
    columns: tuple[str, ...]
    """Devices: GPU0, GPU1, ..., then NICs."""
    affinity: tuple[tuple[int, str], ...]
    """Where each of the columns after the devices begins (tabs expanded), and its name with single blanks."""
    fused: bool
    """Whether labels had run into each other."""


@dataclass(frozen=True)
class Row:
    """One device's line."""

    label: str
    line: int
    cells: tuple[str | None, ...]
    """By column, as written; None where it cannot be read. Shorter than the columns when the line is cut."""
    affinity: dict[str, str]
    """By the name of the column; columns without a value are missing."""
    strange: tuple[str, ...] = ()
    """Words where cells should be."""
    surplus: int = 0
    """Cells beyond the last column."""


def parse_header(number: int, line: str) -> Header | None:
    """The header in a line of the text, counted from 1; None when it is none."""
    start = re.search(r"GPU[0-9]", line)
    if start is None or len(line) > LONGEST_LINE:
        return None
    devices = line[start.start() :]
    if "|" in devices:
        return None
    first_affinity = _AFFINITY_COLUMN.search(devices)
    if first_affinity is not None:
        devices = devices[: first_affinity.start()]
    columns: list[str] = []
    fused = False
    for word in devices.split():
        if _CELL.fullmatch(word):
            return None
        if _FUSED_LABELS.fullmatch(word):
            labels = _LABEL.findall(word)
            fused |= len(labels) > 1
            columns += labels
        elif _NIC_NAME.fullmatch(word):
            columns.append(word)
        elif word in _CUT_AFFINITY and columns:
            break
        else:
            return None
    gpus = sum(label.startswith("GPU") for label in columns)
    if len(set(columns)) != len(columns) or len(columns) > MOST_DEVICES or gpus > MOST_GPUS:
        return None
    affinity = tuple(
        (match.start(), re.sub(r"\s+", " ", match.group())) for match in _AFFINITY_COLUMN.finditer(line.expandtabs(8))
    )
    return Header(number, line[: start.start()].rstrip(), tuple(columns), affinity, fused)


def parse_row(header: Header, number: int, line: str) -> Row | None:
    """The row in a line below `header`; None when it is none."""
    if header.prefix and line.startswith(header.prefix):
        # Blanks in its place keep the columns where they are.
        line = " " * len(header.prefix) + line[len(header.prefix) :]
    if len(line) > LONGEST_LINE:
        return None
    before = len(header.prefix.split())
    start = line.split(maxsplit=before + 1)
    skipped = next((n for n in (0, before) if n + 1 < len(start) and _is_label(header, start[n])), None)
    if skipped is None:
        return None
    label = start[skipped]
    words = [(match.start(), match.group()) for match in re.finditer(r"\S+", line.expandtabs(8))][skipped:]
    wanted = len(header.columns)
    cells: list[str | None] = []
    strange: list[str] = []
    taken = 1
    for _, word in words[1:]:
        if _FUSED_CELLS.fullmatch(word):
            cells += _CELL.findall(word)
        elif len(cells) < wanted and not _AFFINITY.fullmatch(word):
            if _is_label(header, word) or not _STRANGE_CELL.fullmatch(word):
                return None  # words about the device
            cells.append(None)
            strange.append(word)
        else:
            break
        taken += 1
    if not cells:
        return None
    if len(cells) < wanted:
        cells = _by_tabs(header, label, line) or cells
    affinity = _affinity(header.affinity, words[taken:])
    return Row(label, number, tuple(cells[:wanted]), affinity, tuple(strange), max(0, len(cells) - wanted))


def _is_label(header: Header, word: str) -> bool:
    return word in header.columns or _LABEL.fullmatch(word) is not None


def _by_tabs(header: Header, label: str, line: str) -> list[str | None] | None:
    """Cells by their place between tabs, where some are empty; None unless X stands in the row's own column."""
    fields = [field.strip() for field in line.split("\t")]
    cells = [field if _CELL.fullmatch(field) else None for field in fields[1 : 1 + len(header.columns)]]
    if fields[0] != label or label not in header.columns or not any(cells):
        return None
    while cells[-1] is None:
        cells.pop()
    own = header.columns.index(label)
    return cells if own < len(cells) and cells[own] == "X" else None


def _affinity(columns: tuple[tuple[int, str], ...], words: list[tuple[int, str]]) -> dict[str, str]:
    """Values in order when there is one for each column, otherwise each under the heading that is nearest to it."""
    values: list[tuple[int, str]] = []
    for start, word in words:
        if values and values[-1][1].endswith(","):  # "0-63, 128-191"
            values[-1] = (values[-1][0], values[-1][1] + word)
        else:
            values.append((start, word))
    if len(values) == len(columns):
        return {name: value for (_, name), (_, value) in zip(columns, values, strict=True)}
    nearest: dict[str, str] = {}
    for start, value in values:
        if columns:
            nearest.setdefault(min(columns, key=lambda column: abs(column[0] - start))[1], value)
    return nearest
