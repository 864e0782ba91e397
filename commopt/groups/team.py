# SPDX-License-Identifier: Apache-2.0
"""An ordered set of ranks with its own process group, split into nodes and sites, level by level."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from commopt import recording
from commopt.errors import CommoptError, LaneError, TransportError
from commopt.groups import gloo, nccl, segments
from commopt.groups.connections import connections_of
from commopt.groups.gloo import apply_scale
from commopt.groups.shape import TeamShape

# torch 2.13 renamed these and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Collective: TypeAlias = Callable[..., object]

_OVER_NCCL: dict[str, Collective] = {
    **{"all_reduce": nccl.all_reduce, "reduce": nccl.reduce, "broadcast": nccl.broadcast},
    **{"reduce_scatter": nccl.reduce_scatter, "all_gather": nccl.all_gather, "all_to_all": nccl.all_to_all},
    "send_receive": nccl.send_receive,
}

_ABORT_LIMIT_S = 10.0


@dataclass(frozen=True)
class Started:
    """A collective that goes on in threads of its own, while its caller starts another.

    future: done when it has ended, well or badly.
    finish: does the rest, and raises what went wrong; to be called then.
    """

    future: torch.futures.Future[Any]
    finish: Callable[[], None]


_detaching = threading.Lock()  # a failing lane and its watcher may both close teams


class Team(TeamShape):
    """A TeamShape that communicates. `dst` and `src` are positions in its order.

    Every primitive is synchronous: on the CPU it returns when it is done, on CUDA it is ordered on the current stream.
    """

    intra: Team | None = None
    inter: Team | None = None

    def __init__(
        self,
        ranks: tuple[int, ...],
        nodes: tuple[int, ...],
        group: dist.ProcessGroup | None,
        backends: Mapping[str, str],
        level: str = "world",
        sites: Sequence[Sequence[int]] = (),
    ) -> None:
        super().__init__(nodes, ranks.index(dist.get_rank()), backends, level, sites)
        self.ranks = ranks
        # torch's registry owns the group. Weak here, so that destroy_process_group() really closes its connections.
        self._group = None if group is None else ref(group)
        self._closed = False

    @property
    def parts(self) -> Iterator[Team]:
        """This team and all teams of its levels."""
        return cast(Iterator[Team], super().parts)

    @property
    def default_device(self) -> torch.device:
        """The device whose tensors this team is for: this rank's GPU, or the CPU if this machine has none.

        It has an index as the devices of tensors do: a lane is found by its device.
        """
        on_gpu = super().default_device.type == "cuda"
        if not on_gpu or not (torch.cuda.is_initialized() or torch.cuda.is_available()):  # the last is slow
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def all_reduce(self, tensor: Tensor, *, scale: float = 1.0) -> None:
        """Set `tensor` to `scale * sum` over the team; each rank scales its values before they are added."""
        if self.size > 1 and self.node_count == self.size and self._on_gloo(tensor):
            self._run("all_reduce", gloo.all_reduce, tensor, scale=scale)
        else:
            self._run("all_reduce", dist.all_reduce, apply_scale(tensor, scale), over_gloo=gloo.gloo_ring)

    def starts_all_reduce(self, tensor: Tensor) -> bool:
        """Return whether `start_all_reduce` can: on a CPU, by gloo's own all_reduce, which has threads of its own."""
        if tensor.device.type != "cpu" or self.size == 1 or not self._on_gloo(tensor):
            return False
        group = self._live_group()
        return group is not None and (self.node_count < self.size or gloo.uses_gloo_ring(tensor, group))

    def start_all_reduce(self, tensor: Tensor, *, scale: float = 1.0) -> Started:
        """Start what `all_reduce` does, and return. Two at once fill the pauses of each other's rings."""
        group = self._require_group("all_reduce")
        span = recording.primitive(self.level, "all_reduce", tensor.nbytes)
        span.__enter__()
        try:
            parts = gloo.start_gloo_ring(apply_scale(tensor, scale), group)
        except RuntimeError as error:
            self._raise_of_peer(error, "all_reduce")
            raise

        def finish() -> None:
            try:
                parts.finish()
            except RuntimeError as error:
                self._raise_of_peer(error, "all_reduce")
                raise
            span.__exit__(None, None, None)

        return Started(parts.future(), finish)

    def reduce(self, tensor: Tensor, dst: int) -> None:
        """Sum into `tensor` of rank `dst`; the other ranks' tensors are left undefined."""
        self._run("reduce", dist.reduce, tensor, group_dst=dst)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy `tensor` of rank `src` to every rank."""
        self._run("broadcast", dist.broadcast, tensor, group_src=src)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        """Sum `source` over the team and keep this rank's block of output.numel() elements."""
        self._run("reduce_scatter", reduce_scatter_single, output, source, over_gloo=gloo.reduce_scatter)

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        """Fill `output` with every rank's `source`, in rank order; `source` may be this rank's place in it."""
        self._run("all_gather", all_gather_single, output, source, over_gloo=gloo.all_gather)

    def all_to_all(self, output: Tensor, source: Tensor) -> None:
        """Send block j of `source` to rank j; block i of `output` comes from rank i."""
        self._run("all_to_all", dist.all_to_all_single, output, source, over_gloo=gloo.all_to_all)

    def send_receive(self, output: Tensor, source: Tensor, peer: int) -> None:
        """Send `source` to rank `peer`, and fill `output` with as much from it; only the two make this call."""
        self._run("send_receive", gloo.send_receive, output, source, peer=peer)

    def all_equal(self, number: int, device: torch.device) -> bool:
        """Return on every rank whether all gave the same number (63 bits), compared in tensors of `device`."""
        if self.size == 1:
            return True
        mine = torch.tensor([number], device=device)
        if self._on_gloo(mine):
            equal = mine.new_zeros(1)
            self._run("comparison", gloo.all_equal, equal, mine)
            return bool(equal)
        numbers = mine.new_empty(self.size)
        self.all_gather(numbers, mine)
        return bool((numbers == number).all())

    @property
    def connections(self) -> int:
        """Number of connections that gloo has between two of the ranks; 1 where there is none."""
        group = self._live_group()
        return 1 if group is None or "gloo" not in self._backends.values() else connections_of(group)

    def lost_ranks(self) -> list[int]:
        """Return the global ranks whose connection to this one is broken. Known for gloo only."""
        group = self._live_group()
        if group is None or "gloo" not in self._backends.values():
            return []
        return [self.ranks[peer] for peer in gloo.lost_peers(group)]

    def close(self) -> None:
        """Destroy the process groups, which also frees peers that wait in them. Later primitives raise."""
        close_together([self])

    def release(self) -> None:
        """Close a team of gloo, which joins its threads. NCCL communicators are not aborted."""
        if "nccl" not in self._backends.values():
            self.close()

    @property
    def closed(self) -> bool:
        """Whether the team can no longer communicate: it was closed, or its process group was destroyed."""
        if self._closed or self._group is None:
            return self._closed or not dist.is_initialized()
        return self._group() not in c10d._world.pg_map

    def _detach_group(self) -> dist.ProcessGroup | None:
        """Close this level only. Return the group that the caller must destroy, if any."""
        with _detaching:
            group = None if self._closed else self._live_group()
            self._closed = True
        return group

    def _live_group(self) -> dist.ProcessGroup | None:
        group = None if self._group is None else self._group()
        return group if is_alive(group) else None

    def _on_gloo(self, tensor: Tensor) -> bool:
        return self.backend(tensor.device) == "gloo"

    def _run(
        self, primitive: str, call: Collective, *tensors: Tensor, over_gloo: Collective | None = None, **how: Any
    ) -> None:
        """Call and record a collective that writes the first of `tensors` and reads the last. A single rank copies.

        While segments are captured, the call is taken note of for their replays.

        Gloo sends host memory only, so GPU tensors are copied to the host and back, and the host waits for both.
        Raises TransportError for errors that may come from a peer.

        over_gloo: called over gloo instead of `call`.
        """
        if self.size == 1:
            tensors[0].copy_(tensors[-1])
            return
        output, source = tensors[0], tensors[-1]
        backend = self.backend(output.device)
        on_gloo = backend == "gloo"
        if on_gloo and over_gloo is not None:
            call = over_gloo
        elif backend == "nccl":
            call = _OVER_NCCL.get(primitive, call)
        if output.device.type != "cpu":
            if on_gloo:
                call = partial(_by_way_of_the_host, call)
            if (captured := segments.capturing()) is not None:
                captured.between(partial(self._call, primitive, call, *tensors, **how))  # replays are never recorded
                return
        with recording.primitive(self.level, primitive, source.nbytes):
            self._call(primitive, call, *tensors, **how)

    def measure(self, call: Callable[[dist.ProcessGroup], object]) -> object:
        """Return what `call` returns for the process group. Raises TransportError for what may come from a peer."""
        return self._call("a measurement", lambda group: call(group))

    def _call(self, primitive: str, call: Collective, *tensors: Tensor, **how: Any) -> object:
        group = self._require_group(primitive)
        try:
            return call(*tensors, group=group, **how)
        except RuntimeError as error:
            self._raise_of_peer(error, primitive)
            raise

    def _require_group(self, primitive: str) -> dist.ProcessGroup:
        group = None if self._closed or self._group is None else self._group()
        if group is None or not is_alive(group):
            raise LaneError(
                f"{primitive} over ranks {self.ranks}: the process group was destroyed meanwhile; after "
                f"init_process_group() make a new HookState or Communicator"
            )
        return group

    def _raise_of_peer(self, error: RuntimeError, primitive: str) -> None:
        """Raise a TransportError for an error that may come from a peer."""
        if not isinstance(error, CommoptError) and _may_come_from_a_peer(error):
            raise TransportError(f"{primitive} over ranks {self.ranks} failed: {error}") from error


