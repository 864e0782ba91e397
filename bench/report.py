"""What a training benchmark found: its records, their file of JSON lines, and the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.table import print_rows

STOCK = "ddp"


@dataclass(frozen=True)
class Environment:
    """Where and how the numbers were made; the first line of the file."""

    date: str
    command: str
    torch: str
    python: str
    cpu_count: int
    device: str
    backend: str
    nodes: int
    ranks_per_node: list[int]
    emulated_rate: str | None
    """Of each node's link, each way; None outside the emulated cluster, where nothing can be said about the network."""
    parameters: int
    seconds: float
    seed: int
    compute_ms: float
    """Step with a hook that returns the bucket unchanged: median over steps of the slowest rank's."""
    evaluation: str

    @property
    def network(self) -> str:
        """Say what joins the nodes."""
        if self.emulated_rate is None:
            return "network not emulated"
        return "unshaped links" if self.emulated_rate == "none" else f"{self.emulated_rate} links"


@dataclass(frozen=True)
class Look:
    """Held-out loss at one moment of the training; `seconds` excludes all evaluation."""

    step: int
    seconds: float
    held_out_loss: float


@dataclass(frozen=True)
class Outcome:
    """One strategy's training; docs/performance.md has the formula of each figure."""

    strategy: str
    steps: int
    seconds: float
    step_ms: float
    """Median over steps of the slowest rank's."""
    step_p90_ms: float
    exposed_ms: float
    """step_ms less the environment's compute_ms."""
    inter_mib_per_step: float | None
    """Sent by all nodes, counted at their network interfaces, headers included."""
    inter_payload_mib_per_step: float | None
    """The same less 66 B per packet."""
    inter_predicted_mib_per_step: float | None
    """What commopt's wire_bytes() says about the same; None for hooks that are not commopt's."""
    curve: list[Look]

    @property
    def held_out_loss(self) -> float:
        """Loss at the end of the budget."""
        return self.curve[-1].held_out_loss


def fraction_of_stock(outcome: Outcome, outcomes: Sequence[Outcome]) -> float | None:
    """Return the exposed time as a fraction of stock DDP's; None when stock DDP was not run or hid everything."""
    for other in outcomes:
        if other.strategy == STOCK and other.exposed_ms > 0:
            return outcome.exposed_ms / other.exposed_ms
    return None


def write(path: Path, environment: Environment, outcomes: Sequence[Outcome]) -> None:
    """Write one JSON object per line, each naming its kind under "record"."""
    records = [{"record": "environment", **asdict(environment)}]
    records += [{"record": "strategy", **asdict(outcome)} for outcome in outcomes]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read(path: Path) -> tuple[Environment, list[Outcome]]:
    """Read what `write` wrote; raises ValueError when `path` holds something else."""
    try:
        header, *rows = (json.loads(line) for line in path.read_text().splitlines())
        if header.pop("record") != "environment" or any(row.pop("record") != "strategy" for row in rows):
            raise ValueError("unexpected kinds of records")
        curves = [[Look(**look) for look in row.pop("curve")] for row in rows]
        outcomes = [Outcome(**row, curve=curve) for row, curve in zip(rows, curves, strict=True)]
        return Environment(**header), outcomes
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a file that bench.training --json wrote: {error}") from error


def print_table(environment: Environment, outcomes: Sequence[Outcome]) -> None:
    """Print one row per strategy to stdout."""
    title = (
        f"{environment.nodes} nodes x {max(environment.ranks_per_node)} ranks, {environment.network}; "
        f"no-op step {environment.compute_ms:.0f} ms; {environment.seconds:g} s each"
    )
    headings = ["strategy", "step ms", "exposed ms", "of stock's", "inter-node MiB/step", "steps", "held-out loss"]
    rows = [_row(outcome, outcomes) for outcome in outcomes]
    caption = "\n".join(
        f"{outcome.strategy}: {outcome.inter_payload_mib_per_step:.2f} MiB/step between nodes without headers, "
        f"{outcome.inter_predicted_mib_per_step:.2f} predicted"
        for outcome in outcomes
        if outcome.inter_payload_mib_per_step is not None and outcome.inter_predicted_mib_per_step is not None
    )
    print_rows(title, headings, rows, caption)


def _row(outcome: Outcome, outcomes: Sequence[Outcome]) -> list[str]:
    return [
        outcome.strategy,
        f"{outcome.step_ms:.0f}",
        f"{outcome.exposed_ms:.0f}",
        _number(fraction_of_stock(outcome, outcomes), 2),
        _number(outcome.inter_mib_per_step, 1),
        str(outcome.steps),
        f"{outcome.held_out_loss:.3f}",
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
