# SPDX-License-Identifier: Apache-2.0
"""Which tests run where (selection.py); and in several processes (`pytest -n 4`): which test may run beside which."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import speed
from tests.promises import gate, promised
from tests.selection import CHOSEN, IN_GATE, Stopwatch, left_out, longest_first, read

if TYPE_CHECKING:
    from tests.emulator import Emulator

_FOLDER = "commopt_locks"


def _is(mark: str, item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker(mark) is not None


class Locks:
    """Runs a test marked `alone` while no process runs another, and of those marked `cluster` one at a time.

    These are locks of files: when a process dies, the kernel releases them.
    """

    def __init__(self, folder: Path) -> None:
        names, flags = ("next", "running", "cluster"), os.O_CREAT | os.O_WRONLY
        self._next, self._running, self._cluster = (os.open(folder / name, flags) for name in names)
        self._keeps = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest-timeout: waiting is not the test's time
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        if not self._keeps:
            fcntl.flock(self._next, fcntl.LOCK_EX)  # while a test waits to be alone, no other may begin
            fcntl.flock(self._running, fcntl.LOCK_EX if _is("alone", item) else fcntl.LOCK_SH)
            fcntl.flock(self._next, fcntl.LOCK_UN)
        if _is("cluster", item):
            fcntl.flock(self._cluster, fcntl.LOCK_EX)
        try:
            return (yield)
        finally:
            fcntl.flock(self._cluster, fcntl.LOCK_UN)
            self._keeps = _is("alone", item) and _is("alone", nextitem)
            if not self._keeps:
                fcntl.flock(self._running, fcntl.LOCK_UN)


_LIMIT_S = 600.0  # of a test


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads its limit
def pytest_configure(config: pytest.Config) -> None:
    """Scale limits with the machine's speed; give the processes of pytest-xdist locks, in a folder of the first one."""
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is None:
        speed.measure()
    if getattr(config.option, "timeout", None) is None:
        config.option.timeout = speed.limit(_LIMIT_S)
    if worker is not None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: each has a processor, not all of them
        config.pluginmanager.register(Locks(Path(worker[_FOLDER])))
    elif getattr(config.option, "numprocesses", None):
        folder = tempfile.mkdtemp(prefix="locks-")
        setattr(config, _FOLDER, folder)
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.pluginmanager.register(Stopwatch())


@pytest.fixture(scope="session")
def emulator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """Run device code on the CPU. It is built once for all processes."""
    from tests.emulator import Emulator  # which loads torch

    worker: dict[str, Any] | None = getattr(request.config, "workerinput", None)
    folder = tmp_path_factory.mktemp("emulator") if worker is None else Path(worker[_FOLDER], "emulator")
    folder.mkdir(exist_ok=True)
    return Emulator(folder)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist the folder."""
    node.workerinput[_FOLDER] = getattr(node.config, _FOLDER)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around `-m`, which chooses by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Mark what `make test` leaves out as slow; let tests that must be alone come first, in one go, then long ones."""
    durations = read()
    out = left_out([item for item in items if not _is("slow", item)], durations, promised())
    of_the_gate = gate()
    for item in items:
        if item.nodeid in out:
            item.add_marker("slow")
        name = item.nodeid.removeprefix("tests/")
        if _is("slow", item) and not of_the_gate.isdisjoint({name, name.partition("[")[0]}):
            item.add_marker("gate")
    for key, chosen in ((CHOSEN, lambda item: not _is("slow", item)), (IN_GATE, lambda item: _is("gate", item))):
        config.stash[key] = {item.nodeid.removeprefix("tests/") for item in items if chosen(item)}
    yield
    if processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        items[:] = longest_first(items, durations, processes)
    items.sort(key=lambda item: not _is("alone", item))


@pytest.fixture(params=["avx2", "baseline"])
def cpu_target(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield the compiled CPU kernels, for every kind of processor that this one can stand for."""
    from commopt.kernels import loader

    kernels = loader.cpu_kernels()
    if kernels is None:
        pytest.skip("commopt was installed without a C++ compiler")
    before = kernels.target()
    try:
        kernels.use(request.param)
    except ValueError:
        pytest.skip("not this processor's")
    yield kernels
    kernels.use(before)
