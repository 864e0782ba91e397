"""The circumstances of a probe: when, where, with what."""

from __future__ import annotations

import os
import platform
import shlex
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import PurePath

import torch

from commopt.cost import Header
from commopt.groups import Membership

_TELLING = ("BENCH_CLUSTER_RATE", "COMMOPT_RANKS_PER_NODE", "OMP_NUM_THREADS")


def read_header(membership: Membership | None, device: torch.device, command: str) -> Header:
    """Return the circumstances; `command` as `command_line` has it."""
    hosts: tuple[str, ...] = (socket.gethostname(),)
    nodes: tuple[int, ...] = (1,)
    backend = ""
    if membership is not None:
        hosts, backend = membership.cluster.names, membership.team.backend(device)
        nodes = tuple(len(node) for node in membership.cluster.nodes)
    return Header(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        hosts=hosts,
        nodes=nodes,
        backend=backend,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
        torch=f"{torch.__version__}, Python {platform.python_version()}",
        command=command,
    )


def command_line(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """Return how the probe was started: with the variables that tell what was measured, and no folder of this machine.

    BENCH_CLUSTER_RATE is the rate of an emulated network.
    """
    variables = [f"{name}={environ[name]}" for name in _TELLING if environ.get(name)]
    shown = [PurePath(argument).name if "/" in argument else argument for argument in arguments]
    return " ".join([*variables, shlex.join(["python", "-m", "commopt", "probe", *shown])])
