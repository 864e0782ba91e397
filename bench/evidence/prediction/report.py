# SPDX-License-Identifier: Apache-2.0
"""What a run of the comparison found, and how far predictions are from measurements.

`python -m bench.evidence.prediction.report FILE` prints what was measured, and the errors, in Markdown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bench.document import table
from bench.evidence.matrix import World, append_run, read_runs
from commopt.command_line import CommandParser, content_of

_KIND = "prediction"


@dataclass(frozen=True)
class Environment(World):
    """Where and how the numbers of one cluster were made.

    links: for each curve that was probed, by its name, what its largest message took, as [bytes, us, us of a core on
    each rank]. probe_s: how long that took in all.
    """

    probe_s: float
    links: dict[str, list[float]]


@dataclass(frozen=True)
class Configuration:
    """One model by one strategy; milliseconds, of a usual step on the slowest rank.

    predicted_ms: by the simulator, beside communication on the same processors. apart_ms: the same if each rank had
    processors of its own for it. compute_ms: measured without communication. exposed_ms, communication_ms: predicted;
    lane_ms: measured, what communication_ms is a prediction of. cpu_ms, compute_cpu_ms: what all ranks together used in
    a step with and without communication.
    steps_ms: what was timed. buckets: bytes of DDP's, those that were simulated in `simulated_buckets`.
    """

    model: str
    parameters: int
    batch: int
    strategy: str
    measured_ms: float
    predicted_ms: float
    apart_ms: float
    compute_ms: float
    exposed_ms: float
    communication_ms: float
    lane_ms: float
    cpu_ms: float
    compute_cpu_ms: float
    steps_ms: list[float]
    buckets: list[int]
    simulated_buckets: list[int]
    notes: list[str]

    @property
    def error(self) -> float:
        """By how much of what was measured the prediction is too long."""
        return self.predicted_ms / self.measured_ms - 1


Run = tuple[Environment, list[Configuration]]
"""One cluster, and what was found on it."""


def append(path: Path, environment: Environment, configurations: Sequence[Configuration]) -> None:
    """Add a run to a file."""
    append_run(path, _KIND, asdict(environment), list(map(asdict, configurations)))


def read(paths: Sequence[Path]) -> list[Run]:
    """Read what `append` wrote; raises ValueError when a file holds something else."""
    return [run for path in paths for run in read_runs(path, _KIND, Environment, Configuration)]


def markdown(runs: Sequence[Run]) -> str:
    """Return a sentence, and a table: a row for each model on each cluster, a column for each strategy."""
    found = [(environment, each) for environment, configurations in runs for each in configurations]
    errors = [each.error for _, each in found]
    strategies = dict.fromkeys(each.strategy for _, each in found)
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for environment, each in found:
        row = cells.setdefault((environment.cluster, each.model), {})
        row[each.strategy] = f"{each.measured_ms:.0f} ({100 * each.error:+.0f} %)"
    near, within = (sum(abs(error) <= limit for error in errors) for limit in (0.1, 0.25))
    rows = [[*key, *(row.get(name, "-") for name in strategies)] for key, row in cells.items()]
    clusters = len({cluster for cluster, _ in cells})
    text = (
        f"{len(found)} steps on {clusters} clusters: median error {100 * median(map(abs, errors)):.1f} %, worst "
        f"{100 * max(errors, key=abs):+.0f} %; {near} within 10 %, {within} within 25 %."
    )
    return f"{text}\n\n{table(['cluster, link', 'model', *(f'`{name}`' for name in strategies)], rows)}"


def main() -> None:
    """Print."""
    parser = CommandParser(prog="python -m bench.evidence.prediction.report", description="A table of predictions.")
    parser.add_argument(
        "files",
        type=content_of(lambda path: read([path])),
        nargs="+",
        help="what bench.evidence.prediction --json wrote",
    )
    print(markdown([run for runs in parser.parse_args().files for run in runs]))


if __name__ == "__main__":
    main()
