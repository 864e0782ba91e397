# SPDX-License-Identifier: Apache-2.0
"""A parameter server's processes in a run: a rank of a worker, and the server, in whose rounds a fault may strike."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commopt import server_commands
from commopt.chaos.journal import Journal
from commopt.chaos.rank import SERVER, Observer, RunOrder, Striker, digest_of, sample
from commopt.errors import ConfigurationError
from commopt.hooks import attach
from commopt.run.models import Trained
from commopt.server.server import Server
from commopt.server.settings import ParameterServer
from commopt.server.shared import Delta, SharedParameters
from commopt.server.worker import Worker, worker_of


def settings_of(strategy: str, address: str | None = None) -> ParameterServer:
    """Return the settings in "parameter_server:period=4:compressor=OneBit()". Raises ConfigurationError for others.

    address: the scheduler's; None: that in the environment.
    """
    options = {}
    for setting in strategy.split(":")[1:]:
        name, equals, value = setting.partition("=")
        if not equals or name == "address":
            raise ConfigurationError(f"{setting!r} in {strategy!r} is no option=value, for example {SERVER}:period=4")
        options[name] = value
    try:
        return replace(ParameterServer.read(options), address=address)
    except (SyntaxError, TypeError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{strategy!r} does not describe a ParameterServer: {error}") from None


class WorkerObserver(Observer):
    """Joins the server with the first DDP model that is trained, unless the script did, and notes each pull.

    A model is one worker, whichever ranks it has.
    """

    _worker: Worker | None = None
    _group: dist.ProcessGroup | None = None
    _pulls = 0
    _pulling = False

    def attach_to(self, model: nn.Module) -> None:
        """Join with a model."""
        if self.trained or not torch.is_grad_enabled():
            return
        module = model.module if isinstance(model, DistributedDataParallel) else model
        # Gradients are averaged by torch itself. When the last reference to a gloo group goes, torch waits with the GIL
        # for threads that may need it to free what they have sent. They have done so when this reference goes.
        self._group = getattr(model, "process_group", None)
        self._parameters = list(model.parameters())
        self._worker = worker_of(module) or attach(model, settings_of(self._choice.strategy))
        self._watch(self._worker)
        self._note_pull(self._worker)
        self.trained.append(Trained(type(module).__name__, dist.get_rank()))

    def places(self) -> list[Any]:
        """Return the pull that is under way."""
        return [self._pulls] if self._pulling else []

    def _watch(self, worker: Worker) -> None:
        pull = worker.pull

        @wraps(pull)
        def watched() -> None:
            self._pulls, self._pulling = self._pulls + 1, True
            try:
                pull()
            finally:
                self._pulling = False
            self._note_pull(worker)

        worker.pull = watched  # type: ignore[method-assign]

    def _note_pull(self, worker: Worker) -> None:
        """Note the bits, which all workers of this round have, and the work of this worker in them."""
        done = worker.done if worker.number > 0 else None  # of a DDP model the first rank counts
        self.journal.write("pulled", round=worker.round, digest=self.digest(), done=done)


class _ServerStriker(Striker):
    def _diskfull(self, number: int, gradient: Tensor) -> None:
        """Let no checkpoint fit on the disk from now on; the server saves by itself."""
        self.shrink_disk()


def serve_workers(order: RunOrder, rank: int, scheduler: str, workers: int) -> int:
    """Be the server until SIGTERM, as `commopt server` is, with a journal; return the exit status.

    A fault that strikes the server strikes as it closes the round of the step in which a rank would be struck.
    """
    folder = Path(order.folder)
    files = folder / "server"
    files.mkdir()
    journal = Journal(folder / f"rank{rank}.jsonl")
    journal.write("begin", pid=os.getpid(), role="server")
    logging.getLogger("commopt").propagate = False
    strikes = order.fault and order.victim == rank
    rounds = _watch_rounds(order, _ServerStriker(order, journal, files) if strikes else None)
    sample(journal, lambda: list(rounds[-1:]))
    ended = _watch_end()
    parser = argparse.ArgumentParser()
    server_commands.SERVER.add_arguments(parser)
    where = ["--scheduler", scheduler, "--host", scheduler.rpartition(":")[0]]
    what = ["--workers", str(workers), "--checkpoint", str(files / "model.pt"), "--every", "1"]
    try:
        status = server_commands.SERVER.run(parser.parse_args([*where, *what]))
    except Exception as error:
        journal.write("end", error=f"{type(error).__name__}: {error}", named=None)
        raise
    if not ended or ended[0].failure:
        failure = ended[0].failure if ended else "it could not begin"
        journal.write("end", error=failure, named=failure)
        return status
    told = ended[0].state_dict()
    journal.write("end", digest=digest_of(told["parameters"].values()), done=told["done"])
    return status


def _watch_end() -> Sequence[Server]:
    """Return the servers of this process that have ended."""
    ended: list[Server] = []
    close = Server.close

    @wraps(close)
    def watched(server: Server, why: str = "") -> None:
        close(server, why)
        ended.append(server)

    Server.close = watched  # type: ignore[method-assign, assignment]
    return ended


def _watch_rounds(order: RunOrder, strike: Callable[[int, Tensor], Tensor | None] | None) -> Sequence[int]:
    """Let the fault strike as rounds close; return their numbers, as far as they have come."""
    closed: list[int] = []
    moments = order.moments
    close = SharedParameters.close

    @wraps(close)
    def watched(shared: SharedParameters, deltas: Sequence[Delta], bases: Collection[int]) -> None:
        if strike is not None and moments and (shared.round + 1) * shared.settings.period >= moments[0]:
            del moments[0]
            strike(len(order.moments) - len(moments) - 1, shared.exact[0])
        close(shared, deltas, bases)
        closed.append(shared.round)

    SharedParameters.close = watched  # type: ignore[method-assign, assignment]
    return closed
