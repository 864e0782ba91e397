"""Compare the tuner's choices on twelve emulated clusters and on a link that is not shaped: about half an hour.

    python -m bench.evidence.tuning.matrix --json bench/results/tuning.json

What is in the file already is left out, so that a run that was stopped can be resumed. Options that are not listed
below go to bench.evidence.tuning.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from bench.evidence.matrix import EmulatedCluster, Matrix
from bench.evidence.tuning import report
from bench.evidence.tuning.report import Run

_GPT = "gpt:layers=4:width=128"  # 0.9 million parameters
_RESNET = "resnet50:width=16"  # 2.2 million
_VGG = "vgg:hidden=768"  # 2.9 million
_EXACT, _FEW_BITS, _LOW_RANK = ("lossless",), ("lossless", "quantized"), ("lossless", "quantized", "powersgd")


@dataclass(frozen=True)
class Comparison:
    """A model on a cluster, and what the tuner may choose from."""

    place: EmulatedCluster
    model: str
    allow: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}, {self.model}, {'+'.join(self.allow)}"

    @property
    def command(self) -> list[str]:
        """What every rank runs, but for where it writes to."""
        return ["bench.evidence.tuning", "--model", self.model, "--allow", ",".join(self.allow)]

    def is_in(self, runs: list[Run]) -> bool:
        """Return whether a file has it."""
        return any(
            self.place.is_that(world.nodes, world.emulated_rate)
            and (each.model, each.allow) == (self.model, list(self.allow))
            for world, configurations in runs
            for each in configurations
        )


COMPARISONS = (
    Comparison(EmulatedCluster(2, 1, "50mbit"), _GPT, _FEW_BITS),
    Comparison(EmulatedCluster(2, 1, "200mbit"), _RESNET, _EXACT),
    Comparison(EmulatedCluster(2, 1, "400mbit"), _VGG, _LOW_RANK),
    Comparison(EmulatedCluster(2, 2, "100mbit"), _GPT, _LOW_RANK),
    Comparison(EmulatedCluster(2, 2, "200mbit"), _VGG, _FEW_BITS),
    Comparison(EmulatedCluster(2, 2, "400mbit"), _RESNET, _FEW_BITS),
    Comparison(EmulatedCluster(3, 1, "100mbit"), _GPT, _EXACT),
    Comparison(EmulatedCluster(3, 1, "200mbit"), _VGG, _FEW_BITS),
    Comparison(EmulatedCluster(4, 1, "200mbit"), _GPT, _LOW_RANK),
    Comparison(EmulatedCluster(4, 1, "400mbit"), _RESNET, _FEW_BITS),
    Comparison(EmulatedCluster(3, 2, "400mbit"), _VGG, _EXACT),
    Comparison(EmulatedCluster(4, 2, "400mbit"), _GPT, _FEW_BITS),
    Comparison(EmulatedCluster(2, 2, "none"), _VGG, _LOW_RANK),
)


MATRIX = Matrix(
    "bench.evidence.tuning.matrix",
    (__doc__ or "").splitlines()[0],
    COMPARISONS,
    report.read,
    report.markdown,
    timeout_s=600.0,
)


if __name__ == "__main__":
    sys.exit(MATRIX.main())
