# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m bench.kernels --help`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path

import torch

import bench.kernels
from bench.environment import machine
from bench.kernels.case import Setting
from bench.kernels.cases import PEERS, families
from bench.kernels.measure import DeviceCopy, Missing, Record, ResultFile, described, markdown, measure, print_table
from bench.timing import Clock, clock_of, events_us
from commopt.command_line import CommandParser, content_of, output_file, whole
from commopt.kernels.loader import loader_for

_GPU_REPEATS, _CPU_REPEATS = 30, 7


def records(setting: Setting, only: set[str], repeats: int, clock: Clock) -> Iterator[Record]:
    """Measure the kernels of these names; what fails leaves a record and does not keep others from being measured."""
    copy = DeviceCopy(setting.device)
    for family in families():
        if only.isdisjoint(family.names):
            continue
        try:
            for case in family.build(setting):
                if case.name in only:
                    print(f"{case.name}, {case.variant}", file=sys.stderr, flush=True)
                    yield from measure(case, copy, setting.device, repeats, clock)
        except Exception as error:
            yield Missing(family.title, "", "all that follow", True, described(error))


def main() -> None:
    """Measure every kernel, print and write the figures; exits with 1 when something failed."""
    names = sorted({name for family in families() for name in family.names})
    parser = CommandParser(prog="python -m bench.kernels", description=(bench.kernels.__doc__ or "").splitlines()[0])
    parser.add_argument("--numel", type=whole(1), default=25_000_000, help="elements of the gradient")
    parser.add_argument("--peers", type=whole(1), default=PEERS, help="ranks whose rows an owner adds up")
    parser.add_argument("--repeats", type=whole(1), help=f"by default {_GPU_REPEATS} on a GPU, {_CPU_REPEATS} on a CPU")
    parser.add_argument("--only", metavar="KERNEL,...", help=f"some of: {', '.join(names)}")
    parser.add_argument("--threads", type=whole(1), default=min(2, os.cpu_count() or 1), help="of the CPU")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write JSON lines: the environment, then kernels"
    )
    parser.add_argument("--show", type=content_of(_table), metavar="FILE", help="print a table of such a file instead")
    options = parser.parse_args()
    only = set(names if options.only is None else options.only.split(","))
    if unknown := only.difference(names):
        parser.error(f"--only: no kernel is called {sorted(unknown)[0]!r}; choose from {', '.join(names)}")
    if options.show:
        print(options.show(only))
        return
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    title = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {options.threads} threads"
    repeats = options.repeats or (_GPU_REPEATS if device.type == "cuda" else _CPU_REPEATS)
    command = shlex.join(["python", "-m", "bench.kernels", *sys.argv[1:]])
    environment = {**machine(), "command": command, "device": title, "numel": options.numel, "peers": options.peers}
    clock = clock_of(device)
    environment |= {"loader": _loader(device), "events_us": events_us(clock)}
    file = None if options.json is None else ResultFile(options.json, environment)
    found: list[Record] = []
    for record in records(Setting(options.numel, options.peers, device), only, repeats, clock):
        found.append(record)
        if file is not None:
            file.add(record)
    print_table(f"{options.numel:,} elements, {title}; bytes read and written", found)
    if any(isinstance(record, Missing) and record.failed for record in found):
        sys.exit(1)


def _table(path: Path) -> Callable[[Container[str]], str]:
    markdown(path, ())  # raises ValueError where the file is another's
    return partial(markdown, path)


def _loader(device: torch.device) -> str | None:
    """Return what launches the kernels, None where plain torch does their work."""
    loader = loader_for(device)
    return None if loader is None else type(loader).__name__.lower()


if __name__ == "__main__":
    main()
