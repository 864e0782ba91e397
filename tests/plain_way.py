# SPDX-License-Identifier: Apache-2.0
"""Count what the host does for one bucket on a GPU: kernels, torch operations and Python functions, by preset.

The device is made up (tests/fake_cuda.py), and so are the other rank and its NCCL. Kernels are counted and not run.
Measured is the hook call of a bucket in the middle of a step, with the parameters of a block of GPT-2, after the first
steps. Functions are calls of Python functions, torch's own included; what stands for the device is left out.

    python -m tests.plain_way          # the table
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest import mock
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._library import simple_registry

import commopt
from commopt.attached.options import AttachOptions
from commopt.attached.replay import VARIABLE
from commopt.groups import Team, TeamShape, team
from commopt.groups.store import limited
from commopt.hooks.buckets import DDPRegistration
from commopt.kernels import loader
from commopt.kernels.codec import DTYPES
from commopt.kernels.loader import Arguments, Loader
from commopt.lanes import LaneClient, registry
from tests import fake_cuda, test_cuda_streams
from tests.fake_cuda import DEVICE, Gpu
from tests.test_cuda_streams import Setup
from topology import Cluster

PRESETS = (
    "flat",
    "hierarchical_bf16",
    "hierarchical_quantized",
    "hierarchical_quantized:bits=4",
    "hierarchical_quantized:bits=2",
    "hierarchical_onebit",
    "hierarchical_dgc",
    "hierarchical_powersgd",
)
WIDTH = 384  # all vectors are worth being quantized, as those of GPT-2 are
BUCKETS = 3
STEADY_STEP = 4001  # past all warm-up, and not one whose compression error is sampled
SETTLING_STEPS = 12

_STANDS_FOR_THE_DEVICE = (
    fake_cuda.__file__,
    test_cuda_streams.__file__,
    mock.__file__,
    simple_registry.__file__,
    __file__,
)


class Counts(NamedTuple):
    """Of one bucket. asked: how often torch asked the driver for the number of devices."""

    kernels: int
    operations: int
    functions: int
    asked: int


class Counting(Loader):
    """Counts launches."""

    fix = ""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def launch(self, kernel: str, grid: int, block: int, stream: int, arguments: Arguments) -> None:
        assert stream == torch.cuda.current_stream(DEVICE).cuda_stream, "launched on another stream"
        assert grid > 0
        assert all(type(each) in (int, float) for each in arguments), arguments
        self.launched.append(kernel)


class Group:
    """Stands for a process group of NCCL whose ranks all do what this one does."""

    def __init__(self, size: int) -> None:
        self._size = size

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        tensors[0].mul_(self._size)

    def reduce(self, tensors: list[Tensor], options: Any) -> None:
        tensors[0].mul_(self._size)

    def broadcast(self, tensors: list[Tensor], options: Any) -> None:
        tensors[0].mul_(1)

    def _allgather_base(self, output: Tensor, source: Tensor, options: Any) -> None:
        output.view(self._size, -1).copy_(source.reshape(1, -1).expand(self._size, -1))

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: Any) -> None:
        output.copy_(source.view(self._size, -1)[0].view_as(output)).mul_(self._size)

    def alltoall_base(self, output: Tensor, source: Tensor, there: list[int], here: list[int], options: Any) -> None:
        output.view(self._size, -1).copy_(source.view(self._size, -1)[:1].expand(self._size, -1))

    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base


class NcclTeam(Team):
    """Made-up ranks on nodes of their own, beneath the calls of torch.distributed."""

    def __init__(self, size: int) -> None:
        TeamShape.__init__(self, tuple(range(size)), 0, {"cuda": "nccl"})
        self.ranks = tuple(range(size))
        group: Any = Group(size)
        self._group, self._closed = (lambda: group), False  # type: ignore[assignment]


class Profile:
    """Counts calls of Python functions while it is the profiler."""

    def __init__(self) -> None:
        self.functions: Counter[CodeType] = Counter()
        self._outside = 0  # calls from the first one on that stands for the device

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            if self._outside or frame.f_code.co_filename in _STANDS_FOR_THE_DEVICE:
                self._outside += 1
            else:
                self.functions[frame.f_code] += 1
        elif event == "return" and self._outside:
            self._outside -= 1


def block(width: int) -> nn.ParameterDict:
    """Return the parameters of a block of GPT-2, each with dots in place of its module's name."""
    shapes: dict[str, tuple[int, ...]] = {
        **{"ln_1_weight": (width,), "ln_1_bias": (width,)},
        **{"attn_weight": (width, 3 * width), "attn_bias": (3 * width,)},
        **{"attn_proj_weight": (width, width), "attn_proj_bias": (width,)},
        **{"ln_2_weight": (width,), "ln_2_bias": (width,)},
        **{"mlp_weight": (width, 4 * width), "mlp_bias": (4 * width,)},
        **{"mlp_proj_weight": (4 * width, width), "mlp_proj_bias": (width,)},
    }
    return nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})


