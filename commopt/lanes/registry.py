# SPDX-License-Identifier: Apache-2.0
"""The lanes of this process, one for each device; who uses them; and how they end."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.errors import CommoptError, ConfigurationError, LaneError, TransportError
from commopt.groups import Membership, close_stores, join, keep_groups, memberships, read_arguments
from commopt.groups.membership import PATIENCE_S
from commopt.lanes.failure import publish_uncaught
from commopt.lanes.lane import Lane, Operation, Work, WorkerLane

_T = TypeVar("_T")

_lanes: dict[torch.device, Lane] = {}
_lock = threading.Lock()
_world: ref[dist.ProcessGroup] | None = None


def lane_for(device: torch.device) -> Lane:
    """Return the device's lane, new after every init_process_group()."""
    with _lock:
        _forget_old_world()
        if device not in _lanes:
            if device.type != "cuda":
                _lanes[device] = WorkerLane(device)
            else:
                from commopt.lanes.stream import StreamLane  # not to be loaded where there is no GPU

                _lanes[device] = StreamLane(device)
        return _lanes[device]


def require_healthy() -> None:
    """Raise the LaneError of a lane that failed since init_process_group(), if there is one."""
    with _lock:
        _forget_old_world()
        lanes = list(_lanes.values())
    for lane in lanes:
        lane.require_healthy()


def finish() -> bool:
    """Return once all that was submitted before, on any lane, has ended; False at once inside a lane's own work."""
    with _lock:
        lanes = list(_lanes.values())
    return all([lane.finish() for lane in lanes])


def _forget_old_world() -> None:
    """Drop the lanes of a world that was destroyed: their groups, and their errors, are gone with it."""
    global _world
    world = dist.group.WORLD if dist.is_initialized() else None
    if _world is None or _world() is not world:
        _close_all()
        _world = None if world is None else ref(world)


def _close_all() -> bool:
    """Stop every lane; return whether all of them had done their work."""
    lanes = list(_lanes.values())
    _lanes.clear()
    return all([lane.close() for lane in lanes])


def _leave() -> None:
    """Finish, and end gloo's threads, before the interpreter goes.

    They free the tensors of an operation a moment after it has ended, and need the GIL for that: taking it from a
    finalizing interpreter ends in std::terminate. A group that still waits for its peers is left alone; so is NCCL,
    whose threads hold no Python objects.
    """
    try:
        if _close_all():
            for membership in memberships():  # also over a process group that the user destroyed
                membership.team.release()
    finally:
        close_stores()


def _disown() -> None:
    """Leave alone, in a forked child (a DataLoader worker), what the parent communicates with.

    The child has the lanes without their threads, and process groups without those of gloo, for which their end would
    wait: in the exit handler, and where the interpreter frees them.
    """
    _lanes.clear()
    atexit.unregister(_leave)
    keep_groups()


atexit.register(_leave)
os.register_at_fork(after_in_child=_disown)


# ------------------------------------------------------------------------------------------- clients

# How many clients have not left. Strong: when a process group is destroyed and forgotten, commopt's own groups over it
# are still there, and this is how they are found.
_clients: dict[Membership, int] = {}


