# SPDX-License-Identifier: Apache-2.0
"""The parts of a LocalSGD's rounds: a bucket on its way, the factor of a node, digests, what a checkpoint has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite

import torch
from torch import Tensor

from commopt.attached.checksum import as_bytes
from commopt.attached.step_weights import factor_of
from commopt.errors import ConfigurationError
from commopt.feedback.checkpoint import refuse, required
from commopt.feedback.parameter_buckets import Named, ParameterBucket
from commopt.lanes import Agreement, LaneClient, Pending

_DIGESTED_AT_ONCE = 2**24  # elements, which are made int64 for it


@dataclass(eq=False)
class Flight:
    """A bucket on its way.

    values: once `pending` has ended, put into the bucket, or with `adds` added to it.
    agreement: that all ranks have come to this round; None for values from a checkpoint.
    """

    bucket: ParameterBucket
    values: Tensor
    adds: bool
    agreement: Agreement | None = None
    pending: Pending | None = None

    def end(self) -> Tensor:
        """Return the values, once they are there. Raises MismatchError where ranks have come to different rounds."""
        if self.agreement is not None:
            self.agreement.wait()
        if self.pending is not None:
            self.pending.wait()
        return self.values


Underway = dict[int, list[Flight]]  # by fragment
Rounds = tuple[bool, Underway, str | None, list[float] | None, int]
"""What a checkpoint has: whether nodes have agreed, what is under way, the digest of parameters, fragments' weights,
and the optimizer steps before the last turn, -1 for none."""


def factor_of_node(client: LaneClient, agreement: Agreement, place: int) -> float:
    """Return, on the lane, the factor of each rank of this node in a round, by the weights of all nodes.

    place: of the fragment among those that have a round now. Where nobody has learned anything all count alike.
    """
    nodes, sizes = client.team.wire.nodes, Counter(client.team.wire.nodes)
    weights = [answer["weights"] for answer in agreement.answers()]
    if any(each is None for each in weights):
        raise ConfigurationError("only some nodes have given weights since the last round; call weight() on every rank")
    of_ranks = [each[place] / sizes[node] for each, node in zip(weights, nodes, strict=True)]
    return factor_of(of_ranks, client.team.rank) if any(of_ranks) else 1.0


def weights_from(values: object, fragments: int) -> list[float] | None:
    """Return the weights that a checkpoint has of a node's fragments. Raises ConfigurationError for what is damaged."""
    if values is None:
        return None
    weights: list[float] = [each for each in required(values, list, "rounds['weights']") if isinstance(each, float)]
    if len(weights) != fragments or not all(isfinite(each) and each >= 0 for each in weights):
        refuse("rounds['weights']", values, f"None, or {fragments} numbers, 0 or more")
    return weights


def digest_of(tensors: Named) -> str:
    """Return a digest of what tensors hold: of the sums of their bits, which any device adds up in no time."""
    sums = []
    for name, tensor in tensors.items():
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
        bits = as_bytes(tensor).view(integers)
        total = sum(int(part.sum(dtype=torch.int64)) for part in bits.split(_DIGESTED_AT_ONCE))
        sums.append((name, tuple(tensor.shape), total))
    return sha256(repr(sums).encode()).hexdigest()


def part_from(values: object, name: str, tensor: Tensor) -> Tensor:
    if not isinstance(values, Tensor) or values.shape != tensor.shape or not values.isfinite().all():
        refuse(f"rounds['underway'][{name!r}]", values, f"a finite tensor of shape {list(tensor.shape)}")
    return values
