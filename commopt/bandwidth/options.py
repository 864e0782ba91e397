# SPDX-License-Identifier: Apache-2.0
"""The command line: flags of nccl-tests, and ours beside them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from commopt.bandwidth.collectives import COLLECTIVES, COMMOPT, TORCH, find_aggregator, known_aggregators
from commopt.collectives.communicator import Op
from commopt.command_line import parse_nbytes, whole
from commopt.errors import ConfigurationError, did_you_mean
from commopt.probe.collectives import Collective, sizes

DTYPES: Mapping[str, torch.dtype] = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "torchrun ... -m commopt bandwidth [OPTIONS]"
    parser.description = "Time a collective over all ranks and print nccl-tests' table."
    parser.epilog = "Exit status: 0, 1 when a result was wrong, 2 for settings that cannot work, 3 when a rank failed."
    names = ", ".join(sorted(known_aggregators()))
    with_what = f"what to time it with: {TORCH} (the backend's own collective) or, for all_reduce, one of {names} "
    with_what += f"(default hierarchical); {COMMOPT} for other collectives"
    nodes = "declare blocks of L ranks to be nodes (default: ask hosts)"
    add: Any = parser.add_argument
    size = {"type": parse_nbytes, "metavar": "BYTES"}
    add("-b", dest="min_nbytes", default="32M", **size, help="smallest size: 8, 4K, 32M, 1G (default 32M)")
    add("-e", dest="max_nbytes", default="32M", **size, help="largest size (default 32M)")
    add("-f", dest="step_factor", type=whole(1), default=1, metavar="N", help="multiply sizes by N (default: add -i)")
    add("-i", dest="step_nbytes", default="1M", **size, help="add this to each size (default 1M)")
    add("-n", dest="iterations", type=whole(1), default=20, metavar="N", help="timed iterations (default 20)")
    add("-w", dest="warm_up_iterations", type=whole(0, 10**6), default=5, metavar="N", help="untimed ones (default 5)")
    add("-c", dest="check", type=int, choices=(0, 1), default=1, help="check results before timing (default 1)")
    add("-d", dest="type_name", choices=DTYPES, default="float", help="element type (default float)")
    add("-o", dest="op", choices=("sum", "avg"), default="sum", help="reduction (default sum)")
    add("--collective", choices=COLLECTIVES, default="all_reduce", help="what to time (default all_reduce)")
    add("--aggregator", metavar="NAME[,NAME...]", help=with_what)
    add("--wide", action="store_true", help="all of nccl-tests' columns with ours beside them, for 200 columns")
    add("--ranks-per-node", type=whole(1), metavar="L", help=nodes)
    add("--json", type=Path, metavar="FILE", help="also write environment and results to FILE")


@dataclass(frozen=True)
class BandwidthOptions:
    """The options of the command; all ranks must have the same."""

    min_nbytes: int
    max_nbytes: int
    step_factor: int
    step_nbytes: int
    iterations: int
    warm_up_iterations: int
    check: bool
    type_name: str
    op: Op
    collective: Collective
    aggregators: tuple[str, ...]
    ranks_per_node: int | None
    json: Path | None
    wide: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The elements' type."""
        return DTYPES[self.type_name]

    def steps_nbytes(self) -> Iterator[int]:
        """Return every size of the sweep, as nccl-tests steps: times `-f` when that is above 1, else plus `-i`."""
        return sizes(self.min_nbytes, self.max_nbytes, self.step_factor, self.step_nbytes)


def options_of(given: argparse.Namespace) -> BandwidthOptions:
    """Check the options of a command line; raises ConfigurationError."""
    values = {name: value for name, value in vars(given).items() if name in BandwidthOptions.__dataclass_fields__}
    collective = COLLECTIVES[given.collective]
    names = given.aggregator or ("hierarchical" if collective.aggregates else COMMOPT)
    values |= {
        "collective": collective,
        "check": bool(given.check),
        "aggregators": tuple(dict.fromkeys(names.split(","))),
    }
    options = BandwidthOptions(**values)
    if options.min_nbytes > options.max_nbytes:
        raise ConfigurationError(
            f"-b {options.min_nbytes} is more than -e {options.max_nbytes} bytes; raise -e or lower -b"
        )
    whole_numbers = not options.dtype.is_floating_point
    if collective.reduces and options.op == "avg" and whole_numbers:
        raise ConfigurationError(f"-o avg of -d {options.type_name} is no integer; use -o sum")
    known = (TORCH, *sorted(known_aggregators())) if collective.aggregates else (TORCH, COMMOPT)
    for name in options.aggregators:
        aggregator = find_aggregator(name) if collective.aggregates else None
        if aggregator is None and name not in known:
            meant = did_you_mean(name, known) or ";"
            raise ConfigurationError(
                f"--aggregator {name!r} is unknown for {collective.name}{meant} known: {', '.join(known)}"
            )
        if aggregator is not None and not aggregator.lossless and whole_numbers:
            raise ConfigurationError(
                f"--aggregator {name} would round -d {options.type_name}; use a floating-point type or a lossless "
                f"aggregator such as flat"
            )
    return options
