"""Bus bandwidth of collectives against the bytes of a message: a panel for every file of bench.bandwidth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from bench.plot.style import panels, save, styles, unframe
from commopt.probe.prober import nbytes_text

_FAR = 20  # from the least to the most: beyond, the axis is one of factors


def draw_files(files: Sequence[Path], path: Path) -> None:
    """Draw what every file has; rows in place, where there are such."""
    documents = [json.loads(file.read_text()) for file in files]
    figure, axes = panels(len(documents), "Bus bandwidth of collectives")
    for panel, document in zip(axes, documents, strict=True):
        _draw(panel, document["rows"])
        collectives = ", ".join(dict.fromkeys(row["collective"] for row in document["rows"]))
        unframe(panel, f"{collectives}, {_world(document['environment'])}", "bytes of the message", "GB/s")
    save(figure, path)


def _draw(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["aggregator"] for row in rows))
    for name, (colour, marker) in zip(names, styles(names), strict=True):
        own = [row for row in rows if row["aggregator"] == name]
        nbytes = [row["nbytes"] for row in own]
        busbw_gbps = [(row["in_place"] or row["out_of_place"])["busbw_gbps"] for row in own]
        axes.plot(nbytes, busbw_gbps, color=colour, marker=marker, ms=6, lw=1.8, label=name)
    axes.set_xscale("log", base=2)
    every = [value for line in axes.lines for value in np.asarray(line.get_ydata())]
    if max(every) > _FAR * min(every):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda nbytes, _: nbytes_text(nbytes))
    axes.legend(fontsize=8, frameon=False)


def _world(environment: dict[str, Any]) -> str:
    ranks = "+".join(str(len(node)) for node in environment["nodes"])
    rate = environment["emulated_link_rate"]
    links = "links not emulated" if rate is None else f"{rate} links"
    return f"{ranks} ranks on {len(environment['nodes'])} node(s), {links}"