def _by_way_of_the_host(call: Collective, *tensors: Tensor, **how: Any) -> None:
    """Call a collective on copies in host memory, and copy the first back."""
    here = [tensor.cpu() for tensor in tensors]
    call(*here, **how)
    tensors[0].copy_(here[0])


def _may_come_from_a_peer(error: RuntimeError) -> bool:
    """Return whether an error of a collective may come from another rank; errors of memory and kernels do not.

    Gloo raises plain RuntimeErrors that name a line of its source, but for the operations of a pair that it closed when
    another one had timed out. NCCL's errors have a class, which also covers
    failures of this rank's CUDA.
    """
    if isinstance(error, dist.DistError):
        return "unhandled cuda error" not in str(error)
    text = str(error).lower()
    return "gloo" in text or "caused pair closure" in text


def close_together(teams: Iterable[Team]) -> None:
    """Close several teams with all their levels; NCCL communicators in parallel.

    An abort waits for the kernels of its communicator. These may be queued behind a kernel of another level or team,
    which only its own abort ends. All are tried, and the first error of gloo is raised. Aborts that have not ended
    after ten seconds are abandoned.
    """
    aborting: list[dist.ProcessGroup] = []
    errors: list[Exception] = []
    for team in teams:
        detached = [part._detach_group() for part in reversed([*team.parts])]
        for group in dict.fromkeys(group for group in detached if group is not None):  # a level may share the world's
            if "nccl" in team._backends.values():
                aborting.append(group)
                continue
            try:
                dist.destroy_process_group(group)
            except (RuntimeError, ValueError) as error:  # the user is destroying it at the same time
                errors.append(error)
    threads = []
    for group in aborting:
        thread = threading.Thread(target=_abort, args=(group,), name="commopt-abort", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is exiting and starts no threads
            _abort(group)
        else:
            threads.append(thread)
    deadline = time.monotonic() + _ABORT_LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]


