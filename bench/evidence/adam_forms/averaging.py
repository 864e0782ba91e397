# SPDX-License-Identifier: Apache-2.0
"""A form at work, and a training with it."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR

from bench.evidence.accumulated_bias import RESIDUALS, Channel
from bench.evidence.adam_forms.forms import Form
from bench.evidence.adam_forms.replica import NODES, Replica
from bench.evidence.convergence import plan
from commopt.feedback import SAMPLE_EVERY_STEPS
from examples.train_gpt import WARM_UP_STEPS, WEIGHT_DECAY

LEARNING_RATE = dict(plan.GPT.learning_rates)["adamw"]
_EPS = 1e-8
_LEAST_WEIGHT = 0.25  # of a new measurement of lengths, as in commopt.Adam
_SKETCH_NUMEL = 32


class Averaging:
    """A form at work: nodes' gradients in, what the optimizer subtracts out."""

    def __init__(self, form: Form, replica: Replica) -> None:
        self.form, self.lengths = form, replica.lengths
        numel, self._matrices = sum(replica.lengths), slice(replica.matrix_numel)
        self._second = form.second(replica, form.betas[1])
        self._m = torch.zeros(NODES if form.momentum == "node" else 1, numel)
        self._squares = torch.zeros(2, len(replica.lengths))  # of nodes' gradients, of their mean
        self._agreed = torch.ones(len(replica.lengths))
        self._channels: list[Channel] = []
        if form.compressor is not None:
            like = torch.zeros(replica.matrix_numel)
            self._channels = [form.channel(form.compressor, RESIDUALS["float32"], like) for _ in range(NODES)]

    def direction(self, gradients: Tensor, step: int) -> Tensor:
        """Return the mean that nodes have of their directions [numel]."""
        b1 = self.form.betas[0]
        correction = 1 - b1 ** (step + 1)
        root = self._second.follow(gradients, step).sqrt() + _EPS
        behind = self.form.momentum == "behind"
        momentum = gradients if behind else self._m.lerp(gradients, 1 - b1) / correction
        if self.form.momentum == "node":
            self._m.lerp_(gradients, 1 - b1)
        own = momentum / root
        for part, length in zip(own.split(self.lengths, 1), self._length(gradients, step).tolist(), strict=True):
            part *= length
        sent = self._sent(own, step)
        self._compare(own, sent, step)
        found = sent.mean(0)
        if behind:
            self._m.lerp_(found, 1 - b1)
            return self._m[0] / correction
        if self.form.momentum == "common":
            self._m[0] = found * root * correction
        self._second.see(found * root, gradients)
        return found

    @property
    def bytes_of_dense(self) -> float | None:
        """What a node sends, as a part of float32 gradients; None where an oracle is asked."""
        if self.form.oracle:
            return None
        numel, matrices = sum(self.lengths), self._matrices.stop
        dense = numel if self.form.compressor is None else numel - matrices
        floats = dense + self._second.floats
        if self.form.length in ("measured", "sketched"):
            each = 2 if self.form.length == "measured" else 1 + _SKETCH_NUMEL
            floats += each * len(self.lengths) / SAMPLE_EVERY_STEPS
        share = floats / numel
        if (compressor := self.form.compressor) is not None:
            whole_numel = -(-matrices // compressor.granularity) * compressor.granularity
            encoded = compressor.payload_nbytes(whole_numel) / (4 * numel)
            started = compressor.start_step / plan.GPT.steps
            share = share + encoded * (1 - started) + matrices / numel * started
        return share

    def _sent(self, own: Tensor, step: int) -> Tensor:
        """Return what arrives of every node's directions."""
        if self.form.compressor is None or self.form.compressor.at(step) is None:
            return own
        sent = own.clone()
        for channel, values in zip(self._channels, sent, strict=True):
            values[self._matrices] = channel.send(values[self._matrices], step)
        return sent

    def _length(self, gradients: Tensor, step: int) -> Tensor:
        """Return f of each tensor."""
        if self.form.length == "exact":
            self._squares.lerp_(_squares(gradients, self.lengths), 1 - self.form.betas[1])
        if self.form.length == "sketched" and step % SAMPLE_EVERY_STEPS == 0:
            sketch = torch.cat([_sketch(part, step) for part in gradients.split(self.lengths, 1)], 1)
            self._squares.lerp_(_squares(sketch, [_SKETCH_NUMEL] * len(self.lengths)), _weight(step))
        if self.form.length in ("exact", "sketched"):
            ratio = self._squares[0] / self._squares[1]
            return ratio.clamp(1.0, NODES).nan_to_num(1.0).sqrt()
        if self.form.length == "measured":
            return (self._agreed + (1 - self._agreed) / NODES).rsqrt()
        return torch.full_like(self._agreed, 1.0 if self.form.length == "1" else sqrt(NODES))

    def _compare(self, own: Tensor, sent: Tensor, step: int) -> None:
        """Measure how far nodes agree, as commopt.Adam.compare does."""
        if step % SAMPLE_EVERY_STEPS:
            return
        others = sent.sum(0) - sent
        alike, squares = (_sums(each.sum(0), self.lengths) for each in (own * others, own.square()))
        cosine = alike / squares.clamp_min(1e-30) / (NODES - 1)
        cosine.clamp_(0.0, 1.0)
        b1 = 0.0 if self.form.momentum == "behind" else self.form.betas[0]
        noise = (1 - b1) / (1 + b1) * (1 + b1 ** (step + 1)) / (1 - b1 ** (step + 1))
        self._agreed.lerp_(noise * cosine / (1 - cosine + noise * cosine), _weight(step))


def _squares(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return, of each tensor, the mean square of the nodes' values [nodes, numel], and the square of their mean."""
    return torch.stack([_sums(values.square().mean(0), lengths), _sums(values.mean(0).square(), lengths)])


def _sums(values: Tensor, lengths: Sequence[int]) -> Tensor:
    return torch.stack([part.sum() for part in values.split(lengths)])


def _sketch(values: Tensor, step: int) -> Tensor:
    """Return sums of rows [nodes, 32], each with a random sign: what their squares add up to is expected of values'."""
    rows = pad(values, (0, -values.shape[1] % _SKETCH_NUMEL)).unflatten(1, (-1, _SKETCH_NUMEL))
    signs = torch.randint(2, (rows.shape[1],), generator=torch.Generator().manual_seed(step)) * 2.0 - 1
    return torch.einsum("nrs,r->ns", rows, signs)


def _weight(step: int) -> float:
    """Return how much a measurement in every 8th step counts, beside those before."""
    return max(_LEAST_WEIGHT, 1 / (1 + step // SAMPLE_EVERY_STEPS))


def train(form: Form, rate: float, seed: int, steps: int) -> tuple[Replica, Averaging]:
    """Train for so many steps, in which the learning rate falls to zero."""
    replica = Replica(seed)
    averaging = Averaging(form, replica)
    optimizer = torch.optim.SGD([replica.weights], rate * LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = schedule_of(optimizer, steps)
    for step in range(steps):
        replica.weights.grad = averaging.direction(replica.gradients(), step)
        optimizer.step()
        schedule.step()
    return replica, averaging


def schedule_of(optimizer: torch.optim.Optimizer, steps: int) -> ChainedScheduler:
    """Return the benchmark's: up within 10 steps, and down to zero."""
    return ChainedScheduler(
        [
            LinearLR(optimizer, 1 / WARM_UP_STEPS, total_iters=WARM_UP_STEPS),
            LinearLR(optimizer, 1.0, 0.0, steps),
        ]
    )
