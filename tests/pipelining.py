"""One buffer of a made-up model, reduced step by step with its residuals, by aggregators that cut it into chunks."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from unittest.mock import patch

import torch
from torch import Tensor

from commopt import Account, Aggregator, lanes
from commopt.aggregate import chunks
from commopt.feedback import Layout, Ledger
from commopt.groups import join
from commopt.lanes import lanes_available

PARAMETERS = (
    ("gain", ()),
    ("first.weight", (60, 50)),
    ("first.bias", (50,)),
    ("second.weight", (4097,)),
    ("third.weight", (7, 100)),
    ("third.bias", (65,)),
    ("fourth.weight", (80, 40)),
)
LAYOUT = Layout.of_parameters(PARAMETERS)
SHORT_NBYTES = 1024


@contextmanager
def short_chunks(one_lane: bool = False) -> Iterator[None]:
    """Let small buffers be cut into chunks; with `one_lane`, as where a second is not safe."""
    chunks.cut.cache_clear()
    here = patch.object(lanes, "lanes_here", lambda backend: 1 if one_lane else lanes_available(backend))
    with here, patch.object(chunks, "MIN_CHUNK_NBYTES", SHORT_NBYTES):
        yield
    chunks.cut.cache_clear()


def gradient(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return half of what never changes and half of what is new each step."""
    always, now = (torch.Generator().manual_seed(seed) for seed in (rank, 1000 * step + rank + 100))
    parts = [torch.randn(LAYOUT.numel, generator=generator) for generator in (always, now)]
    return ((parts[0] + parts[1]) * (1 + 0.5 * rank)).to(dtype)


@dataclass
class Books:
    """What one rank was owed and told so far, and what it keeps: float64 [LAYOUT.numel] each."""

    steps: int
    owed: Tensor
    told: Tensor
    kept: Tensor


class Run:
    """One rank's ledger, and the lane that everything runs on."""

    def __init__(self, rank: int, world_size: int, dtype: torch.dtype = torch.float32, per_step: bool = False) -> None:
        self.rank, self.world_size, self.dtype = rank, world_size, dtype
        self.membership = join()
        self.ledger = Ledger(per_step=per_step)
        self.owed, self.told = (torch.zeros(LAYOUT.numel, dtype=torch.float64) for _ in range(2))
        self._steps = count()
        self._digest = hashlib.sha256()

    def step(self, aggregator: Aggregator, poison: tuple[int, int] | None = None, factor: float = 1.0) -> Tensor:
        """Average one gradient times `factor` and return it; `poison` makes (rank, element) infinite."""
        step = next(self._steps)
        buffer = gradient(self.rank, step, self.dtype).mul_(factor)
        own = buffer.double()
        if poison is not None and poison[0] == self.rank:
            buffer[poison[1]] = float("inf")
        account = Account(LAYOUT, step, 0, self.membership.global_rank, self.ledger)
        team = self.membership.team

        def work() -> None:
            self.ledger.begin_step()
            aggregator.all_reduce(buffer, team, 1.0 / team.size, account)
            self.ledger.end_bucket(last=True)

        operation = lanes.Operation(self.membership, "test", step, str(aggregator), buffer.numel(), "cpu")
        lanes.lane_for(buffer.device).submit(operation, work, buffer).wait()
        if poison is None:
            self.owed += own / self.world_size
            self.told += buffer.double()
        self._digest.update(buffer.view(torch.uint8).numpy().tobytes())
        return buffer

    def kept(self) -> Tensor:
        """Return all residuals, at their elements' places."""
        kept = torch.zeros(LAYOUT.numel, dtype=torch.float64)
        for slot in self.ledger.slots():
            if slot.path.endswith("momentum"):
                continue
            for (begin, end), values in zip(
                LAYOUT.spans_of(slot.layout),
                slot.values.split([piece.numel for piece in slot.layout.pieces]),
                strict=True,
            ):
                kept[begin:end] += values.double()
        return kept

    def books(self) -> Books:
        """Return the books as they are now."""
        return Books(next(self._steps), self.owed.clone(), self.told.clone(), self.kept())

    def digest(self) -> str:
        """Return a hash of all results."""
        return self._digest.hexdigest()

    def state(self) -> str:
        """Return a hash of all this rank keeps: residuals, momentum, factors."""
        digest = hashlib.sha256()
        for slot in sorted(self.ledger.slots(), key=lambda slot: (slot.path, slot.kind, str(slot.layout))):
            digest.update(f"{slot.path} {slot.kind} {slot.layout}".encode())
            digest.update(slot.values.view(torch.uint8).numpy().tobytes())
        for path, kept in self.ledger.factors.everything():
            digest.update(f"{path} {kept.piece}".encode())
            digest.update(kept.right.numpy().tobytes())
        return digest.hexdigest()


def assert_balanced(ranks: list[Books]) -> None:
    """Check that nothing is lost but float32 roundings, and that something was kept at all."""
    owed, kept = sum(books.owed for books in ranks), sum(books.kept for books in ranks)
    assert isinstance(owed, Tensor)
    assert isinstance(kept, Tensor)
    largest = max(float(values.abs().max()) for books in ranks for values in (books.owed, books.told, books.kept))
    lost = (owed - ranks[0].told - kept).abs()
    tolerance = 4 * torch.finfo(torch.float32).eps * max(ranks[0].steps, 1) * largest
    assert float(lost.max()) <= tolerance, f"lost {float(lost.max()):.3g} at element {int(lost.argmax())}"
    assert float(kept.abs().max()) > 1e-4 * largest


def lane_threads() -> list[str]:
    """Return the names of commopt's threads in this process."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.endswith("lane"))
