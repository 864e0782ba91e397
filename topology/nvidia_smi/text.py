"""Finding the matrix of `nvidia-smi topo -m` in a text, as labels and cells: no meaning given to them yet.

A pasted matrix has colour codes, blank lines between rows, text around it, and pieces missing at any edge.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice

from topology.errors import TopologyError, shown
from topology.nvidia_smi.lines import LONGEST_LINE, TITLES, Header, Row, parse_header, parse_row

_COLOUR = re.compile(r"(?:\x1b|\\x1b|\\u001b|\\033|\\e|\^\[|\u241b)?\[[0-9;]{0,8}m")
_INVISIBLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\u200c\u200d\ufeff]")
# Notebooks, JSON and programs write tabs and line ends as \t and \n, with quotation marks before the real line end.
_LINE_END = re.compile(r"""(?:\\n[\\"', ]{0,4})?(?:\r\n|\r|\n)|\\n""")
_NIC_LEGEND = re.compile(r"(?<!\S)(NIC[0-9]{1,4}) {0,4}[:=]\s{0,8}([\w.:-]{1,80})\s*$")
_NICS_LEFT_OUT = re.compile(r"([0-9]{1,6}) NICs? found.{0,60}displaying ([0-9]{1,6})")
_CELLS_ALONE = re.compile(r"\s*(?:X|NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS)(?:\s+[A-Z0-9,/-]{1,40}){0,260}\s*")
_MOST_CHARACTERS = 4_000_000
_MOST_MENTIONS = 50_000
_MOST_HEADERS = 100
_MOST_LINES = 2_000
_P2P_WORDS = frozenset({"OK", "CNS", "GNS", "TNS", "NS", "DR", "U"})
_MESSAGES = {
    "No devices were found": "nvidia-smi found no GPU",
    "NVIDIA-SMI has failed": "nvidia-smi could not reach the driver",
    "| NVIDIA-SMI ": "this is the overview that nvidia-smi prints without arguments",
}


@dataclass(frozen=True)
class MatrixText:
    """What the text says, and what is wrong with it."""

    header: Header
    rows: dict[str, Row]
    """By label: devices of the header only."""
    nic_names: dict[str, str]
    """From the NIC legend: "NIC0" -> "mlx5_0"."""
    hides_nvlink: bool
    """Written by `topo -mp`: the command stands above, or the legend has no line about NVLink."""
    warnings: tuple[str, ...]


def find_matrix(text: str, source: str) -> MatrixText:
    """The first connection matrix in a text (in its first four million characters, and 50,000 lines about a GPU).

    Raises TopologyError when there is none, saying what there is instead.
    """
    text = text[:_MOST_CHARACTERS]
    if not re.search("GPU[0-9]", text):
        raise _refusal(source, text[:_MOST_LINES].splitlines(), [], [])
    lines = _LINE_END.split(_INVISIBLE.sub("", _COLOUR.sub("", text)).replace("\\t", "\t"))
    mentions = islice(((number, line) for number, line in enumerate(lines, 1) if "GPU" in line), _MOST_MENTIONS)
    headers = list(islice(filter(None, (parse_header(number, line) for number, line in mentions)), _MOST_HEADERS))
    found = [
        (header, end, rows)
        for header, end in zip(headers, _ends(headers), strict=True)
        if (rows := _rows(header, lines, end))
    ]
    matrices = [(header, end, rows) for header, end, rows in found if not _is_foreign(rows)]
    if not matrices:
        raise _refusal(source, lines, headers, [rows for _, _, rows in found])
    header, end, rows = matrices[0]
    warnings = [_left_out(match) for line in lines[: header.line] if (match := _NICS_LEFT_OUT.search(line))]
    if len(matrices) > 1:
        other = matrices[1][0].line
        warnings.append(f"another matrix begins at line {other}: only the one at line {header.line} is read")
    for row in rows:
        if row.line < len(lines) and _CELLS_ALONE.fullmatch(lines[row.line]):
            raise TopologyError(
                f"{source}:{row.line + 1}: the row of {row.label} goes on in another line: the matrix was wrapped by a "
                "narrow window; save the output of `nvidia-smi topo -m` to a file"
            )
    kept = _keep(header, rows, warnings)
    below = lines[header.line : end]
    legend = any("= Self" in line for line in below)
    above = lines[max(0, header.line - 4) : header.line - 1]
    return MatrixText(
        header=header,
        rows=kept,
        nic_names=_nic_names(header, below, warnings),
        # Drivers that wrote SOC are older than NVLink.
        hides_nvlink=any(re.search(r"\btopo -mp\b", line) for line in above)
        or (legend and not any("NVLink" in line or "SOC " in line for line in below)),
        warnings=tuple(warnings),
    )


def _ends(headers: list[Header]) -> list[int]:
    """The last line that may belong to each header."""
    bounds = [header.line + _MOST_LINES for header in headers]
    return [min(end, below.line - 1) for end, below in zip(bounds, headers[1:], strict=False)] + bounds[-1:]


def _rows(header: Header, lines: list[str], end: int) -> list[Row]:
    below = enumerate(lines[header.line : end], header.line + 1)
    return [row for number, line in below if (row := parse_row(header, number, line))]


def _is_foreign(rows: list[Row]) -> bool:
    """Words instead of connections in every row, as `topo -p2p` and other vendors' tools write them."""
    connected = any(cell not in (None, "X") for row in rows for cell in row.cells)
    return not connected and any(row.strange for row in rows)


def _keep(header: Header, rows: list[Row], warnings: list[str]) -> dict[str, Row]:
    """Rows that can be trusted, by label; `warnings` gets a sentence for everything else."""
    kept: dict[str, Row] = {}
    orphans: list[Row] = []
    repeated: list[Row] = []
    if header.fused:
        warnings.append(f"line {header.line}: fused header labels were split")
    titles = [name for _, name in header.affinity if name not in TITLES]
    if titles:
        warnings.append(f"line {header.line}: {shown(', '.join(titles[:4]))} is no column known here: not read")
    for row in rows:
        if row.label not in header.columns:
            orphans.append(row)
            continue
        if row.label in kept:
            repeated.append(row)
            continue
        own = header.columns.index(row.label)
        if any((cell == "X") != (place == own) for place, cell in enumerate(row.cells)):
            warnings.append(f"line {row.line}: X is not in the column of {row.label}, so cells are missing: left out")
            continue
        if row.strange:
            warnings.append(f"line {row.line}: {shown(', '.join(row.strange[:4]))} is no connection: taken as unknown")
        if len(row.cells) < len(header.columns):
            warnings.append(f"line {row.line}: {row.label} has {len(row.cells)} of {len(header.columns)} cells")
        if row.surplus:
            warnings.append(f"line {row.line}: {row.surplus} more cell(s) than the header has columns: left out")
        kept[row.label] = row
    if unclear := [row for row in kept.values() if row.unclear]:
        warnings.append(
            f"line {unclear[0].line}: the columns after the devices are not the header's in the row of "
            f"{_labels(unclear)}: affinity unknown where it cannot be told"
        )
    if orphans:
        warnings.append(f"line {orphans[0].line}: no column in the header for {_labels(orphans)}: left out")
    if repeated:
        warnings.append(f"line {repeated[0].line}: another row for {_labels(repeated)}: left out")
    return kept


def _labels(rows: list[Row]) -> str:
    return ", ".join(row.label for row in rows[:8]) + (", ..." if len(rows) > 8 else "")


def _nic_names(header: Header, below: list[str], warnings: list[str]) -> dict[str, str]:
    listed: dict[str, str] = {}
    for line in below:
        match = _NIC_LEGEND.search(line.removeprefix(header.prefix)[:LONGEST_LINE])
        if match:
            listed.setdefault(match[1], match[2])
    named = {label: listed[label] for label in header.columns if label in listed}
    nameless = [label for label in header.columns if re.fullmatch(r"NIC[0-9]+", label) and label not in listed]
    if listed and nameless:
        warnings.append(f"the NIC legend names no {', '.join(nameless[:8])}: called by their columns")
    if len(set(named.values())) != len(named):
        warnings.append("the NIC legend gives one name to several NICs: all are called by their columns")
        return {}
    return named


def _left_out(match: re.Match[str]) -> str:
    return f"nvidia-smi found {match[1]} NICs but shows {match[2]}: the others are missing here"


def _refusal(source: str, lines: list[str], headers: list[Header], found: list[list[Row]]) -> TopologyError:
    if found:
        row = found[0][0]
        words = list(dict.fromkeys(word for row in found[0] for word in row.strange[:4]))
        guess = "this is `nvidia-smi topo -p2p`" if _P2P_WORDS.issuperset(words) else "this is another table"
        what = f":{row.line}: {shown(', '.join(words))} is no connection (NV#, PIX, PXB, PHB, NODE, SYS): {guess}"
    elif headers:
        what = f":{headers[0].line}: the header of a matrix without rows below it: the text is cut"
    else:
        what = _without_header(lines)
    return TopologyError(f"{source}{what}; save the output of `nvidia-smi topo -m`")


def _without_header(lines: list[str]) -> str:
    for number, line in enumerate(lines, 1):
        if ("|" in line or "\u2502" in line) and re.search(r"\bGPU[0-9]", line):
            return f":{number}: a table drawn with | is not the plain text of a matrix"
        if re.match(r"\W{0,8}GPU[0-9]{1,4}\s+(?:X|NV[0-9])", line):
            return f":{number}: rows of a matrix, but no header line with GPU0 GPU1 ... above them"
        for words, meaning in _MESSAGES.items():
            if words in line:
                return f":{number}: {meaning}"
    return ": no header line with GPU0 GPU1 ... and no rows: not a connection matrix"
