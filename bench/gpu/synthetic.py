# SPDX-License-Identifier: Apache-2.0
"""A GPT of any size on random tokens that lie on the device: what a step takes has nothing of reading data in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import commopt
from examples.train_gpt import GPT, parallelize

_LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Size:
    """The shape of a GPT and of a rank's batch."""

    layers: int
    width: int
    vocabulary: int
    context: int = 512
    batch: int = 4


SIZES = {
    "gpt2": Size(12, 768, 50257),
    "gpt-28m": Size(8, 512, 4096),
    "tiny": Size(2, 64, 128, context=16, batch=2),
}
"""By name; gpt2 is the smallest of that family, with 124 million parameters."""


class SyntheticGPT:
    """As examples.train_gpt.Training, computing in bfloat16: by autocast under DDP, by its policy under FSDP2.

    Every rank makes the same parameters from the same seed, so that none are sent.
    """

    def __init__(self, size: Size, parallel: str, device: torch.device) -> None:
        torch.manual_seed(0)
        with device:
            model = GPT(size.layers, size.width, size.context, size.vocabulary)
            nn.init.normal_(model.bytes.weight, std=0.02)
            model.head[1].weight = model.bytes.weight
            draws = torch.Generator(device).manual_seed(1 + dist.get_rank())
            tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1), generator=draws)
        self.device = device
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:]
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model: nn.Module
        if parallel == "ddp":
            ids = [device.index] if device.type == "cuda" else None
            self.model = DistributedDataParallel(model, device_ids=ids, init_sync=False)
        else:
            self.model = parallelize(model, parallel, device, bf16=True)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), _LEARNING_RATE, fused=True)
        self.evaluation = "the batch that it trains on"
        self._autocast = parallel == "ddp"

    def _loss(self) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            return cross_entropy(self.model(self.inputs).flatten(0, 1).float(), self.targets.flatten())

    def step(self) -> Tensor:
        """Do one optimizer step; return this rank's loss, still on the device."""
        loss = self._loss()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss over all ranks' batches; collective."""
        loss = self._loss()
        dist.all_reduce(loss)
        return float(loss / dist.get_world_size())

    def follow(self, state: commopt.CommState | None) -> None:
        """Take the optimizer that goes with the hook, where the hook does Adam's part of AdamW."""
        if state is not None and state.aggregator is not None and state.aggregator.adam is not None:
            self.optimizer = state.optimizer(self.model.parameters(), _LEARNING_RATE)
