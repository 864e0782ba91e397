# SPDX-License-Identifier: Apache-2.0
"""Current devices and streams of CUDA, known without asking the driver how many devices there are.

torch.cuda asks whenever it looks for the current device (`current_stream()`, `stream(...)`): 25 us, for each kernel.
A device is named by its index here, as that of a tensor always has one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import Any

import torch


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream of a device that has an index."""
    stream_id, device_index, device_type = torch._C._cuda_getCurrentStream(device.index)
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


class on_stream:
    """Makes a stream the current one of its device, and that the current device, while it is entered."""

    __slots__ = ("_before", "_device_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._device_before = torch._C._cuda_exchangeDevice(stream.device_index)
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch._C._cuda_setStream(*self._before)
        torch._C._cuda_maybeExchangeDevice(self._device_before)  # makes no context on a device that has none


@contextmanager
def captures_of_others_allowed() -> Iterator[None]:
    """Let this thread ask for events while another one captures a graph, which any such question would spoil."""
    exchange, mode = _exchange_capture_mode(), ctypes.c_int(_RELAXED)
    if exchange is not None:
        exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(mode))


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@cache
def _exchange_capture_mode() -> Any:
    """Return the driver's function, to which torch has no way; None where there is no driver."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
