# SPDX-License-Identifier: Apache-2.0
"""Show in four minutes what commopt does: `python -m bench.demo`.

Trains on two emulated nodes joined by a slow link where this machine can emulate them (root and network namespaces),
else on plain local ranks. Prints a table and writes one picture.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from commopt.cluster import EmulatedCluster
from commopt.command_line import CommandParser

_NODES = 2
_RANKS_PER_NODE = 2
# Torch's own hooks and plain PowerSGD beside commopt's presets, 25 s each, to a loss that stock DDP reaches as well.
_CONTEST = (
    "--strategies=ddp,torch_fp16,torch_powersgd,unoverlapped_powersgd,hierarchical,hierarchical_bf16,"
    "hierarchical_quantized:bits=4,hierarchical_powersgd",
    "--seconds=25",
    "--look-every=2",
    "--target-loss=3",
)


def choose_launcher(missing: str | None, rate: str) -> tuple[list[str], dict[str, str], str]:
    """Return the launcher, the variables to set, and the reason; `missing`: see EmulatedCluster.missing."""
    if missing is None:
        shape = ["--nodes", str(_NODES), "--ranks-per-node", str(_RANKS_PER_NODE), "--rate", rate]
        why = f"Emulating {_NODES} nodes x {_RANKS_PER_NODE} ranks joined by {rate} links."
        return ["bench.cluster", *shape], {}, why
    why = (
        f"Not emulating a slow network: {missing}\n"
        f"Running {_NODES * _RANKS_PER_NODE} local ranks instead, declared to be {_NODES} nodes: communication is "
        f"cheap here, so expect little or no gain."
    )
    return *local_ranks(_NODES, _RANKS_PER_NODE), why


def local_ranks(nodes: int, ranks_per_node: int) -> tuple[list[str], dict[str, str]]:
    """Return how to start plain local ranks that pass for several nodes, and what to add to the environment."""
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]  # the host name may not resolve
    torchrun.append(f"--nproc-per-node={nodes * ranks_per_node}")
    return torchrun, {"COMMOPT_RANKS_PER_NODE": str(ranks_per_node), "OMP_NUM_THREADS": "1"}


def main() -> None:
    """Choose a launcher, say which and why, and become it."""
    parser = CommandParser(
        prog="python -m bench.demo", description=__doc__, epilog="Other options go to bench.training."
    )
    parser.add_argument("--rate", default="200mbit", help="of each emulated node's link (default 200mbit)")
    parser.add_argument("--output", type=Path, default=Path("build/demo"), metavar="FOLDER", help="default build/demo")
    options, others = parser.parse_known_args()
    try:
        launcher, environment, why = choose_launcher(EmulatedCluster.missing(options.rate), options.rate)
        options.output.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    files = ["--json", str(options.output / "training.json"), "--plot", str(options.output / "training.png")]
    arguments = ["-m", *launcher, "-m", "bench.training", *files, *_CONTEST, *others]
    settings = "".join(f"{name}={value} " for name, value in environment.items())
    print(f"{why}\n\n{settings}{shlex.join(['python', *arguments])}\n", flush=True)
    # Replaced, not started, so that Ctrl-C reaches the launcher alone and it can take everything down.
    os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, **environment})


if __name__ == "__main__":
    main()
