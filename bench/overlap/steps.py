"""A few steps of a GPT under torch's profiler."""

from __future__ import annotations

import argparse
import os
import socket

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import commopt
from examples.train_gpt import GPT, VOCABULARY

STEP = "training step"

# Until DDP has its buckets, NCCL its connections, and the allocators all they need.
_FIRST_STEPS = 12
# What ranks that share a GPU can use: NCCL refuses two of them on one host, so each claims a host of its own.
_ALL_BY_SOCKETS = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}


def start_process_group() -> torch.device:
    """Join the other ranks that torchrun started on this machine; return this rank's device, maybe shared."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if int(os.environ["LOCAL_WORLD_SIZE"]) > gpus:
        settings = {"NCCL_HOSTID": f"{socket.gethostname()}-{local}", **_ALL_BY_SOCKETS}
        os.environ.update({name: os.environ.get(name, value) for name, value in settings.items()})
    device = torch.device("cuda", local % gpus)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    return device


class Steps:
    """Steps that read nothing but the device's memory, so that all that waits in them is the training itself."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        self._device = device
        model = GPT(options.layers, options.width, options.context).to(device)
        self.ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
        self.state = commopt.attach(self.ddp, options.strategy, plan="ddp")
        self._optimizer = torch.optim.AdamW(self.ddp.parameters(), fused=True)
        window = torch.randint(VOCABULARY, (options.batch, options.context + 1), device=device)
        self._tokens, self._targets = window[:, :-1].contiguous(), window[:, 1:].flatten()

    def run(self, count: int) -> None:
        """Take steps, each marked for the profiler; return when the device has done them."""
        for _ in range(count):
            with record_function(STEP):
                self._optimizer.zero_grad(set_to_none=True)
                cross_entropy(self.ddp(self._tokens).flatten(0, 1), self._targets).backward()
                self._optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def profiled(self, count: int) -> profile:
        """Take steps under the profiler, after those that every training begins with."""
        self.run(_FIRST_STEPS)
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities)
        with profiler:
            self.run(count)
        return profiler
