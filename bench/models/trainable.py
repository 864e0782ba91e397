"""What a benchmark needs of a model in training."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class Trainable(Protocol):
    """A fresh model, its optimizer and this rank's batches; equal seeds start equal runs."""

    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    device: torch.device
    evaluation: str
    """On what the held-out loss is computed."""

    def step(self) -> Tensor:
        """Do one optimizer step on this rank's next batch; return this rank's loss, still on the device."""
        ...

    def held_out_loss(self) -> float:
        """Return the mean loss in nats on the same held-out data each time; collective."""
        ...
