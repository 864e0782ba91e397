"""Bytes of any length over a team, for what is too rare to deserve a form of its own; on a lane only."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.groups.team import Team


def gather_bytes(team: Team, payload: bytes) -> list[bytes]:
    """Return every rank's payload, in the team's order, on every rank; collective."""
    lengths = [int(length) for length in _gather(team, torch.tensor([len(payload)], device="cpu")).tolist()]
    longest = max(lengths)
    if longest == 0:
        return [b""] * team.size
    padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    padded[: len(payload)] = _tensor(payload)
    rows = _gather(team, padded).view(team.size, longest)
    return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]


def broadcast_bytes(team: Team, payload: bytes | None, src: int) -> bytes:
    """Return the payload of rank `src` of the team, the others pass None, on every rank; collective."""
    own = b"" if payload is None else payload
    length = torch.tensor([len(own)], device=team.default_device)
    team.broadcast(length, src)
    data = torch.zeros(int(length.item()), dtype=torch.uint8, device="cpu")
    if data.numel() == 0:
        return b""
    if team.rank == src:
        data.copy_(_tensor(own))
    moved = data.to(team.default_device)
    team.broadcast(moved, src)
    return moved.cpu().numpy().tobytes()


def _gather(team: Team, own: Tensor) -> Tensor:
    source = own.to(team.default_device)
    output = source.new_empty(team.size * source.numel())
    team.all_gather(output, source)
    return output.cpu()


def _tensor(payload: bytes) -> Tensor:
    """Return uint8 [len(payload)], on the CPU."""
    if not payload:  # which torch.frombuffer refuses
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
