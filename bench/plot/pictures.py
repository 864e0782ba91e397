# SPDX-License-Identifier: Apache-2.0
"""Every picture there is: of which results it is made, and who draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.environment import headers, kind_in
from bench.evidence.scaling.predicted import KIND as PREDICTED
from bench.plot import evidence, training


def kind_of(path: Path) -> str | None:
    """Return which benchmark made a file: "training", "convergence", "probe" ...; None when its header does not say."""
    try:
        found = headers(path)
    except (ValueError, AttributeError):
        return None
    return kind_in(found[0]) if found else None


@dataclass(frozen=True)
class Picture:
    """What is drawn of results of one kind."""

    kind: str
    draw: Callable[[Path, Path], None]
    """Draws a file of this kind into another, in the format of its suffix."""


PICTURES = (
    Picture("training", training.draw_file),
    Picture("convergence", evidence.draw_learning),
    Picture(PREDICTED, evidence.draw_predicted_scaling),
    Picture("probe", evidence.draw_probe),
)

# Pictures that pages show under another name than that of the file they are drawn from.
_SHOWN_AS = {"probe_200mbit": "probe", "training_200mbit": "time_to_loss"}


def picture_of(kind: str | None) -> Picture | None:
    """Return the picture that a file of this kind is drawn as."""
    return next((picture for picture in PICTURES if picture.kind == kind), None)


def drawings(files: Iterable[Path], folder: Path) -> list[tuple[Picture, Path, Path]]:
    """Return every picture of `files`, with the file it is made of and where in `folder` it goes."""
    found = [(picture_of(kind_of(file)), file) for file in sorted(files)]
    return [
        (picture, file, folder / f"{_SHOWN_AS.get(file.stem, file.stem)}.png") for picture, file in found if picture
    ]
