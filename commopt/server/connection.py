# SPDX-License-Identifier: Apache-2.0
"""A worker's connection to the server, which a thread listens to: its loss is noticed whatever the worker does."""

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
from commopt.server.link import BEAT, DATA, END, SAY_S, TEXT, EndedError, bytes_of, plain, reason, words_of
from commopt.server.scheduler import find_server
from commopt.server.secret import given_secret
from commopt.server.settings import ADDRESS_VARIABLE, ParameterServer
from commopt.version import __version__

_log = logging.getLogger("commopt")

_FRAMES = 64  # that may have come before they are asked for
_LOOK_S = 0.2
_PARTING_S = 2.0

_open: WeakSet[Connection] = WeakSet()  # of this process


class Connection:
    """Joins with a model's parcels; sends their values if the server has none yet.

    abandoned: to be set when the model is gone; then it leaves. steps: how many the model is said to have made.
    Raises TransportError when there is no scheduler or no server, MismatchError when the server refuses this worker,
    ConfigurationError without an address, or with another secret.
    """

    def __init__(self, settings: ParameterServer, parcels: Sequence[ParameterBucket]) -> None:
        self.abandoned: bool = False
        address = settings.address or os.environ.get(ADDRESS_VARIABLE)
        if not address:
            raise ConfigurationError(
                f"ParameterServer() has no address and {ADDRESS_VARIABLE} is not set; pass the scheduler's host:port"
            )
        if _open:
            gc.collect()  # whose model is gone leaves before another one joins
        for each in list(_open):
            if each.abandoned:
                each.close("its model was deleted")
        self.number = -1
        self.steps = 0
        self._lost = self._lost_kind = ""
        self._status: dict[str, Any] = {}
        self._inbox: Queue[tuple[int, memoryview]] = Queue(_FRAMES)
        self._link, self._timeout_s = find_server(address, given_secret(None))
        self._thread = Thread(target=self._listen, name="commopt-worker", daemon=True)
        try:
            shapes = [
                [(name, list(each.shape), str(each.dtype)) for name, each in parcel.tensors.items()]
                for parcel in parcels
            ]
            self.ask("join", version=__version__, settings=settings.as_text(), parcels=shapes)
            self._thread.start()
            self._link.beat_regularly(self._leave_if_abandoned)
            answer = self.answer()
            self.number = int(answer["number"])
            for parcel in parcels if answer["sends"] else ():
                self.send(parcel.values(copy=False).cpu())
        except BaseException:
            self.close("could not join")
            raise
        _open.add(self)
        atexit.register(self.close)

    def ask(self, kind: str, **request: Any) -> None:
        """Send a request."""
        self._require_alive()
        try:
            self._link.say(kind=kind, **request)
        except TransportError as error:
            raise self._loss_after(error) from error

    def send(self, payload: Tensor) -> None:
        """Send a tensor of the CPU."""
        try:
            self._link.send(payload)
        except TransportError as error:
            raise self._loss_after(error) from error

    def answer(self, *, attaching: bool = False) -> dict[str, Any]:
        """Wait for the answer to the last request, as long as the server is there; say for whom every 30 s.

        attaching: raise ConfigurationError where those waited for are workers of this process that stand still.
        """
        moved = time.monotonic()
        said = moved - (SAY_S * 2 / 3 if attaching else 0)  # often for a worker that nobody has started
        steps = -1
        while (body := self._next(TEXT)) is None:
            now = time.monotonic()
            if attaching:
                waited_for = self._of_this_process()
                made = sum(each.steps for each in waited_for)
                if not waited_for or made != steps:
                    steps, moved = made, now
                elif now > moved + self._timeout_s:
                    numbers = ", ".join(str(each.number) for each in waited_for)
                    raise ConfigurationError(
                        f"attach() waits for worker {numbers}, which is in this process too and has made no step for "
                        f"{self._timeout_s:g} s; close() what it returned before, then attach again"
                    )
            if now > said + SAY_S:
                said = now
                whom = plain(self._status.get("waits_for", "the server's answer"))
                _log.warning("worker %d is waiting for %s", self.number, whom)
        return words_of(body)

    def receive(self, nbytes: int) -> Tensor:
        """Return so many bytes."""
        found, place = torch.empty(nbytes, dtype=torch.uint8, device="cpu"), 0
        values = bytes_of(found)
        while place < nbytes:
            body = self._next(DATA)
            if body is not None:
                values[place : place + len(body)] = body
                place += len(body)
        return found

    def close(self, why: str = "has ended") -> None:
        """Leave."""
        atexit.unregister(self.close)
        _open.discard(self)
        self._link.part(why)
        if self._thread.is_alive():
            self._thread.join(_PARTING_S)
        self._link.close()
        self._lose("this worker has left")

    # ------------------------------------------------------------------------------------- what comes

    def _next(self, kind: int) -> memoryview | None:
        """Return the next frame, which must be of a kind; None when none has come for a moment."""
        try:
            found, body = self._inbox.get(timeout=_LOOK_S)
        except Empty:
            self._require_alive()
            return None
        if found == END:
            raise self._loss()
        if found != kind:
            raise TransportError("the server has sent something else than was asked for; attach the model again")
        return body

    def _listen(self) -> None:
        try:
            while True:
                kind, body = self._link.receive()
                if kind == BEAT:
                    self._status = words_of(body)
                else:
                    self._keep(kind, body)
        except EndedError as error:
            self._lose(str(error), error.kind)
        except Exception as error:
            self._lose(reason(error))
        finally:
            self._link.close()

    def _keep(self, kind: int, body: memoryview) -> None:
        while not self._link.closed:
            try:
                return self._inbox.put((kind, body), timeout=_LOOK_S)
            except Full:
                pass

    def _of_this_process(self) -> list[Connection]:
        """Return the workers that are waited for, if all of them are of this process."""
        numbers = self._status.get("numbers") or []
        own = {each.number: each for each in list(_open) if each is not self and each._link.peer == self._link.peer}
        return [own[each] for each in numbers] if all(each in own for each in numbers) else []

    def _leave_if_abandoned(self) -> None:
        if self.abandoned:
            self.close("its model was deleted")

    # ------------------------------------------------------------------------------------- what has failed

    def _lose(self, why: str, kind: str = "") -> None:
        if not self._lost:
            self._lost_kind = kind
            self._lost = why or "it has ended"
            with suppress(Full):
                self._inbox.put_nowait((END, memoryview(b"")))  # wakes who waits

    def _require_alive(self) -> None:
        if self._lost and self._inbox.empty():
            raise self._loss()

    def _loss_after(self, error: TransportError) -> CommoptError:
        """Return the loss: what the server says of it comes a moment after what it broke."""
        if self._thread.is_alive():
            self._thread.join(_PARTING_S)
        self._lose(str(error))
        return self._loss()

    def _loss(self) -> CommoptError:
        if self.number < 0 and self._lost_kind:
            kind = getattr(errors, self._lost_kind, None)
            if isinstance(kind, type) and issubclass(kind, CommoptError) and kind is not TransportError:
                return kind(self._lost)
            return MismatchError(self._lost)
        why = f"it goes on without this worker: {self._lost}" if self._lost_kind else self._lost
        return TransportError(
            f"the parameter server is lost: {why}; start what has ended again (the server goes on from its "
            f"checkpoint), then attach the model again"
        )
