# SPDX-License-Identifier: Apache-2.0
"""A worker's connection to the server. A thread receives from it, so a loss is noticed at any time."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from commopt import errors
from commopt.errors import CommoptError, ConfigurationError, MismatchError, TransportError
from commopt.feedback.parameter_buckets import ParameterBucket
from commopt.server.channel import (
    DATA,
    END,
    HEARTBEAT,
    LOG_EVERY_S,
    TEXT,
    EndedError,
    bytes_of,
    parse_json,
    plain,
    reason,
)
from commopt.server.scheduler import find_server
from commopt.server.secret import given_secret
from commopt.server.settings import ADDRESS_VARIABLE, ParameterServer
from commopt.version import __version__

_log = logging.getLogger("commopt")

_MOST_QUEUED = 64  # frames received ahead of their use
_POLL_S = 0.2
_CLOSE_TIMEOUT_S = 2.0

_open: WeakSet[ServerConnection] = WeakSet()  # all of this process


class ServerConnection:
    """Joins the server with a model's buckets, and sends their values if the server has no parameters yet.

    Raises TransportError when there is no scheduler or no server, MismatchError when the server refuses this worker,
    ConfigurationError when there is no address or the secrets differ.

    number: number of this worker at the server; -1 before it has joined.
    steps: optimizer steps of the model so far, which the owner updates.
    abandoned: set by the owner when the model is gone; the connection then closes.
    """

    def __init__(self, settings: ParameterServer, buckets: Sequence[ParameterBucket]) -> None:
        self.abandoned: bool = False
        address = settings.address or os.environ.get(ADDRESS_VARIABLE)
        if not address:
            raise ConfigurationError(
                f"ParameterServer() has no address and {ADDRESS_VARIABLE} is not set; pass the scheduler's host:port"
            )
        if _open:
            gc.collect()  # workers whose model is gone leave before another one joins
        for each in list(_open):
            if each.abandoned:
                each.close("its model was deleted")
        self.number = -1
        self.steps = 0
        self._loss_reason = self._loss_kind = ""
        self._status: dict[str, Any] = {}
        self._inbox: Queue[tuple[int, memoryview]] = Queue(_MOST_QUEUED)
        self._channel, self._timeout_s = find_server(address, given_secret(None))
        self._thread = Thread(target=self._listen, name="commopt-worker", daemon=True)
        try:
            shapes = [
                [(name, list(each.shape), str(each.dtype)) for name, each in bucket.tensors.items()]
                for bucket in buckets
            ]
            self.ask("join", version=__version__, settings=settings.as_text(), buckets=shapes)
            self._thread.start()
            self._channel.start_heartbeat(self._leave_if_abandoned)
            answer = self.receive_answer()
            self.number = int(answer["number"])
            for bucket in buckets if answer["sends"] else ():
                self.send(bucket.values(copy=False).cpu())
        except BaseException:
            self.close("could not join")
            raise
        _open.add(self)
        atexit.register(self.close)

    def ask(self, kind: str, **request: Any) -> None:
        """Send a request."""
        self._require_alive()
        self._status = {}  # of the request before
        try:
            self._channel.send_json(kind=kind, **request)
        except TransportError as error:
            raise self._loss_after(error) from error

    def send(self, payload: Tensor) -> None:
        """Send a CPU tensor."""
        try:
            self._channel.send_tensor(payload)
        except TransportError as error:
            raise self._loss_after(error) from error

    def receive_answer(self, *, attaching: bool = False) -> dict[str, Any]:
        """Return the answer to the last request. Logs every 30 s for which workers the server waits.

        attaching: raise ConfigurationError if the server waits only for workers of this process, and these make no
            step for the timeout.
        """
        progress_s = time.monotonic()
        logged_s = progress_s - (LOG_EVERY_S * 2 / 3 if attaching else 0)  # sooner, as a worker may not be started yet
        steps = -1
        while (body := self._next(TEXT)) is None:
            now = time.monotonic()
            if attaching:
                waited_for = self._waited_for_here()
                made = sum(each.steps for each in waited_for)
                if not waited_for or made != steps:
                    steps, progress_s = made, now
                elif now > progress_s + self._timeout_s:
                    numbers = ", ".join(str(each.number) for each in waited_for)
                    raise ConfigurationError(
                        f"attach() waits for worker {numbers}, which is in this process too and has made no step for "
                        f"{self._timeout_s:g} s; close() that worker first, then attach again"
                    )
            if now > logged_s + LOG_EVERY_S:
                logged_s = now
                missing = plain(self._status.get("waits_for", "the server's answer"))
                _log.warning("worker %d is waiting for %s", self.number, missing)
        return parse_json(body)

    def receive(self, nbytes: int) -> Tensor:
        """Return `nbytes` bytes."""
        found, place = torch.empty(nbytes, dtype=torch.uint8, device="cpu"), 0
        values = bytes_of(found)
        while place < nbytes:
            body = self._next(DATA)
            if body is not None:
                values[place : place + len(body)] = body
                place += len(body)
        return found

    def close(self, why: str = "has ended") -> None:
        """Leave the server."""
        atexit.unregister(self.close)
        _open.discard(self)
        self._channel.end(why)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)
        self._channel.close()
        self._mark_lost("this worker has left")

    # ------------------------------------------------------------------------------------- receiving

    def _next(self, kind: int) -> memoryview | None:
        """Return the body of the next frame, which must be of this kind; None if none arrives within 0.2 s."""
        try:
            found, body = self._inbox.get(timeout=_POLL_S)
        except Empty:
            self._require_alive()
            return None
        if found == END:
            raise self._loss_error()
        if found != kind:
            raise TransportError("the server sent something that was not requested; attach the model again")
        return body

    def _listen(self) -> None:
        try:
            while True:
                kind, body = self._channel.receive()
                if kind != HEARTBEAT:
                    self._enqueue(kind, body)
                elif len(body):
                    self._status = parse_json(body)
        except EndedError as error:
            self._mark_lost(str(error), error.kind)
        except Exception as error:
            self._mark_lost(reason(error))
        finally:
            self._channel.close()

    def _enqueue(self, kind: int, body: memoryview) -> None:
        while not self._channel.closed:
            try:
                return self._inbox.put((kind, body), timeout=_POLL_S)
            except Full:
                pass

    def _waited_for_here(self) -> list[ServerConnection]:
        """Return the workers that the server waits for, if all of them belong to this process."""
        numbers = self._status.get("numbers") or []
        others = (each for each in list(_open) if each is not self and each._channel.peer == self._channel.peer)
        own = {each.number: each for each in others}
        return [own[each] for each in numbers] if all(each in own for each in numbers) else []

    def _leave_if_abandoned(self) -> None:
        if self.abandoned:
            self.close("its model was deleted")

    # ------------------------------------------------------------------------------------- failures

    def _mark_lost(self, why: str, kind: str = "") -> None:
        if not self._loss_reason:
            self._loss_kind = kind
            self._loss_reason = why or "it has ended"
            with suppress(Full):
                self._inbox.put_nowait((END, memoryview(b"")))  # wakes a waiting thread

    def _require_alive(self) -> None:
        if self._loss_reason and self._inbox.empty():
            raise self._loss_error()

    def _loss_after(self, error: TransportError) -> CommoptError:
        """Return the error to raise: the server's own reason may arrive a moment after the broken connection."""
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)
        self._mark_lost(str(error))
        return self._loss_error()

    def _loss_error(self) -> CommoptError:
        if self.number < 0 and self._loss_kind:
            kind = getattr(errors, self._loss_kind, None)
            if isinstance(kind, type) and issubclass(kind, CommoptError) and kind is not TransportError:
                return kind(self._loss_reason)
            return MismatchError(self._loss_reason)
        why = f"it continues without this worker: {self._loss_reason}" if self._loss_kind else self._loss_reason
        return TransportError(
            f"the parameter server is lost: {why}; restart the process that ended (a server resumes from its "
            f"checkpoint), then attach the model again"
        )
