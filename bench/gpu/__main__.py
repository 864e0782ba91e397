"""Command line: `python -m bench.gpu --help`."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

import bench.gpu
from bench.environment import machine
from bench.gpu.place import Place
from bench.gpu.report import print_tables
from bench.gpu.session import FILE, session
from bench.gpu.step import Step
from bench.gpu.steps import steps

_UNUSABLE = 2


def main() -> int:
    """Take the chosen steps; return 1 when one of them fell through, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(bench.gpu.__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), metavar="FOLDER", help="default build/gpu")
    parser.add_argument("--only", metavar="STEP[,STEP...]", help="take these steps alone; others' outcomes are kept")
    parser.add_argument("--skip", default="", metavar="STEP[,STEP...]", help="leave these steps out")
    parser.add_argument("--limit-s", type=float, metavar="S", help="of all steps together (default: none)")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="compile first, and install into FOLDER alone")
    parser.add_argument("--list", action="store_true", help="print the steps and what each shows")
    options = parser.parse_args()
    known = steps(build=options.build is not None)
    try:
        chosen = choose(known, options.only, options.skip)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for step in chosen:
            print(f"{step.name:<18}{step.limit_s:>4.0f} s  {step.shows}")
        return 0
    if not torch.cuda.is_available():
        print(f"bench.gpu: {no_gpu()}", file=sys.stderr)
        return _UNUSABLE
    options.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "bench.gpu", *sys.argv[1:]])
    try:
        with _ending_when_told(), tempfile.TemporaryDirectory(prefix="bench-gpu-") as scratch:
            place = Place(options.out, Path(scratch), options.build)
            order = [step.name for step in known]
            outcomes = session(chosen, place, options.limit_s, {**machine(), "command": command}, order)
    except ValueError as error:  # the file in --out is another's
        parser.error(str(error))
    print_tables(options.out / FILE)
    return 1 if any(outcome.fell_through for outcome in outcomes) else 0


def choose(known: Sequence[Step], only: str | None, skip: str) -> list[Step]:
    """Return the steps named in `only`, or all, without those in `skip`; raises ValueError for unknown names."""
    names = [step.name for step in known]
    wanted = names if only is None else _split(only)
    unwanted = _split(skip)
    for name in (*wanted, *unwanted):
        if name not in names:
            raise ValueError(f"there is no step {name!r}; known: {', '.join(names)}")
    return [step for step in known if step.name in wanted and step.name not in unwanted]


def no_gpu() -> str:
    """Say why nothing can be done here."""
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return (
        f"torch {torch.__version__} of {sys.executable} is built {built} and sees no GPU, so there is nothing to "
        f"test or measure; run it where there is one, with a Python that has torch for CUDA: make gpu PYTHON=..."
    )


def _split(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


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