class GradBucket:
    """Stands for DDP's."""

    def __init__(self, number: int, values: Tensor, parameters: list[nn.Parameter]) -> None:
        self._number, self._values, self._parameters = number, values, parameters

    def buffer(self) -> Tensor:
        return self._values

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return self._number + 1 == BUCKETS

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters


@contextmanager
def device(*, replays: bool = False) -> Iterator[tuple[Gpu, Counting]]:
    """A GPU whose kernels are counted. replays: whether they may be replayed as CUDA graphs."""
    registry._close_all()
    kernels = Counting()
    chosen = patch.object(loader, "loader_for", lambda _, dtype=torch.float32: kernels if dtype in DTYPES else None)
    with (
        Gpu() as gpu,
        chosen,
        patch.object(registry, "_forget_old_world"),
        patch.object(team, "is_alive", lambda group: True),
        patch.dict(os.environ, {"COMMOPT_KERNELS": "", VARIABLE: str(int(replays))}),
    ):
        try:
            yield gpu, kernels
        finally:
            gpu.finish()
            registry._close_all()


def training(preset: str, size: int) -> tuple[DDPRegistration, list[Any]]:
    """Return the registration of a model of equal blocks, and a bucket for each of them."""
    group: Any = lambda: None  # noqa: E731
    store = limited(dist.HashStore(), "made up", 60.0)
    membership = Setup("made up", group, group, Cluster.from_ranks_per_node(size, 1), NcclTeam(size), 60.0, store)
    model = nn.ModuleList(block(WIDTH) for _ in range(BUCKETS))
    aggregator = commopt.build_preset(preset)
    registration = DDPRegistration(AttachOptions(), aggregator, model)
    client = registration.joined = LaneClient(membership, "test")
    registration._begin(aggregator, client)
    buckets: list[Any] = []
    for number, each in enumerate(model):
        parameters = list(each.parameters())
        values = torch.zeros(sum(one.numel() for one in parameters), device=DEVICE)
        buckets.append(GradBucket(number, values, parameters))
    return registration, buckets


def count(preset: str, size: int = 2, step: int = STEADY_STEP, *, replays: bool = False) -> tuple[Counts, Counter[str]]:
    """Return what the hook call of a bucket costs, and how often each function is called."""
    with device(replays=replays) as (gpu, kernels):
        registration, buckets = training(preset, size)
        registration.steps = step - SETTLING_STEPS
        for _ in range(SETTLING_STEPS):
            _reduce_all(registration, buckets)
        _fill(buckets)
        registration.reduce(buckets[0])
        before = len(kernels.launched), gpu.operations, gpu.asked
        profile = Profile()
        with torch.no_grad():  # as in a backward
            sys.setprofile(profile)
            registration.reduce(buckets[1])
            sys.setprofile(None)
        after = len(kernels.launched), gpu.operations, gpu.asked
        registration.reduce(buckets[2])
        assert registration.replayed >= 2 * BUCKETS * replays, "nothing was replayed"
        assert not gpu.faults, gpu.faults
    names: Counter[str] = Counter()
    for code, times in profile.functions.items():
        names[f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_name}"] += times
    launched, operations, asked = (late - early for late, early in zip(after, before, strict=True))
    return Counts(launched, operations, names.total(), asked), names


def _fill(buckets: list[Any]) -> None:
    for bucket in buckets:
        bucket.buffer().copy_(torch.randn(bucket.buffer().numel()).to(DEVICE))


def _reduce_all(registration: DDPRegistration, buckets: list[Any]) -> None:
    _fill(buckets)
    for future in [registration.reduce(bucket) for bucket in buckets]:
        future.wait()


def main() -> None:
    """Print the table, and with an argument the functions of that preset."""
    for preset in PRESETS:
        for size in (2, 4):
            found, names = count(preset, size)
            print(f"{preset:34}{size:3} ranks {found}")
            replayed, names_replayed = count(preset, size, replays=True)
            print(f"{'    replayed':34}{size:3} ranks {replayed}")
            if preset in sys.argv[1:]:
                print("\n".join(f"    {times:4} {name}" for name, times in names_replayed.most_common()))
                print("\n".join(f"    {times:4} {name}" for name, times in names.most_common()))


if __name__ == "__main__":
    main()
