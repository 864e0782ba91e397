# SPDX-License-Identifier: Apache-2.0
"""Simulate what others have published about scaling and compare: `python -m bench.evidence.scaling.published`, seconds.

Inputs that a source gives are taken from it, the others are listed beside it; none was chosen by the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from bench.document import table
from commopt.simulate import (
    ClusterSpec,
    NetworkSpec,
    Scaling,
    ScalingPoint,
    Stragglers,
    Workload,
    gpu,
    model,
    of_model,
    strategy,
)

NOT_REPRODUCED = "**not reproduced**"
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
    network: NetworkSpec

    def point(self, name: str) -> ScalingPoint:
        """Simulate one strategy, with stragglers of 2 %."""
        plain = of_model(model(self.model), gpu(self.gpu), self.batch, self.precision)
        workload = at_rate(plain, self.samples_per_s)
        cluster = ClusterSpec(self.gpus_per_node, gpu(self.gpu), self.network)
        scaling = Scaling(lambda _: workload, cluster, stragglers=Stragglers(0.02))
        return scaling.weak([self.nodes], [strategy(name)], self.batch)[0]


def at_rate(workload: Workload, samples_per_s: float) -> Workload:
    """Return a workload whose computation takes what so many samples per second on one GPU make of its batch."""
    factor = workload.samples / samples_per_s * 1e6 / workload.compute_us
    return replace(
        workload,
        units=tuple(replace(unit, ready_us=factor * unit.ready_us) for unit in workload.units),
        optimizer_us=factor * workload.optimizer_us,
        note=f"{workload.samples} samples at {samples_per_s:g} a second",
    )


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

    def simulated(self) -> float:
        """Return the same figure from a simulation."""
        found = self.setup.point(self.strategy)
        if not self.against:
            return found.gpu_efficiency
        return self.setup.point(self.against).outcome.step_us / found.outcome.step_us - 1

    def verdict(self, simulated: float) -> str:
        """Return whether it is reproduced (or at least consistent with "more than"), else on which side it lies."""
        low, high = self.published
        if simulated < (1 - TOLERANCE) * low:
            return "lower"
        if simulated > (1 + TOLERANCE) * high:
            return "higher"
        return "reproduced" if high < inf else "consistent"

    def shown(self) -> list[str]:
        """Return a row of the table: source, published, simulated, verdict, assumed."""
        (low, high), plus, found = self.published, "+" if self.against else "", self.simulated()
        figure = f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}" if isfinite(high) else f"> {low:.0%}"
        verdict = self.verdict(found)
        told = f"{NOT_REPRODUCED}: {self.remark}" if verdict in ("lower", "higher") else verdict
        return [self.source, f"{plus}{figure}", f"{plus}{found:.0%}", told, self.assumed]


# One Pascal GPU at batch 64 in float32: TensorFlow's benchmarks, DGX-1, May 2017; RDMA, and NCCL had rings only.
_ROCE = NetworkSpec(25, 10, trees=False)
_RESNET50_512 = Setup("resnet50", "p100", "fp32", 64, 219, 128, 4, _ROCE)
_VGG16_512 = Setup("vgg16", "p100", "fp32", 64, 154, 128, 4, _ROCE)
_PASCAL = "P100 (says: Pascal), PCIe 3, NCCL's rings"
_BERT_256 = Setup("bert-large", "v100", "fp16", 64, 100, 32, 8, NetworkSpec(100, 120))
_RATE = "sequences of 128, 100 a second on one GPU, float32 gradients"
_BERT_A100 = Setup("bert-large", "a100", "fp16", 256, 580, 32, 8, NetworkSpec(200, 200, nics=8))
_MODELARTS = Setup("resnet50", "v100", "fp16", 128, 1200, 512, 8, NetworkSpec(100, 120))
_TCP = NetworkSpec(25, 120, inter_latency_us=30, socket_gbps=10, connections=1)
_CLOUD = "V100, NVLink 2, mixed precision, one TCP connection of 10 Gb/s for each ring, batch, rate of one GPU"
_BF16 = "as with Swin; strategies: hierarchical, 16 bits"
_LESS = "their stock DDP must have been faster than one connection of 10 Gb/s, or its batch larger"


def _baidu(name: str, batch: int, samples_per_s: float) -> Setup:
    return Setup(name, "v100", "fp16", batch, samples_per_s, 4, 8, _TCP)


CLAIMS = (
    Claim(
        "Horovod, docs/benchmarks: Inception V3, ResNet-101 at 512 GPUs, 25 Gb/s RoCE",
        _RESNET50_512,
        "stock",
        (0.90, 0.90),
        f"ResNet-50 in place of both; {_PASCAL}",
    ),
    Claim("Horovod, docs/benchmarks: VGG-16 at 512 GPUs, 25 Gb/s RoCE", _VGG16_512, "stock", (0.68, 0.68), _PASCAL),
    Claim(
        "Horovod, docs/benchmarks, 2017: VGG-16 at 128 GPUs, 25 Gb/s RoCE",
        replace(_VGG16_512, nodes=32),
        "stock",
        (0.79, 0.79),
        _PASCAL,
    ),
    Claim(
        "BytePS, README: BERT-large at 256 GPUs, 100 Gb/s RDMA, its own servers",
        _BERT_256,
        "lossless",
        (0.90, 0.90),
        _RATE,
    ),
    Claim(
        "BytePS, README: the same with Horovod and NCCL",
        _BERT_256,
        "stock",
        (0.70, 0.70),
        _RATE,
        remark="communication is hidden at 90 % of the line rate; what kept Horovod from it is not in the source",
    ),
    Claim(
        "NVIDIA DeepLearningExamples: BERT-large at 256 A100, 138,294 sequences a second",
        _BERT_A100,
        "stock",
        (0.93, 0.93),
        "eight ports of 200 Gb/s per node (says: DGX A100), float32 gradients",
    ),
    Claim(
        "Huawei ModelArts: ResNet-50 at thousands of GPUs",
        _MODELARTS,
        "hierarchical",
        (0.80, inf),
        "everything: 512 x 8 V100, 100 Gb/s RDMA, batch 128, 1200 images a second on one GPU",
    ),
    Claim(
        "Baidu AIAK-Training: Swin at 4 x 8 GPUs, 25 Gb/s TCP, hierarchical all_reduce",
        _baidu("swin-t", 64, 450),
        "hierarchical",
        (0.85, 0.85),
        f"Swin-T; {_CLOUD}",
        "stock",
        "a smaller batch or a faster GPU would expose more of stock DDP's communication",
    ),
    *(
        Claim(
            f"Baidu AIAK-Training: {title}, 25 Gb/s TCP, all strategies for slow networks",
            _baidu(*setup),
            "hierarchical_bf16",
            (0.26, 0.78),
            _BF16,
            "stock",
            remark,
        )
        for title, setup, remark in (
            ("ResNet-50", ("resnet50", 128, 1200), ""),
            ("BERT", ("bert-base", 32, 280), _LESS),
            ("VGG-16", ("vgg16", 128, 500), _LESS),
        )
    ),
)


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """Return a table of what `Claim.shown` returns."""
    return table(["source", "published", "simulated", "verdict", "assumed"], list(rows))


def main() -> None:
    """Simulate every claim and print it beside what was published."""
    print(markdown(claim.shown() for claim in CLAIMS))


if __name__ == "__main__":
    main()
