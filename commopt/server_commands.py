# SPDX-License-Identifier: Apache-2.0
"""`python -m commopt scheduler`, `server` and `worker`: the three roles of a parameter server."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from commopt.checkpoint_files import claim, identity, load_whole, previous, save_checkpoint
from commopt.command_line import content_of, number, output_file, refuse, whole
from commopt.errors import CommoptError, ConfigurationError
from commopt.run.script import Script
from commopt.server.scheduler import Scheduler, host_and_port
from commopt.server.secret import LOOPBACK, SECRET_VARIABLE, read_secret
from commopt.server.server import Server
from commopt.server.settings import ADDRESS_VARIABLE
from commopt.server.shared import require_saved

_log = logging.getLogger("commopt")

_LOOK_S = 0.2
_FAILED = 1


@dataclass(frozen=True)
class Command:
    """One of the three commands.

    add_arguments: declares the options.
    run: runs the command and returns its exit status.
    """

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _address(text: str) -> str:
    try:
        host_and_port(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


@contextmanager
def _until_interrupted() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the block, and log to stderr which workers join and leave."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log = logging.getLogger("commopt")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        log.removeHandler(handler)
        for each, handle in before.items():
            signal.signal(each, handle)


def _add_access(parser: argparse.ArgumentParser) -> None:
    host = f"address to listen on (default {LOOPBACK}: this machine only; 0.0.0.0: all machines, which needs a secret)"
    parser.add_argument("--host", default=LOOPBACK, help=host)
    _add_secret(parser)


def _add_secret(parser: argparse.ArgumentParser) -> None:
    file = f"file with the secret of scheduler, server and workers (default: the variable {SECRET_VARIABLE})"
    parser.add_argument("--secret-file", type=content_of(read_secret), metavar="FILE", dest="secret", help=file)


# ------------------------------------------------------------------------------------------- scheduler


def _add_scheduler(parser: argparse.ArgumentParser) -> None:
    parser.description = "Let a server and its workers find each other, and log who leaves. Runs until it is stopped."
    parser.add_argument("--port", type=whole(0, 65535), default=29400, help="port to listen on (default 29400; 0: any)")
    _add_access(parser)
    timeout = "seconds without a heartbeat after which a process counts as gone (default 30)"
    parser.add_argument("--timeout", type=number(), default=30.0, metavar="SECONDS", help=timeout)


def _run_scheduler(options: argparse.Namespace) -> int:
    try:
        scheduler = Scheduler(options.port, options.host, options.timeout, secret=options.secret)
    except ConfigurationError as error:
        return refuse("commopt scheduler", error)
    with _until_interrupted():
        print(f"commopt scheduler: listening on {options.host}, port {scheduler.port}", flush=True)
        while not scheduler.failure:
            time.sleep(_LOOK_S)
    scheduler.close()
    if scheduler.failure:
        sys.stderr.write(f"commopt scheduler: {scheduler.failure}\n")
    return _FAILED if scheduler.failure else 0


# ------------------------------------------------------------------------------------------- server


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.description = "Hold the parameters of workers that train independently. Runs until it is stopped."
    parser.epilog = "The first worker that joins determines the settings and, without a checkpoint, the parameters."
    parser.add_argument("--scheduler", type=_address, required=True, metavar="HOST:PORT")
    workers = "number of workers that start the first round (default 1)"
    parser.add_argument("--workers", type=whole(1), default=1, help=workers)
    _add_access(parser)
    parser.add_argument("--port", type=whole(0, 65535), default=0, help="port to listen on (default 0: any)")
    file = 'resume from FILE if it exists, and write it: torch.load gives "parameters", "momentum" and "round"; the '
    file += "checkpoint before is kept as FILE.previous"
    parser.add_argument("--checkpoint", type=output_file, metavar="FILE", help=file)
    every = "rounds between two checkpoints (default 10)"
    parser.add_argument("--every", type=whole(1), default=10, metavar="ROUNDS", help=every)


def _run_server(options: argparse.Namespace) -> int:
    try:
        checkpoint = _Checkpoint(options.checkpoint, options.every)
        server = Server(
            options.scheduler,
            workers=options.workers,
            host=options.host,
            port=options.port,
            secret=options.secret,
            state_dict=checkpoint.resume,
        )
    except CommoptError as error:
        return refuse("commopt server", error)
    server.on_end = lambda: checkpoint.finish(server)
    with _until_interrupted():
        print(f"commopt server: listening on {options.host}, port {server.port}", flush=True)
        while not server.failure:
            checkpoint.save_if_due(server)
            time.sleep(_LOOK_S)
    server.close()
    return _FAILED if server.failure or checkpoint.failed else 0


class _Checkpoint:
    """The file that a server resumes from and writes, if it has one.

    Raises ConfigurationError for a damaged file, before the server waits for another one to end.

    failed: whether the last state to be saved is not at the path.
    """

    def __init__(self, path: Path | None, every: int) -> None:
        self.failed = self._is_beside = False
        self._path = path
        self._every = every
        self._written = self._tried = 0  # rounds
        self._lock = Lock()  # a server may end, in another thread, while it saves
        self._read()

    def _read(self) -> None:
        self._known = None if self._path is None else identity(self._path)
        self._saved = _load(self._path)

    def resume(self) -> dict[str, Any] | None:
        """Return what was saved last, once no other server is there.

        One that was given up, as it stood still, may go on later. It must see that the file is no longer its own.
        """
        if self._path is not None:
            if claim(self._path) != self._known:
                self._read()  # the server before has ended only now
            self._known = identity(self._path)
        saved, self._saved = self._saved, None
        self._written = self._tried = 0 if saved is None else saved["round"]
        return saved

    def save_if_due(self, server: Server) -> None:
        """Save every so many rounds. A full disk is logged, and the next attempt follows after as many rounds."""
        if server.round >= self._tried + self._every:
            self._save(server)

    def finish(self, server: Server) -> None:
        """Save what is not written yet."""
        if server.round > self._written:
            self._save(server)

    def _save(self, server: Server) -> None:
        """Write the checkpoint, and keep the one before. A kill leaves both files intact."""
        with self._lock:
            if self._path is None:
                return
            saved = server.state_dict()
            number = self._tried = int(saved["round"])
            self.failed = True
            try:
                self._path = self._own_path(self._path, number)
                save_checkpoint(saved, self._path)
            except OSError as error:
                _log.error("the checkpoint of round %d could not be written: %s", number, error)
            except BaseException:
                self._known = identity(self._path)  # interrupted, perhaps after the file got its name
                raise
            else:
                self._known = identity(self._path)
                self._written = number
                self.failed = self._is_beside

    def _own_path(self, path: Path, number: int) -> Path:
        """Return a path where no other server has written, or taken over, what this one has read or written last."""
        while (found := identity(path)) is not None and found != self._known:
            beside = path.resolve().with_name(f"{path.name}.round-{number}")
            _log.error(
                "%s is no longer the file that this server has read or written: another one goes on from it. It stays, "
                "and round %d is written to %s; resume from the one to keep",
                path,
                number,
                beside,
            )
            path, self._known, self._is_beside = beside, None, True
        return path


def _load(path: Path | None) -> dict[str, Any] | None:
    if path is None or not path.exists():
        return None
    try:
        saved = load_whole(path)
        require_saved(saved)
    except Exception as error:  # torch.load raises whatever a damaged file leads to
        why = str(error).removeprefix(f"{path} cannot be read: ").partition("; ")[0]
        before = previous(path)
        instead = f"put {before} in its place, or move it away to start anew" if before.exists() else "move it away"
        raise ConfigurationError(f"{path} cannot be read: {why}; {instead}") from None
    return dict(saved)


# ------------------------------------------------------------------------------------------- worker


def _add_worker(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m commopt worker --scheduler HOST:PORT [-m] SCRIPT ARGS..."
    parser.description = (
        "Run a training script that calls commopt.attach(model, commopt.ParameterServer(period=...)). Without an "
        "address, that call uses this scheduler. Under torchrun the ranks of a DDP model are one worker."
    )
    parser.add_argument("--scheduler", type=_address, required=True, metavar="HOST:PORT")
    _add_secret(parser)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as in python -m")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS...", help="the script and its arguments"
    )


def _run_worker(options: argparse.Namespace) -> int:
    try:
        if not options.script:
            raise ConfigurationError("no script was given; pass one after the options")
        script = Script(options.script[0], tuple(options.script[1:]), options.module)
        script.require_there()
    except ConfigurationError as error:
        return refuse("commopt worker", error)
    os.environ[ADDRESS_VARIABLE] = options.scheduler
    if options.secret is not None:
        os.environ[SECRET_VARIABLE] = options.secret
    script.run()
    return 0


SCHEDULER = Command(_add_scheduler, _run_scheduler)
SERVER = Command(_add_server, _run_server)
WORKER = Command(_add_worker, _run_worker)
