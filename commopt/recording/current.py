"""Which message a thread works for: collectives deep inside an aggregator report to it without being told."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from commopt.recording.clock import Mark
from commopt.recording.message import Message


class _Here(threading.local):
    message: Message | None = None


_here = _Here()
_nothing: AbstractContextManager[None] = nullcontext()


def current() -> Message | None:
    """Return the message this thread works for, or None when nobody records."""
    return _here.message


def running(message: Message | None) -> AbstractContextManager[None]:
    """Make `message` this thread's and mark where its work starts and ends; without an end when the work raises."""
    return _nothing if message is None else _Working(message, marks=True)


def helping(message: Message | None) -> AbstractContextManager[None]:
    """Make `message`, which runs in another thread, this thread's too."""
    return _nothing if message is None else _Working(message, marks=False)


def primitive(level: str, name: str, nbytes: int) -> AbstractContextManager[None]:
    """Record one collective as a span of this thread's message, if there is one."""
    message = _here.message
    return _nothing if message is None else _Primitive(message, level, name, nbytes)


# Classes rather than generators: a third of the time, and these surround every collective.
class _Working(AbstractContextManager[None]):
    __slots__ = ("_before", "_marks", "_message")

    def __init__(self, message: Message, marks: bool) -> None:
        self._message = message
        self._marks = marks
        self._before: Message | None = None

    def __enter__(self) -> None:
        self._before, _here.message = _here.message, self._message
        if self._marks:
            self._message.started = self._message.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _here.message = self._before
        if self._marks and kind is None:
            self._message.finished = self._message.mark()


class _Primitive(AbstractContextManager[None]):
    __slots__ = ("_begin", "_level", "_message", "_name", "_nbytes")

    def __init__(self, message: Message, level: str, name: str, nbytes: int) -> None:
        self._message = message
        self._level = level
        self._name = name
        self._nbytes = nbytes
        self._begin: Mark = None

    def __enter__(self) -> None:
        self._begin = self._message.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        message = self._message
        message.spans.append((self._level, self._name, self._nbytes, self._begin, message.mark()))
