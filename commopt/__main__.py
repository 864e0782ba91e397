"""`python -m commopt`: the commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from commopt.doctor.cli import BAD_INPUT, add_arguments, run


class Parser(argparse.ArgumentParser):
    """An argument parser whose own errors do not look like the doctor's findings (argparse exits with 2)."""

    def error(self, message: str) -> None:  # type: ignore[override]  # does not return either
        """Print one line and leave."""
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = Parser(prog="python -m commopt")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_arguments(commands.add_parser("doctor", help="look for what makes communication slow"))
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
