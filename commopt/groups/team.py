"""An ordered set of ranks with its own process group, and its two-level split into nodes."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from commopt import recording
from commopt.errors import CommoptError, LaneError, TransportError
from commopt.groups import gloo
from commopt.groups.scaling import apply_scale
from commopt.groups.shape import TeamShape

# torch 2.13 renamed these and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_ABORT_LIMIT_S = 10.0

_parting = threading.Lock()  # a lane that fails and its watcher may both close what there is


class Team(TeamShape):
    """A TeamShape that communicates; `dst` and `src` below are positions in its order.

    Every primitive is synchronous: on the CPU it returns when done, on CUDA it is ordered on the current stream.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        nodes: tuple[int, ...],
        group: dist.ProcessGroup | None,
        backends: Mapping[str, str],
        level: str = "world",
        intra: Team | None = None,
        inter: Team | None = None,
    ) -> None:
        super().__init__(nodes, ranks.index(dist.get_rank()), backends, level)
        self.ranks = ranks
        self._parts = (intra, inter)
        # torch's registry owns the group. Weak here, so that destroy_process_group() really closes its connections.
        self._group = None if group is None else ref(group)
        self._closed = False

    @property
    def intra(self) -> Team | None:
        """See TeamShape."""
        return self._parts[0]

    @property
    def inter(self) -> Team | None:
        """See TeamShape."""
        return self._parts[1]

    @property
    def default_device(self) -> torch.device:
        """See TeamShape; this machine may have no GPU for NCCL."""
        return super().default_device if torch.cuda.is_available() else torch.device("cpu")

    def all_reduce(self, tensor: Tensor, *, scale: float = 1.0) -> None:
        """Set `tensor` to `scale * sum` over the team, scaled before anything is added."""
        if self.size > 1:
            with self._transport("all_reduce", tensor) as group, self._in_reach(tensor) as (here, _):
                if self._on_gloo(tensor) and self.node_count == self.size:
                    gloo.all_reduce(here, group, scale)
                else:
                    apply_scale(here, scale)
                    dist.all_reduce(here, group=group)
        else:
            apply_scale(tensor, scale)

    def coalesces(self, device: torch.device) -> bool:
        """Whether `all_reduce_coalesced` is worth it for tensors on `device`: gloo would copy them into one."""
        return self.backend(device) == "nccl"

    def all_reduce_coalesced(self, tensors: Sequence[Tensor], *, scale: float = 1.0) -> None:
        """Do to all tensors, of one dtype and device, what `all_reduce` does to one, in one group of launches."""
        for tensor in tensors:
            apply_scale(tensor, scale)
        if self.size > 1:
            with self._transport("all_reduce", *tensors) as group:
                options = c10d.AllreduceCoalescedOptions()
                if hasattr(options, "asyncOp"):  # on the lane's own stream, as other collectives of new torch are
                    options.asyncOp = False
                launched = group.allreduce_coalesced(list(tensors), options)
                if launched is not None:
                    launched.wait()

    def reduce(self, tensor: Tensor, dst: int) -> None:
        """Sum into `tensor` of rank `dst`; the other ranks' tensors are left undefined."""
        if self.size > 1:
            with self._transport("reduce", tensor) as group, self._in_reach(tensor) as (here, _):
                dist.reduce(here, group=group, group_dst=dst)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy `tensor` of rank `src` to every rank."""
        if self.size > 1:
            with self._transport("broadcast", tensor) as group, self._in_reach(tensor) as (here, _):
                dist.broadcast(here, group=group, group_src=src)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        """Sum `source` over the team and keep this rank's block of output.numel() elements."""
        if self.size > 1:
            with self._transport("reduce_scatter", source) as group, self._in_reach(output, source) as (target, here):
                if self._on_gloo(source):
                    gloo.reduce_scatter(target, here, group)
                else:
                    reduce_scatter_single(target, here, group=group)
        else:
            output.copy_(source)

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        """Fill `output` with every rank's `source`, in rank order."""
        if self.size > 1:
            with self._transport("all_gather", source) as group, self._in_reach(output, source) as (target, here):
                if self._on_gloo(source):
                    gloo.all_gather(target, here, group)
                else:
                    all_gather_single(target, here, group=group)
        else:
            output.copy_(source)

    def all_to_all(self, output: Tensor, source: Tensor) -> None:
        """Send block j of `source` to rank j; block i of `output` comes from rank i."""
        if self.size > 1:
            with self._transport("all_to_all", source) as group, self._in_reach(output, source) as (target, here):
                if self._on_gloo(source):
                    gloo.all_to_all(target, here, group)
                else:
                    dist.all_to_all_single(target, here, group=group)
        else:
            output.copy_(source)

    def all_equal(self, number: int, device: torch.device) -> bool:
        """Return, alike on every rank, whether all gave the same number (of 63 bits); it travels as `device`'s data."""
        if self.size == 1:
            return True
        mine = torch.tensor([number], device=device)
        if self._on_gloo(mine):
            with self._transport("comparison", mine) as group:
                return gloo.all_equal(number, group)
        numbers = mine.new_empty(self.size)
        self.all_gather(numbers, mine)
        return bool((numbers == number).all())

    def lost_ranks(self) -> list[int]:
        """Return the global ranks whose connection to this one is broken; over gloo only, else nobody knows."""
        group = self._live_group()
        if group is None or "gloo" not in self._backends.values():
            return []
        return [self.ranks[peer] for peer in gloo.lost_peers(group)]

    def close(self) -> None:
        """Destroy the process groups, which also frees peers that wait in them; later primitives raise."""
        close_together([self])

    def release(self) -> None:
        """Close when nothing but gloo is behind it, whose threads are then joined; of NCCL nothing is aborted."""
        if "nccl" not in self._backends.values():
            self.close()

    @property
    def closed(self) -> bool:
        """Whether the team can no longer communicate: it was closed, or its process group destroyed."""
        return self._closed or not dist.is_initialized() or (self._group is not None and self._live_group() is None)

    def _part_with(self) -> dist.ProcessGroup | None:
        """Close this level alone; return the group that is to be destroyed, if it exists and nobody is at it."""
        with _parting:
            group = None if self._closed else self._live_group()
            self._closed = True
        return group

    def _live_group(self) -> dist.ProcessGroup | None:
        group = None if self._group is None else self._group()
        return group if group is not None and is_alive(group) else None

    def _on_gloo(self, tensor: Tensor) -> bool:
        return self.backend(tensor.device) == "gloo"

    @contextmanager
    def _in_reach(self, output: Tensor, source: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Give output and source, by default the same, where the backend can read and write them.

        Gloo sends host memory only: what lies on a GPU is copied there, and what came back. The host waits for both.
        """
        if output.device.type == "cpu" or not self._on_gloo(output):
            yield output, output if source is None else source
        elif source is None:
            host = output.cpu()
            yield host, host
            output.copy_(host)
        else:
            host = torch.empty(output.shape, dtype=output.dtype, device="cpu")
            yield host, source.cpu()
            output.copy_(host)

    @contextmanager
    def _transport(self, primitive: str, *sources: Tensor) -> Iterator[dist.ProcessGroup]:
        """Give the group for a collective that reads `sources`: recorded, and with its errors made understandable."""
        group = self._live_group()
        if group is None:
            raise LaneError(
                f"{primitive} over ranks {self.ranks}: the process group was destroyed meanwhile; after "
                f"init_process_group() make a new HookState or Communicator"
            )
        try:
            with recording.primitive(self.level, primitive, sum(source.nbytes for source in sources)):
                yield group
        except CommoptError:
            raise
        except RuntimeError as error:
            if not _may_be_an_echo(error):
                raise
            raise TransportError(f"{primitive} over ranks {self.ranks} failed: {error}") from error


def _may_be_an_echo(error: RuntimeError) -> bool:
    """Return whether an error of a collective may come from another rank; memory and kernels are this rank's own.

    Gloo raises RuntimeErrors of no class of their own, which name the line of its source; NCCL's have one, in which it
    reports failures of this rank's CUDA too.
    """
    if isinstance(error, dist.DistError):
        return "unhandled cuda error" not in str(error)
    return "gloo" in str(error).lower()


def close_together(teams: Iterable[Team]) -> None:
    """Close several teams with all their levels; those of NCCL all at once.

    An abort waits for the kernels of its communicator, which may be queued behind one of another level, or of another
    team, that only its own abort ends. All are tried; the first error of gloo is raised. Whatever has not ended after
    ten seconds is left to itself.
    """
    aborting: list[dist.ProcessGroup] = []
    errors: list[Exception] = []
    for team in teams:
        levels = [part for part in (team.intra, team.inter, team) if part is not None]
        for group in [group for part in levels if (group := part._part_with()) is not None]:
            if "nccl" in team._backends.values():
                aborting.append(group)
                continue
            try:
                dist.destroy_process_group(group)
            except (RuntimeError, ValueError) as error:  # the user destroys it at this very moment
                errors.append(error)
    threads = []
    for group in aborting:
        thread = threading.Thread(target=_abort, args=(group,), name="commopt-abort", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is leaving and starts no more
            _abort(group)
        else:
            threads.append(thread)
    deadline = time.monotonic() + _ABORT_LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]


def _abort(group: dist.ProcessGroup) -> None:
    """End a group of NCCL and its kernels, also those that wait for a peer, and never free its NCCL part.

    Freeing that waits for a thread of torch, which sleeps for a minute once it has seen an error. Gloo's part, if there
    is one, goes with the group: peers are freed by its connections closing.
    """
    with suppress(RuntimeError, ValueError, KeyError):  # the user destroys it at this very moment
        _pin(group)
        c10d._abort_process_group(group)


def _pin(group: dist.ProcessGroup) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group._get_backend(torch.device("cuda"))))


def keep_groups() -> None:
    """Let no process group of this process ever be freed."""
    for group in list(c10d._world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return whether torch still knows `group`: destroy_process_group forgets it."""
    return group in c10d._world.pg_map
