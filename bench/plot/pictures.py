# SPDX-License-Identifier: Apache-2.0
"""Every picture there is: what it is called, of which files it is made, and who draws it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.evidence.scaling.predicted import KIND as PREDICTED
from bench.plot import evidence, large, training
from commopt.document import parse, read_text

_PROBE = "probe"
_LAUNCHERS = ("bench.cluster",)


def kind_of(path: Path) -> str | None:
    """Return what made a file: "training", "scaling", "bandwidth" ...; None when its header does not say.

    The header says it under "kind"; before there was that, the command in it does.
    """
    header = _header(path)
    if header is None:
        return None
    if {"format", "links"} <= header.keys():  # of commopt.cost, which knows nothing of benchmarks
        return _PROBE
    header = header.get("environment", header)
    if not isinstance(header, dict):
        return None
    kind = header.get("kind") or _kind_in(header.get("command", ""))
    return kind if isinstance(kind, str) else None


def _header(path: Path) -> dict[str, Any] | None:
    """Return the whole JSON document, or the first of several lines; None when it is neither."""
    text = read_text(path)
    for candidate in (text, text.partition("\n")[0]):
        try:
            found = parse(candidate, str(path))
        except ValueError:
            continue
        return found if isinstance(found, dict) else None
    return None


def _kind_in(command: str) -> str | None:
    modules = [word for word in shlex.split(command) if word.startswith("bench.") and word not in _LAUNCHERS]
    return modules[0].rpartition(".")[2] if modules else None


@dataclass(frozen=True)
class Picture:
    """One picture of several files, or one of each file."""

    name: str
    kind: str
    draw: Callable[[Sequence[Path], Path], None]
    """Draws files of this kind into a file, in the format of its suffix."""
    together: bool = False


def _each(name: str, kind: str, draw: Callable[[Path, Path], None]) -> Picture:
    return Picture(name, kind, lambda files, path: draw(files[0], path))


PICTURES = (
    _each("training", "training", training.draw_file),
    _each("convergence", "convergence", evidence.draw_learning),
    _each("convergence_large", "convergence_large", large.draw),
    _each("periodic", "periodic", evidence.draw_learning),
    _each("scaling", "scaling", evidence.draw_scaling),
    _each("scaling_predicted", PREDICTED, evidence.draw_predicted_scaling),
    _each("prediction", "prediction", evidence.draw_prediction),
    _each("tuning", "tuning", evidence.draw_tuning),
    Picture("busbw", "bandwidth", evidence.draw_busbw, together=True),
    _each("bucketing", "bucketing", evidence.draw_bucketing),
    _each("probe", _PROBE, evidence.draw_probe),
)

# What pages show under another name than that of the file it is drawn from.
_SHOWN_AS = {"probe_200mbit": "probe", "training_200mbit": "time_to_loss"}


def picture_of(kind: str | None) -> Picture | None:
    """Return the picture that a file of this kind is drawn as."""
    return next((picture for picture in PICTURES if picture.kind == kind), None)


def drawings(files: Iterable[Path], folder: Path) -> list[tuple[Picture, list[Path], Path]]:
    """Return every picture of `files`, with those it is made of and where in `folder` it goes."""
    by_kind: dict[str | None, list[Path]] = {}
    for file in sorted(files):
        by_kind.setdefault(kind_of(file), []).append(file)
    found: list[tuple[Picture, list[Path], Path]] = []
    for picture in PICTURES:
        own = by_kind.get(picture.kind, [])
        if picture.together:
            found += [(picture, own, folder / f"{picture.name}.png")] if own else []
        else:
            found += [(picture, [file], folder / f"{_SHOWN_AS.get(file.stem, file.stem)}.png") for file in own]
    return found
