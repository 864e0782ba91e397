# SPDX-License-Identifier: Apache-2.0
"""What `--local-mask` compares: the deltas of a LocalSGD chosen by what bfloat16 sees, and by size, at equal bytes.

PULSELoCo (arXiv 2602.03839) sends those elements of a node's delta, with its residual, that change the bfloat16 view of
a parameter, and keeps the others for the next round. DGC sends the largest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import Any

import torch
from torch import Tensor

from bench.evidence.convergence.plan import PAIRED, RATE_SEED, REVERSED, Case, Comparison, Entry, Task
from commopt import DGC, Aggregator, LocalSGD, Outer, Quantize
from commopt.aggregate import Hierarchical
from commopt.aggregate.base import Action, Buffer
from commopt.aggregate.outer import Deltas
from commopt.feedback import ANCHOR, BufferContext, Feedback
from commopt.groups import Team, TeamShape
from commopt.kernels.finite import all_finite
from commopt.kernels.sparse import SparseRow
from examples import train_gpt

OUTER_RATES = (0.7, 1.0, 1.4)
"""The rates of the outer optimizer that each way is tried at, in a shorter training."""
DENSITIES: Mapping[str, Mapping[int, float]] = {
    "0.001": {4: 0.372, 16: 0.446},
    "0.0003": {4: 0.32, 16: 0.41},
    "0.0001": {4: 0.265, 16: 0.388},
    "1e-05": {4: 0.032, 16: 0.069},
    "1e-05-bf16": {4: 0.032, 16: 0.074},
}
"""Of DGC, by AdamW's learning rate and the period: with it about as many bytes as the mask sent in a first training."""
PERIODS = (4, 16)
_RATE_TO_CONTINUE_AT = 1e-5
"""From random weights nothing would be learned at it."""
_OTHER_BATCHES = 1000


