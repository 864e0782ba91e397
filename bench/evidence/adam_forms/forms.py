# SPDX-License-Identifier: Apache-2.0
"""The forms that are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from bench.evidence.accumulated_bias import Channel
from bench.evidence.adam_forms.replica import Replica
from bench.evidence.adam_forms.second_moments import Blocks, Decoded, Exact, Factored, Frozen, Own, Shared
from commopt import DGC, Compressor, OneBit, Quantize


class Differences(Channel):
    """Sends what values differ by from what was sent before (EF21, arXiv 2106.05203); nothing is owed."""

    def __init__(self, compressor: Compressor, keep: Any, like: Tensor) -> None:
        super().__init__(compressor, None, like)

    def send(self, values: Tensor, step: int) -> Tensor:
        """Return the sum of what was sent."""
        super().send(values - self.total, step)
        return self.total


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


_BIT, _LARGEST = OneBit(), DGC(0.015)
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
    "one bit, 1-bit Adam, 50 dense steps": Form(partial(Frozen, _START), OneBit(start_step=_START), "1", "common"),
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
