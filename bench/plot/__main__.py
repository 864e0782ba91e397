# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m bench.plot --help`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import bench.plot
from commopt import ConfigurationError
from commopt.command_line import CommandParser

_RESULTS, _IMAGES = Path("bench/results"), Path("docs/images")


def main() -> None:
    """Draw one picture, or all."""
    parser = CommandParser(prog="python -m bench.plot", description=(bench.plot.__doc__ or "").splitlines()[0])
    parser.add_argument("json", type=Path, nargs="?", help=f"what to draw (default: what {_IMAGES} has pictures of)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="PNG, SVG or PDF")
    options = parser.parse_args()
    if not find_spec("matplotlib"):
        parser.error("pictures need matplotlib: pip install matplotlib")
    if bool(options.json) != bool(options.output):
        parser.error("name a file and, with -o, where to draw it; or nothing, and what pages show is drawn")
    try:
        if options.json:
            draw_one(options.json, options.output)
        else:
            draw_all(_RESULTS, _IMAGES)
    except (OSError, ValueError, ConfigurationError) as error:
        parser.error(str(error))


def draw_one(file: Path, output: Path) -> None:
    """Draw a file. Raises ValueError when there is no picture of such, OSError when it cannot be read."""
    from bench.plot.pictures import kind_of, picture_of

    picture = picture_of(kind_of(file))
    if picture is None:
        raise ValueError(f"{file} is no result of a benchmark that there is a picture of")
    picture.draw(file, output)


def draw_all(results: Path, images: Path) -> None:
    """Draw every picture in `images` anew that is one of a file in `results`, and say so."""
    from bench.plot.pictures import drawings

    for picture, file, output in drawings(results.glob("*.json"), images):
        if output.exists():
            picture.draw(file, output)
            print(f"{output}: {file.name}", flush=True)


if __name__ == "__main__":
    main()
