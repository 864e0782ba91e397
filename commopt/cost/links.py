"""What the links of a cluster and the work on a rank cost: a table of curves, measured or nominal, and its file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isnan, log
from pathlib import Path
from typing import Any, NamedTuple

from commopt.cost.curve import Curve, Point, Segment
from commopt.cost.formulas import PRIMITIVES, ring
from commopt.document import parse, read_text
from commopt.errors import ConfigurationError

FORMAT = 1


class LinkKey(NamedTuple):
    """One collective of `ranks` ranks of a level ("world", "intra", "inter"), run by `groups` groups at once."""

    level: str
    primitive: str
    ranks: int
    groups: int = 1


class WorkKey(NamedTuple):
    """Work of one rank by itself: kind and what as in `aggregate.calls.Work`."""

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
        """Return the curve of a collective over `ranks` ranks while `groups` groups of the level are at it.

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
        told = [] if key.ranks == ranks else [f"{ranks} ranks from {key.ranks}"]
        told += [] if key.groups == groups else [f"{groups} groups at once from {key.groups}"]
        mine, theirs = (ring(primitive, count) for count in (ranks, key.ranks))
        return curve.scaled(mine.steps / theirs.steps, mine.volume / theirs.volume, f"for {', '.join(told)}")

    @property
    def contents(self) -> str:
        """Which links there are figures for, in words."""
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
        Path(path).write_text(_indented(content) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Links:
        """Read what `save` wrote. Raises ConfigurationError, naming what is wrong, for anything else."""
        content = parse(read_text(path), str(path))
        try:
            return _from_json(content)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}; probe the cluster again") from None


def _as_json(curve: Curve) -> dict[str, Any]:
    fit = {name: None if isnan(value) else round(value, 6) for name, value in _quality(curve)}
    segments = [[each.from_nbytes, each.alpha_us, each.beta_us_per_byte] for each in curve.segments]
    return fit | {"segments": segments, "points": [list(point) for point in curve.points], "note": curve.note}


def _quality(curve: Curve) -> Iterable[tuple[str, float]]:
    return ("r_squared", curve.r_squared), ("mape", curve.mape)


def _indented(content: dict[str, Any]) -> str:
    """Return JSON text with a line for every curve: short enough to be read, and compared."""
    lines = []
    for name, value in content.items():
        if isinstance(value, list):
            inner = ",\n  ".join(json.dumps(each) for each in value)
            lines.append(f"{json.dumps(name)}: [\n  {inner}\n ]" if value else f"{json.dumps(name)}: []")
        else:
            lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}"


def _from_json(content: Any) -> Links:
    content = _table(content, "the file")
    found = content.get("format")
    if found != FORMAT:
        raise ConfigurationError(f"format {found!r} is not {FORMAT}, the one this version of commopt reads")
    known = {each.name: each.default for each in fields(Header)}
    header = _table(content.get("header"), "header")
    for name, value in header.items():
        if name not in known:
            raise ConfigurationError(f"header has an unknown entry {name!r}; there are {', '.join(known)}")
        kind = str if isinstance(known[name], str) else list
        if not isinstance(value, kind):
            raise ConfigurationError(f"header: {name} is {value!r}, which is no {kind.__name__}")
    facts: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in header.items()}
    nominal = content.get("nominal")
    if not isinstance(nominal, bool):
        raise ConfigurationError(f"nominal is {nominal!r}; it must be true or false")
    curves: dict[LinkKey, Curve] = {}
    for place, entry in _entries(content, "links"):
        key = LinkKey(_text(entry, "level", place), _text(entry, "primitive", place), *_counts(entry, place))
        if key.primitive not in PRIMITIVES:
            raise ConfigurationError(f"{place}: primitive {key.primitive!r} is none of {', '.join(PRIMITIVES)}")
        curves[_new(key, curves, place)] = _curve(entry, place)
    work: dict[WorkKey, Curve] = {}
    for place, entry in _entries(content, "work"):
        doing = WorkKey(_text(entry, "kind", place), _text(entry, "what", place))
        work[_new(doing, work, place)] = _curve(entry, place)
    for known_work, curve in [*work.items()]:
        if known_work.kind == "factor":  # a file from before the second message's work was probed by itself
            second = WorkKey("refresh", known_work.what)
            work.setdefault(second, curve.scaled(1.0, 1.0, "as for a first message; probe again"))
    return Links(Header(**facts), curves, work, nominal)


def _curve(entry: Mapping[str, Any], place: str) -> Curve:
    segments = tuple(Segment(*_numbers(row, 3, f"{place}: segment")) for row in _rows(entry, "segments", place))
    points: tuple[Point, ...] = tuple(
        (row[0], row[1]) for row in (_numbers(row, 2, f"{place}: point") for row in _rows(entry, "points", place))
    )
    try:
        return Curve(segments, points, _text(entry, "note", place))
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {error}") from None


def _entries(content: Mapping[str, Any], name: str) -> list[tuple[str, dict[str, Any]]]:
    rows = _rows(content, name, "the file")
    return [(f"{name}[{place}]", _table(row, f"{name}[{place}]")) for place, row in enumerate(rows)]


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{what} is {_shown(value)} where a table of names and values belongs")
    return value


def _rows(entry: Mapping[str, Any], name: str, place: str) -> list[Any]:
    value = entry.get(name)
    if not isinstance(value, list):
        raise ConfigurationError(f"{place}: {name} is {_shown(value)} where a list belongs")
    return value


def _numbers(row: Any, count: int, what: str) -> list[float]:
    if not isinstance(row, list) or len(row) != count or any(type(each) not in (int, float) for each in row):
        raise ConfigurationError(f"{what} {_shown(row)} is not {count} numbers")
    return [float(each) for each in row]


def _text(entry: Mapping[str, Any], name: str, place: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str):
        raise ConfigurationError(f"{place}: {name} is {_shown(value)} where a text belongs")
    return value


def _counts(entry: Mapping[str, Any], place: str) -> tuple[int, int]:
    ranks, groups = entry.get("ranks"), entry.get("groups")
    if type(ranks) is not int or ranks < 2:
        raise ConfigurationError(f"{place}: ranks is {_shown(ranks)}; a collective needs 2 or more")
    if type(groups) is not int or groups < 1:
        raise ConfigurationError(f"{place}: groups is {_shown(groups)}; it must be 1 or more")
    return ranks, groups


def _new(key: Any, known: Mapping[Any, Curve], place: str) -> Any:
    if key in known:
        raise ConfigurationError(f"{place} has figures for {tuple(key)}, of which there were some already")
    return key


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:80]
