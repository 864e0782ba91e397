"""Everything a tuner may choose from, each as one strategy for all gradients."""

from __future__ import annotations

from collections.abc import Sequence

from commopt import ConfigurationError

# The strengths that stay within the tuner's own limit of error when all gradients go by them.
_STRENGTHS = {
    "lossless": ("flat",),
    "bf16": ("hierarchical_bf16",),
    "quantized": ("quantized", "quantized:bits=4"),
    "onebit": ("onebit",),
    "dgc": ("dgc:density=0.05", "dgc:density=0.01"),
    "powersgd": tuple(f"powersgd:matrix_rank={rank}:start_step=0" for rank in (16, 8, 4)),
}
FAMILIES = tuple(_STRENGTHS)
_HIERARCHICAL = {"flat": "hierarchical"}


def candidates(allow: Sequence[str], *, two_levels: bool) -> list[str]:
    """Return the presets of the allowed families, "lossless" always among them.

    two_levels: whether nodes have several ranks; with one each hierarchical is the same as flat, and left out.
    Raises ConfigurationError for a family that does not exist.
    """
    unknown = [family for family in allow if family not in FAMILIES]
    if unknown:
        raise ConfigurationError(f"--allow {unknown[0]} is no family; name some of {', '.join(FAMILIES)}")
    found: list[str] = []
    for family in FAMILIES:
        if family != "lossless" and family not in allow:
            continue
        for text in _STRENGTHS[family]:
            found.append(text)
            if two_levels and not text.startswith("hierarchical"):
                found.append(_HIERARCHICAL.get(text, f"hierarchical_{text}"))
    return found
