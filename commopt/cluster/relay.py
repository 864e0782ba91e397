# SPDX-License-Identifier: Apache-2.0
"""Delay and loss in user space, for kernels without netem: `relay.py relay SEED LIMIT NODE_PORT BRIDGE_PORT`.

A relay carries the frames of one node between two ports of the hub. What the node sends is delayed and lost as the
lines on stdin say, "DELAY_US LOSS"; each is answered by a line with the counters. What the node receives passes at
once. The relay ends when stdin does. It is started as a file, and loads nothing but the standard library: within
milliseconds, where commopt would take seconds.

`relay.py whole PORT` makes a port send every packet by itself and finished. Otherwise the kernel hands over up to
64 KB at once, to be cut and summed by an adapter: one loss would be that of forty packets.
"""

from __future__ import annotations

import array
import errno
import fcntl
import json
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

_AT_ONCE = 64  # frames of one direction, before the other has its turn
_LONGEST_FRAME = 1 << 16
_BUFFER_BYTES = 16 << 20  # of a socket: frames that wait while the relay is not running

# Of <linux/if_packet.h>, <asm-generic/socket.h>, <linux/if_ether.h>, <linux/sockios.h> and <linux/ethtool.h>.
_SOL_PACKET, _PACKET_STATISTICS, _PACKET_IGNORE_OUTGOING = 263, 6, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_ETH_P_ALL = 3
_SIOCETHTOOL = 0x8946
_OFFLOADS = {"checksum": 0x17, "TSO": 0x1F, "GSO": 0x24, "GRO": 0x2C}  # ETHTOOL_STXCSUM and so on


class RelayCounters(NamedTuple):
    """What a relay has done since the node was made.

    sent: packets of the node that were passed on.
    lost: packets of the node that were lost on purpose.
    overflowed: packets lost because too many were under way.
    missed: packets lost, of both directions, because the relay did not keep up.
    late_us: how much later than asked for packets were passed on, in total.
    latest_us: the same, at most.
    """

    sent: int = 0
    lost: int = 0
    overflowed: int = 0
    missed: int = 0
    late_us: int = 0
    latest_us: int = 0

    def since(self, earlier: RelayCounters | None) -> RelayCounters:
        """Return what was done after that; `latest_us` stays what it is."""
        then = earlier or RelayCounters()
        return self._replace(
            sent=self.sent - then.sent,
            lost=self.lost - then.lost,
            overflowed=self.overflowed - then.overflowed,
            missed=self.missed - then.missed,
            late_us=self.late_us - then.late_us,
        )


@dataclass
class DelayLine:
    """Frames under way in one direction, in their order, and which of them are lost. Times are in seconds.

    delay_s: from arriving to being due.
    loss: share of the frames that never arrive.
    limit: number of frames that can be under way.
    """

    seed: str
    limit: int
    delay_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._frames: deque[tuple[float, bytes]] = deque()
        self.sent = self.lost = self.overflowed = 0
        self.late_s = self.latest_s = 0.0

    def enter(self, frame: bytes, now_s: float) -> None:
        """Take a frame that arrived now, unless it is lost."""
        if self.loss and self._random.random() < self.loss:
            self.lost += 1
        elif len(self._frames) >= self.limit:
            self.overflowed += 1
        else:
            self._frames.append((now_s + self.delay_s, frame))

    def waits_s(self, now_s: float) -> float | None:
        """Return for how long nothing is due, None if nothing is under way."""
        return max(0.0, self._frames[0][0] - now_s) if self._frames else None

    def leave(self, now_s: float) -> bytes | None:
        """Return the next frame if it is due, and forget it. None overtakes another, even where the delay falls."""
        if not self._frames or self._frames[0][0] > now_s:
            return None
        due_s, frame = self._frames.popleft()
        self.sent += 1
        self.late_s += now_s - due_s
        self.latest_s = max(self.latest_s, now_s - due_s)
        return frame


def whole_packets(port: str) -> None:
    """Switch the offloads of a port of this namespace off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for command in _OFFLOADS.values():
            value = array.array("B", struct.pack("II", command, 0))
            fcntl.ioctl(asker, _SIOCETHTOOL, struct.pack("16sP16x", port.encode(), value.buffer_info()[0]))


class _Tap:
    """A port of this namespace: all frames that arrive there, whoever they are for."""

    def __init__(self, name: str) -> None:
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self.socket.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
            self.socket.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self.socket.setblocking(False)
        self.socket.bind((name, _ETH_P_ALL))
        self._missed = 0

    def receive(self) -> bytes | None:
        """Return a frame, None if there is no more."""
        try:
            return self.socket.recv(_LONGEST_FRAME)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno != errno.ENETDOWN:  # the link was cut
                raise
            return None

    def send(self, frame: bytes) -> None:
        """Send a frame, unless the port is down or its queue is full: then it is lost, as on any network."""
        try:
            self.socket.send(frame)
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENETDOWN, errno.ENOBUFS):
                raise

    def missed(self) -> int:
        """Return how many frames did not fit into the buffer so far."""
        found = self.socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
        self._missed += struct.unpack("II", found)[1]
        return self._missed


def _carry(line: DelayLine, node: _Tap, bridge: _Tap) -> None:
    """Carry frames and follow the lines on stdin, until that ends."""
    orders, heard = sys.stdin.fileno(), b""
    while True:
        ready, _, _ = select.select([node.socket, bridge.socket, orders], [], [], line.waits_s(time.monotonic()))
        now_s = time.monotonic()
        for _ in range(_AT_ONCE) if node.socket in ready else ():
            if (frame := node.receive()) is None:
                break
            line.enter(frame, now_s)
        for _ in range(_AT_ONCE) if bridge.socket in ready else ():
            if (frame := bridge.receive()) is None:
                break
            node.send(frame)
        now_s = time.monotonic()
        while (frame := line.leave(now_s)) is not None:
            bridge.send(frame)
        if orders in ready:
            part = os.read(orders, 4096)
            if not part:
                return
            *lines, heard = (heard + part).split(b"\n")
            for order in lines:
                delay_us, line.loss = map(float, order.split())
                line.delay_s = delay_us / 1e6
                late_us, latest_us = round(line.late_s * 1e6), round(line.latest_s * 1e6)
                missed = node.missed() + bridge.missed()
                counters = RelayCounters(line.sent, line.lost, line.overflowed, missed, late_us, latest_us)
                print(json.dumps(counters), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "whole":
        whole_packets(sys.argv[2])
    else:
        # A frame that waits for a processor is late: by up to 60 ms where ranks take turns, by 4 ms with this priority.
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        for port in sys.argv[4:]:
            whole_packets(port)
        _carry(DelayLine(sys.argv[2], int(sys.argv[3])), *map(_Tap, sys.argv[4:]))
