# SPDX-License-Identifier: Apache-2.0
"""`python -m topology`: show this machine, or a recorded topology."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from topology.files import read_any
from topology.machine import discover
from topology.model import Topology, TopologyError
from topology.network import Network, network_text
from topology.text import as_json, as_text

_LONGEST = 600


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line, as for all refused input, and exit."""
        self.exit(2, f"{self.prog}: {_one_line(message)}; see {self.prog} --help\n")


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="python -m topology",
        description="Show GPUs, network cards and their connections, of this machine or of a recorded topology.",
        epilog="Exit status: 0, or 2 with one line on stderr when the input is refused.",
    )
    parser.add_argument("command", nargs="?", choices=["show"], help="show a file instead of this machine")
    parser.add_argument("file", nargs="?", help="NCCL topology XML, nvidia-smi topo -m, or a probe's JSON")
    parser.add_argument("--json", action="store_true", help="print JSON: null for unknown, speeds in Gb/s")
    parser.add_argument("--plot", metavar="FILE", help="draw a picture: .svg, .png or .pdf (needs matplotlib)")
    parser.add_argument("--root", metavar="DIR", default="/", help="read a copy of another machine's /sys and /proc")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    if options.command and options.file is None:
        parser.error("show needs a file")
    if options.command and options.root != "/":
        parser.error("--root is for a machine, show for a file; give one of them")
    try:
        _run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # after `| head`; Python would complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except TopologyError as error:
        return _refused(str(error))
    except OSError as error:
        return _refused(f"{error.filename}: {error.strerror}" if error.strerror else str(error))
    return 0


def _refused(why: str) -> int:
    print(f"topology: {_one_line(why)}", file=sys.stderr)
    return 2


def _run(options: argparse.Namespace) -> None:
    found = read_any(options.file) if options.command else _machine(Path(options.root))
    if options.plot:
        _draw(found, Path(options.plot))
    if options.json:
        print(json.dumps(asdict(found) if isinstance(found, Network) else as_json(found), indent=2))
    else:
        if isinstance(sys.stdout, io.TextIOWrapper):  # file names may not fit a terminal's encoding
            sys.stdout.reconfigure(errors="replace")
        print(*(network_text(found) if isinstance(found, Network) else as_text(found)), sep="\n")


def _draw(found: Topology | Network, path: Path) -> None:
    """Draw into a file. Raises TopologyError with the file's name if it cannot be written."""
    from topology.network_picture import draw_network
    from topology.picture import draw

    if path.is_fifo():  # writing would block until another process reads
        raise TopologyError(f"{path} cannot be written: it is a pipe; pass the name of a file")
    try:
        if isinstance(found, Network):
            draw_network(found, path)
        else:
            draw(found, path)
    except TopologyError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TopologyError(f"{path} cannot be written: {reason}; pass a file in a folder that exists") from None


def _machine(root: Path) -> Topology:
    if not root.is_dir():
        raise TopologyError(f"{root}: is not a folder; pass the folder with the machine's sys and proc")
    return discover(root)


if __name__ == "__main__":
    sys.exit(main())
