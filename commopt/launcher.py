# SPDX-License-Identifier: Apache-2.0
"""The ranks that a launcher started: torchrun, Slurm, Open MPI or a PMI tell their number in variables of their own."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from zlib import crc32

from commopt.errors import ConfigurationError

_DEFAULT_PORT = 29500  # torch's own
_FIRST_PORT, _PORTS = 20_000, 10_000  # below those that Linux gives to clients
_LOOPBACK = "127.0.0.1"
_TORCH = ("RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class LaunchedRanks:
    """The place of this process among those that a launcher started.

    source: the launcher's name.
    names: its variables that tell rank and world size.
    local_rank, local_world_size: place among the ranks of this machine, and their number; None if it does not tell.
    address, port: where rank 0 holds the rendezvous store; None if the launcher does not tell.
    one_a_node: whether it started one process on each node, as it does for a launcher inside it.
    """

    source: str
    names: tuple[str, str]
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    address: str | None = None
    port: int | None = None
    one_a_node: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """The variables that torch's env:// rendezvous reads, as far as they are known."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        local = "" if self.local_world_size is None else f", {self.local_world_size} on this node"
        at = "" if self.address is None else f", meeting at {self.address} port {self.port}"
        return f"ranks from {self.source}: {self.world_size}{local}{at}"


def take_ranks(environ: MutableMapping[str, str] = os.environ, meets: bool = True) -> LaunchedRanks | None:
    """Set what torch's env:// rendezvous reads, where it is absent, as this process's launcher tells it.

    Returns the ranks; None for a process that no launcher started, or that it started alone. Call it before
    `init_process_group`. Raises ConfigurationError when two launchers contradict each other, when variables of one are
    incomplete or invalid, and if `meets` when nothing tells where rank 0 is.

    meets: whether the caller meets the other ranks through env://; a training script may have its own way.
    """
    if not meets and "RANK" not in environ and {"WORLD_SIZE", "NODE_RANK"} <= environ.keys():
        return None  # a framework that starts its ranks itself, as Lightning does, and numbers them later
    found = read_ranks(environ)
    if found is None:
        return None
    if found.address is None and meets:
        raise ConfigurationError(
            f"{_told(found, environ)}, and nothing tells where rank 0 is; export MASTER_ADDR, the host of rank 0, for "
            f"all ranks (mpirun -x MASTER_ADDR=HOST, mpiexec -genv MASTER_ADDR HOST), or start them with torchrun"
        )
    if found.rank == 0 and found.address is not None and "MASTER_ADDR" not in environ:
        _require_here(found.address, found)
    for name, value in found.variables.items():
        environ.setdefault(name, value)
    return found


def read_ranks(environ: Mapping[str, str]) -> LaunchedRanks | None:
    """Return the ranks that the launchers' variables tell; None for a process alone.

    Of launchers inside each other, as torchrun in srun, the innermost counts. Raises ConfigurationError as `take_ranks`
    does.
    """
    found = [ranks for read in (_torch, _open_mpi, _pmi, _slurm) if (ranks := read(environ)) is not None]
    if not found:
        _numbered("torchrun", _TORCH, environ)  # not one without the other
        return None
    inner, *outer = found
    _require_same(inner, environ)
    for other in outer:
        if (other.rank, other.world_size) == (inner.rank, inner.world_size):
            inner = _completed(inner, other)
        elif not _inside(inner, other):
            raise ConfigurationError(_contradiction(inner, other, environ))
    given = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if inner.names != _TORCH:
        if inner.world_size == 1:
            return None
        port = _whole("MASTER_PORT", environ) if given[1] else inner.port
        inner = replace(inner, address=given[0] or inner.address, port=port)
    return inner


# ------------------------------------------------------------------------------------------ launchers


def _torch(environ: Mapping[str, str]) -> LaunchedRanks | None:
    """The variables of torch: torchrun's, or those that a script or another launcher has set for it."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    ranks = _numbered("torchrun" if "TORCHELASTIC_RUN_ID" in environ else "RANK and WORLD_SIZE", _TORCH, environ)
    if ranks is None:
        return None
    address, port = environ.get("MASTER_ADDR"), None
    with suppress(ValueError):  # torch says what is wrong with it
        port = int(environ.get("MASTER_PORT", ""))
    local = (environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    rank, size = (int(text) if text.isdecimal() else None for text in local)
    return replace(ranks, local_rank=rank, local_world_size=size, address=address, port=port)


def _open_mpi(environ: Mapping[str, str]) -> LaunchedRanks | None:
    ranks = _numbered("Open MPI", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), environ)
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return None if ranks is None else _placed(ranks, local, environ, job)


def _pmi(environ: Mapping[str, str]) -> LaunchedRanks | None:
    """MPICH, Intel MPI and others whose processes are started by Hydra, or by Slurm's PMI."""
    ranks = _numbered("PMI", ("PMI_RANK", "PMI_SIZE"), environ)
    job = environ.get("PMI_JOBID") or environ.get("SLURM_JOB_ID", "")
    return None if ranks is None else _placed(ranks, ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), environ, job)


