# SPDX-License-Identifier: Apache-2.0
"""Measure a bucket's path: the functions of commopt that one steady step enters, and what the hook costs the host.

Definition. A function is a code object of the package `commopt`; comprehensions and generator expressions belong to the
function they are written in. Counted are distinct functions, in the order in which they are first entered, on the
thread of backward and on the lane's, in one step after the buckets have settled:

hook    in the first bucket's hook call, the beginning of the step included: nothing is sent before it has returned
before  those, and the lane's up to its first call into torch.distributed
step    in the whole step
moves   from one file of commopt to another, over all calls of `before` in their order, returns not counted

Nothing is bounded by it: it shows what a change adds.

    python -m tests.bucket_path                  # the numbers and the names, on 2 x 2 ranks over gloo
    python -m tests.bucket_path flat             # of another preset
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from tests.hook_training import SMALL_BUCKET, Tower, batch_of, loss_of, seeded
from tests.ranks import run

STEADY_STEP = 12
TIMED_STEPS = 40

_PACKAGE = str(Path(commopt.__file__).parent)
_COLLECTIVES = str(Path(dist.__file__).with_name("distributed_c10d.py"))
_INNER = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


class Way(NamedTuple):
    """Functions by name, as first entered; moves between files; hook_us: the median time of a hook call."""

    hook: list[str]
    before: list[str]
    step: list[str]
    moves: int
    hook_us: float


class Profile:
    """Takes down which functions each thread enters while `on`; `marks` are where the first bucket's hook call ends."""

    def __init__(self) -> None:
        self.on = False
        self.entered: dict[int, list[CodeType | None]] = {}
        self.first_bucket_ends = 0
        self._main = threading.get_ident()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.on or event != "call":
            return
        code, entered = frame.f_code, self.entered.setdefault(threading.get_ident(), [])
        if code.co_filename == _COLLECTIVES:
            entered.append(None)
        elif code.co_filename.startswith(_PACKAGE) and code.co_name not in _INNER:
            entered.append(code)

    def end_bucket(self) -> None:
        """Note that a hook call has returned."""
        if self.on and not self.first_bucket_ends:
            self.first_bucket_ends = len(self.entered[self._main])

    def way(self, hook_us: float) -> Way:
        main = self.entered.pop(self._main)
        (lane,) = self.entered.values()
        hook = main[: self.first_bucket_ends]
        before = [*hook, *lane[: lane.index(None)]]
        files = [code.co_filename for code in before if code is not None]
        moves = sum(here != there for here, there in pairwise(files))
        return Way(_distinct(hook), _distinct(before), _distinct([*main, *lane]), moves, hook_us)


def _distinct(codes: list[CodeType | None]) -> list[str]:
    found = dict.fromkeys(code for code in codes if code is not None)
    return [f"{Path(code.co_filename).relative_to(_PACKAGE)}:{code.co_firstlineno} {code.co_name}" for code in found]


def measure(rank: int, world_size: int, preset: str) -> Way:
    profile, times_ns = Profile(), list[int]()
    threading.setprofile(profile)  # before the lane's thread begins
    try:
        ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
        state = commopt.HookState(commopt.build_preset(preset), process_group=ddp.process_group, module=ddp.module)

        def timed_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            began_ns = time.perf_counter_ns()
            future = commopt.hook(state, bucket)
            times_ns.append(time.perf_counter_ns() - began_ns)
            profile.end_bucket()
            return future

        # DDP compares a hook's annotations with the types themselves.
        timed_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
        ddp.register_comm_hook(state, timed_hook)
        for step in range(STEADY_STEP):
            loss_of(ddp, batch_of(rank, step)).backward()
        times_ns.clear()
        for step in range(TIMED_STEPS):
            loss_of(ddp, batch_of(rank, step)).backward()
        hook_us = statistics.median(times_ns) / 1000
        dist.barrier()
        profile.on = True
        sys.setprofile(profile)
        loss_of(ddp, batch_of(rank, STEADY_STEP)).backward()
        sys.setprofile(None)
        profile.on = False
        state.close()
    finally:
        threading.setprofile(None)
    return profile.way(hook_us)


def ways(preset: str) -> list[Way]:
    return run(measure, 4, preset, nodes=(2, 2), fresh=True)


def main(preset: str = "hierarchical_quantized:bits=4") -> None:
    """Print what the first rank found."""
    found = ways(preset)
    way = found[0]
    print("\n".join([*way.hook, "--- on the lane"]))
    print("\n".join([*(name for name in way.before if name not in way.hook), "--- first collective"]))
    print("\n".join(name for name in way.step if name not in way.before))
    counts = f"{len(way.hook)} in the hook, {len(way.before)} before the first collective, {len(way.step)} in the step"
    print(f"{preset}: functions {counts}; {way.moves} moves between files before the first collective")
    print(f"hook: {', '.join(f'{each.hook_us:.1f}' for each in found)} us per bucket (median, by rank)")


if __name__ == "__main__":
    main(*sys.argv[1:])
