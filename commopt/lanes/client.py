# SPDX-License-Identifier: Apache-2.0
"""`LaneClient`, one user of the lanes, and `Agreement`, by which its ranks find out whether they make the same call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor

from commopt.errors import CommoptError, ConfigurationError, LaneError, TransportError
from commopt.groups import Membership, Started, join, read_arguments, require_site
from commopt.groups.agreement import PATIENCE_S
from commopt.lanes import activity, flight, heartbeat
from commopt.lanes.failure import publish_uncaught
from commopt.lanes.lane import Lane, Pending, Task
from commopt.lanes.registry import finish, lane_for, require_healthy

_T = TypeVar("_T")

_lock = threading.Lock()
# How many clients have not left. Strong: when a process group is destroyed and forgotten, commopt's own groups over it
# are still there, and this is how they are found.
_clients: dict[Membership, int] = {}


class LaneClient:
    """One user of the lanes, called `name` on all ranks: its tasks run in one order, the same everywhere.

    team: all ranks.
    submitted: the number of its latest task; -1 before the first.
    step, bucket: of its latest message of gradients; -1 before the first.
    """

    def __init__(self, membership: Membership, name: str) -> None:
        self.membership = membership
        self.team = membership.team
        self.name = name
        self.closed = False
        self.submitted = self.step = self.bucket = -1
        self._sequence = count()
        self._device: torch.device | None = None  # of the last task
        self._first_device: torch.device | None = None
        self._lane: Lane | None = None
        activity.note(self)

    @classmethod
    def join(
        cls,
        kind: str,
        group: Any,
        ranks_per_node: int | None,
        timeout: float | timedelta | None,
        problem: Exception | None = None,
        *,
        site: str | None = None,
        meets: bool = True,
        **facts: str,
    ) -> LaneClient:
        """Find the other ranks of `group`, which compare `facts`; collective as `groups.join`, and raises what it does.

        problem: the error of this rank, which raises it; the others raise a ConfigurationError that names it.
        meets: whether the ranks meet for that, also where the groups exist. Raises LaneError when a lane has failed.
        """
        require_healthy()
        _close_orphans()
        try:
            ranks_per_node, timeout = read_arguments(ranks_per_node, timeout)
            flight.folder()
            site = None if site is None else require_site(site, "site")
        except Exception as error:  # perhaps of this rank alone: the others learn of it in `join`
            problem, ranks_per_node, timeout, site = problem or error, None, None, None
        membership = join(group, ranks_per_node, timeout, problem, site, meets=meets)
        publish_uncaught()
        heartbeat.watch(membership)
        with _lock:
            _clients[membership] = _clients.get(membership, 0) + 1
        try:
            name = membership.enroll(kind, problem, **facts) if meets else f"{kind} {next(membership.owners)}"
            return cls(membership, name)
        except BaseException:
            _leave_membership(membership, close=False)
            raise

    def submit(
        self,
        title: object,
        run: Callable[[], Started | None],
        result: Tensor,
        inputs: Sequence[Tensor] = (),
        numel: int = 0,
        *,
        overlaps: bool = False,
    ) -> Pending:
        """Queue a task of `numel` elements on the lane of the device of `result`, as Lane.submit; all ranks must.

        title: its text names the task in errors. overlaps: as Task has it. Raises ConfigurationError when the process
        group was destroyed.
        """
        if self.closed:
            self.require_open(str(title))
        device, membership = result.device, self.membership
        if not membership.alive:
            lane_for(device).require_healthy()  # a lane that fails closes all groups before it knows why
            membership.require_alive()
        if self._lane is None or device != self._device:
            self._device = device
            self._lane = lane_for(device)
            self._first_device = self._first_device or device
        self.submitted = number = next(self._sequence)
        task = Task(membership, self.name, number, run, title, numel, device.type, overlaps)
        return self._lane.submit(task, result, inputs)

    @property
    def lane(self) -> Lane:
        """The lane of its latest task; before that of the device that it will use unless it is told another."""
        return self._lane or lane_for(self.team.default_device)

    def run(self, task: Callable[[], Started | None], title: str, device: torch.device | None = None) -> Pending:
        """Queue a task of another kind on the lane of `device`, by default the first one used; all ranks must."""
        # Not the last one: parameters on another device than the gradients would take the meetings to another lane.
        device = device or self._first_device or self.team.default_device
        return self.submit(title, task, torch.zeros(1, dtype=torch.float32, device=device))

    def agree(
        self, call: str, problem: Exception | None = None, patience_s: float = PATIENCE_S, **facts: Any
    ) -> Agreement:
        """Let all ranks find out, on the lane, whether they have come to the same call; all ranks must.

        call: its name, and between which steps it is. `facts` go to all ranks. problem, patience_s: as in
        Membership.exchange. Tasks submitted behind it that send anything run by Agreement.guard.
        """
        title, membership = f"{call} ({self.name})", self.membership
        agreement = Agreement(lambda: membership.exchange(title, problem, self.name, patience_s, **facts), problem)
        agreement.pending = self.run(agreement.reach, title)
        return agreement

    def together(self, call: str, task: Callable[[], _T]) -> _T:
        """Return what `task`, on the lane, returns, once all ranks have come to `call`; collective, as `agree`.

        Raises MismatchError, before `task` has sent anything, when they have not.
        """
        agreement, found = self.agree(call), list[_T]()
        pending = self.run(agreement.guard(lambda: found.append(task())), call)
        agreement.wait()
        pending.wait()
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
            _leave_membership(self.membership, close=groups)
            self.closed = True


class Agreement:
    """The answer to whether all ranks have come to the same call.

    A disagreement is no failure of the lane: all ranks that came find the same, and nothing was sent.

    ask: returns the facts of every rank, if they are needed; raises `problem` or a CommoptError on all of them.
    pending: the task that runs `reach`, once it is submitted.
    """

    def __init__(self, ask: Callable[[], list[dict[str, Any]] | None], problem: Exception | None = None) -> None:
        self.pending: Pending | None = None
        self._ask = ask
        self._problem = problem
        self._answers: list[dict[str, Any]] = []
        self._error: Exception | None = None

    def reach(self) -> None:
        """Ask, on the lane."""
        try:
            self._answers = self._ask() or []
        except (LaneError, TransportError):
            raise
        except Exception as error:
            if error is not self._problem and not isinstance(error, CommoptError):
                raise
            self._error = error

    def guard(self, task: Callable[[], Started | None]) -> Callable[[], Started | None]:
        """Return a task that does what `task` does, unless ranks have disagreed before it."""

        def run() -> Started | None:
            return task() if self._error is None else None

        return run

    def wait(self) -> list[dict[str, Any]]:
        """Return the facts of every rank, in their order. Raises as Membership.exchange."""
        assert self.pending is not None
        self.pending.wait()
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """Return the facts of every rank when `reach` has ended. Raises as Membership.exchange."""
        if self._error is not None:
            raise self._error.with_traceback(None)  # which would keep the frames of every waiter alive
        return self._answers


def _leave_membership(membership: Membership, *, close: bool) -> None:
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
