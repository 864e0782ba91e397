"""`python -m commopt`: the commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from commopt.bandwidth import cli as bandwidth
from commopt.cluster import cli as cluster
from commopt.command_line import Parser
from commopt.doctor import cli as doctor
from commopt.probe import cli as probe
from commopt.run import cli as run
from commopt.simulate import cli as simulate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = Parser(prog="python -m commopt")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    runs = {
        "bandwidth": bandwidth.run,
        "cluster": cluster.run,
        "doctor": doctor.run,
        "probe": probe.run,
        "run": run.run,
        "simulate": simulate.run,
    }
    bandwidth.add_arguments(commands.add_parser("bandwidth", help="time collectives, as nccl-tests does"))
    cluster.add_arguments(commands.add_parser("cluster", help="run a script on emulated nodes on this machine"))
    doctor.add_arguments(commands.add_parser("doctor", help="look for what makes communication slow"))
    probe.add_arguments(commands.add_parser("probe", help="measure what messages and compression cost"))
    run.add_arguments(commands.add_parser("run", help="train with a strategy and leave the script as it is"))
    simulate.add_arguments(commands.add_parser("simulate", help="what a training step takes on a cluster you describe"))
    options = parser.parse_args(arguments)
    return runs[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
