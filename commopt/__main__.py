# SPDX-License-Identifier: Apache-2.0
"""`commopt` and `python -m commopt`: the commands, each imported when it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from commopt.command_line import Parser

COMMANDS = {
    "bandwidth": "time collectives, as nccl-tests does",
    "cluster": "run a script on emulated nodes on this machine",
    "doctor": "look for what makes communication slow",
    "probe": "measure what messages and compression cost",
    "run": "train with a strategy and leave the script as it is",
    "scheduler": "let a parameter server and its workers find each other",
    "server": "hold the parameters of workers that train by themselves",
    "simulate": "what a training step takes on a cluster you describe",
    "worker": "run a script as a worker of a parameter server",
}
_ROLES = ("scheduler", "server", "worker")  # of one package


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = Parser(prog="commopt")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {name: commands.add_parser(name, help=purpose) for name, purpose in COMMANDS.items()}
    name = next((word for word in words if word in COMMANDS), None)  # what stands before it, argparse refuses
    if name is None:
        parser.parse_args(words)
        raise AssertionError("argparse takes no line without a command")
    module = import_module(f"commopt.{'server' if name in _ROLES else name}.cli")
    command = getattr(module, name.upper()) if name in _ROLES else module
    command.add_arguments(parsers[name])
    return int(command.run(parser.parse_args(words)))


if __name__ == "__main__":
    sys.exit(main())