class LaneClient:
    """One user of the lanes, called `name` on all ranks: its operations run in one order, the same everywhere.

    team: all ranks.
    """

    def __init__(self, membership: Membership, name: str) -> None:
        self.membership = membership
        self.team = membership.team
        self.name = name
        self.closed = False
        self._sequence = count()
        self._device: torch.device | None = None  # of the last task
        self._first_device: torch.device | None = None
        self._lane: Lane | None = None

    @classmethod
    def join(
        cls,
        kind: str,
        group: Any,
        ranks_per_node: int | None,
        timeout: float | timedelta | None,
        problem: Exception | None = None,
        *,
        meets: bool = True,
        **facts: str,
    ) -> LaneClient:
        """Find the other ranks of `group`, which compare `facts`; collective as `groups.join`, and raises what it does.

        `problem` is why this rank cannot go on: it raises it, and the others a ConfigurationError that tells it.
        meets: whether the ranks meet for that, also where the groups exist. Raises LaneError when a lane has failed.
        """
        require_healthy()
        _close_orphans()
        try:
            ranks_per_node, timeout = read_arguments(ranks_per_node, timeout)
        except ConfigurationError as error:  # of this rank alone, perhaps: then it is said where the others come to
            problem, ranks_per_node, timeout = problem or error, None, None
        membership = join(group, ranks_per_node, timeout, problem)
        publish_uncaught()
        with _lock:
            _clients[membership] = _clients.get(membership, 0) + 1
        try:
            name = membership.enroll(kind, problem, **facts) if meets else f"{kind} {next(membership.owners)}"
            return cls(membership, name)
        except BaseException:
            _part(membership, close=False)
            raise

    def submit(
        self,
        what: object,
        task: Callable[[], None],
        result: Tensor,
        inputs: Sequence[Tensor] = (),
        numel: int = 0,
    ) -> Work:
        """Queue `task`, of `numel` elements, on the lane of the device of `result`, as Lane.submit; all ranks must.

        what: its text names the task in errors.
        """
        if self.closed:
            self.require_open(str(what))
        device, membership = result.device, self.membership
        # A lane lives as long as the world its process groups belong to.
        if self._lane is None or device != self._device or not membership.alive:
            self._device = device
            self._lane = lane_for(device)
            self._first_device = self._first_device or device
        operation = Operation(membership, self.name, next(self._sequence), what, numel, device.type)
        return self._lane.submit(operation, task, result, inputs)

    def run(self, task: Callable[[], None], what: str, device: torch.device | None = None) -> Work:
        """Queue a task of another kind on the lane of `device`, by default the first one used; all ranks must."""
        # Not the last one: parameters on another device than the gradients would take the meetings to another lane.
        device = device or self._first_device or self.team.default_device
        return self.submit(what, task, torch.zeros(1, dtype=torch.float32, device=device))

    def agree(
        self, what: str, problem: Exception | None = None, patience_s: float = PATIENCE_S, **facts: Any
    ) -> Agreement:
        """Let all ranks find out, on the lane, whether they have come to the same call; all ranks must.

        what: the call, and between which steps it is. `facts` go to all ranks. `problem`, patience_s: as in
        Membership.exchange. What is submitted behind it asks `refused` before it sends anything.
        """
        return Agreement(self, f"{what} ({self.name})", problem, patience_s, facts)

    def together(self, what: str, task: Callable[[], _T]) -> _T:
        """Return what `task`, on the lane, returns, once all ranks have come to `what`; collective, as `agree`.

        Raises MismatchError, before `task` has sent anything, when they have not.
        """
        agreement, found = self.agree(what), list[_T]()
        work = self.run(lambda: None if agreement.refused else found.append(task()), what)
        agreement.wait()
        work.wait()
        return found[0]

    def require_open(self, what: str) -> None:
        """Raise ConfigurationError when `close` came before `what`."""
        if self.closed:
            raise ConfigurationError(
                f"{self.name} was closed, and this is its {what}; make a new {self.name.partition(' ')[0]}"
            )

    def close(self, *, groups: bool = True) -> None:
        """Take part no more; the last client to leave closes the process groups, once all that was submitted has ended.

        groups: False keeps them for the next client, at once. Raises CommoptError when called from a lane's work, which
        would wait for its own end.
        """
        if not self.closed:
            _part(self.membership, close=groups)
            self.closed = True


class Agreement:
    """The answer to whether all ranks have come to the same call; LaneClient.agree asks.

    That they have not is no failure of the lane: all that came know it alike, and nothing was sent.
    """

    def __init__(
        self, client: LaneClient, purpose: str, problem: Exception | None, patience_s: float, facts: dict[str, Any]
    ) -> None:
        self._client = client
        self._purpose = purpose
        self._problem = problem
        self._facts = facts
        self._patience_s = patience_s
        self._answers: list[dict[str, Any]] = []
        self._error: Exception | None = None
        self._work = client.run(self._ask, purpose)

    def _ask(self) -> None:
        membership = self._client.membership
        try:
            self._answers = membership.exchange(
                self._purpose, self._problem, self._client.name, self._patience_s, **self._facts
            )
        except (LaneError, TransportError):
            raise
        except Exception as error:
            self._error = error

    @property
    def refused(self) -> bool:
        """Whether nothing may be sent; known to the lane's work behind it."""
        return self._error is not None

    def wait(self) -> list[dict[str, Any]]:
        """Return the facts of every rank, in their order. Raises as Membership.exchange."""
        self._work.wait()
        if self._error is not None:
            raise self._error
        return self._answers


def _part(membership: Membership, *, close: bool) -> None:
    if close and not finish():
        raise CommoptError("close() was called inside lane work and would wait for its own end; call it from outside")
    with _lock:
        _clients[membership] = _clients.get(membership, 1) - 1
        if _clients[membership] or not close:
            return
        del _clients[membership]
    membership.team.close()


def _close_orphans() -> None:
    """Close what was built over process groups that were destroyed since: threads and sockets on either side.

    Not collective: nobody can use them any more.
    """
    with _lock:
        gone = [membership for membership in _clients if not membership.alive]
    # What was submitted before its group was destroyed may still be under way.
    if any(not membership.team.closed for membership in gone) and not finish():
        return
    for membership in gone:
        membership.team.close()
        with _lock:
            _clients.pop(membership, None)
