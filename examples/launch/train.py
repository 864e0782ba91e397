# SPDX-License-Identifier: Apache-2.0
"""A DDP script as anybody has one, started by any launcher: it trains an MLP of 1.3 million parameters.

torchrun --nproc-per-node 2 train.py
srun python -m commopt run --strategy hierarchical_bf16 --report train.py
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commopt

STEPS, WARM_UP_STEPS = 40, 10


def main() -> None:
    """Train, and print the time of a step."""
    commopt.take_ranks()  # for srun and mpirun; torchrun and `commopt run` have done it
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    layers = (nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        if step == WARM_UP_STEPS:
            started = time.monotonic()
        images = torch.randn(32, 256, device=device)
        loss = nn.functional.cross_entropy(model(images), images[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean = loss.detach()  # reading it waits for the GPU
    dist.all_reduce(mean)
    step_ms = (time.monotonic() - started) / (STEPS - WARM_UP_STEPS) * 1e3
    if dist.get_rank() == 0:
        world = dist.get_world_size()
        print(f"{world} ranks: loss {mean.item() / world:.3f}, {step_ms:.0f} ms per step", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
