# SPDX-License-Identifier: Apache-2.0
"""Reads topology files of any supported format."""

from __future__ import annotations

import re
from pathlib import Path

from topology.matrix import read_matrix
from topology.model import Topology, TopologyError
from topology.network import Network, read_network
from topology.xml_reader import read_nccl_xml

MAX_BYTES = 16 << 20

_WEB_PAGE = re.compile(r"\s*</?(?:details|summary|pre|code|p|div|br)\b", re.IGNORECASE)


def read_any(path: str | Path) -> Topology | Network:
    """Read a machine as `read` does, or the network between nodes that a measurement wrote as JSON."""
    text = _decoded(_content(Path(path), str(path)))
    return read_network(text, str(path)) if text.lstrip().startswith("{") else read(path)


def read(path: str | Path) -> Topology:
    """Read NCCL topology XML (dump or template), or the output of `nvidia-smi topo -m`, which may be inside other text.

    Raises TopologyError, with a message of one line, for anything else: also for a file that is absent, not a plain
    file, larger than 16 MiB, or binary.
    """
    source = str(path)
    data = _content(Path(path), source)
    text = _decoded(data)
    if text.lstrip().startswith("<") and not _WEB_PAGE.match(text):
        return read_nccl_xml(text, source)
    if not text.strip():
        raise TopologyError(f"{source}: is empty; expected NCCL topology XML or the output of `nvidia-smi topo -m`")
    if "\0" in text:
        raise TopologyError(
            f"{source}: is a binary file; expected NCCL topology XML or the output of `nvidia-smi topo -m`"
        )
    if "<system" in text:
        raise TopologyError(f"{source}: has other text around NCCL's XML; keep the part from <system to </system>")
    return read_matrix(text, source)


def _content(path: Path, source: str) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise TopologyError(f"{source}: is not a plain file; name a file with NCCL topology XML or a matrix")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise TopologyError(f"{source}: cannot be read ({_reason(error)}); check the path") from None
    if len(data) > MAX_BYTES:
        raise TopologyError(f"{source}: is larger than {MAX_BYTES >> 20} MiB; a topology file is far below 1 MiB")
    return data


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _decoded(data: bytes) -> str:
    """Return text of UTF-8, or of UTF-16 with its mark, as Windows writes redirected output."""
    utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    return data.decode("utf-16" if utf16 else "utf-8-sig", errors="replace")
