# SPDX-License-Identifier: Apache-2.0
"""`commopt` and `python -m commopt`: the commands, each imported when it is called."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib import import_module

from commopt.command_line import CommandParser, refuse
from commopt.errors import ConfigurationError
from commopt.launcher import take_ranks
from commopt.version import __version__, revision

COMMANDS = {
    "bandwidth": "time collectives, as nccl-tests does",
    "chaos": "let faults strike a training run, and judge how it ends",
    "cluster": "run a script on emulated nodes on this machine",
    "doctor": "find the causes of slow communication, and measure every link",
    "probe": "measure the cost of messages and compression",
    "run": "train with a strategy, without changes to the script",
    "scheduler": "let a parameter server and its workers find each other",
    "server": "hold the parameters of workers that train independently",
    "simulate": "predict the time of a training step on a cluster you describe",
    "worker": "run a script as a worker of a parameter server",
}


class _Version(argparse.Action):
    """Prints versions and kernels, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> None:
        """Print and exit."""
        import torch

        from commopt.kernels.loader import kernels_in_use

        made = f" at {known}" if (known := revision()) else ""
        print(f"commopt {__version__}{made}, torch {torch.__version__}, Python {platform.python_version()}")
        try:
            found = kernels_in_use()
        except ConfigurationError as error:
            parser.error(str(error))
        for device, kernels in found.items():
            print(f"kernels on the {device}: {kernels}")
        parser.exit()


_ROLES = ("scheduler", "server", "worker")  # of a parameter server
_MEET = ("bandwidth", "doctor", "probe")  # several ranks are one run of these, and meet by themselves
_RUN_SCRIPTS = ("run", "worker")  # in several ranks, which the script lets meet


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = CommandParser(prog="commopt")
    about = "show the versions and the kernels for this machine's CPU and GPU, and exit"
    parser.add_argument("--version", action=_Version, nargs=0, help=about)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {name: commands.add_parser(name, help=purpose) for name, purpose in COMMANDS.items()}
    name = next((word for word in words if word in COMMANDS), None)  # argparse refuses words before it
    if name is None:
        parser.parse_args(words)
        raise AssertionError("argparse accepts no line without a command")
    module = import_module("commopt.server_commands" if name in _ROLES else f"commopt.{name}.cli")
    command = getattr(module, name.upper()) if name in _ROLES else module
    command.add_arguments(parsers[name])
    problem = _take_ranks(name)  # before parsing: the first rank checks files
    options = parser.parse_args(words)
    return int(command.run(options)) if problem is None else refuse(f"commopt {name}", problem)


def _take_ranks(name: str) -> ConfigurationError | None:
    """Let a command know the ranks that its launcher started, and name them on the first; return what is wrong."""
    if name not in (*_MEET, *_RUN_SCRIPTS):
        return None
    try:
        ranks = take_ranks(meets=name in _MEET)
    except ConfigurationError as error:
        return error
    if ranks is not None and ranks.rank == 0 and ranks.world_size > 1:
        print(f"commopt {name}: {ranks}", file=sys.stderr)
    return None


if __name__ == "__main__":
    sys.exit(main())
