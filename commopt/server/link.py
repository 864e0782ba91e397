# SPDX-License-Identifier: Apache-2.0
"""The connection of one worker and the server: a gloo group of these two, so that a death ends nobody else's."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Thread, current_thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.errors import TransportError
from commopt.server.scheduler import Participant

_SEGMENT_NBYTES = 4 * 2**20  # each has the time limit: 30 s are enough at 2 Mbit/s
_NEVER_SENT = 2**30  # a tag
_PARTING_S = 2.0
_FOR_EVER = timedelta(days=365)


class Link:
    """Sends and receives tensors of the CPU, in order. server, worker: the numbers of the two; `me` is one of them.

    on_loss: called in a thread when the connection breaks, which the end of the other process does at once.
    Raises TransportError, as all methods do, when the other does not come, or take part, within the time limit.
    """

    def __init__(self, me: Participant, server: int, worker: int, on_loss: Callable[[str], None]) -> None:
        rank = int(me.number == worker)
        self._peer, self._limit = 1 - rank, timedelta(seconds=me.timeout_s)
        self._group: Any = None
        kind: Any = dist.ProcessGroupGloo  # which torch declares in part
        options = kind._Options()
        options._timeout = self._limit
        options._devices = [_device(kind, me)]
        try:
            self._group = kind(dist.PrefixStore(f"commopt-server/link/{server}/{worker}", me.meeting), rank, 2, options)
        except RuntimeError as error:
            raise TransportError(f"no connection came about within {me.timeout_s:g} s: {_first_line(error)}") from error
        watched = self._group.recv([torch.empty(1, device="cpu")], self._peer, _NEVER_SENT)
        self._watch = Thread(target=_watch, args=(watched, on_loss), name="commopt-link", daemon=True)
        self._watch.start()
        # A wait of gloo's that returns to an interpreter that goes would end the process.
        atexit.register(self.close)

    def send(self, tensor: Tensor) -> None:
        """Send a contiguous tensor."""
        self._move("send", tensor)

    def receive(self, tensor: Tensor) -> Tensor:
        """Fill a contiguous tensor, of the length and dtype that is sent; return it."""
        self._move("recv", tensor)
        return tensor

    def close(self) -> None:
        """Break the connection, also for those that wait in it; a second time nothing happens."""
        group, self._group = self._group, None
        atexit.unregister(self.close)
        if group is not None:
            with suppress(RuntimeError):  # a wait that is over closes gloo's pair
                group.recv([torch.empty(1, device="cpu")], self._peer, _NEVER_SENT + 1).wait(timedelta(milliseconds=1))
            if self._watch is not current_thread():
                self._watch.join(_PARTING_S)

    def _move(self, method: str, tensor: Tensor) -> None:
        group = self._group
        if group is None:
            raise TransportError("the connection is closed")
        try:
            pieces = tensor.view(-1).view(torch.uint8).split(_SEGMENT_NBYTES)
            works = [getattr(group, method)([piece], self._peer, tag) for tag, piece in enumerate(pieces)]
            for work in works:
                work.wait(self._limit)
        except RuntimeError as error:
            raise TransportError(f"the connection broke: {_first_line(error)}") from error


def _watch(work: dist.Work, on_loss: Callable[[str], None]) -> None:
    try:
        work.wait(_FOR_EVER)
    except RuntimeError as error:
        on_loss(f"the connection broke: {_first_line(error)}")


def _device(kind: Any, me: Participant) -> object:
    """Return what gloo is to listen on: GLOO_SOCKET_IFNAME, or the address by which the scheduler is reached."""
    create = kind.create_device
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return create(interface=interface.partition(",")[0])
    family, kind, protocol, _, address = socket.getaddrinfo(me.host, me.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:  # sends nothing
        probe.connect(address)
        return create(hostname=probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition("This is typically")[0].rpartition("] ")[2].strip() or str(error)
