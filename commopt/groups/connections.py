# SPDX-License-Identifier: Apache-2.0
"""TCP connections of gloo between two ranks: how many were asked for, and groups that have several.

Torch gives a process group over gloo one context for each of its devices, and a device is an interface. Several devices
of one interface are several connections to each peer. A message is split over them in gloo.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from commopt.errors import ConfigurationError

CONNECTIONS_VARIABLE = "COMMOPT_CONNECTIONS"
INTERFACES_VARIABLE = "GLOO_SOCKET_IFNAME"
MOST_CONNECTIONS = 8


@dataclass(frozen=True)
class Connections:
    """Connections of gloo between two ranks of different nodes.

    count: their number.
    reason: who chose it.
    measured: whether commopt chose several by itself.
    """

    count: int = 1
    reason: str = "as gloo has them"
    measured: bool = False

    def __str__(self) -> str:
        return f"{self.count} connection{'s' * (self.count > 1)} between two ranks of different nodes: {self.reason}"


def asked_for() -> int | None:
    """Return the number of connections that COMMOPT_CONNECTIONS asks for, None for "auto" or without it.

    Raises ConfigurationError for any other value.
    """
    text = os.environ.get(CONNECTIONS_VARIABLE, "").strip()
    if text in ("", "auto"):
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_CONNECTIONS):
        raise ConfigurationError(
            f"{CONNECTIONS_VARIABLE}={text!r} is neither auto nor a whole number from 1 to {MOST_CONNECTIONS}; unset "
            f"it, or set for example {CONNECTIONS_VARIABLE}=4 on every rank"
        )
    return int(text)


def listed_interfaces() -> list[str]:
    """Return the names in GLOO_SOCKET_IFNAME, which may be there several times; torch connects once for each."""
    return [name for name in os.environ.get(INTERFACES_VARIABLE, "").split(",") if name]


def connections_of(group: dist.ProcessGroup) -> int:
    """Return the number of connections that a group of gloo has between two ranks."""
    backend = group._get_backend(torch.device("cpu"))
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    return len(getattr(getattr(backend, "options", None), "_devices", ())) or 1


@contextmanager
def with_connections(count: int | None) -> Iterator[None]:
    """Give groups over gloo that are made inside this number of connections; None: as torch does.

    The listed interfaces take turns. Torch passes no options of gloo on, so it finds another class here.
    """
    if count is None:
        yield
        return
    plain: Any = c10d.ProcessGroupGloo
    number = count

    class WithConnections(plain):  # type: ignore[misc]
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            options = plain._Options()
            options._devices = _devices(plain, number)
            options._threads = 2 * number  # as torch does
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = WithConnections  # type: ignore[misc]
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = plain  # type: ignore[misc]


def _devices(gloo: Any, count: int) -> list[Any]:
    names = listed_interfaces()
    if not names:
        return [gloo.create_default_device() for _ in range(count)]
    return [gloo.create_device(interface=names[place % len(names)]) for place in range(count)]
