"""What a launch costs that has nothing to do: `python -m bench.kernels.launches --json FILE`.

10,000 launches of a kernel that returns at once, through both loaders, and of an empty kernel with as many arguments
through Triton. They take turns of a few hundred, each into an empty queue, so that the host never waits for room in it.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import TypeAlias

import torch

from bench.clocks import Clock, GpuClock
from bench.environment import machine
from bench.kernels.measure import described
from bench.table import print_rows
from bench.turns import take_turns
from commopt.command_line import Parser, output_file
from commopt.kernels.loader import Arguments, Loader, Native, Nvrtc

Launch: TypeAlias = Callable[[], object]

KIND = "launches"
LAUNCHES = 10_000
IDLE_KERNEL = "encode_uniform8"
IDLE_ARGUMENTS: Arguments = (0, 0, 0, 1.0, 0, 0, 0, 0, 64, 0, 0, 0, 1.0)
"""No rows of payload, so no address is looked at."""

_PER_TURN = 250  # with what holds the queue, well below the thousand or so that fit into it
_HOLD_S = 1e-2
_GRID, _THREADS = 1, 256


@dataclass(frozen=True)
class Cost:
    """What launches through one launcher took."""

    launcher: str
    launches: int
    host_us: float
    """Of one launch, median of the turns."""
    host_ms: float
    """Of all launches."""
    device_us: float
    device_ms: float
    queued: bool
    """Whether the device had a turn's launches before it began the first; else its times are the host's."""


def nothing(a, b, c, d, e, f, g, h, i, j, k, m, n):  # type: ignore[no-untyped-def]  # Triton compiles this source
    """Return."""


def through_loader(kind: type[Loader], stream: int) -> Launch:
    """Return what launches the idle kernel through one of commopt's loaders."""
    return partial(kind().launch, IDLE_KERNEL, _GRID, _THREADS, stream, IDLE_ARGUMENTS)


def through_triton() -> Launch:
    """Return what launches an empty kernel, with as many threads, through Triton."""
    kernel = import_module("triton").jit(nothing)[(_GRID,)]
    return partial(kernel, *IDLE_ARGUMENTS, num_warps=_THREADS // 32)


def working(makers: Mapping[str, Callable[[], Launch]]) -> tuple[dict[str, Launch], dict[str, str]]:
    """Return the launchers that launch something here, and why the others do not."""
    able: dict[str, Launch] = {}
    absent: dict[str, str] = {}
    for name, make in makers.items():
        try:
            launch = make()
            launch()
        except Exception as error:  # compilers and drivers raise what they like; the others are measured all the same
            absent[name] = described(error)
        else:
            able[name] = launch
    return able, absent


def measure(launchers: Mapping[str, Launch], launches: int, clock: Clock) -> list[Cost]:
    """Time so many launches through each launcher, in turns."""
    turns = take_turns(list(launchers.values()), launches // _PER_TURN, clock, [_PER_TURN] * len(launchers))
    return [
        Cost(
            name,
            len(each.readings) * each.calls,
            each.host_us,
            1000 * sum(reading.host_s for reading in each.readings),
            each.median_us,
            1000 * sum(reading.taken_s for reading in each.readings),
            each.queued,
        )
        for name, each in zip(launchers, turns, strict=True)
    ]


def print_table(costs: Sequence[Cost], absent: Mapping[str, str]) -> None:
    """Print a row per launcher, and who is missing."""
    headings = ["launcher", "launches", "host us", "host ms", "device us", "device ms"]
    rows = [
        [
            cost.launcher,
            str(cost.launches),
            f"{cost.host_us:.2f}",
            f"{cost.host_ms:.1f}",
            f"{cost.device_us:.2f}" if cost.queued else "-",
            f"{cost.device_ms:.1f}" if cost.queued else "-",
        ]
        for cost in costs
    ]
    caption = "\n".join(f"{name}: {why}" for name, why in absent.items())
    print_rows("Launches with nothing to do; us: of one, ms: of all", headings, rows, caption)


def main() -> None:
    """Measure, print and write the figures; exits with 2 where there is no GPU."""
    parser = Parser(prog="python -m bench.kernels.launches", description=__doc__)
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write JSON lines: the environment, then launchers"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is nothing to measure: torch sees no CUDA device.", file=sys.stderr)
        sys.exit(2)
    clock = GpuClock(torch.device("cuda"), _HOLD_S)
    stream = torch.cuda.current_stream().cuda_stream
    loaders: dict[str, type[Loader]] = {"_C": Native, "CuPy": Nvrtc}
    makers = {name: partial(through_loader, kind, stream) for name, kind in loaders.items()}
    launchers, absent = working({**makers, "Triton": through_triton})
    costs = measure(launchers, LAUNCHES, clock)
    print_table(costs, absent)
    if options.json is not None:
        command = shlex.join(["python", "-m", "bench.kernels.launches", *sys.argv[1:]])
        device = torch.cuda.get_device_name()
        records = [{"record": "environment", "kind": KIND, **machine(), "command": command, "device": device}]
        records += [{"record": "launcher", **asdict(cost)} for cost in costs]
        records += [{"record": "missing", "launcher": name, "why": why} for name, why in absent.items()]
        options.json.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()
