"""What was kept for a buffer by whatever sent it before goes along with whatever sends it now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from commopt.aggregate.base import Aggregator
from commopt.compress import ErrorFeedback
from commopt.feedback import Account
from commopt.groups import apply_scale
from commopt.kernels.residual import round_with_carry


def hand_over(aggregator: Aggregator, parts: Sequence[Tensor], scale: float, account: Account) -> float:
    """Let `aggregator`, which sends the buffer in `parts` next, send what other aggregators kept of it.

    With residuals of its own it finds them there. Otherwise they are added to `parts`, which are then scaled: once,
    and gone when the account's owner commits. Returns the scale that is left to be applied. On every rank for every
    buffer, without communication: what is held, and hence whether anything is added, differs from rank to rank.
    """
    ledger, layout, device = account.ledger, account.layout, parts[0].device
    if ledger is None:
        return scale
    paths = aggregator.residual_paths
    ledger.hand_over(layout, paths, device)
    carry = None if paths else account.leftover(layout, device)
    if carry is None:
        return scale
    begin = 0
    for part in parts:
        end = begin + part.numel()
        scale_and_add(part, part, scale, replace(carry, old=carry.old[begin:end], new=carry.new[begin:end]))
        begin = end
    return 1.0


def scale_and_add(values: Tensor, target: Tensor, scale: float, carry: ErrorFeedback | None) -> None:
    """Set `target` to `scale * values` plus what `carry` brings, rounded once; it takes what that leaves out.

    `target` may be `values`, which are overwritten where that saves memory.
    """
    if carry is None:
        apply_scale(values, scale)
        if target is not values:
            target.copy_(values)
    elif target.dtype == torch.float64:
        kept = carry.old if carry.loss_scale is None else carry.old * carry.loss_scale
        target.copy_(apply_scale(values, scale)).add_(kept, alpha=carry.decay)
        carry.new.zero_()
    else:
        round_with_carry(values, target, scale, carry)
