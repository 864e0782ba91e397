# SPDX-License-Identifier: Apache-2.0
"""The script that `commopt chaos` trains where none is named: a small network, on DDP or on FSDP2 with replicas.

It knows nothing of commopt, nor of faults, and does the same in every run, bit by bit.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

WIDTH, CLASSES, BATCH = 96, 10, 32


def network() -> nn.Sequential:
    """Return four layers, 29 thousand parameters, alike on all ranks."""
    torch.manual_seed(0)
    hidden = [each for _ in range(3) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("ddp", "hsdp"), default="ddp")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--timeout", type=float, default=60, help="of the process group, in seconds (default 60)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    world_size, shards = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    place = int(os.environ["GROUP_RANK"]) * shards + int(os.environ["LOCAL_RANK"])  # a node may be a world of its own
    module = network()
    model: Any
    if options.model == "ddp":
        model = DistributedDataParallel(module, bucket_cap_mb=0.05)
    else:
        mesh = init_device_mesh("cpu", (world_size // shards, shards), mesh_dim_names=("replicate", "shard"))
        for layer in module:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        model = fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(options.steps):
        draw = torch.Generator().manual_seed(1000 * step + place)
        inputs = torch.randn(BATCH, WIDTH, generator=draw)
        loss = cross_entropy(model(inputs), inputs[:, :CLASSES].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
