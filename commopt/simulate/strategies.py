"""Ways of averaging that a simulation compares, by the names users type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from commopt.aggregate import Aggregator
from commopt.errors import ConfigurationError
from commopt.hooks import PRESETS, build_preset

LOSSLESS = ("flat", "hierarchical")
LOSSY = (
    "hierarchical_bf16",
    "quantized",
    "quantized:bits=4",
    "onebit",
    "powersgd",
    "dgc",
    "hierarchical_quantized",
    "hierarchical_quantized:bits=4",
    "hierarchical_onebit",
    "hierarchical_powersgd",
    "hierarchical_dgc",
)
DEFAULT = ("stock", "lossless", "hierarchical_bf16", "hierarchical_quantized", "hierarchical_powersgd", "lossy")

Bucketing = Literal["ddp", "planned"]


@dataclass(frozen=True)
class Candidate:
    """A preset with its options, in DDP's buckets or in the planner's."""

    preset: str
    buckets: Bucketing

    def build(self) -> Aggregator:
        """Return the aggregator; raises ConfigurationError for a preset that does not exist or does not average."""
        aggregator = build_preset(self.preset)
        if aggregator.tunes:
            raise ConfigurationError(
                f"{self.preset} chooses on live steps, which a simulation has none of; compare 'lossless' and 'lossy'"
            )
        return aggregator

    def __str__(self) -> str:
        return STOCK if self == _STOCK else self.preset


STOCK = "stock"
_STOCK = Candidate("flat", "ddp")


@dataclass(frozen=True)
class Strategy:
    """The fastest of some candidates."""

    name: str
    candidates: tuple[Candidate, ...]


def strategy(name: str, buckets: Bucketing = "planned") -> Strategy:
    """Return the strategy of that name: "stock", "lossless", "lossy", or a preset like "powersgd:matrix_rank=2".

    stock: what DDP does without a hook, its own buckets in one all_reduce over all ranks each. lossless: the best that
    is exact. lossy: the best there is. Raises ConfigurationError for any other name.
    """
    exact = (_STOCK, *(Candidate(preset, buckets) for preset in LOSSLESS))
    groups = {
        STOCK: (_STOCK,),
        "lossless": exact,
        "lossy": (*exact, *(Candidate(preset, buckets) for preset in LOSSY)),
    }
    if name in groups:
        return Strategy(name, groups[name])
    if name.split(":")[0] not in PRESETS:
        raise ConfigurationError(f"strategy {name!r} is unknown; there are {', '.join([*groups, *sorted(PRESETS)])}")
    candidate = Candidate(name, buckets)
    candidate.build()
    return Strategy(name, (candidate,))
