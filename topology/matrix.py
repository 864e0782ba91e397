# SPDX-License-Identifier: Apache-2.0
"""Reads the matrix of `nvidia-smi topo -m`.

It contains distances and numbers of NVLinks, but no PCIe switches, bus ids or speeds of NICs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import combinations, islice

from topology.kernel_files import cpu_list
from topology.matrix_lines import CPUS, LONGEST_LINE, NUMA, TITLES, MatrixHeader, MatrixRow, parse_header, parse_row
from topology.model import Cpu, Distance, Gpu, Nic, NvLinks, Topology, TopologyError, shown

_COLOUR = re.compile(r"(?:\x1b|\\x1b|\\u001b|\\033|\\e|\^\[|\u241b)?\[[0-9;]{0,8}m")
_INVISIBLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\u200c\u200d\ufeff]")
# Notebooks, JSON and programs write tabs and line ends as \t and \n, with quotation marks before the real line end.
_LINE_END = re.compile(r"""(?:\\n[\\"', ]{0,4})?(?:\r\n|\r|\n)|\\n""")
# Users add text after a name ("NIC0: mlx5_0 -> ib0"), or put several NICs in a line. Plain words are then not names.
_NIC_LEGEND = re.compile(
    r"(?<!\S)(NIC[0-9]{1,4})\s{0,4}(?:[:=]|->|\u2192)\s{0,8}(?:([\w.:-]{1,80})\s*$"
    r"|(\w[\w.:-]{0,60}?[0-9][\w.:-]{0,20}?)(?=[\s,;()]|$))"
)
_NIC_LEGEND_LOST = re.compile(r"^\W{0,8}(NIC[0-9]{1,4})\s{0,4}(?:[:=]|->|\u2192|is\b)")
_COMMAND = re.compile(r"\btopo\s+(-mp|--matrix[_-]pci|-m|--matrix)(?![\w-])")
_HEADLESS = re.compile(r"\W{0,8}GPU[0-9]{1,4}(?:\s+(?:X|NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS|SOC)(?!\S)){2}")
_NICS_LEFT_OUT = re.compile(r"([0-9]{1,6}) NICs? found.{0,60}displaying ([0-9]{1,6})")
_CELLS_ALONE = re.compile(r"\s*(?:X|NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS)(?:\s+[A-Z0-9,/-]{1,40}){0,260}\s*")
_FIRST_NODE = re.compile(r"[0-9]{1,5}(?=[,-])")
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
NO_LEGEND = "no whole legend below: a matrix of PCIe alone, which hides NVLinks, would look the same"
MOST_LINKS = 18
"""Largest number of NVLinks of one GPU, up to Blackwell."""
MOST_LINKS_TO_EACH_OF_SEVERAL = 6
"""No board joins a GPU directly to two or more others with more links than this to each."""


def read_matrix(text: str, source: str) -> Topology:
    """Read the first connection matrix in `text`; `source` names it in messages.

    The search covers the first four million characters and 50,000 lines about a GPU. NICs have the names of the legend,
    or of their columns without a legend; their speeds are None. `stated` labels devices "GPU0", "GPU1", ... and "NIC0",
    "NIC1", ... by their index in `gpus` and `nics`. Missing facts are None and cause a warning. Raises TopologyError if
    there is no such matrix; the message describes the text instead.
    """
    text = text[:_MOST_CHARACTERS]
    if not re.search("GPU[0-9]", text):
        raise _refusal(source, text[:_MOST_LINES].splitlines(), [], [])
    lines = _LINE_END.split(_INVISIBLE.sub("", _COLOUR.sub("", text)).replace("\\t", "\t"))
    warnings: list[str] = []
    header, end, found = _first_matrix(lines, source, warnings)
    rows = _valid_rows(header, found, warnings)
    labels = [label for label in header.columns if label.startswith("GPU")]
    present = [label for label in labels if label in rows]
    if not present:
        raise TopologyError(
            f"{source}:{header.line}: a header for {len(labels)} GPU(s), but no row of a GPU that can be "
            "read below it; save the whole output of `nvidia-smi topo -m`"
        )
    if len(present) < len(labels):
        warnings.append(f"only {len(present)} of {len(labels)} GPU rows present: the text is cut")
    nics = [label for label in header.columns if not label.startswith("GPU")]
    names = _nic_names(header, lines[header.line : end], warnings)
    cells = _cells(header.columns, rows, warnings)
    nodes = _nodes(list(rows.values()))
    places = {label: f"GPU{place}" for place, label in enumerate(labels)}
    places |= {label: f"NIC{place}" for place, label in enumerate(nics)}
    return Topology(
        source=f"nvidia-smi matrix {source}",
        gpus=tuple(_gpu(label, rows.get(label), nodes) for label in labels),
        nics=tuple(Nic(names.get(label, label), None, None, None, None) for label in nics),
        cpus=_cpus([rows[label] for label in present], nodes, warnings),
        nvlinks=_nvlinks(labels, cells, _hides_nvlink(header, lines, end), warnings),
        stated=tuple((places[a], places[b], _distance(cell)) for (a, b), cell in cells.items()),
        warnings=tuple(warnings),
    )


def _first_matrix(lines: list[str], source: str, warnings: list[str]) -> tuple[MatrixHeader, int, list[MatrixRow]]:
    """Return the header of the first matrix, the end of the lines below it, and its rows."""
    mentions = islice(((number, line) for number, line in enumerate(lines, 1) if "GPU" in line), _MOST_MENTIONS)
    headers = list(islice(filter(None, (parse_header(number, line) for number, line in mentions)), _MOST_HEADERS))
    next_lines = [*(header.line - 1 for header in headers[1:]), len(lines)]
    ends = [min(header.line + _MOST_LINES, below) for header, below in zip(headers, next_lines, strict=False)]
    found = [
        (header, end, rows) for header, end in zip(headers, ends, strict=True) if (rows := _rows(header, lines, end))
    ]
    matrices = [(header, end, rows) for header, end, rows in found if not _is_foreign(rows)]
    if not matrices:
        raise _refusal(source, lines, headers, [rows for _, _, rows in found])
    header, end, rows = matrices[0]
    for line in lines[: header.line]:
        if match := _NICS_LEFT_OUT.search(line):
            warnings.append(f"nvidia-smi found {match[1]} NICs but shows {match[2]}: the others are missing here")
    above = enumerate(lines[: header.line - 1], 1)
    headless = next((number for number, line in above if _is_headless(found, number, line)), None)
    if headless:
        warnings.append(f"line {headless}: rows of a matrix without a header above them: not read")
    if len(matrices) > 1:
        other = matrices[1][0].line
        warnings.append(f"another matrix begins at line {other}: only the one at line {header.line} is read")
    for row in rows:
        if row.line < len(lines) and _CELLS_ALONE.fullmatch(lines[row.line]):
            raise TopologyError(
                f"{source}:{row.line + 1}: the row of {row.label} continues in another line: the matrix was wrapped by "
                "a narrow window; save the output of `nvidia-smi topo -m` to a file"
            )
    return header, end, rows


def _is_headless(found: list[tuple[MatrixHeader, int, list[MatrixRow]]], number: int, line: str) -> bool:
    return _HEADLESS.match(line) is not None and not any(header.line < number <= end for header, end, _ in found)


def _hides_nvlink(header: MatrixHeader, lines: list[str], end: int) -> bool | None:
    """Return whether `topo -mp` wrote the matrix: by the command above, or by a legend without NVLink.

    None if there is neither the command nor a whole legend.
    """
    commands = [match[1] for line in lines[max(0, header.line - 4) : header.line] for match in _COMMAND.finditer(line)]
    if commands:
        return commands[-1] not in ("-m", "--matrix")
    below = lines[header.line : end]
    # Drivers that wrote SOC are older than NVLink.
    if any("NVLink" in line or "SOC " in line for line in below):
        return False
    # PIX is the last line of that legend: without it the text is cut, and NVLink may have stood below.
    return True if any(re.search(r"\bPIX\s+=", line) for line in below) else None


def _cells(columns: tuple[str, ...], rows: dict[str, MatrixRow], warnings: list[str]) -> dict[tuple[str, str], str]:
    """Return the cells by pairs of labels in the order of columns, from either row unless the two contradict."""

    def cell(label: str, column: int) -> str | None:
        row = rows.get(label)
        return row.cells[column] if row is not None and column < len(row.cells) else None

    cells: dict[tuple[str, str], str] = {}
    contradicting: list[str] = []
    for (place, a), (other, b) in combinations(enumerate(columns), 2):
        seen = {one for one in (cell(a, other), cell(b, place)) if one is not None}
        if len(seen) == 1:
            cells[a, b] = seen.pop()
        elif seen:
            contradicting.append(f"{a}-{b} {' or '.join(sorted(seen))}")
    if contradicting:
        more = ", ..." if len(contradicting) > 8 else ""
        warnings.append(f"rows contradict each other, taken as unknown: {', '.join(contradicting[:8])}{more}")
    return cells


def _distance(cell: str) -> Distance:
    if cell.startswith("NV"):
        return Distance.NVL
    return Distance.SYS if cell == "SOC" else Distance(cell)  # SOC: the word of drivers before 2017


def _nvlinks(
    labels: list[str], cells: dict[tuple[str, str], str], hidden: bool | None, warnings: list[str]
) -> tuple[NvLinks, ...] | None:
    place = {label: number for number, label in enumerate(labels)}
    among_gpus = {(place[a], place[b]): cell for (a, b), cell in cells.items() if a in place and b in place}
    counts = {pair: int(cell[2:]) for pair, cell in among_gpus.items() if cell.startswith("NV")}
    if not counts and hidden and len(labels) > 1:
        warnings.append("NVLinks are unknown: this is of `topo -mp`, which hides them; run `nvidia-smi topo -m`")
        return None
    if not counts and hidden is None and len(labels) > 1:
        warnings.append(NO_LEGEND)
    links = nvlinks_of_cells(counts, len(labels))
    if any(link.kind == "unknown" for link in links):
        warnings.append(
            "two GPUs with this many NVLinks may be on a bridge or on NVSwitches, which a matrix does not show"
        )
    # Switches serve all their GPUs alike; direct links of pairs that are not shown cannot be known.
    switched = {link.gpu for link in links if link.kind == "switch"}
    apart = set(range(len(labels))) - {link.gpu for link in links}
    if switched and apart:
        names = ", ".join(labels[gpu] for gpu in sorted(apart))
        warnings.append(f"no NVLink at {names}, though others are on an NVSwitch: see `nvidia-smi nvlink -s`")
    if any(pair not in among_gpus and not switched.issuperset(pair) for pair in combinations(range(len(labels)), 2)):
        warnings.append("NVLinks are unknown: the connections of some GPUs are missing")
        return None
    return links


def _gpu(label: str, row: MatrixRow | None, nodes: dict[str, int]) -> Gpu:
    affinity = row.affinity if row is not None else {}
    return Gpu(int(label[3:]), None, nodes.get(affinity.get(NUMA, "")), affinity=affinity.get(CPUS))


def _nodes(rows: list[MatrixRow]) -> dict[str, int]:
    """Return the NUMA node of each NUMA Affinity.

    If the memory of GPUs counts as nodes (Grace), the value is a list, "0,3-9,11-17", that begins with the processor's
    node. That node is used if each list belongs to one set of CPUs.
    """
    cpus: dict[str, set[str]] = {}
    for row in rows:
        if numa := row.affinity.get(NUMA, ""):
            cpus.setdefault(numa, set()).add(row.affinity.get(CPUS, "N/A"))
    nodes = {numa: int(numa) for numa in cpus if _is_node(numa)}
    lists = {numa: int(match[0]) for numa in cpus if numa not in nodes and (match := _FIRST_NODE.match(numa))}
    sets = [next(iter(cpus[numa])) for numa in lists]
    apart = all(len(cpus[numa]) == 1 for numa in lists) and len(set(sets)) == len(sets)
    known = all(_cpu_numbers(one) for one in sets)
    first = [*lists.values(), *nodes.values()]
    return nodes | (lists if apart and known and len(set(first)) == len(first) else {})


def _cpu_numbers(cpus: str) -> tuple[int, ...] | None:
    """Return the CPUs of "0-31,64-95"; None for implausible numbers."""
    plausible = len(cpus) <= 2048 and all(int(number) < 8192 for number in re.findall("[0-9]{1,6}", cpus))
    return cpu_list(cpus) if plausible else None


def _is_node(numa: str) -> bool:
    return numa.isdecimal() and len(numa) < 6


def _cpus(rows: list[MatrixRow], nodes: dict[str, int], warnings: list[str]) -> tuple[Cpu, ...]:
    """Return the NUMA nodes with GPUs, with their CPUs if the rows agree on them."""
    affinity: dict[int, dict[str, str]] = {}
    lists: list[str] = []
    unknown = False
    damaged: dict[str, list[str]] = {}
    for row in rows:
        label, numa, cpus = row.label, row.affinity.get(NUMA, ""), row.affinity.get(CPUS, "N/A")
        if numa in nodes:
            affinity.setdefault(nodes[numa], {})[cpus] = label
        if numa not in ("", "N/A") and not _is_node(numa):
            lists.append(f"{label} {numa}")
            unknown |= numa not in nodes
        if cpus != "N/A" and _cpu_numbers(cpus) is None:
            damaged.setdefault(cpus, []).append(label)
    warnings += [f"CPU Affinity {shown(cpus)} of {', '.join(gpus)} is damaged" for cpus, gpus in damaged.items()]
    if lists:
        taken = "NUMA unknown for these" if unknown else "the first of each is taken, that of the CPUs"
        warnings.append(f"NUMA Affinity is no single node ({'; '.join(lists[:4])}): {taken}")
    for numa_node, seen in affinity.items():
        if len(seen) > 1:
            values_seen = " and ".join(f"{cpus} ({label})" for cpus, label in seen.items())
            warnings.append(f"CPU Affinity differs on NUMA node {numa_node}: {values_seen}")
    return tuple(
        Cpu(numa_node, affinity=_cpu_numbers(next(iter(seen))) if len(seen) == 1 else None)
        for numa_node, seen in sorted(affinity.items())
    )


def nvlinks_of_cells(cells: dict[tuple[int, int], int], gpus: int) -> tuple[NvLinks, ...]:
    """Return the NVLinks of all GPUs of a matrix from the counts of pairs (by index, each pair once)."""
    by_gpu: dict[int, dict[int, int]] = defaultdict(dict)
    for (a, b), count in cells.items():
        by_gpu[a][b] = by_gpu[b][a] = count
    switched = {gpu for gpu, counts in by_gpu.items() if _needs_switch(list(counts.values()))}
    # Peers of a switched GPU are on a switch too, even if too few of their own cells are known.
    switched |= {peer for gpu in switched for peer in by_gpu[gpu]}
    links: list[NvLinks] = []
    for gpu, counts in sorted(by_gpu.items()):
        if gpu in switched:
            links.append(NvLinks(gpu, None, max(counts.values()), kind="switch"))
        else:
            # Only two GPUs, with many links: a bridge between them, or two GPUs of a machine with NVSwitches.
            either = gpus == 2 and max(counts.values()) >= MOST_LINKS_TO_EACH_OF_SEVERAL
            for peer, count in sorted(counts.items()):
                links.append(NvLinks(gpu, peer, count, kind="unknown" if either else "gpu"))
    return tuple(links)


def _needs_switch(counts: list[int]) -> bool:
    return sum(counts) > MOST_LINKS or (len(counts) > 1 and min(counts) > MOST_LINKS_TO_EACH_OF_SEVERAL)


def _rows(header: MatrixHeader, lines: list[str], end: int) -> list[MatrixRow]:
    below = enumerate(lines[header.line : end], header.line + 1)
    return [row for number, line in below if (row := parse_row(header, number, line))]


def _is_foreign(rows: list[MatrixRow]) -> bool:
    """Return whether rows have other words than connections, as in `topo -p2p` and other vendors' tools."""
    connected = any(cell not in (None, "X") for row in rows for cell in row.cells)
    return not connected and any(row.unknown_words for row in rows)


def _valid_rows(header: MatrixHeader, rows: list[MatrixRow], warnings: list[str]) -> dict[str, MatrixRow]:
    """Return the valid rows by label; `warnings` gets a sentence for every other."""

    def labels(rows: list[MatrixRow]) -> str:
        return ", ".join(row.label for row in rows[:8]) + (", ..." if len(rows) > 8 else "")

    kept: dict[str, MatrixRow] = {}
    orphans: list[MatrixRow] = []
    repeated: list[MatrixRow] = []
    if header.fused:
        warnings.append(f"line {header.line}: fused header labels were split")
    titles = [name for name in header.affinity if name not in TITLES]
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
        if row.unknown_words:
            words = shown(", ".join(row.unknown_words[:4]))
            warnings.append(f"line {row.line}: {words} is no connection: taken as unknown")
        if len(row.cells) < len(header.columns):
            warnings.append(f"line {row.line}: {row.label} has {len(row.cells)} of {len(header.columns)} cells")
        if row.surplus:
            warnings.append(f"line {row.line}: {row.surplus} more cell(s) than the header has columns: left out")
        kept[row.label] = row
    if ambiguous := [row for row in kept.values() if row.ambiguous]:
        warnings.append(
            f"line {ambiguous[0].line}: the columns after the devices are not the header's in the row of "
            f"{labels(ambiguous)}: affinity unknown where it cannot be told"
        )
    if orphans:
        warnings.append(f"line {orphans[0].line}: no column in the header for {labels(orphans)}: left out")
    if repeated:
        warnings.append(f"line {repeated[0].line}: another row for {labels(repeated)}: left out")
    return kept


def _nic_names(header: MatrixHeader, below: list[str], warnings: list[str]) -> dict[str, str]:
    listed: dict[str, str] = {}
    lost: list[str] = []
    for line in below:
        text = line.removeprefix(header.prefix)[:LONGEST_LINE]
        known = list(_NIC_LEGEND.finditer(text))
        for match in known:
            listed.setdefault(match[1], match[2] or match[3])
        unread = None if known else _NIC_LEGEND_LOST.match(text)
        if unread is not None and unread[1] in header.columns:
            lost.append(unread[1])
    named = {label: listed[label] for label in header.columns if label in listed}
    nameless = [label for label in header.columns if re.fullmatch(r"NIC[0-9]+", label) and label not in listed]
    if not listed and lost:
        warnings.append(f"the NIC legend cannot be read ({', '.join(lost[:8])}): called by their columns")
    if listed and nameless:
        warnings.append(f"the NIC legend names no {', '.join(nameless[:8])}: called by their columns")
    if len(set(named.values())) != len(named):
        warnings.append("the NIC legend gives one name to several NICs: all are called by their columns")
        return {}
    return named


def _refusal(source: str, lines: list[str], headers: list[MatrixHeader], found: list[list[MatrixRow]]) -> TopologyError:
    """Return the error that describes a text without a matrix."""
    if found:
        row = found[0][0]
        words = list(dict.fromkeys(word for row in found[0] for word in row.unknown_words[:4]))
        guess = "this is `nvidia-smi topo -p2p`" if _P2P_WORDS.issuperset(words) else "this is another table"
        problem = f":{row.line}: {shown(', '.join(words))} is no connection (NV#, PIX, PXB, PHB, NODE, SYS): {guess}"
    elif headers:
        problem = f":{headers[0].line}: the header of a matrix without rows below it: the text is cut"
    else:
        problem = _description_of(lines)
    return TopologyError(f"{source}{problem}; save the output of `nvidia-smi topo -m`")


def _description_of(lines: list[str]) -> str:
    for number, line in enumerate(lines, 1):
        if ("|" in line or "\u2502" in line) and re.search(r"\bGPU[0-9]", line):
            return f":{number}: a table drawn with | is not the plain text of a matrix"
        if re.match(r"\W{0,8}GPU[0-9]{1,4}\s+(?:X|NV[0-9])", line):
            return f":{number}: rows of a matrix, but no header line with GPU0 GPU1 ... above them"
        for words, meaning in _MESSAGES.items():
            if words in line:
                return f":{number}: {meaning}"
    return ": no header line with GPU0 GPU1 ... and no rows: not a connection matrix"
