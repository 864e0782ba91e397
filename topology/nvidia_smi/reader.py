"""The matrix that `nvidia-smi topo -m` prints, read into the model.

It states distances and numbers of NVLinks, and nothing about PCIe switches, bus ids or the speed of a NIC.
"""

from __future__ import annotations

import re
from itertools import combinations

from topology.errors import TopologyError, shown
from topology.kernel_files import cpu_list
from topology.model import Cpu, Distance, Gpu, Nic, NvLinks, Topology
from topology.nvidia_smi.lines import CPUS, NUMA
from topology.nvidia_smi.links import nvlinks_of_cells
from topology.nvidia_smi.text import MatrixText, find_matrix


def read_matrix(text: str, source: str) -> Topology:
    """Read the first connection matrix in `text`; `source` names it in messages.

    NICs are called as in the legend, or by their columns where there is none; their speeds are None. `stated` calls
    devices "GPU0", "GPU1", ... and "NIC0", "NIC1", ... by their places in `gpus` and `nics`. What the text lacks is
    None, and `warnings` say so. Raises TopologyError where there is no such matrix.
    """
    matrix = find_matrix(text, source)
    warnings = list(matrix.warnings)
    columns = matrix.header.columns
    labels = [label for label in columns if label.startswith("GPU")]
    present = [label for label in labels if label in matrix.rows]
    if not present:
        raise TopologyError(
            f"{source}:{matrix.header.line}: a header for {len(labels)} GPU(s), but no row of a GPU that can be "
            "read below it; save the whole output of `nvidia-smi topo -m`"
        )
    if len(present) < len(labels):
        warnings.append(f"only {len(present)} of {len(labels)} GPU rows present: the text is cut")
    nics = [label for label in columns if not label.startswith("GPU")]
    cells = _cells(matrix, warnings)
    places = {label: f"GPU{place}" for place, label in enumerate(labels)}
    places |= {label: f"NIC{place}" for place, label in enumerate(nics)}
    return Topology(
        source=f"nvidia-smi matrix {source}",
        gpus=tuple(_gpu(matrix, label) for label in labels),
        nics=tuple(Nic(matrix.nic_names.get(label, label), None, None, None, None) for label in nics),
        cpus=_cpus(matrix, present, warnings),
        nvlinks=_nvlinks(matrix, labels, cells, warnings),
        stated=tuple((places[a], places[b], _distance(cell)) for (a, b), cell in cells.items()),
        warnings=tuple(warnings),
    )


def _cells(matrix: MatrixText, warnings: list[str]) -> dict[tuple[str, str], str]:
    """Cells of pairs by label in the order of the columns: from either row, where both do not contradict."""
    columns = matrix.header.columns
    cells: dict[tuple[str, str], str] = {}
    contradicting: list[str] = []
    for place, a in enumerate(columns):
        for other in range(place + 1, len(columns)):
            b = columns[other]
            seen = {cell for cell in (_cell(matrix, a, other), _cell(matrix, b, place)) if cell is not None}
            if len(seen) == 1:
                cells[a, b] = seen.pop()
            elif seen:
                contradicting.append(f"{a}-{b} {' or '.join(sorted(seen))}")
    if contradicting:
        more = ", ..." if len(contradicting) > 8 else ""
        warnings.append(f"rows contradict each other, taken as unknown: {', '.join(contradicting[:8])}{more}")
    return cells


def _cell(matrix: MatrixText, label: str, column: int) -> str | None:
    row = matrix.rows.get(label)
    return row.cells[column] if row is not None and column < len(row.cells) else None


def _distance(cell: str) -> Distance:
    if cell.startswith("NV"):
        return Distance.NVL
    return Distance.SYS if cell == "SOC" else Distance(cell)  # SOC: the word of drivers before 2017


def _nvlinks(
    matrix: MatrixText, labels: list[str], cells: dict[tuple[str, str], str], warnings: list[str]
) -> tuple[NvLinks, ...] | None:
    place = {label: number for number, label in enumerate(labels)}
    among_gpus = {(place[a], place[b]): cell for (a, b), cell in cells.items() if a in place and b in place}
    counts = {pair: int(cell[2:]) for pair, cell in among_gpus.items() if cell.startswith("NV")}
    if not counts and matrix.hides_nvlink and len(labels) > 1:
        warnings.append("NVLinks are unknown: this is of `topo -mp`, which hides them; run `nvidia-smi topo -m`")
        return None
    links = nvlinks_of_cells(counts, len(labels))
    if any(link.kind == "unknown" for link in links):
        warnings.append(
            "two GPUs with this many NVLinks may be on a bridge or on NVSwitches, which a matrix does not tell"
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


def _gpu(matrix: MatrixText, label: str) -> Gpu:
    row = matrix.rows.get(label)
    affinity = row.affinity if row is not None else {}
    numa = affinity.get(NUMA, "")
    return Gpu(int(label[3:]), None, int(numa) if _is_node(numa) else None, affinity=affinity.get(CPUS))


def _cpu_numbers(cpus: str) -> tuple[int, ...] | None:
    """The CPUs of "0-31,64-95"; None for what no machine has."""
    plausible = len(cpus) <= 2048 and all(int(number) < 8192 for number in re.findall("[0-9]{1,6}", cpus))
    return cpu_list(cpus) if plausible else None


def _is_node(numa: str) -> bool:
    return numa.isdecimal() and len(numa) < 6


def _cpus(matrix: MatrixText, present: list[str], warnings: list[str]) -> tuple[Cpu, ...]:
    """NUMA nodes that have a GPU, with CPUs where the rows agree on them."""
    affinity: dict[int, dict[str, str]] = {}
    lists: list[str] = []
    damaged: dict[str, list[str]] = {}
    for label in present:
        values = matrix.rows[label].affinity
        numa, cpus = values.get(NUMA, ""), values.get(CPUS, "N/A")
        if _is_node(numa):
            affinity.setdefault(int(numa), {})[cpus] = label
        elif numa not in ("", "N/A"):
            lists.append(f"{label} {numa}")
        if cpus != "N/A" and _cpu_numbers(cpus) is None:
            damaged.setdefault(cpus, []).append(label)
    warnings += [f"CPU Affinity {shown(cpus)} of {', '.join(gpus)} is damaged" for cpus, gpus in damaged.items()]
    if lists:
        warnings.append(f"NUMA Affinity is no single node ({'; '.join(lists[:4])}): NUMA unknown for these")
    for numa_node, seen in affinity.items():
        if len(seen) > 1:
            values_seen = " and ".join(f"{cpus} ({label})" for cpus, label in seen.items())
            warnings.append(f"CPU Affinity differs on NUMA node {numa_node}: {values_seen}")
    return tuple(
        Cpu(numa_node, affinity=_cpu_numbers(next(iter(seen))) if len(seen) == 1 else None)
        for numa_node, seen in sorted(affinity.items())
    )
