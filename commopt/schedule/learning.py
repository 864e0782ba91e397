# SPDX-License-Identifier: Apache-2.0
"""How many steps a training takes to the same loss with each strategy, measured: what the tuner prefers by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from commopt.aggregate import Aggregator, Hierarchical, LocalSGD
from commopt.compress import OneBit

MOST_STEPS = 1.05  # of one strength: a weaker one of the family is taken instead, where there is one


class Learned(NamedTuple):
    """Steps to a loss over those of exact averages, by SGD with momentum and by AdamW; None where nobody measured.

    measured: what the strategy is called in bench/results/convergence.json.
    """

    measured: str
    sgd: float | None
    adamw: float | None

    def steps(self, optimizer: str) -> float | None:
        """Return those with an optimizer: "sgd", "adamw", or "" for unknown: what is worse of the two."""
        if optimizer:
            return self.sgd if optimizer == "sgd" else self.adamw
        return None if self.sgd is None or self.adamw is None else max(self.sgd, self.adamw)


# The GPT of docs/evidence/convergence.md, 134,656 parameters, means of three seeds: to 5 % above what stock DDP ends
# with after 400 steps; what does not come so far counts with all 400. Tests compare the numbers with the file.
LEARNED = {
    "Compressed(Cast(dtype=torch.bfloat16), feedback=None)": Learned("hierarchical_bf16", 1.00, 1.00),
    "Compressed(Quantize(bits=8))": Learned("hierarchical_quantized", 1.00, 1.00),
    "Compressed(Quantize(bits=4))": Learned("hierarchical_quantized:bits=4", 1.00, 1.01),
    "Compressed(Quantize(bits=2))": Learned("hierarchical_quantized:bits=2", 1.03, 1.04),
    "Compressed(OneBit(block=512))": Learned("hierarchical_onebit", 1.52, 1.43),
    "Compressed(DGC(density=0.05))": Learned("hierarchical_dgc:density=0.05", 1.09, 1.41),
    # Measured where 1024 elements at least were sent of a message, 1.5 %.
    "Compressed(DGC(density=0.01))": Learned("hierarchical_dgc", 1.18, 1.94),
    "Compressed(DGC(density=0.001))": Learned("hierarchical_dgc:min_elements=1", 2.11, 2.70),
    "PowerSGD(matrix_rank=16)": Learned("hierarchical_powersgd:matrix_rank=16", 1.00, 1.03),
    "PowerSGD(matrix_rank=4)": Learned("hierarchical_powersgd", 1.04, 1.19),
    "PowerSGD(matrix_rank=1)": Learned("hierarchical_powersgd:matrix_rank=1", 1.40, 1.83),
}

# Those that `auto` knows of, by the names of presets.
LEARNED_LOCAL = {
    LocalSGD(16, compressor=OneBit()): Learned("onebit_local", None, 1.26),
    LocalSGD(16, compressor=OneBit(), delay=4, fragments=4): Learned("onebit_local:delay=4:fragments=4", None, 1.26),
}


def steps_to_loss(strength: Aggregator, optimizer: str) -> float | None:
    """Return the steps to a loss over those of exact averages, None where nobody measured.

    strength: in any form. optimizer: as Learned.steps has it.
    """
    inner: Any = strength.inter if isinstance(strength, Hierarchical) else strength
    learned = LEARNED.get(repr(replace(inner, dense=()) if getattr(inner, "dense", ()) else inner))
    return None if learned is None else learned.steps(optimizer)


def strength_of(strengths: Sequence[Aggregator], usual: int, optimizer: str) -> tuple[int, float]:
    """Return the place of the strength to try, and its steps to a loss: the strongest with MOST_STEPS at most.

    strengths: the weakest first. Where all take more, the weakest; where none was measured, the usual one, with 1.
    """
    known = [
        (place, steps)
        for place, strength in enumerate(strengths)
        if (steps := steps_to_loss(strength, optimizer)) is not None
    ]
    if not known:
        return usual, 1.0
    return next((each for each in reversed(known) if each[1] <= MOST_STEPS), known[0])
