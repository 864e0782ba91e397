"""Which machine is this process on? The facts NCCL itself uses to answer, read without NCCL."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostIdentity:
    """What one process reports about its machine; equal `node_key` means same machine."""

    hostname: str
    boot_id: str
    nccl_hostid: str | None
    local_rank: int | None

    @property
    def node_key(self) -> tuple[str, ...]:
        """Identify the machine as NCCL does: NCCL_HOSTID replaces host name and boot id when it is set."""
        return (self.nccl_hostid,) if self.nccl_hostid else (self.hostname, self.boot_id)

    def as_dict(self) -> dict[str, str | int | None]:
        """Return plain values that survive JSON."""
        return asdict(self)


def read_host_identity(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> HostIdentity:
    """Read this process's identity; `root` redirects the file reads to a fixture tree."""
    try:
        boot_id = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux, or a hardened container: the host name alone has to do
        boot_id = ""
    local_rank = environ.get("LOCAL_RANK", "")
    return HostIdentity(
        hostname=socket.gethostname(),
        boot_id=boot_id,
        nccl_hostid=environ.get("NCCL_HOSTID") or None,
        local_rank=int(local_rank) if local_rank.isdigit() else None,
    )
