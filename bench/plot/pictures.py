"""Every picture there is: what it is called, of which files it is made, and who draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.convergence.plan import RATE
from bench.convergence.plot import draw as draw_convergence
from bench.convergence.report import read as read_convergence
from bench.plot import breakdown, bucketing, busbw, learning, loss, predicted, prediction, scaling, training, tuning
from bench.plot.files import kind_of
from bench.scaling.predicted import KIND as PREDICTED
from bench.training.report import read as read_training
from commopt.cost import Links
from commopt.probe.report import draw as draw_probe


@dataclass(frozen=True)
class Picture:
    """One picture of several files, or one of each file."""

    name: str
    kind: str
    draw: Callable[[Sequence[Path], Path], None]
    """Draws files of this kind into a file, in the format of its suffix."""
    together: bool = False


def on_link(file: Path) -> Path:
    """Return where bench.convergence puts the times on a slow network that belong to `file`."""
    return file.with_stem(f"{file.stem}_{RATE}")


def convergence(file: Path, path: Path) -> None:
    """Draw a file of bench.convergence, with the times on a slow network from the file beside it, if there is one."""
    timed = on_link(file)
    outcomes = read_training(timed)[1] if timed.exists() else []
    draw_convergence(*read_convergence(file), outcomes, path)


def probe(file: Path, path: Path) -> None:
    """Draw a file of links."""
    draw_probe(Links.load(file), path)


def _each(name: str, kind: str, draw: Callable[[Path, Path], None]) -> Picture:
    return Picture(name, kind, lambda files, path: draw(files[0], path))


# The first of a kind is what one file is drawn as unless another is asked for.
PICTURES = (
    _each("training", "training", training.draw_file),
    Picture("step_breakdown", "training", breakdown.draw_files, together=True),
    Picture("loss_by_time", "training", loss.draw_by_time, together=True),
    Picture("loss_by_bytes", "training", loss.draw_by_bytes, together=True),
    _each("convergence", "convergence", convergence),
    _each("learning", "convergence", learning.draw_file),
    _each("learning", "periodic", learning.draw_file),
    _each("scaling", "scaling", scaling.draw_file),
    _each("scaling_predicted", PREDICTED, predicted.draw_file),
    _each("prediction", "prediction", prediction.draw_file),
    _each("tuning", "tuning", tuning.draw_file),
    Picture("busbw", "bandwidth", busbw.draw_files, together=True),
    _each("bucketing", "bucketing", bucketing.draw_file),
    _each("probe", "probe", probe),
)

# What documents show under another name than that of the file it is drawn from.
_SHOWN_AS = {"demo_200mbit": "demo", "probe_200mbit": "probe"}


def pictures_of(kind: str | None) -> list[Picture]:
    """Return the pictures that a file of this kind can be drawn as, the usual one first."""
    return [picture for picture in PICTURES if picture.kind == kind]


def drawings(files: Iterable[Path], folder: Path) -> list[tuple[Picture, list[Path], Path]]:
    """Return every picture of `files`, with those it is made of and where in `folder` it goes."""
    by_kind: dict[str | None, list[Path]] = {}
    for file in sorted(files):
        by_kind.setdefault(kind_of(file), []).append(file)
    companions = {on_link(file) for file in by_kind.get("convergence", ())}
    by_kind["training"] = [file for file in by_kind.get("training", ()) if file not in companions]
    found: list[tuple[Picture, list[Path], Path]] = []
    for picture in PICTURES:
        own = by_kind.get(picture.kind, [])
        if picture.together:
            found += [(picture, own, folder / f"{picture.name}.png")] if own else []
        else:
            found += [(picture, [file], folder / f"{_name(picture, file)}.png") for file in own]
    return found


def _name(picture: Picture, file: Path) -> str:
    if picture is not pictures_of(picture.kind)[0] or picture.name == "learning":
        return f"{picture.name}_{file.stem}"
    return _SHOWN_AS.get(file.stem, file.stem)
