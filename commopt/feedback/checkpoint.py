"""Residuals and factors as plain dictionaries: for torch.save, rank-0-only checkpoints, other worlds and buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commopt.errors import ConfigurationError
from commopt.feedback.layout import Layout, Piece
from commopt.feedback.ledger import Kind, Ledger, Slot

_Pieces = list[list[Any]]  # [name, begin, end, shape] each


def save(ledger: Ledger) -> dict[str, Any]:
    """Return copies in host memory: residuals by level and kind, then by name and element range, and all factors."""
    residuals: dict[str, dict[str, Tensor]] = {}
    layouts: dict[str, list[_Pieces]] = {}
    for slot in ledger.slots():
        role = f"{slot.path}/{slot.kind}"
        layouts.setdefault(role, []).append(pieces_of(slot.layout))
        by_range = residuals.setdefault(role, {})
        for offset, piece in zip(slot.layout.offsets, slot.layout.pieces, strict=True):
            values = slot.values[offset : offset + piece.numel].detach().to("cpu", copy=True)
            # Pieces nobody has asked for yet may lie on top of each other; they add up.
            by_range[str(piece)] = by_range[str(piece)] + values if str(piece) in by_range else values
    placed = {
        path: [[pieces_of(layout), division] for layout, division in known.items()]
        for path, known in ledger.placed().items()
    }
    return {"residuals": residuals, "layouts": layouts, "placed": placed, "factors": ledger.factors.save()}


def restore(ledger: Ledger, saved: Mapping[str, Any]) -> None:
    """Put a rank's residuals and factors where they were: nothing is rounded, added or moved between ranks.

    They wait in host memory: what a lane lets go must not be memory of another stream, which would use it at once.
    """
    for role, layouts in saved["layouts"].items():
        path, kind = _role(role)
        taken: set[str] = set()
        for pieces in layouts:
            layout = layout_of(pieces)
            fresh = [piece for piece in layout.pieces if str(piece) not in taken]
            taken |= {str(piece) for piece in fresh}
            if fresh:
                values = torch.cat([saved["residuals"][role][str(piece)].cpu() for piece in fresh])
                ledger.install(Slot(path, kind, Layout(tuple(fresh)), values))
    for path, known in saved["placed"].items():
        for pieces, division in known:
            ledger.place(path, layout_of(pieces), division)
    ledger.factors.restore(saved["factors"])
    ledger.warm = True


def spread(ledger: Ledger, ranks: Sequence[Mapping[str, Any]], numels: Mapping[str, int], world_size: int) -> None:
    """Give this rank of a new world its part of what all old ranks held: the sum over all ranks stays what it was."""
    sums: dict[str, dict[str, Tensor]] = {}
    for saved in ranks:
        for role, layouts in saved["layouts"].items():
            path, _ = _role(role)
            for piece in {str(piece): piece for pieces in layouts for piece in layout_of(pieces).pieces}.values():
                values = saved["residuals"][role][str(piece)].cpu()
                zero = torch.zeros(numels[piece.name], dtype=torch.float64, device="cpu")
                sums.setdefault(path, {}).setdefault(piece.name, zero)[piece.begin : piece.end] += values
    for path, by_name in sums.items():
        for name, total in by_name.items():
            layout = Layout.of_parameters([(name, total.numel())])
            ledger.deposit(path, layout, (total / world_size).float())
    ledger.factors.spread(saved["factors"] for saved in ranks)
    ledger.warm = True


def pieces_of(layout: Layout) -> _Pieces:
    """Return a layout as plain lists."""
    return [[piece.name, piece.begin, piece.end, list(piece.shape)] for piece in layout.pieces]


def layout_of(pieces: _Pieces) -> Layout:
    """Return the layout that `pieces_of` took apart."""
    return Layout(tuple(Piece(name, begin, end, tuple(shape)) for name, begin, end, shape in pieces))


def _role(role: str) -> tuple[str, Kind]:
    path, _, kind = role.rpartition("/")
    if kind == "worker":
        return path, "worker"
    if kind == "owner":
        return path, "owner"
    raise ConfigurationError(f"residuals of kind {role!r} are unknown; this checkpoint is from another version")