@dataclass(frozen=True, repr=False, eq=False)  # none is another's equal: each has counts of its own
class Visible(Aggregator):
    """Between `Deltas`: sums the elements that change the bfloat16 view of the agreed parameters, in bfloat16.

    An element is sent where bfloat16(theta) != bfloat16(theta - a), a the node's delta and residual. For the others
    zeros are sent; `sent` counts the elements, and the bytes of rows without them: values in bfloat16, and a list of
    places as DGC's or a bitmap, whichever is shorter.
    """

    by_size: bool = False
    """Whether to send the largest instead, as many as would be seen."""
    sent: list[tuple[int, int, int]] = field(default_factory=list)
    """Elements, those of them that were sent, and bytes, of each message of this rank."""

    def __repr__(self) -> str:
        return f"Visible(by_size={self.by_size})"

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Sum what is seen, and keep the rest."""
        residual = context.error_feedback("worker", context.layout, Feedback(), buffer.device)
        assert residual is not None  # a LocalSGD has a store
        theta = context.memory.found[f"{context.path}.{ANCHOR}", "worker", context.layout].values
        left = torch.add(residual.old, buffer, alpha=scale, out=residual.new)
        # The values are parts of the mean over nodes of one rank.
        seen = theta.bfloat16() != (theta - team.size * left).bfloat16()
        count = int(seen.sum())
        if self.by_size:
            seen = torch.zeros_like(seen)
            seen[left.abs().topk(count).indices] = True
        buffer.copy_((left * seen).bfloat16())
        left.sub_(buffer)
        self.sent.append((buffer.numel(), count, row_nbytes(buffer.numel(), count) * (team.size - 1)))
        team.all_reduce(buffer)
        context.report(all_finite(buffer))

    def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Action, ...]:
        """Return none: how much is sent depends on the values, and `sent` has it."""
        return ()

    @property
    def residual_paths(self) -> tuple[str, ...]:
        """Its own level."""
        return ("",)


def row_nbytes(numel: int, count: int) -> int:
    """Return the bytes of so many values in bfloat16 and of their places among `numel`, in the shorter form."""
    row = SparseRow(numel, count, torch.bfloat16)
    bitmap = 16 * ceil((ceil(numel / 8) + 2 * count) / 16)
    return min(row.nbytes, bitmap)


@dataclass(frozen=True, repr=False)
class LocalMask(LocalSGD):
    """LocalSGD whose deltas are sent by `Visible`, between nodes of one rank."""

    by_size: bool = False

    @cached_property
    def visible(self) -> Visible:
        """What sends the deltas."""
        return Visible(self.by_size)

    @cached_property
    def parameters(self) -> Aggregator:
        """The deltas of nodes, and the outer optimizer."""
        return Hierarchical(inter=Deltas(self.visible, self.outer))

    def take_sent(self) -> tuple[float, int]:
        """Return the share of the elements that this rank has sent since the last call, and the bytes."""
        messages = list(self.visible.sent)
        self.visible.sent.clear()
        elements = sum(numel for numel, _, _ in messages)
        share = sum(count for _, count, _ in messages) / max(elements, 1)
        return share, sum(nbytes for _, _, nbytes in messages)


@dataclass(frozen=True)
class Continued(Task):
    """Goes on from a model that was trained at a usual rate, on other batches."""

    def start(self, optimizer: str, seed: int, device: torch.device, rate: float = 1.0) -> train_gpt.Training:
        """Return the trained model with a fresh optimizer. Collective."""
        trained = _trained(self.steps, seed + _OTHER_BATCHES, device)
        training = super().start(optimizer, seed, device, rate)
        training.model.load_state_dict(trained)
        return training


@dataclass(frozen=True)
class InBfloat16(Continued):
    """The same with matrices multiplied in bfloat16: what bfloat16 does not see of them has no effect."""

    def start(self, optimizer: str, seed: int, device: torch.device, rate: float = 1.0) -> train_gpt.Training:
        """Return the trained model, which computes under autocast from now on. Collective."""
        training = super().start(optimizer, seed, device, rate)
        (model,) = training.model.children()  # DDP's module
        model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
        model.register_forward_hook(lambda module, tokens, logits: logits.float())
        return training


@lru_cache(1)  # seeds come one after the other
def _trained(steps: int, seed: int, device: torch.device) -> dict[str, Any]:
    training = replace(PAIRED, steps=steps).start("adamw", seed, device)
    for _ in range(steps):
        training.step()
    return training.model.state_dict()


@dataclass(frozen=True)
class AtBestOuterRates(Comparison):
    """Each way at its own best outer rate; without compression also with windows in reverse order, at one period."""

    def rate_cases(self) -> list[Case]:
        """Return the trainings that try outer rates."""
        return [self._trial(entry, rate) for entry in self.entries for rate in OUTER_RATES]

    def cases(self, losses: Mapping[tuple[str, str, str, int], float]) -> list[Case]:
        """Return every training to compare, seed after seed."""
        chosen = []
        for entry in self.entries:
            best = min(OUTER_RATES, key=lambda rate: losses[self._trial(entry, rate).key])
            chosen.append(_at(entry, best))
            if entry.aggregator == LocalSGD(PERIODS[-1]):
                chosen.append(replace(chosen[-1], strategy=chosen[-1].strategy + REVERSED))
        return [Case(self.task, "adamw", entry, seed) for seed in range(self.seeds) for entry in chosen]

    def _trial(self, entry: Entry, rate: float) -> Case:
        return Case(self.task.for_rates, "adamw", _at(entry, rate), RATE_SEED)


def _at(entry: Entry, rate: float) -> Entry:
    assert isinstance(entry.aggregator, LocalSGD)
    average = replace(entry.aggregator, outer=Outer(rate))
    return replace(entry, strategy=repr(average), aggregator=average)


@dataclass(frozen=True)
class Ways:
    """What is compared at a period.

    density: of DGC.
    four_bits: where the mask sends more bytes than that.
    """

    plain: LocalSGD
    mask: LocalMask
    largest: LocalMask
    dgc: LocalSGD
    density: float
    four_bits: LocalSGD | None

    @classmethod
    def of(cls, name: str, period: int) -> Ways:
        """Return those of the comparison `name`."""
        density = DENSITIES[name][period]
        plain = LocalSGD(period)
        four_bits = replace(plain, compressor=Quantize(bits=4)) if density > 1 / 8 else None
        dgc = replace(plain, compressor=DGC(density))
        return cls(plain, LocalMask(period), LocalMask(period, by_size=True), dgc, density, four_bits)

    def all(self) -> list[LocalSGD]:
        """Return them in a list."""
        return [each for each in (self.plain, self.mask, self.largest, self.dgc, self.four_bits) if each is not None]


def comparison(name: str) -> Comparison:
    """Return the one of DENSITIES that is called `name`."""
    rate = float(name.removesuffix("-bf16"))
    kind = InBfloat16 if name.endswith("-bf16") else Continued if rate == _RATE_TO_CONTINUE_AT else Task
    task = kind(
        name=f"gpt-{name}" if kind is Task else f"gpt-continued-{name}",
        steps=160,
        look_every=80,
        model=PAIRED.model,
        learning_rates=(("adamw", rate),),
        windows=256,
        rate_steps=80,
    )
    entries = (Entry(repr(each), ("adamw",), each) for period in PERIODS for each in Ways.of(name, period).all())
    return AtBestOuterRates(task, tuple(entries), (1, 1), seeds=8)


COMPARISONS: Mapping[str, str] = {comparison(name).task.name: name for name in DENSITIES}
"""The names of comparisons by those of their tasks."""
