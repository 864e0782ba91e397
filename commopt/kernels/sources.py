# SPDX-License-Identifier: Apache-2.0
"""Find the device code and hand it out as self-contained translation units."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_ENTRY = re.compile(r'extern "C" __global__ void (\w+)\(')
_INCLUDE = re.compile(r'^#include "(?P<name>[\w.]+)"$', re.MULTILINE)


@cache
def directory() -> Path:
    """Return the folder of the .cuh files: beside the package in a source tree, else inside it."""
    package = Path(__file__).parent.parent
    candidates = [package.parent / "csrc", package / "csrc"]
    for folder in candidates:
        if (folder / "lowrank.cuh").is_file():
            return folder
    raise FileNotFoundError(f"no kernel sources in {' or '.join(map(str, candidates))}; reinstall commopt")


def contents(folder: Path) -> dict[str, bytes]:
    """Return the texts of the sources in a folder, by name."""
    files = [*folder.glob("*.cuh"), *folder.glob("cpu/*.?pp")]
    return {path.name: path.read_bytes() for path in files}


@cache
def file_of_kernel() -> dict[str, str]:
    """Map every kernel's name to the .cuh file that defines it."""
    return {
        kernel: path.name
        for path in sorted(directory().glob("*.cuh"))
        for kernel in _ENTRY.findall(path.read_text(encoding="utf-8"))
    }


def translation_unit(file: str) -> str:
    """Return `file` with its includes pasted in, each once, so that a compiler's cache sees every edit."""
    seen = {file}

    def paste(name: str) -> str:
        text = (directory() / name).read_text(encoding="utf-8").replace("#pragma once\n", "")
        return _INCLUDE.sub(include, text)

    def include(match: re.Match[str]) -> str:
        name = match["name"]
        if name in seen:
            return ""
        seen.add(name)
        return paste(name)

    return paste(file)
