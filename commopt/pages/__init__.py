# SPDX-License-Identifier: Apache-2.0
"""Self-contained HTML pages: one file each, with pictures in SVG, that loads nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
    file.write_text(environment.get_template(template.name).render(**values), encoding="utf-8")
