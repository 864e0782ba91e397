"""Settings that NCCL takes from files: they count wherever the environment says nothing, and nobody remembers them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from commopt.doctor.facts.machine import Machine
from commopt.doctor.finding import Check, Finding
from topology.kernel_files import text

FILES = Check("nccl-conf", "NCCL's configuration file")

SYSTEM = "etc/nccl.conf"
_LINE = re.compile(r"\s*(NCCL_\w+)\s*=\s*(.*?)\s*", re.ASCII)


def own_file(environ: Mapping[str, str]) -> str:
    """Return the user's file as a path below the root; NCCL reads it before the system's."""
    named = environ.get("NCCL_CONF_FILE") or f"{environ.get('HOME') or '/root'}/.nccl.conf"
    return named.lstrip("/")


def settings_of(root: Path, path: str) -> dict[str, str]:
    """Return the settings of one file; empty when there is none."""
    lines = (text(root / path) or "").splitlines()
    matches = [match for line in lines if (match := _LINE.fullmatch(line.split("#")[0]))]
    return {match[1]: match[2] for match in matches}


def effective(root: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment as NCCL sees it: over the user's file, over the system's."""
    return {**settings_of(root, SYSTEM), **settings_of(root, own_file(environ)), **environ}


def configuration(machine: Machine) -> list[Finding]:
    """Name the settings that come from files, because `unset` does not remove them."""
    own, found = own_file(machine.environ), []
    for path in (own, SYSTEM):
        settings = settings_of(machine.root, path)
        if settings:
            shown = ", ".join(f"{name}={value}" for name, value in settings.items())
            expected = "only what every job on this machine needs; edit the file, unset does not help"
            found.append(FILES.info(f"/{path}", shown, expected, f"sudoedit /{path}", "medium"))
    return found or [FILES.ok(f"/{own}, /{SYSTEM}", "no settings", "none, or those of the provider")]
