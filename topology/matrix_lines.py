# SPDX-License-Identifier: Apache-2.0
"""Single lines of the matrix of `nvidia-smi topo -m`: the header with its columns, and a device's row.

Users paste the matrix into scripts, logs and issues. Lines may begin with comment signs, host names or times, and
labels may have run into each other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_DEVICES = 256
MOST_GPUS = 64
LONGEST_LINE = 65_536

# Users shorten the titles when they format the table again. An unknown title is a column of its own.
_TITLE = re.compile(
    r"(?P<gpu>GPU[ \t_]{1,3}NUMA(?:[ \t_]{1,3}(?:ID|node))?\b)|(?P<numa>NUMA(?:[ \t_-]{0,3}(?:affinity|node|ID))?\b)"
    r"|(?P<cpu>CPUs?(?:[ \t_-]{0,3}affinity)?\b)|[A-Z]+[ \t]{1,3}(?:affinity|ID)\b|[\w/.()-]*[A-Z][\w/.()-]*",
    re.IGNORECASE,
)
TITLES = CPUS, NUMA, _GPU_NUMA = "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"
_TITLE_OF = {"cpu": CPUS, "numa": NUMA, "gpu": _GPU_NUMA}
_LABEL = re.compile(r"(?:GPU|NIC)[0-9]{1,4}|mlx[0-9]_[0-9]{1,3}")
_FUSED_LABELS = re.compile(rf"(?:{_LABEL.pattern})+")
# Old drivers use the device name as the heading.
_NIC_NAME = re.compile(r"(?!GPU|NIC)[A-Za-z][\w.-]{0,40}[0-9][\w.-]{0,40}")
_CELL = re.compile(r"X|NV[1-9][0-9]{0,2}|PIX|PXB|PHB|NODE|SYS|SOC")
_FUSED_CELLS = re.compile(rf"(?:{_CELL.pattern})+")
_FIRST_TITLE = re.compile(
    r"(?<!\S)(?:CPUs?|NUMA|GPU)(?!\S)|(?<![A-Za-z])[A-Z][A-Za-z]{1,9}[ \t_-]{0,3}(?:Affinity|affinity|ID)\b"
)
# "AffinityNUMA Affinity", "NIC9CPU Affinity"
_FUSED_TITLE = re.compile(r"(?<=[A-Za-z0-9])(?=(?:CPUs?|NUMA|GPU)[ \t_-]{0,3}(?:affinity|NUMA|ID))", re.IGNORECASE)
_AFFINITY = re.compile(r"[0-9,-]+|N/A")
_UNKNOWN_CELL = re.compile(r"[A-Z0-9?/-]{1,16}")


@dataclass(frozen=True)
class MatrixHeader:
    """The line with the names of the columns.

    line: number of the line, from 1.
    prefix: text before the first column ("#", "node01:", a time), without trailing blanks. Rows begin with the same
        text, as many other words, or nothing.
    columns: labels of the devices, GPUs and then NICs.
    affinity: titles of the columns after them, as in nvidia-smi.
    fused: whether labels or titles had run into each other.
    """

    line: int
    prefix: str
    columns: tuple[str, ...]
    affinity: tuple[str, ...]
    fused: bool


@dataclass(frozen=True)
class MatrixRow:
    """The line of one device.

    label: label of the device.
    line: number of the line, from 1.
    cells: cells by column, as written; None if unreadable, and fewer if the line is cut.
    affinity: values by title.
    ambiguous: whether there are values whose column is unknown.
    unknown_words: words in the place of cells.
    surplus: number of cells beyond the last column.
    """

    label: str
    line: int
    cells: tuple[str | None, ...]
    affinity: dict[str, str]
    ambiguous: bool = False
    unknown_words: tuple[str, ...] = ()
    surplus: int = 0


def parse_header(number: int, line: str) -> MatrixHeader | None:
    """Return the header in a line with this number, from 1; None if it is not a header."""
    start = re.search(r"GPU[0-9]", line)
    if start is None or len(line) > LONGEST_LINE:
        return None
    whole = _FUSED_TITLE.sub(" ", line[start.start() :])
    devices = whole
    if "|" in devices:
        return None
    first_title = _FIRST_TITLE.search(devices)
    if first_title is not None:
        devices = devices[: first_title.start()]
    columns: list[str] = []
    fused = whole != line[start.start() :]
    for word in devices.split():
        if _CELL.fullmatch(word):
            return None
        if _FUSED_LABELS.fullmatch(word):
            labels = _LABEL.findall(word)
            fused |= len(labels) > 1
            columns += labels
        elif _NIC_NAME.fullmatch(word):
            columns.append(word)
        else:
            return None
    gpus = sum(label.startswith("GPU") for label in columns)
    if not columns or len(set(columns)) != len(columns) or len(columns) > MOST_DEVICES or gpus > MOST_GPUS:
        return None
    titles = "" if first_title is None else whole[first_title.start() :]
    names = tuple(_TITLE_OF.get(match.lastgroup or "", match.group()) for match in _TITLE.finditer(titles))
    return MatrixHeader(number, line[: start.start()].rstrip(), tuple(columns), names, fused)


def parse_row(header: MatrixHeader, number: int, line: str) -> MatrixRow | None:
    """Return the row in a line below `header`; None if it is not a row."""
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
    words = line.split()[skipped:]
    wanted = len(header.columns)
    cells: list[str | None] = []
    unknown_words: list[str] = []
    taken = 1
    for word in words[1:]:
        if _FUSED_CELLS.fullmatch(word):
            cells += _CELL.findall(word)
        elif len(cells) < wanted and not _AFFINITY.fullmatch(word):
            if _is_label(header, word) or not _UNKNOWN_CELL.fullmatch(word):
                return None  # a remark about the device
            cells.append(None)
            unknown_words.append(word)
        else:
            break
        taken += 1
    if not cells:
        return None
    surplus, whole = max(0, len(cells) - wanted), words[taken:] == [] or len(cells) == wanted
    if (surplus or not whole) and label in header.columns:
        # A cell or a title is lost. The X shows that cells left of it are complete.
        cells = cells[: header.columns.index(label) + 1]
    end = [match.end() for match in re.finditer(r"\S+", line)][skipped + taken - 1]
    by_tabs = "\t\t" not in line[:end].rstrip() and line[end:].lstrip(" ").startswith("\t")
    cells_behind = line[end:].lstrip(" ")[1:].split("\t") if by_tabs else None
    affinity, ambiguous = _affinity(header.affinity, words[taken:], cells_behind)
    return MatrixRow(label, number, tuple(cells[:wanted]), affinity, ambiguous, tuple(unknown_words), surplus)


def _is_label(header: MatrixHeader, word: str) -> bool:
    return word in header.columns or _LABEL.fullmatch(word) is not None


def _affinity(names: tuple[str, ...], words: list[str], cells: list[str] | None) -> tuple[dict[str, str], bool]:
    """Return values by title, and whether there are others that cannot be assigned.

    nvidia-smi leaves unknown cells empty (CPUs that a container or a job may not use), and puts one or two tabs between
    cells. So only the first cell has a certain place, directly after the devices, and the second if it directly follows
    the first.

    cells: texts between tabs; None if tabs do not separate single cells.
    """
    values: list[str] = []
    for word in words:
        if values and values[-1].endswith(","):  # "0-63, 128-191"
            values[-1] += word
        else:
            values.append(word)
    while len(values) > len(names) and not _AFFINITY.fullmatch(values[-1]):
        values.pop()  # a remark
    first_is_empty = cells is not None and not cells[0].strip()
    if len(values) == len(names):
        # A title may have been cut off, and the first cell be empty.
        doubtful = len(names) > 1 and first_is_empty and values[0].isdecimal()
        return ({}, True) if doubtful else (dict(zip(names, values, strict=True)), False)
    if len(values) > len(names):
        cut = bool(names) and names == TITLES[: len(names)]
        return (dict(zip(names, values, strict=False)), False) if cut else ({}, True)
    if not values or cells is None:
        return {}, bool(values)
    found = {} if first_is_empty else {names[0]: values.pop(0)}
    if len(values) == len(names) - 1 or (len(cells) > 1 and cells[1].strip()):
        return found | dict(zip(names[1:], values, strict=False)), False
    return found, any(value != "N/A" for value in values)
