# SPDX-License-Identifier: Apache-2.0
"""Self-contained HTML pages: one file each, with pictures in SVG, that loads nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commopt.document import write_whole


def write_page(file: Path, template: Path, **values: Any) -> None:
    """Fill in a Jinja template, which may include `style.css` of this folder; values are escaped. Raises OSError."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # a dependency of torch

    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    # A browser may read a page that is written anew every so many steps.
    write_whole(file, environment.get_template(template.name).render(**values).encode())