def _abort(group: dist.ProcessGroup) -> None:
    """Abort an NCCL group and its kernels, also those that wait for a peer, and never free its NCCL backend.

    Freeing it would wait for a thread of torch that sleeps for a minute after an error. A gloo backend, if there is
    one, is freed with the group: closing its connections releases the peers.
    """
    with suppress(RuntimeError, ValueError, KeyError):  # the user is destroying it at the same time
        _keep_forever(group)
        c10d._abort_process_group(group)


def _keep_forever(group: dist.ProcessGroup) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group._get_backend(torch.device("cuda"))))


def keep_groups() -> None:
    """Keep all process groups of this process from being freed."""
    for group in list(c10d._world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def is_alive(group: dist.ProcessGroup | None) -> bool:
    """Return whether torch still has `group`, which destroy_process_group removes."""
    return group in c10d._world.pg_map


# --------------------------------------------- bytes of any length, for rare messages


def gather_bytes(team: Team, payload: bytes) -> list[bytes]:
    """Return every rank's payload in the team's order, on every rank. Collective."""
    lengths = [int(length) for length in _gather(team, torch.tensor([len(payload)], device="cpu")).tolist()]
    longest = max(lengths)
    if longest == 0:
        return [b""] * team.size
    padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    padded[: len(payload)] = _tensor(payload)
    rows = _gather(team, padded).view(team.size, longest)
    return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]


def broadcast_bytes(team: Team, payload: bytes | None, src: int) -> bytes:
    """Return the payload of rank `src` of the team on every rank; the others pass None. Collective."""
    own = b"" if payload is None else payload
    length = torch.tensor([len(own)], device=team.default_device)
    team.broadcast(length, src)
    data = torch.zeros(int(length.item()), dtype=torch.uint8, device="cpu")
    if data.numel() == 0:
        return b""
    if team.rank == src:
        data.copy_(_tensor(own))
    moved = data.to(team.default_device)
    team.broadcast(moved, src)
    return moved.cpu().numpy().tobytes()


def _gather(team: Team, own: Tensor) -> Tensor:
    source = own.to(team.default_device)
    output = source.new_empty(team.size * source.numel())
    team.all_gather(output, source)
    return output.cpu()


def _tensor(payload: bytes) -> Tensor:
    """Return uint8 [len(payload)], on the CPU."""
    if not payload:  # torch.frombuffer refuses it
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