def _slurm(environ: Mapping[str, str]) -> LaunchedRanks | None:
    """The tasks of a step. A job script has SLURM_PROCID and SLURM_NTASKS as well, and is one process: no step."""
    of_steps = ("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
    if "SLURM_PROCID" not in environ or not any(name in environ for name in of_steps):
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    ranks = _numbered("Slurm", ("SLURM_PROCID", size), environ)
    if ranks is None:
        return None
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    tasks, node = _tasks_of_nodes(text), environ.get("SLURM_NODEID", "")
    here = tasks[int(node)] if node.isdecimal() and int(node) < len(tasks) else None
    local = _whole("SLURM_LOCALID", environ) if "SLURM_LOCALID" in environ else None
    # With tasks in an arbitrary order the first host of the list need not have rank 0.
    known = "" if environ.get("SLURM_DISTRIBUTION") == "arbitrary" else environ.get("SLURM_STEP_NODELIST", "")
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    return replace(
        ranks,
        local_rank=local,
        local_world_size=here,
        address=_LOOPBACK if here == ranks.world_size else first_host(known),
        port=_port_of(job),
        one_a_node=set(tasks) == {1},
    )


def _numbered(source: str, names: tuple[str, str], environ: Mapping[str, str]) -> LaunchedRanks | None:
    """Return the rank and the world size in two variables; None if there is neither."""
    there = [name for name in names if name in environ]
    if not there:
        return None
    if len(there) == 1:
        (absent,) = set(names) - set(there)
        raise ConfigurationError(
            f"{there[0]}={environ[there[0]]} is set and {absent} is not; {source} sets both: start every rank with it, "
            f"or unset {there[0]}"
        )
    rank, world_size = (_whole(name, environ) for name in names)
    if rank >= world_size:
        raise ConfigurationError(
            f"{names[0]}={rank} and {names[1]}={world_size}: ranks count from 0 to one less than their number; start "
            f"every rank with {source}, or unset both"
        )
    return LaunchedRanks(source, names, rank, world_size)


def _placed(ranks: LaunchedRanks, local: tuple[str, str], environ: Mapping[str, str], job: str) -> LaunchedRanks:
    """Add the place on this machine, and the address if all ranks are on it, or if Slurm told mpirun the hosts."""
    rank, size = (_whole(name, environ) if name in environ else None for name in local)
    address = _LOOPBACK if size == ranks.world_size else first_host(environ.get("SLURM_JOB_NODELIST", ""))
    return replace(ranks, local_rank=rank, local_world_size=size, address=address, port=_port_of(job))


def first_host(nodes: str) -> str | None:
    """Return the first host of Slurm's list: n3 of "n[3,5-7],m1", rack2-n01 of "rack[2-3]-n[01-04]"; None of ""."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "") or None


def _tasks_of_nodes(text: str) -> list[int]:
    """Return Slurm's number of tasks for each node: [2, 2, 1] of "2(x2),1"; [] if it is none."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if match is None:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _port_of(job: str) -> int:
    """Return a port for the store of a job, the same on all ranks; jobs that share a host get different ones."""
    return _FIRST_PORT + crc32(job.encode()) % _PORTS if job.strip(".") else _DEFAULT_PORT


def _whole(name: str, environ: Mapping[str, str]) -> int:
    text = environ[name]
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigurationError(
            f"{name}={text[:40]!r} is not a whole number; a launcher sets it: start every rank with torchrun, srun or "
            f"mpirun, or unset {name}"
        )
    return int(text)


# ------------------------------------------------------------------------------------------ two of them


def _inside(inner: LaunchedRanks, outer: LaunchedRanks) -> bool:
    """Return whether the ranks can be those of a launcher that `outer` started.

    A world of one where the outer launcher started more is a slip: torchrun or mpirun in every one of its tasks, or
    variables that came along from elsewhere. mpirun and Hydra let Slurm start one process on each node, and start
    their ranks from these.
    """
    if inner.names == _TORCH:
        return inner.world_size > 1 or outer.world_size == 1
    return outer.names[0] == "SLURM_PROCID" and outer.one_a_node and inner.world_size >= outer.world_size


def _completed(inner: LaunchedRanks, other: LaunchedRanks) -> LaunchedRanks:
    """Return the ranks with what only the other launcher, which started the same ones, tells of them."""
    return replace(
        inner,
        local_rank=other.local_rank if inner.local_rank is None else inner.local_rank,
        local_world_size=inner.local_world_size or other.local_world_size,
        address=inner.address or other.address,
        port=inner.port or other.port,
    )


def _require_same(inner: LaunchedRanks, environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError if RANK or WORLD_SIZE, of which only one is set, is not the launcher's."""
    if inner.names == _TORCH:
        return
    for name, value in zip(_TORCH, (inner.rank, inner.world_size), strict=True):
        if name in environ and _whole(name, environ) != value:
            raise ConfigurationError(
                f"{name}={environ[name]} is set, and {inner.source} says {_told(inner, environ)}; unset {name}, or "
                f"start every rank with torchrun"
            )


def _told(ranks: LaunchedRanks, environ: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={environ[name]}" for name in ranks.names)


def _contradiction(inner: LaunchedRanks, outer: LaunchedRanks, environ: Mapping[str, str]) -> str:
    mistaken = inner if inner.names == _TORCH else outer  # anybody sets torch's
    return (
        f"{inner.source} says {_told(inner, environ)}, and {outer.source} {_told(outer, environ)}: these are different "
        f"worlds; start the ranks with one of them (inside srun, torchrun and mpirun need --ntasks-per-node=1 and all "
        f"nodes), or unset {' and '.join(mistaken.names)} where they came along by mistake"
    )


def _require_here(address: str, ranks: LaunchedRanks) -> None:
    """Raise ConfigurationError on rank 0 unless `address`, which its launcher gave, is one of this machine."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.bind(place)
    except OSError as error:
        raise ConfigurationError(
            f"rank 0 is on {socket.gethostname()}, and {ranks.source} names {address} as the first host, which is no "
            f"address of it ({error.strerror or error}); export MASTER_ADDR, the host of rank 0, for all ranks"
        ) from None
