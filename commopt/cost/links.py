# SPDX-License-Identifier: Apache-2.0
"""The costs of a cluster's links and of work on a rank: a table of curves, measured or nominal, and its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from math import isnan, log
from pathlib import Path
from typing import Any, NamedTuple

from commopt.cost.curve import Curve, LineSegment
from commopt.document import load, one_line_each, read_as, read_text, write_whole
from commopt.errors import ConfigurationError
from topology.network import Network

FORMAT = 1
PRIMITIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reduce", "broadcast")


class LinkCost(NamedTuple):
    """The cost of a link: microseconds per message and per byte."""

    alpha_us: float
    beta_us_per_byte: float


class Ring(NamedTuple):
    """A collective is `steps` messages one after the other; `volume` times its bytes pass each link."""

    steps: int
    volume: float

    def time_us(self, nbytes: float, link: LinkCost) -> float:
        """Return its time."""
        return self.steps * link.alpha_us + self.volume * nbytes * link.beta_us_per_byte


def ring(primitive: str, ranks: int) -> Ring:
    """Return the steps and the volume of a collective in the algorithm for large messages; bytes as in `WireModel`.

    Rings (Patarasuk and Yuan 2009): reduce_scatter and all_gather P - 1 steps, all_reduce both; reduce is a
    reduce_scatter whose blocks the root collects. all_to_all: direct sends. broadcast: a binomial tree.
    """
    others = ranks - 1
    match primitive:
        case "all_reduce" | "reduce":
            return Ring(2 * others, 2 * others / ranks)
        case "reduce_scatter" | "all_to_all":
            return Ring(others, others / ranks)
        case "all_gather":
            return Ring(others, others)
        case "broadcast":
            return Ring(others.bit_length(), others.bit_length())
    raise ValueError(f"{primitive!r} is none of {', '.join(PRIMITIVES)}")


class LinkKey(NamedTuple):
    """One collective of `ranks` ranks of a level ("world", "intra", "inter"), run by `groups` groups at once.

    Where sites are known, "inter.intra" is inside a site, and "inter.inter" between sites.
    """

    level: str
    primitive: str
    ranks: int
    groups: int = 1


class WorkKey(NamedTuple):
    """Work of one rank by itself: kind and what as in `aggregate.LocalWork`."""

    kind: str
    what: str = ""


@dataclass(frozen=True)
class LinksHeader:
    """The source of the figures.

    date: in ISO format.
    hosts: one name for each node.
    nodes: ranks on each node.
    backend: of torch.distributed.
    device: its name.
    torch: its version.
    command: that measured.
    commopt: its version.
    revision: of commopt.
    """

    date: str = ""
    hosts: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()
    backend: str = ""
    device: str = ""
    torch: str = ""
    command: str = ""
    commopt: str = ""
    revision: str | None = None


@dataclass(frozen=True)
class Links:
    """The costs of a cluster.

    header: their source.
    curves: of collectives; bytes as `WireModel`'s method of the primitive's name counts them.
    work: curves of work on a rank, by dense bytes.
    nominal: whether the figures are line rates, and nothing was measured.
    network: the sites that were found where nobody had told any, for people: the curves do not depend on them.
    """

    header: LinksHeader
    curves: Mapping[LinkKey, Curve]
    work: Mapping[WorkKey, Curve] = field(default_factory=dict)
    nominal: bool = False
    network: Network | None = None

    def curve(self, level: str, primitive: str, ranks: int, groups: int = 1) -> Curve:
        """Return the curve of a collective over `ranks` ranks while `groups` groups of the level run it at once.

        Without a measurement it is the curve of the nearest number of ranks, scaled by the ring's formula, then of the
        nearest number of groups; for a level of sites also of the level around it. Its note says so. Raises
        ConfigurationError if there is no curve of this collective.
        """
        exact = self.curves.get(LinkKey(level, primitive, ranks, groups))
        if exact is not None:
            return exact
        around = [".".join(level.split(".")[:depth]) for depth in range(level.count("."), 0, -1)]
        levels = [level, *around, "world"] if around else [level]
        found = ([key for key in self.curves if key[:2] == (each, primitive)] for each in levels)
        like = next((keys for keys in found if keys), [])
        if not like:
            raise ConfigurationError(
                f"no figures for {primitive} at level {level!r}, only for {self.contents}; probe the cluster again"
            )
        key = min(like, key=lambda key: (abs(log(key.ranks / ranks)), abs(log(key.groups / groups)), key))
        curve = self.curves[key]
        notes = [] if key.level == level else [f"level {level} from {key.level}"]
        notes += [] if key.ranks == ranks else [f"{ranks} ranks from {key.ranks}"]
        notes += [] if key.groups == groups else [f"{groups} groups at once from {key.groups}"]
        mine, theirs = (ring(primitive, count) for count in (ranks, key.ranks))
        return curve.scaled(mine.steps / theirs.steps, mine.volume / theirs.volume, f"for {', '.join(notes)}")

    @property
    def contents(self) -> str:
        """The measured links as text, for messages."""
        levels: dict[tuple[str, str], list[str]] = {}
        for key in sorted(self.curves):
            count = f"{key.ranks}" if key.groups == 1 else f"{key.groups}x{key.ranks}"
            levels.setdefault(key[:2], []).append(count)
        return "; ".join(f"{level} {what} ({', '.join(ranks)})" for (level, what), ranks in levels.items()) or "nothing"

    def as_text(self) -> str:
        """Return JSON, which `read` reads back without a difference."""
        content = {
            "format": FORMAT,
            "nominal": self.nominal,
            "header": asdict(self.header),
            **({} if self.network is None else {"network": asdict(self.network)}),
            "links": [key._asdict() | _as_json(curve) for key, curve in sorted(self.curves.items())],
            "work": [key._asdict() | _as_json(curve) for key, curve in sorted(self.work.items())],
        }
        return one_line_each(content)

    def save(self, path: str | Path) -> None:
        """Write a JSON file."""
        write_whole(path, self.as_text().encode())

    @classmethod
    def load(cls, path: str | Path) -> Links:
        """Read a file of `save`. Raises ConfigurationError, naming the fault, for anything else."""
        return cls.read(read_text(path), str(path))

    @classmethod
    def read(cls, text: str, name: str) -> Links:
        """Read a text of `as_text`, as `load` does. name: its source, for messages."""
        try:
            content = load(text, "the file", FORMAT)
            nominal: bool = read_as(bool, content.get("nominal"), "nominal")
            header: LinksHeader = read_as(LinksHeader, content.get("header"), "header")
            curves = _table(LinkKey, content, "links")
            for key in curves:
                if key.primitive not in PRIMITIVES or key.ranks < 2 or key.groups < 1:
                    raise ConfigurationError(
                        f"{key} cannot be: it must be one of {', '.join(PRIMITIVES)} over 2 or more ranks in 1 or more "
                        f"groups"
                    )
            network: Network | None = read_as(Network | None, content.get("network"), "network")
            return cls(header, curves, _table(WorkKey, content, "work"), nominal, network)
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}: {error}; probe the cluster again") from None


@dataclass(frozen=True)
class _Entry:
    """A curve in the file, beside its key and the quality of its fit."""

    segments: tuple[tuple[float, float, float], ...]
    points: tuple[tuple[float, float], ...]
    note: str


def _table(kind: Any, content: Mapping[str, Any], name: str) -> dict[Any, Curve]:
    """Return the curves of a list in the file; the key of each is a `kind`."""
    found: dict[Any, Curve] = {}
    for number, row in enumerate(read_as(tuple[Any, ...], content.get(name), name)):
        where = f"{name}[{number}]"
        key, entry = read_as(kind, row, where), read_as(_Entry, row, where)
        try:
            if key in found:
                raise ConfigurationError(f"there are figures for {tuple(key)} already")
            found[key] = Curve(tuple(LineSegment(*each) for each in entry.segments), entry.points, entry.note)
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}") from None
    return found


def _as_json(curve: Curve) -> dict[str, Any]:
    quality = {"r_squared": curve.r_squared, "mape": curve.mape}
    fit = {name: None if isnan(value) else round(value, 6) for name, value in quality.items()}
    return fit | {"segments": [astuple(each) for each in curve.segments], "points": curve.points, "note": curve.note}
