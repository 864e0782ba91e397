"""Which files a picture can be drawn into."""

from __future__ import annotations

from pathlib import Path

from commopt.errors import ConfigurationError

FORMATS = (".svg", ".png", ".pdf")


def require_drawable(path: Path) -> None:
    """Raise ConfigurationError for a file whose format is none of FORMATS, and where matplotlib is missing."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigurationError(f"{path}: no format to draw in; pass a name that ends in {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401  (asked for, not used)
    except ImportError:
        raise ConfigurationError("a picture needs matplotlib: pip install matplotlib") from None
