# SPDX-License-Identifier: Apache-2.0
"""How many steps a training takes to the same loss with each strategy, as measured; the tuner prefers by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from commopt.aggregate import Aggregator, Hierarchical, LocalSGD
from commopt.compress import DGC, OneBit
from commopt.groups import TeamShape

MOST_STEPS = 1.05  # a strength that takes more gives way to a weaker one of the family, where there is one


class StepsToLoss(NamedTuple):
    """Steps to a loss over those of exact averages; None where nobody measured, or no advice rests on it.

    preset: the name of the strategy in bench/results/convergence.json.
    sgd: with momentum.
    adamw: with AdamW.
    """

    preset: str
    sgd: float | None
    adamw: float | None

    def with_optimizer(self, optimizer: str) -> float | None:
        """Return the steps with "sgd" or "adamw"; with "", for unknown, the larger of the two."""
        if optimizer:
            return self.sgd if optimizer == "sgd" else self.adamw
        return None if self.sgd is None or self.adamw is None else max(self.sgd, self.adamw)


# The GPT of docs/evidence/convergence.md, 134,656 parameters, at stock DDP's best learning rate, means of eight seeds:
# steps to a loss 5 % above the one that stock DDP ends with after 300 steps. A strategy that does not come so far
# counts with all 300, and less than 1 is chance: it counts as 1. Tests compare the numbers with the file.
LEARNED = {
    "Compressed(Cast(dtype=torch.bfloat16), feedback=None)": StepsToLoss("hierarchical_bf16", 1.00, 1.00),
    "Compressed(Quantize(bits=8))": StepsToLoss("hierarchical_quantized", 1.00, 1.00),
    "Compressed(Quantize(bits=4))": StepsToLoss("hierarchical_quantized:bits=4", 1.01, 1.00),
    "Compressed(Quantize(bits=2))": StepsToLoss("hierarchical_quantized:bits=2", 1.23, 1.03),
    "Compressed(OneBit(block=512))": StepsToLoss("hierarchical_onebit", 2.37, 1.33),
    "Compressed(DGC(density=0.05))": StepsToLoss("hierarchical_dgc:density=0.05", 1.23, 1.21),
    "Compressed(DGC(density=0.01))": StepsToLoss("hierarchical_dgc:density=0.01", 1.35, 1.38),
    "Compressed(DGC(density=0.001))": StepsToLoss("hierarchical_dgc:min_elements=1", 1.85, 2.08),
    "PowerSGD(matrix_rank=16)": StepsToLoss("hierarchical_powersgd:matrix_rank=16", 1.01, 1.01),
    "PowerSGD(matrix_rank=4)": StepsToLoss("hierarchical_powersgd", 1.11, 1.16),
    "PowerSGD(matrix_rank=1)": StepsToLoss("hierarchical_powersgd:matrix_rank=1", 1.82, 1.86),
}

# The ones that `auto` gives advice on, with AdamW.
LEARNED_LOCAL = {
    LocalSGD(16, compressor=OneBit()): StepsToLoss("onebit_local", None, 1.18),
    LocalSGD(16, compressor=OneBit(), delay=4, fragments=4): StepsToLoss(
        "onebit_local:delay=4:fragments=4", None, 1.20
    ),
}


# From three ranks on long sparse rows go by way of servers, which select a second time. The larger figures of four and
# eight nodes, as above but for 400 steps and three seeds: bench/results/convergence_sparse_4.json and _8.json, where
# `preset` is the name.
LEARNED_THROUGH_SERVERS = {
    "Compressed(DGC(density=0.05))": StepsToLoss("ThroughServers(DGC(density=0.05))", 1.15, 1.89),
    "Compressed(DGC(density=0.01))": StepsToLoss("ThroughServers(DGC(density=0.01))", 1.58, 2.70),
}


def steps_to_loss(strength: Aggregator, optimizer: str, team: TeamShape | None = None) -> float | None:
    """Return the steps to a loss over those of exact averages, None where nobody measured.

    strength: in any form.
    optimizer: as StepsToLoss.with_optimizer has it.
    team: whose average it is; None: of two ranks.
    """
    inner: Any = strength.inter if isinstance(strength, Hierarchical) else strength
    name = repr(replace(inner, dense=()) if getattr(inner, "dense", ()) else inner)
    sparse = isinstance(getattr(inner, "compressor", None), DGC)
    served = sparse and team is not None and _ranks_across(strength, team) > 2
    learned = (LEARNED_THROUGH_SERVERS if served else LEARNED).get(name)
    return None if learned is None else learned.with_optimizer(optimizer)


def _ranks_across(strength: Aggregator, team: TeamShape) -> int:
    """Return how many ranks compress for each other."""
    if not isinstance(strength, Hierarchical):
        return team.size
    return len(set(team.wire.sites[-1])) if strength.sites and team.wire.sites else team.node_count


def strength_of(
    strengths: Sequence[Aggregator], usual: int, optimizer: str, team: TeamShape | None = None
) -> tuple[int, float]:
    """Return the place of the strength to try, and its steps to a loss.

    It is the strongest that takes MOST_STEPS at most, or the weakest if all take more. If none was measured, it is the
    usual one, with 1.

    strengths: the weakest first.
    team: as steps_to_loss has it.
    """
    known = [
        (place, steps)
        for place, strength in enumerate(strengths)
        if (steps := steps_to_loss(strength, optimizer, team)) is not None
    ]
    if not known:
        return usual, 1.0
    return next((each for each in reversed(known) if each[1] <= MOST_STEPS), known[0])
