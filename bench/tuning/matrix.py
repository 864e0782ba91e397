"""Compare the tuner's choices on twelve emulated clusters and on a link that is not shaped: about half an hour.

    python -m bench.tuning.matrix --json bench/results/tuning.json

What is in the file already is left out, so that a run that was stopped can be resumed. Options that are not listed
below go to bench.tuning.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.cluster import ClusterUnavailableError
from bench.prediction.matrix import UNUSABLE, Place, run_at
from bench.tuning import record, summary
from bench.tuning.record import Run

_GPT = "gpt:layers=4:width=128"  # 0.9 million parameters
_RESNET = "resnet50:width=16"  # 2.2 million
_VGG = "vgg:hidden=768"  # 2.9 million
_EXACT, _FEW_BITS, _LOW_RANK = ("lossless",), ("lossless", "quantized"), ("lossless", "quantized", "powersgd")


@dataclass(frozen=True)
class Comparison:
    """A model on a cluster, and what the tuner may choose from."""

    place: Place
    model: str
    allow: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}, {self.model}, {'+'.join(self.allow)}"

    @property
    def command(self) -> list[str]:
        """What every rank runs, but for where it writes to."""
        return ["bench.tuning", "--model", self.model, "--allow", ",".join(self.allow)]

    def is_in(self, runs: list[Run]) -> bool:
        """Return whether a file has it."""
        return any(
            self.place.is_that(world.nodes, world.emulated_rate)
            and (each.model, each.allow) == (self.model, list(self.allow))
            for world, configurations in runs
            for each in configurations
        )


COMPARISONS = (
    Comparison(Place(2, 1, "50mbit"), _GPT, _FEW_BITS),
    Comparison(Place(2, 1, "200mbit"), _RESNET, _EXACT),
    Comparison(Place(2, 1, "400mbit"), _VGG, _LOW_RANK),
    Comparison(Place(2, 2, "100mbit"), _GPT, _LOW_RANK),
    Comparison(Place(2, 2, "200mbit"), _VGG, _FEW_BITS),
    Comparison(Place(2, 2, "400mbit"), _RESNET, _FEW_BITS),
    Comparison(Place(3, 1, "100mbit"), _GPT, _EXACT),
    Comparison(Place(3, 1, "200mbit"), _VGG, _FEW_BITS),
    Comparison(Place(4, 1, "200mbit"), _GPT, _LOW_RANK),
    Comparison(Place(4, 1, "400mbit"), _RESNET, _FEW_BITS),
    Comparison(Place(3, 2, "400mbit"), _VGG, _EXACT),
    Comparison(Place(4, 2, "400mbit"), _GPT, _FEW_BITS),
    Comparison(Place(2, 2, "none"), _VGG, _LOW_RANK),
)


def main() -> int:
    """Run what the file lacks, then show all of it."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m bench.tuning.matrix", description=description)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="append JSON lines")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for each cluster (default 600)")
    options, passed_on = parser.parse_known_args()
    failed = 0
    try:
        done = record.read([options.json]) if options.json.exists() else []
        for comparison in COMPARISONS:
            if comparison.is_in(done):
                print(f"{comparison}: in {options.json} already")
                continue
            command = [*comparison.command, "--json", str(options.json), *passed_on]
            failed = run_at(comparison.place, command, options.timeout) or failed
        if options.json.exists():
            summary.show(record.read([options.json]))
    except (ClusterUnavailableError, ValueError) as error:
        print(f"bench.tuning.matrix: {error}", file=sys.stderr)
        return UNUSABLE
    return failed


if __name__ == "__main__":
    sys.exit(main())
