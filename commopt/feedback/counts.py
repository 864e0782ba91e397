# SPDX-License-Identifier: Apache-2.0
"""How many steps Adam has made of each parameter, for its bias correction: alike on all ranks of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from commopt.feedback.layout import Layout


@dataclass(eq=False)
class ParameterSteps:
    """Adam's steps of the parameters in one buffer.

    layout: of the buffer.
    before: number of steps before this one, float64 [pieces].
    used: whether each has a gradient on any rank in this step, bool [pieces]; None where all have.
    equal: whether the host knows that all pieces are equal in both.
    """

    layout: Layout
    before: Tensor
    used: Tensor | None = None
    equal: bool = True


@dataclass(eq=False)
class StepCounts:
    """The counts of one registration: by buffer, and by name for parameters that no buffer has asked for yet.

    named: counts by name.
    by_parameter: False after a checkpoint of an older version, which counted the steps of the model only.
    """

    named: dict[str, int] = field(default_factory=dict)
    by_parameter: bool = True
    _taken: dict[Layout, ParameterSteps] = field(default_factory=dict)

    def take(self, layout: Layout, device: torch.device, of_model: Callable[[], float | Tensor]) -> ParameterSteps:
        """Return the counts of a buffer. of_model: returns the steps of the model."""
        known = self._taken.get(layout)
        if known is None:
            self.named = self.by_name()
            unknown = 0 if self.by_parameter else int(of_model())
            counts = [self.named.get(piece.name, unknown) for piece in layout.pieces]
            before = torch.tensor(counts, dtype=torch.float64, device=device)
            self._taken = {other: each for other, each in self._taken.items() if not other.shares_names(layout)}
            known = self._taken[layout] = ParameterSteps(layout, before, equal=len(set(counts)) == 1)
        return known

    def state(self) -> dict[str, int] | None:
        """Return the counts for a checkpoint: by name, None where they are still those of the model."""
        return self.by_name() if self.by_parameter or self._taken else None

    def by_name(self) -> dict[str, int]:
        """Return the number of steps of each parameter; waits for the device."""
        counts = dict(self.named)
        for layout, steps in self._taken.items():
            for piece, count in zip(layout.pieces, steps.before.tolist(), strict=True):
                counts[piece.name] = int(count)
        return counts
