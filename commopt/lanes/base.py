"""A lane runs all communication of one device in one total order."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from commopt.errors import CommoptError, LaneError
from commopt.groups import checking
from commopt.lanes.failure import fail
from commopt.lanes.modes import fresh_modes
from commopt.lanes.operation import Operation, Ticket
from commopt.lanes.order_check import check_order
from commopt.lanes.second import Second

Work = Callable[[], None]


class _Here(threading.local):
    lane: Lane | None = None


_here = _Here()


def current_lane() -> Lane | None:
    """Return the lane whose work this thread runs, None outside of such work."""
    return _here.lane


class Lane(ABC):
    """One per device and process; the first failure poisons it for good."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._error: LaneError | None = None
        self._verdict = threading.RLock()  # held from a failure until `_error` says what it was
        self._own = threading.local()  # `busy`: whether this thread is at work for the lane
        self._second: Second | None = None

    @abstractmethod
    def submit(
        self,
        operation: Operation,
        work: Work,
        result: Tensor,
        inputs: Sequence[Tensor] = (),
        reserved: Sequence[Ticket] = (),
    ) -> Ticket:
        """Queue `work`, which communicates, reads `inputs` and leaves its outcome in `result`.

        `work` sees both as the submitting thread (on CUDA: its current stream) left it. `reserved` are tickets handed
        out earlier for tensors among `inputs` that `work` completes too. Raises LaneError when
        the lane is poisoned, ConfigurationError when the process group was destroyed, CommoptError when called from
        `work` itself: it would wait for its own end.
        """

    @abstractmethod
    def close(self) -> bool:
        """Finish what was submitted and stop; return False after a few seconds in which it did not end."""

    def finish(self) -> bool:
        """Return True once all that was submitted before has ended, False at once when called from this lane's work."""
        if getattr(self._own, "busy", False):
            return False
        self._wait()
        return True

    @abstractmethod
    def _wait(self) -> None:
        """Return once all that was submitted before has ended, well or badly."""

    @abstractmethod
    def _make_second(self) -> Second:
        """Return a second lane of the same device."""

    def second(self) -> Second:
        """Return the lane beside this one, made when it is first wanted; for this lane's work only."""
        if self._second is None:
            self._second = self._make_second()
        return self._second

    def require_healthy(self) -> None:
        """Raise the error that poisoned the lane, if any; wait for it while the lane is finding out."""
        with self._verdict:
            error = self._error
        if error is not None:
            raise self._anew(error)

    def _anew(self, error: LaneError) -> LaneError:
        """Return what to raise: a traceback of the same error would keep the frames of every caller alive."""
        return LaneError(*error.args)

    def _require_usable(self, operation: Operation) -> None:
        if getattr(self._own, "busy", False):
            raise CommoptError(
                f"{operation} was called inside lane work, by an aggregator or by a callback of a pending future, and "
                f"would wait for its own end; call it after the outer operation's wait()"
            )
        alive = operation.membership.alive  # asked first: a lane that fails closes all groups before it knows why
        self.require_healthy()
        if not alive:
            operation.membership.require_alive()
        operation.membership.submitted[operation.device_type] += 1

    def _run(self, operation: Operation, work: Work, result: Tensor) -> LaneError | None:
        """Run `work` in the calling thread; return the error that now poisons the lane, if any.

        Ctrl-C poisons it too, and goes on.
        """
        if self._error is not None:
            return self._error
        try:
            if checking():
                check_order(operation)
            # A tensor made in inference mode can be written in no other.
            with fresh_modes(inference=result.is_inference()):
                _here.lane = self
                work()
        except BaseException as error:
            if self._second is not None:
                self._second.stop()
            with self._verdict:
                self._error = _reported(operation, error)
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            _here.lane = None
        return self._error


def _reported(operation: Operation, error: BaseException) -> LaneError:
    try:
        return fail(operation, error)
    except Exception as trouble:  # poisoned all the same
        return LaneError(f"{operation} failed: {error}; reporting it failed too: {trouble}")
