# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m bench.gpu --help`."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

import bench.gpu
from bench.environment import machine
from bench.gpu.report import FILE, print_tables
from bench.gpu.runner import Place
from bench.gpu.session import ARCHIVE, Step, session
from bench.gpu.steps import steps
from commopt.command_line import CommandParser, number, output_file

_UNUSABLE = 2
_ONLY = "take these steps alone, in this order; others' outcomes stay"


def main() -> int:
    """Take the chosen steps; return 1 when one of them fell through, 2 where there is no GPU."""
    parser = CommandParser(prog="python -m bench.gpu", description=(bench.gpu.__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), metavar="FOLDER", help="default build/gpu")
    packed = f"of all that is in --out, written anew after each step (default: {ARCHIVE} there)"
    parser.add_argument("--archive", type=output_file, metavar="FILE", help=packed)
    parser.add_argument("--only", metavar="STEP[,STEP...]", help=_ONLY)
    parser.add_argument("--limit-s", type=number(), metavar="S", help="of all steps together (default: none)")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="compile first, and install into FOLDER alone")
    parser.add_argument("--list", action="store_true", help="print the steps and what each shows")
    options = parser.parse_args()
    known = steps(build=options.build is not None)
    try:
        chosen = choose(known, options.only)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for step in chosen:
            print(f"{step.name:<16}{step.limit_s:>4.0f} s  {step.shows}")
        return 0
    if not torch.cuda.is_available():
        print(f"bench.gpu: {no_gpu()}", file=sys.stderr)
        return _UNUSABLE
    options.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "bench.gpu", *sys.argv[1:]])
    try:
        with _ending_when_told():
            order, place = [step.name for step in known], Place(options.out, options.build, options.archive)
            outcomes = session(chosen, place, options.limit_s, {**machine(), "command": command}, order)
    except ValueError as error:  # the file in --out is another's
        parser.error(str(error))
    print_tables(options.out / FILE)
    return 1 if any(outcome.fell_through for outcome in outcomes) else 0


def choose(known: Sequence[Step], only: str | None) -> list[Step]:
    """Return the steps named in `only`, in its order, or all; raises ValueError for unknown names."""
    if only is None:
        return list(known)
    by_name = {step.name: step for step in known}
    names = list(dict.fromkeys(name.strip() for name in only.split(",") if name.strip()))
    for name in names:
        if name not in by_name:
            raise ValueError(f"there is no step {name!r}; known: {', '.join(by_name)}")
    return [by_name[name] for name in names]


def no_gpu() -> str:
    """Say why nothing can be done here."""
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return (
        f"torch {torch.__version__} of {sys.executable} is built {built} and sees no GPU, so there is nothing to "
        f"test or measure; run it where there is one, with a Python that has torch for CUDA: make gpu PYTHON=..."
    )


@contextmanager
def _ending_when_told() -> Iterator[None]:
    """Let signals end what runs inside as errors do, so that no step outlives it."""
    former = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            if handler is not None:  # else it is none of Python's
                signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
