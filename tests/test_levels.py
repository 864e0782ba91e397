# SPDX-License-Identifier: Apache-2.0
"""Networks with sites: exact sums by level, residuals that no level loses, and the bytes that cross each border."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

import commopt
from commopt import (
    Aggregator,
    Communicator,
    Compressed,
    Flat,
    Hierarchical,
    OneBit,
    PowerSGD,
    Quantize,
)
from commopt.groups import TeamShape
from tests.ranks import run

# Ranks of each node, and the site of each node.
Network = tuple[tuple[int, ...], tuple[str, ...]]
EVEN: Network = ((2, 2, 2, 2), ("a", "a", "b", "b"))
UNEVEN: Network = ((2, 1, 2, 1, 3), ("a", "a", "b", "b", "b"))
SINGLE: Network = ((1, 1, 1, 1, 1), ("a", "a", "a", "b", "b"))
RACKS: Network = ((1,) * 8, ("a/1", "a/1", "a/2", "a/2", "b/1", "b/1", "b/2", "b/2"))
SCATTERED: Network = ((1,) * 4, ("a", "b", "a", "b"))
NETWORKS = {"2x2x2": EVEN, "(2+1)x(2+1+3)": UNEVEN, "3+2": SINGLE, "racks": RACKS, "scattered": SCATTERED}


def run_in(network: Network, function, *args, **kwargs):
    """Run a function on all ranks of a network whose sites are told."""
    nodes, sites = network
    site_of = [site for site, count in zip(sites, nodes, strict=True) for _ in range(count)]
    return run(partial(_told, function, site_of), sum(nodes), *args, nodes=nodes, **kwargs)


def _told(function, site_of: Sequence[str], rank: int, world_size: int, *args):
    import os

    os.environ["COMMOPT_SITE"] = site_of[rank]
    try:
        return function(rank, world_size, *args)
    finally:
        del os.environ["COMMOPT_SITE"]


def gradients(world_size: int, numel: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(world_size)]


def average(rank: int, world_size: int, aggregator: Aggregator, numels: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    comm = Communicator()
    found = []
    for numel in numels:
        buffer = gradients(world_size, numel)[rank].to(dtype)
        comm.all_reduce(buffer, aggregator=aggregator)
        found.append(buffer)
    return found


NUMELS = (1, 7, 1023, 40_001)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("aggregator", [Hierarchical(), Hierarchical(inter=Hierarchical()), Flat()], ids=str)
def test_exact_averages_are_those_of_float64(network: str, aggregator: Aggregator) -> None:
    world_size = sum(NETWORKS[network][0])
    results = run_in(NETWORKS[network], average, aggregator, NUMELS, torch.float32)
    for place, numel in enumerate(NUMELS):
        exact = torch.stack(gradients(world_size, numel)).mean(0)
        for result in results:
            assert torch.equal(result[place], results[0][place])
            torch.testing.assert_close(result[place].double(), exact, rtol=1e-6, atol=3e-7)
