"""What others have published about scaling, simulated: with every input, also those that had to be assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from commopt.simulate.cluster import Cluster
from commopt.simulate.gpus import gpu
from commopt.simulate.models import model
from commopt.simulate.network import Network
from commopt.simulate.scaling import Row, Scaling
from commopt.simulate.stragglers import Stragglers
from commopt.simulate.strategies import strategy
from commopt.simulate.workload import Workload, of_model

TOLERANCE = 0.1
"""A simulated figure within a tenth of what was published reproduces it."""


@dataclass(frozen=True)
class Setup:
    """What was trained, on what. samples_per_s: on one GPU alone, which says more about computation than its peak."""

    model: str
    gpu: str
    precision: str
    batch: int
    samples_per_s: float
    nodes: int
    gpus_per_node: int
    network: Network
    sigma: float = 0.02

    def row(self, name: str) -> Row:
        """Simulate one strategy."""
        cluster = Cluster(self.gpus_per_node, gpu(self.gpu), self.network)
        scaling = Scaling(lambda _: self._workload, cluster, stragglers=Stragglers(self.sigma))
        return scaling.weak([self.nodes], [strategy(name)], self.batch)[0]

    @cached_property
    def _workload(self) -> Workload:
        return at_rate(of_model(model(self.model), gpu(self.gpu), self.batch, self.precision), self.samples_per_s)


@dataclass(frozen=True)
class Claim:
    """A published figure: an efficiency against one GPU, or by how much a strategy is faster than `against`.

    published: from, to; infinite where it says "more than". assumed: which inputs the source does not give.
    remark: what a difference may come from.
    """

    source: str
    setup: Setup
    strategy: str
    published: tuple[float, float]
    assumed: str
    against: str = ""
    remark: str = ""

    def simulate(self) -> Reproduction:
        """Return the same figure from a simulation."""
        row = self.setup.row(self.strategy)
        if not self.against:
            return Reproduction(self, row.gpu_efficiency)
        return Reproduction(self, self.setup.row(self.against).outcome.step_us / row.outcome.step_us - 1)


@dataclass(frozen=True)
class Reproduction:
    """A published figure beside the simulated one."""

    claim: Claim
    simulated: float

    @property
    def verdict(self) -> str:
        """Whether it is reproduced (or at least consistent with "more than"), and if not, on which side it lies."""
        low, high = self.claim.published
        if self.simulated < (1 - TOLERANCE) * low:
            return "lower"
        if self.simulated > (1 + TOLERANCE) * high:
            return "higher"
        return "reproduced" if high < inf else "consistent"


def at_rate(workload: Workload, samples_per_s: float) -> Workload:
    """Return a workload whose computation takes what so many samples per second on one GPU make of its batch."""
    factor = workload.samples / samples_per_s * 1e6 / workload.compute_us
    return replace(
        workload,
        units=tuple(replace(unit, ready_us=factor * unit.ready_us) for unit in workload.units),
        optimizer_us=factor * workload.optimizer_us,
        note=f"{workload.samples} samples at {samples_per_s:g} a second",
    )


_HOROVOD = "Horovod, docs/benchmarks"
_AIAK = "Baidu AIAK-Training"
# One Pascal GPU at batch 64 in float32: TensorFlow's benchmarks, DGX-1, May 2017.
_P100_RESNET50, _P100_VGG16 = 219, 154
_PASCAL_CLUSTER = Network(25, 10, trees=False)  # RDMA; NCCL had rings only
_PASCAL = "P100 (says: Pascal), PCIe 3, NCCL's rings, 90 % of the line rate, sigma 2 %"
_TCP = Network(25, 120, inter_latency_us=30, socket_gbps=10, connections=1)
_CLOUD = "V100, NVLink 2, mixed precision, one TCP connection of 10 Gb/s for each ring, batch, rate of one GPU"
_LESS = "their stock DDP must have been faster than one connection of 10 Gb/s, or its batch larger"

CLAIMS: Sequence[Claim] = (
    Claim(
        f"{_HOROVOD}: Inception V3, ResNet-101 at 512 GPUs, 25 Gb/s RoCE",
        Setup("resnet50", "p100", "fp32", 64, _P100_RESNET50, 128, 4, _PASCAL_CLUSTER),
        "stock",
        (0.90, 0.90),
        f"ResNet-50 in place of both; {_PASCAL}",
    ),
    Claim(
        f"{_HOROVOD}: VGG-16 at 512 GPUs, 25 Gb/s RoCE",
        Setup("vgg16", "p100", "fp32", 64, _P100_VGG16, 128, 4, _PASCAL_CLUSTER),
        "stock",
        (0.68, 0.68),
        _PASCAL,
    ),
    Claim(
        f"{_HOROVOD}, 2017: VGG-16 at 128 GPUs, 25 Gb/s RoCE",
        Setup("vgg16", "p100", "fp32", 64, _P100_VGG16, 32, 4, _PASCAL_CLUSTER),
        "stock",
        (0.79, 0.79),
        _PASCAL,
    ),
    Claim(
        "BytePS, README: BERT-large at 256 GPUs, 100 Gb/s RDMA, its own servers",
        Setup("bert-large", "v100", "fp16", 64, 100, 32, 8, Network(100, 120)),
        "lossless",
        (0.90, 0.90),
        "sequences of 128, 100 a second on one GPU, float32 gradients, sigma 2 %",
    ),
    Claim(
        "BytePS, README: the same with Horovod and NCCL",
        Setup("bert-large", "v100", "fp16", 64, 100, 32, 8, Network(100, 120)),
        "stock",
        (0.70, 0.70),
        "sequences of 128, 100 a second on one GPU, float32 gradients, sigma 2 %",
        remark="communication is hidden at 90 % of the line rate; what kept Horovod from it is not in the source",
    ),
    Claim(
        "Huawei ModelArts: ResNet-50 at thousands of GPUs",
        Setup("resnet50", "v100", "fp16", 128, 1200, 512, 8, Network(100, 120)),
        "hierarchical",
        (0.80, inf),
        "everything: 512 x 8 V100, 100 Gb/s RDMA, batch 128, 1200 images a second on one GPU, sigma 2 %",
    ),
    Claim(
        f"{_AIAK}: Swin at 4 x 8 GPUs, 25 Gb/s TCP, hierarchical all_reduce",
        Setup("swin-t", "v100", "fp16", 64, 450, 4, 8, _TCP),
        "hierarchical",
        (0.85, 0.85),
        f"Swin-T; {_CLOUD}",
        against="stock",
        remark="a smaller batch or a faster GPU would expose more of stock DDP's communication",
    ),
    Claim(
        f"{_AIAK}: ResNet-50, 25 Gb/s TCP, all strategies for slow networks",
        Setup("resnet50", "v100", "fp16", 128, 1200, 4, 8, _TCP),
        "hierarchical_bf16",
        (0.26, 0.78),
        f"4 x 8 GPUs; strategies: hierarchical, 16 bits; {_CLOUD}",
        against="stock",
    ),
    Claim(
        f"{_AIAK}: BERT, 25 Gb/s TCP, all strategies for slow networks",
        Setup("bert-base", "v100", "fp16", 32, 280, 4, 8, _TCP),
        "hierarchical_bf16",
        (0.26, 0.78),
        f"BERT-base, 4 x 8 GPUs; strategies: hierarchical, 16 bits; {_CLOUD}",
        against="stock",
        remark=_LESS,
    ),
    Claim(
        f"{_AIAK}: VGG-16, 25 Gb/s TCP, all strategies for slow networks",
        Setup("vgg16", "v100", "fp16", 128, 500, 4, 8, _TCP),
        "hierarchical_bf16",
        (0.26, 0.78),
        f"4 x 8 GPUs; strategies: hierarchical, 16 bits; {_CLOUD}",
        against="stock",
        remark=_LESS,
    ),
)


def reproductions() -> list[Reproduction]:
    """Simulate every claim."""
    return [claim.simulate() for claim in CLAIMS]
