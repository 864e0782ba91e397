"""What the links of a cluster and the work on a rank cost: a table of curves, measured or nominal, and its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isnan, log
from pathlib import Path
from typing import Any, NamedTuple

from commopt.cost.curve import Curve, Segment
from commopt.document import one_line_each, parse, read_text
from commopt.errors import ConfigurationError

FORMAT = 1
PRIMITIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reduce", "broadcast")


class Link(NamedTuple):
    """Microseconds per message and per byte."""

    alpha_us: float
    beta_us_per_byte: float


class Ring(NamedTuple):
    """A collective is `steps` messages one after the other; `volume` times its bytes pass each link."""

    steps: int
    volume: float

    def time_us(self, nbytes: float, link: Link) -> float:
        """Return what it costs."""
        return self.steps * link.alpha_us + self.volume * nbytes * link.beta_us_per_byte


def ring(primitive: str, ranks: int) -> Ring:
    """Return what a collective takes in the algorithm for large messages; bytes as `WireModel` counts them.

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
    """One collective of `ranks` ranks of a level ("world", "intra", "inter"), run by `groups` groups at once."""

    level: str
    primitive: str
    ranks: int
    groups: int = 1


class WorkKey(NamedTuple):
    """Work of one rank by itself: kind and what as in `aggregate.Work`."""

    kind: str
    what: str = ""


@dataclass(frozen=True)
class Header:
    """Where the figures come from. `nodes`: ranks on each node; `hosts`: one name for each node."""

    date: str = ""
    hosts: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()
    backend: str = ""
    device: str = ""
    torch: str = ""
    command: str = ""


@dataclass(frozen=True)
class Links:
    """Curves of links, whose bytes are those that `WireModel`'s method of that name counts, and of work (dense bytes).

    nominal: nothing was measured; the figures are line rates.
    """

    header: Header
    curves: Mapping[LinkKey, Curve]
    work: Mapping[WorkKey, Curve] = field(default_factory=dict)
    nominal: bool = False

    def curve(self, level: str, primitive: str, ranks: int, groups: int = 1) -> Curve:
        """Return the curve of a collective over `ranks` ranks while `groups` groups of the level run it at once.

        What was not measured is taken from the nearest number of groups, then from the nearest number of ranks by the
        ring's formula; the curve's note says so. Raises ConfigurationError when there is nothing to go by.
        """
        exact = self.curves.get(LinkKey(level, primitive, ranks, groups))
        if exact is not None:
            return exact
        like = [key for key in self.curves if (key.level, key.primitive) == (level, primitive)]
        if not like:
            raise ConfigurationError(
                f"no figures for {primitive} at level {level!r}, only for {self.contents}; probe the cluster again"
            )
        key = min(like, key=lambda key: (abs(log(key.ranks / ranks)), abs(log(key.groups / groups)), key))
        curve = self.curves[key]
        notes = [] if key.ranks == ranks else [f"{ranks} ranks from {key.ranks}"]
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

    def save(self, path: str | Path) -> None:
        """Write a JSON file."""
        content = {
            "format": FORMAT,
            "nominal": self.nominal,
            "header": asdict(self.header),
            "links": [key._asdict() | _as_json(curve) for key, curve in sorted(self.curves.items())],
            "work": [key._asdict() | _as_json(curve) for key, curve in sorted(self.work.items())],
        }
        Path(path).write_text(one_line_each(content))

    @classmethod
    def load(cls, path: str | Path) -> Links:
        """Read what `save` wrote. Raises ConfigurationError, naming what is wrong, for anything else."""
        content = parse(read_text(path), str(path))
        try:
            return _from_json(content)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}; probe the cluster again") from None


def _as_json(curve: Curve) -> dict[str, Any]:
    quality = {"r_squared": curve.r_squared, "mape": curve.mape}
    fit = {name: None if isnan(value) else round(value, 6) for name, value in quality.items()}
    segments = [[each.from_nbytes, each.alpha_us, each.beta_us_per_byte] for each in curve.segments]
    return fit | {"segments": segments, "points": [list(point) for point in curve.points], "note": curve.note}


def _from_json(document: Any) -> Links:
    content = _checked(document, dict, "the file")
    found = content.get("format")
    if found != FORMAT:
        raise ConfigurationError(f"format {found!r} is not {FORMAT}, the one this version of commopt reads")
    curves: dict[LinkKey, Curve] = {}
    for place, entry in _entries(content, "links"):
        ranks, groups = _entry(entry, "ranks", int, place), _entry(entry, "groups", int, place)
        if ranks < 2 or groups < 1:
            raise ConfigurationError(f"{place}: ranks is {ranks}, groups is {groups}; they must be 2 and 1 or more")
        key = LinkKey(_entry(entry, "level", str, place), _entry(entry, "primitive", str, place), ranks, groups)
        if key.primitive not in PRIMITIVES:
            raise ConfigurationError(f"{place}: primitive {key.primitive!r} is none of {', '.join(PRIMITIVES)}")
        _add(curves, key, entry, place)
    work: dict[WorkKey, Curve] = {}
    for place, entry in _entries(content, "work"):
        _add(work, WorkKey(_entry(entry, "kind", str, place), _entry(entry, "what", str, place)), entry, place)
    return Links(_header(content), curves, work, _entry(content, "nominal", bool, "the file"))


def _header(content: Mapping[str, Any]) -> Header:
    known = {each.name: each.default for each in fields(Header)}
    facts: dict[str, Any] = {}
    for name, value in _entry(content, "header", dict, "the file").items():
        if name not in known:
            raise ConfigurationError(f"header has an unknown entry {name!r}; there are {', '.join(known)}")
        kind = str if isinstance(known[name], str) else list
        _checked(value, kind, f"header: {name}")
        facts[name] = tuple(value) if kind is list else value
    return Header(**facts)


def _add(known: dict[Any, Curve], key: Any, entry: Mapping[str, Any], place: str) -> None:
    if key in known:
        raise ConfigurationError(f"{place} has figures for {tuple(key)}, of which there were some already")
    segments = [_numbers(row, 3, f"{place}: segment") for row in _entry(entry, "segments", list, place)]
    points = [_numbers(row, 2, f"{place}: point") for row in _entry(entry, "points", list, place)]
    try:
        known[key] = Curve(
            tuple(Segment(*row) for row in segments),
            tuple((n, us) for n, us in points),
            _entry(entry, "note", str, place),
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {error}") from None


def _entries(content: Mapping[str, Any], name: str) -> list[tuple[str, dict[str, Any]]]:
    rows = _entry(content, name, list, "the file")
    return [(f"{name}[{place}]", _checked(row, dict, f"{name}[{place}]")) for place, row in enumerate(rows)]


def _entry(entry: Mapping[str, Any], name: str, kind: type, place: str) -> Any:
    return _checked(entry.get(name), kind, f"{place}: {name}")


def _checked(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        shown = "missing" if value is None else repr(value)[:80]
        raise ConfigurationError(f"{what} is {shown}; it must be {_KINDS[kind]}")
    return value


_KINDS = {
    str: "text",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
    dict: "a table of names and values",
}


def _numbers(row: Any, count: int, what: str) -> list[float]:
    if not isinstance(row, list) or len(row) != count or any(type(each) not in (int, float) for each in row):
        raise ConfigurationError(f"{what} {row!r:.80} is not {count} numbers")
    return [float(each) for each in row]
