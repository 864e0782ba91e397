"""Residuals between the nodes follow their elements to the ranks of a node that take them across."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commopt.aggregate.base import Aggregator
from commopt.aggregate.routes import Route
from commopt.feedback import Account
from commopt.groups import Team


def bring_home(
    inter: Aggregator, division: str, routes: Sequence[Route], intra: Team, account: Account, device: torch.device
) -> None:
    """Move residuals inside the node when a buffer is new, or divided anew: to those who take them across by `routes`.

    Each rank adds what it holds of the buffer's parameters to zeros, so that adding up moves it exactly.
    """
    ledger, path = account.ledger, _path(account)
    if ledger is None or not ledger.place(path, account.layout, division):
        return
    paths = _paths(inter, account)
    numel = account.layout.numel
    for each in paths:
        ledger.dissolve(each, account.layout)
    held = [ledger.collect(each, account.layout, device) for each in paths]
    factors = inter.shared_factors(account.layout)
    moving = torch.cat([*held, ledger.factors.first_rights(path, factors, device)])
    intra.all_reduce(moving)
    here = [mine for route in routes if (mine := route.mine) is not None]
    for layout in here:
        spans = account.layout.spans_of(layout)
        for begin, each in zip(range(0, numel * len(paths), numel), paths, strict=True):
            parts = [moving[begin + first : begin + last] for first, last in spans]
            ledger.deposit(each, layout, torch.cat(parts) if parts else moving[:0])
    rights = moving[numel * len(paths) :]
    names = frozenset(name for layout in here for name in layout.names)
    ledger.factors.keep_rights(path, factors, rights, names)


def on_the_move(inter: Aggregator, account: Account) -> bool:
    """Return whether residuals of the buffer have yet to be put together."""
    ledger = account.ledger
    return ledger is not None and any(ledger.has_loose(path, account.layout) for path in _paths(inter, account))


def _path(account: Account) -> str:
    return account.within("inter", account.layout).path


def _paths(inter: Aggregator, account: Account) -> list[str]:
    return [f"{_path(account)}.{part}".rstrip(".") for part in inter.residual_paths]
