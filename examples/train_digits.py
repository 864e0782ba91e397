# SPDX-License-Identifier: Apache-2.0
"""Learn scikit-learn's handwritten digits with DDP and one of commopt's hooks; a few seconds on a laptop.

    torchrun --nproc-per-node 2 examples/train_digits.py --hook hierarchical_quantized:bits=4
    torchrun --nproc-per-node 2 examples/train_digits.py --hook ddp --optimizer adamw

1,797 images of 8 x 8 pixels that scikit-learn ships (pip install scikit-learn), so nothing is downloaded. A third of
them is held out. `--hook` takes any preset with its options, or ddp for stock DDP.
"""

# No `from __future__ import annotations`: what you copy from here may be a hook, whose annotations DDP reads.

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import commopt

HELD_OUT_EVERY = 3  # images
LEARNING_RATES = {"sgd": 0.1, "adamw": 3e-3}


def load_images() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (images, labels) to learn from and to hold out: float32 [images, 1, 8, 8] in 0..1, int64 [images]."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target)
    held_out = torch.arange(len(labels)) % HELD_OUT_EVERY == 0
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


def build_model() -> nn.Module:
    """Return a small CNN: float32 [batch, 1, 8, 8] in, logits [batch, 10] out, 151,306 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class Training:
    """A fresh model, its optimizer and this rank's batches: equal seeds start equal runs, whatever the hook."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(options.seed)
        model = build_model().to(device)
        self.model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
        self.learning_rate = learning_rate = options.learning_rate or LEARNING_RATES[options.optimizer]
        self.steps = options.steps
        self.optimizer: torch.optim.Optimizer
        if options.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(self.model.parameters(), learning_rate, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), learning_rate)
        self.decay = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.0, self.steps)  # to zero at the end
        (self.images, self.labels), self.held_out = ([x.to(device) for x in part] for part in load_images())
        self.batches = self._batches(options.batch, torch.Generator().manual_seed(options.seed))

    def _batches(self, batch: int, shuffle: torch.Generator) -> Iterator[Tensor]:
        """Yield indices, epoch after epoch: all ranks shuffle alike, and each takes its share of every batch."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        while True:
            order = torch.randperm(len(self.images), generator=shuffle)
            for together in order.split(batch * world_size):
                if len(together) == batch * world_size:  # DDP's mean needs equal shares: the rest waits for its turn
                    yield together[rank::world_size]

    def follow(self, state: commopt.CommState | None) -> None:
        """Take the optimizer that goes with the hook, where the hook does Adam's part of AdamW."""
        if state is not None and state.aggregator is not None and state.aggregator.adam is not None:
            self.optimizer = state.optimizer(self.model.parameters(), self.learning_rate)
            self.decay = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.0, self.steps)

    def step(self) -> Tensor:
        """Do one optimizer step on this rank's next batch; return this rank's loss, still on the device."""
        chosen = next(self.batches)
        loss = cross_entropy(self.model(self.images[chosen]), self.labels[chosen])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # gradients are averaged in here, while it runs
        self.optimizer.step()
        self.decay.step()
        return loss.detach()

    @torch.no_grad()
    def held_out_accuracy(self) -> tuple[float, float]:
        """Return the share of held-out images that are recognized, and the loss in nats; all ranks take a part."""
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        images, labels = (x[mine] for x in self.held_out)
        logits = self.model.module(images)
        right = (logits.argmax(1) == labels).sum()
        totals = torch.stack([right, cross_entropy(logits, labels, reduction="sum")])
        dist.all_reduce(totals)
        accuracy, loss = (totals / len(self.held_out[1])).tolist()
        return accuracy, loss


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add what `Training` reads from its options."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300, help="of the optimizer (default 300)")
    parser.add_argument("--batch", type=int, default=16, help="images per rank and step (default 16)")
    parser.add_argument("--optimizer", choices=LEARNING_RATES, default="sgd")
    parser.add_argument("--learning-rate", type=float, help=f"default: {LEARNING_RATES}")


def main() -> None:
    """Train, and show the accuracy on the way."""
    parser = argparse.ArgumentParser(description="Learn scikit-learn's digits, under torchrun, srun or mpirun.")
    parser.add_argument("--hook", default="hierarchical", metavar="NAME[:OPTION=VALUE...]", help="a preset, or ddp")
    add_model_options(parser)
    options = parser.parse_args()
    if options.hook != "ddp":
        try:
            commopt.build_preset(options.hook)
        except commopt.ConfigurationError as error:
            parser.error(str(error))

    commopt.take_ranks()  # for srun and mpirun: torchrun sets what torch reads by itself
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    training = Training(options, device)
    if options.hook != "ddp":
        training.follow(commopt.attach(training.model, options.hook))  # <- attach is all it takes, but for adam=
    for step in range(1, options.steps + 1):
        training.step()
        if step % 50 == 0 or step == options.steps:
            accuracy, loss = training.held_out_accuracy()
            if dist.get_rank() == 0:
                print(f"{options.hook}: step {step}, {100 * accuracy:.1f} % right, loss {loss:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
