# SPDX-License-Identifier: Apache-2.0
"""Run a module on ranks that share one GPU and are joined by slow links: `python -m bench.gpu.paced -m MODULE ARGS...`.

    python -m bench.gpu.paced --rate 10gbit --nodes 2 --ranks-per-node 1 -m bench.gpu.exposed --json exposed.json

The ranks use the GPU at the same time, by an MPS daemon of this program's own. Every TCP connection between nodes is
paced by the kernel at the rate (pace.c), and NCCL is held to one such connection each way. With `--device cpu` the same
command rehearses over gloo.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import bench.gpu.paced
from bench.demo import local_ranks
from bench.environment import end_when_told
from bench.gpu.mps import mps
from commopt.cluster import EmulatedLink
from commopt.command_line import CommandParser, whole

RATE_VARIABLE = "COMMOPT_PACE_BYTES"
"""Bytes a second of each link: read by pace.c, and by programs that say at which rate they have measured."""

_SOURCE = Path(__file__).with_name("pace.c")
_END_S = 12
_ONE_CONNECTION = {
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_NSOCKS_PERTHREAD": "1",
    "NCCL_SOCKET_NTHREADS": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}
_QUEUES = 64
"""Of all ranks. Streams of one queue wait for each other, so a rank needs many; but clients of MPS share one pool of
queues (NVIDIA's guide to MPS), and on an H100 a fourth rank that asked for 32 was told that it is out of memory."""
_MOST_QUEUES = 32  # that CUDA gives to one process


def pacing_library(folder: Path) -> Path:
    """Compile pace.c into `folder`; raises CalledProcessError, or OSError where there is no C compiler."""
    library = folder / "pace.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE), "-ldl"], check=True)
    return library


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return the exit status of a launcher. Where this process is interrupted, so is the launcher, which ends ranks."""
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()
        process.wait()
        raise


def _parse_options() -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m bench.gpu.paced", description=(bench.gpu.paced.__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rate", default="10gbit", help="of each link, each way: 1gbit (default 10gbit)")
    parser.add_argument("--nodes", type=whole(1), default=2, help="default 2")
    parser.add_argument("--ranks-per-node", type=whole(1), default=1, help="default 1")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal over gloo")
    parser.add_argument("-m", dest="module", required=True, nargs=argparse.REMAINDER, metavar="MODULE ARGS...")
    options = parser.parse_args()
    try:
        options.bytes_per_s = (EmulatedLink.parse(options.rate).send_bps or 0) // 8
    except ValueError as error:
        parser.error(str(error))
    if not options.module:
        parser.error("-m names no module; write -m bench.gpu.exposed ... at the end")
    return options


def main() -> int:
    """Set everything up, run the module on all ranks, and take everything down."""
    options = _parse_options()
    end_when_told()
    launcher, variables = local_ranks(options.nodes, options.ranks_per_node)
    with tempfile.TemporaryDirectory(prefix="paced-") as name:
        folder = Path(name)
        try:
            no_daemon: AbstractContextManager[dict[str, str]] = nullcontext({})
            with mps(folder) if options.device == "cuda" else no_daemon as shared:
                paced = {"LD_PRELOAD": str(pacing_library(folder)), RATE_VARIABLE: str(options.bytes_per_s)}
                queues = min(_MOST_QUEUES, _QUEUES // (options.nodes * options.ranks_per_node))
                paced["CUDA_DEVICE_MAX_CONNECTIONS"] = str(max(queues, 1))
                environment = {**os.environ, **variables, **_ONE_CONNECTION, **shared, **paced}
                if options.device == "cpu":
                    environment |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
                return run([sys.executable, "-m", *launcher, "-m", "bench.gpu.rank", *options.module], environment)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"bench.gpu.paced: {error}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
