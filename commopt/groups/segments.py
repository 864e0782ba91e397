# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the kernels between collectives, to be replayed with the collectives between them.

A step's kernels are mostly the same as in the step before, and a host needs longer to launch them than a GPU to run
them. Captured once, they are launched with one call for each segment. Collectives stay outside of the graphs: each is
called as ever, so torch's watchdog knows of it, errors are raised where they were, and it is this rank's own affair
whether it replays (NCCL wants a captured collective to be captured on all ranks alike).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

_own = threading.local()  # `capturing`: the Segments that this thread captures
_EMPTY = "The CUDA Graph is empty"
_failed: list[torch.cuda.CUDAGraph] = []


def capturing() -> Segments | None:
    """Return the segments that the calling thread is capturing, None for none."""
    return getattr(_own, "capturing", None)


class Segments:
    """The kernels of some work on the current stream as CUDA graphs, with the collectives between them."""

    def __init__(self) -> None:
        self._parts: list[Callable[[], object]] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def __len__(self) -> int:
        return len(self._parts)

    def replay(self) -> None:
        """Launch everything on the current stream, and call the collectives, in order."""
        for part in self._parts:
            part()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Capture what the body launches: nothing of it runs, and no collective is called. Raises what the body does.

        The current stream must not be the default one. Memory that the body allocates is shared by all segments of this
        process, so it must not be read after the next segments are replayed.
        """
        _own.capturing = self
        try:
            self._begin()
            yield
            self._end()
        finally:
            _own.capturing = None
            graph, self._graph = self._graph, None
            if graph is not None:  # the body raised
                _abandon(graph)

    def between(self, collective: Callable[[], object]) -> None:
        """Take note of a collective, which is called in each replay between what came before it and what comes now."""
        self._end()
        self._parts.append(collective)
        self._begin()

    def _begin(self) -> None:
        device = torch.cuda.current_device()
        _keeper(device)
        self._graph = _begun(_handle(device))

    def _end(self) -> None:
        graph, self._graph = self._graph, None
        assert graph is not None
        if _ended(graph):
            self._parts.append(graph.replay)


def _begun(pool: Any) -> torch.cuda.CUDAGraph:
    """Return a graph that captures the current stream."""
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads, such as torch's watchdog, go on using CUDA.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    except BaseException:
        _abandon(graph)
        raise
    return graph


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that has failed: a stream, an allocator and a generator that go on capturing can do nothing else.

    The driver ends it with an error, and torch then leaves its allocators and its generator as they are. That of pinned
    memory cannot be told: it goes on for this pool, and asks the graph of each later capture. So the graph is kept, and
    later ones get another pool.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        device = torch.cuda.current_device()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device, _handle(device))
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())
        _failed.append(graph)
        _handle.cache_clear()
        _keeper.cache_clear()


def _ended(graph: torch.cuda.CUDAGraph) -> bool:
    """End the capture; return whether there is anything in the graph, which torch only warns of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        graph.capture_end()
    others = [each for each in said if _EMPTY not in str(each.message)]
    for each in others:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return len(others) == len(said)


@cache
def _handle(device: int) -> Any:
    """Return the pool of memory of all segments of a device, since one could not be captured."""
    return torch.cuda.graph_pool_handle()


@cache
def _keeper(device: int) -> torch.cuda.CUDAGraph:
    """Return an empty graph: torch forgets a pool with the last graph in it, and can capture no other into it then."""
    graph = _begun(_handle(device))
    _ended(graph)
    return graph
