# SPDX-License-Identifier: Apache-2.0
"""Tutorial: train with the compressor and the aggregator of the two other tutorials, without changing commopt.

    torchrun --nproc-per-node 4 -m examples.new_strategies

A script registers its own classes by itself; a preset gives a strategy a name and takes its options.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commopt
from commopt import AGGREGATORS, COMPRESSORS, PRESETS, Aggregator, Compressed, Preset
from examples.new_aggregator import InOrder
from examples.new_compressor import TopOfBlock


def top_of_block(block: int = 64) -> Aggregator:
    """The largest element of each block between all ranks, with error feedback."""
    return Compressed(TopOfBlock(block))


def in_order() -> Aggregator:
    """Exact average with the same bits on every network: added up in rank order, in float64."""
    return InOrder()


def register() -> None:
    """Make both known by name, to `attach`, `auto` and the benchmarks of this process."""
    COMPRESSORS["top_of_block"] = TopOfBlock
    AGGREGATORS["in_order"] = InOrder
    PRESETS["top_of_block"] = Preset(top_of_block)  # commopt.attach(ddp, "top_of_block", block=32)
    PRESETS["in_order"] = Preset(in_order)  # commopt.attach(ddp, "in_order"), or Hierarchical(inter=InOrder())


def train(strategy: str, learning_rate: float, steps: int = 300) -> float:
    """Learn a matrix with a preset; return the last loss."""
    target = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    ddp = DistributedDataParallel(nn.Linear(64, 64, bias=False))
    commopt.attach(ddp, strategy)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=learning_rate)
    for _ in range(steps):
        batch = torch.randn(32, 64)
        loss = nn.functional.mse_loss(ddp(batch), batch @ target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    """Train with each of them."""
    commopt.take_ranks()
    dist.init_process_group("gloo")
    register()
    for strategy, learning_rate in (("top_of_block:block=16", 2.0), ("in_order", 10.0)):
        loss = train(strategy, learning_rate)
        if dist.get_rank() == 0:
            print(f"{strategy}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
