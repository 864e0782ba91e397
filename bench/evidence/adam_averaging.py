# SPDX-License-Identifier: Apache-2.0
"""The forms that `adam_forms` compares, and what a form makes of the gradients of all nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from bench.evidence.accumulated_bias import RESIDUALS, Channel
from bench.evidence.adam_nodes import (
    EPS,
    NODES,
    Blocks,
    Decoded,
    Differences,
    Exact,
    Factored,
    Frozen,
    Own,
    Replica,
    Shared,
)
from bench.evidence.convergence import plan
from commopt import DGC, Compressor, OneBit, Quantize
from commopt.feedback import SAMPLE_EVERY_STEPS

_LEAST_WEIGHT = 0.25  # of a new measurement of lengths, as in commopt.Adam
_SKETCH_NUMEL = 32


@dataclass(frozen=True)
class Form:
    """What nodes exchange. With r = sqrt(v) + eps, g a node's gradient, C the channel, f the length, x the weights:

    momentum "node":   m = b1 m + (1 - b1) g, of each node;   x -= lr mean(C(f m / r))
    momentum "behind": m = b1 m + (1 - b1) mean(C(f g / r));  x -= lr m                     (LaProp, arXiv 2002.04839)
    momentum "common": u = mean(C((b1 m + (1 - b1) g) / r));  x -= lr u;  m = u r           (1-bit Adam's order)

    length: 1, sqrt(nodes), or of each tensor: "exact" from the squares of nodes' gradients and of their mean;
        "sketched" the same of 32 sums with random signs in place of the gradients, in every 8th step; "measured" as
        commopt.Adam does it, from directions.
    """

    second: Callable[[Replica, float], Own]
    compressor: Compressor | None = None
    length: Literal["1", "sqrt(K)", "exact", "sketched", "measured"] = "measured"
    momentum: Literal["node", "behind", "common"] = "node"
    betas: tuple[float, float] = (0.9, 0.95)
    channel: type[Channel] = Channel

    @property
    def oracle(self) -> bool:
        """Whether it takes what only a dense exchange tells, though what it sends is compressed."""
        return self.compressor is not None and (self.second is Exact or self.length == "exact")


_BIT, _LARGEST = OneBit(scale="rms"), DGC(0.015)
_START = 50
DENSE = "AdamW"
TODAY = "one bit, own v"

FORMS: dict[str, Form] = {
    DENSE: Form(Exact, length="1"),
    "AdamW, betas 0.5 and 0.95": Form(Exact, length="1", betas=(0.5, 0.95)),
    "own v, length 1": Form(Own, length="1"),
    "own v, length sqrt(K)": Form(Own, length="sqrt(K)"),
    "own v, length exact": Form(Own, length="exact"),
    "own v, length sketched": Form(Own, length="sketched"),
    "own v": Form(Own),
    "v shared": Form(partial(Shared, 1)),
    "v shared every 8": Form(partial(Shared, 8)),
    "v shared every 32": Form(partial(Shared, 32)),
    "v of rows and columns": Form(Factored),
    "oracle v, momentum behind": Form(Exact, length="1", momentum="behind"),
    "own v, momentum behind": Form(Own, momentum="behind"),
    "one bit, oracle v": Form(Exact, _BIT, "1"),
    "one bit, own v, length 1": Form(Own, _BIT, "1"),
    "one bit, own v, length sqrt(K)": Form(Own, _BIT, "sqrt(K)"),
    "one bit, own v, length exact": Form(Own, _BIT, "exact"),
    TODAY: Form(Own, _BIT),
    "one bit, own v, length sketched": Form(Own, _BIT, "sketched"),
    "one bit, v shared": Form(partial(Shared, 1), _BIT),
    "one bit, v shared every 8": Form(partial(Shared, 8), _BIT),
    "one bit, v shared every 32": Form(partial(Shared, 32), _BIT),
    "one bit, v of rows and columns": Form(Factored, _BIT),
    "one bit, v decoded": Form(Decoded, _BIT, "1"),
    "one bit, own v, blocks of 64": Form(partial(Blocks, 64, 1), _BIT),
    "one bit, own v, blocks of 512 every 8": Form(partial(Blocks, 512, 8), _BIT),
    "one bit, 1-bit Adam, 50 dense steps": Form(
        partial(Frozen, _START), OneBit(scale="rms", start_step=_START), "1", "common"
    ),
    "AdamW, v frozen after 50 steps": Form(partial(Frozen, _START), None, "1"),
    "one bit, oracle v, momentum behind": Form(Exact, _BIT, "1", "behind"),
    "one bit, own v, momentum behind": Form(Own, _BIT, "measured", "behind"),
    "one bit of differences, own v": Form(Own, _BIT, channel=Differences),
    "4 bits of differences, own v": Form(Own, Quantize(bits=4), channel=Differences),
    "one bit, own v, betas 0.5 and 0.95": Form(Own, _BIT, betas=(0.5, 0.95)),
    "top-k, oracle v": Form(Exact, _LARGEST, "1"),
    "top-k, own v": Form(Own, _LARGEST),
    "top-k, own v, momentum behind": Form(Own, _LARGEST, "measured", "behind"),
}


# What costs something: with it, and without.
PRICES: dict[str, tuple[str, str]] = {
    "the mean of directions by own v, not AdamW's direction of the mean": ("own v", DENSE),
    "one bit behind it": (TODAY, "own v"),
    "own v, not shared in every step": ("own v", "v shared"),
    "own v, not shared in every step, with one bit": (TODAY, "one bit, v shared"),
    "own v, not shared in every 32nd step, with one bit": (TODAY, "one bit, v shared every 32"),
    "own v, not scaled to the mean of blocks of 512, with one bit": (TODAY, "one bit, own v, blocks of 512 every 8"),
    "lengths measured, not exact": ("own v", "own v, length exact"),
    "lengths measured, not exact, with one bit": (TODAY, "one bit, own v, length exact"),
    "lengths measured, not sketched, with one bit": (TODAY, "one bit, own v, length sketched"),
    "lengths measured, not left at 1, with one bit": (TODAY, "one bit, own v, length 1"),
    "momentum in the nodes, not behind, with one bit": (TODAY, "one bit, own v, momentum behind"),
    "both, with betas 0.5 and 0.95": ("one bit, own v, betas 0.5 and 0.95", "AdamW, betas 0.5 and 0.95"),
}


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
        root = self._second.follow(gradients, step).sqrt() + EPS
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
