# SPDX-License-Identifier: Apache-2.0
"""The site of a rank: where its node stands in a network whose nodes are not all equally near."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from commopt.errors import ConfigurationError

SITE_VARIABLE = "COMMOPT_SITE"
_SLURM = "SLURM_TOPOLOGY_ADDR"
_EXAMPLE = 'for example "berlin", or "berlin/rack3" for a site with racks'


def read_site(given: object, environ: Mapping[str, str] = os.environ, *, emulated: bool = False) -> str:
    """Return this rank's site, levels outermost first as in "berlin/rack3"; "" if nothing tells it.

    The first of these that is there: `given`, the variable COMMOPT_SITE, the switches above this node that Slurm names.
    Raises ConfigurationError for a text that is no site.

    emulated: whether nodes are declared, and not those that Slurm knows.
    """
    if given is not None:
        return require_site(given, "site")
    if text := environ.get(SITE_VARIABLE, ""):
        return require_site(text, SITE_VARIABLE)
    return "" if emulated else _switches(environ)


def require_site(site: object, name: str) -> str:
    """Return a valid site. Raises ConfigurationError that calls it `name`."""
    if not isinstance(site, str):
        raise ConfigurationError(f"{name} {site!r} is a {type(site).__name__}; pass a text, {_EXAMPLE}")
    if not all(re.fullmatch(r"\S(.*\S)?", part) for part in site.split("/")):
        raise ConfigurationError(
            f"{name}={site!r} has a level without a name, or with spaces around it; name every level, {_EXAMPLE}"
        )
    return site


def _switches(environ: Mapping[str, str]) -> str:
    """Return the switches above this node, outermost first, "" where Slurm does not name them.

    SLURM_TOPOLOGY_ADDR=spine.leaf0.n0 with SLURM_TOPOLOGY_ADDR_PATTERN=switch.switch.node is spine/leaf0.
    """
    names, kinds = environ.get(_SLURM, "").split("."), environ.get(f"{_SLURM}_PATTERN", "").split(".")
    if len(names) != len(kinds):  # a name of a switch or a node has a dot in it
        return ""
    return "/".join(name for name, kind in zip(names, kinds, strict=True) if name and kind != "node")
