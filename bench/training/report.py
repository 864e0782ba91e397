# SPDX-License-Identifier: Apache-2.0
"""What a training benchmark found: its records, their file of JSON lines, and the table.

`python -m bench.training.report FILE` prints a table of such a file in Markdown; with --text as a training prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, inf, isfinite
from pathlib import Path
from textwrap import fill

from bench.document import table
from bench.environment import Header
from bench.output import print_rows, read_lines, write_results, written_by
from commopt.command_line import CommandParser, content_of


def first_below(curve: Iterable[tuple[float, float]], level: float) -> float | None:
    """Return the x at which a curve of (x, y) is first down at `level`, None if it never is.

    Straight lines join the points; where the point before is not finite, that of the first one below counts.
    """
    x_before, y_before = -inf, inf
    for x, y in curve:
        if y <= level:
            if not isfinite(y_before):
                return x
            return x_before + (y_before - level) / (y_before - y) * (x - x_before)
        x_before, y_before = x, y
    return None


STOCK = ("ddp", "hsdp", "fsdp")  # without commopt


@dataclass(frozen=True)
class Environment(Header):
    """Where and how the numbers were made; the first line of the file."""

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
    """Step without messages between nodes: median over all such steps of the slowest rank's."""
    evaluation: str
    model: str = "gpt"
    target_loss: float | None = None
    """The held-out loss to which seconds are reported."""
    parallel: str = "ddp"
    """ddp, hsdp (FSDP2 inside a node, replicas on the others) or fsdp (FSDP2 over all ranks)."""
    kind: str = "training"

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
    """Median over steps of the slowest rank's; with LocalSGD the mean, as rounds are rare."""
    step_p90_ms: float
    exposed_ms: float
    """step_ms less the median of the steps without messages just before and after."""
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

    @property
    def steps_per_s(self) -> float:
        """Over the whole budget, slow steps included."""
        return self.steps / self.seconds

    def seconds_to(self, loss: float) -> float | None:
        """Return when the held-out loss was down at `loss`, between two looks; None if it never was."""
        return first_below(((look.seconds, look.held_out_loss) for look in self.curve), loss)


def fraction_of_stock(outcome: Outcome, outcomes: Sequence[Outcome]) -> float | None:
    """Return the exposed time as a fraction of what torch takes; None when that was not run or hid everything."""
    for other in outcomes:
        if other.strategy in STOCK and other.exposed_ms > 0:
            return outcome.exposed_ms / other.exposed_ms
    return None


def is_ours(strategy: str) -> bool:
    """Return whether it is one of commopt's, not torch's own nor plain PowerSGD."""
    return strategy not in STOCK and not strategy.startswith(("torch_", "unoverlapped_"))


def headline(environment: Environment, outcomes: Sequence[Outcome], named: Callable[[str], str] = str) -> str:
    """Say what was gained: the time to the target loss, or the loss after equal time where there is no target.

    Of commopt's strategies, of the others and of stock DDP, the best each; named: how they are to be called.
    """
    target, budget = environment.target_loss, f"{environment.seconds:g} s"

    def told(outcome: Outcome) -> tuple[float, float, str]:
        seconds = 0.0 if target is None else outcome.seconds_to(target)
        shown = f"{seconds:.3g} s" if seconds else f"not in {budget}" if target else f"{outcome.held_out_loss:.2f}"
        order = inf if seconds is None else seconds
        return order, outcome.held_out_loss, f"{shown} with {named(outcome.strategy)}"

    groups: dict[str, list[Outcome]] = {"ours": [], "others": [], "stock": []}
    for each in outcomes:
        groups["stock" if each.strategy in STOCK else "ours" if is_ours(each.strategy) else "others"].append(each)
    best = ", ".join(min(map(told, group))[-1] for group in groups.values() if group)
    return f"Held-out loss after {budget}: {best}" if target is None else f"To a held-out loss of {target:g}: {best}"


def write(path: Path, environment: Environment, outcomes: Sequence[Outcome]) -> None:
    """Write JSON lines: the environment, then a line for each strategy."""
    write_results(path, asdict(environment), "strategy", map(asdict, outcomes))


def read(path: Path) -> tuple[Environment, list[Outcome]]:
    """Read what `write` wrote; raises ValueError when `path` holds something else."""
    with written_by("bench.training --json", path):
        header, rows = read_lines(path, "strategy")
        curves = [[Look(**look) for look in row.pop("curve")] for row in rows]
        outcomes = [Outcome(**row, curve=curve) for row, curve in zip(rows, curves, strict=True)]
        return Environment(**header), outcomes


def print_table(environment: Environment, outcomes: Sequence[Outcome], notes: Sequence[str] = ()) -> None:
    """Print one row per strategy to stdout, and notes below."""
    title = (
        f"{environment.parallel.upper()}, {environment.nodes} nodes x {max(environment.ranks_per_node)} ranks, "
        f"{environment.network}; "
        f"no-op step {environment.compute_ms:.0f} ms; {environment.seconds:g} s each"
    )
    payloads = ", ".join(
        f"{outcome.strategy} {_number(outcome.inter_payload_mib_per_step, 2)} "
        f"({_number(outcome.inter_predicted_mib_per_step, 2)})"
        for outcome in outcomes
        if outcome.inter_payload_mib_per_step is not None and outcome.inter_predicted_mib_per_step is not None
    )
    told = ["MiB/step: between nodes, headers included."]
    told += [f"Without headers (and as expected): {payloads}."] if payloads else []
    caption = [fill(text, 80) for text in (*told, *notes, "", headline(environment, outcomes))]
    print_rows(title, *_figures(environment, outcomes), "\n".join(caption))


def _figures(environment: Environment, outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of what a training prints."""
    target_loss = environment.target_loss
    last = "steps /s" if target_loss is None else f"s to {target_loss:g}"
    headings = ["strategy", "step ms", "exposed ms", "of stock's", "MiB /step", "held-out loss", last]
    return headings, [_row(outcome, outcomes, target_loss) for outcome in outcomes]


def _row(outcome: Outcome, outcomes: Sequence[Outcome], target_loss: float | None) -> list[str]:
    return [
        outcome.strategy,
        f"{outcome.step_ms:.0f}",
        f"{outcome.exposed_ms:.0f}",
        _number(fraction_of_stock(outcome, outcomes), 2),
        _number(outcome.inter_mib_per_step, 1),
        f"{outcome.held_out_loss:.3f}",
        f"{outcome.steps_per_s:.2f}" if target_loss is None else _number(outcome.seconds_to(target_loss), 1),
    ]


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:.2g}" if 0 < value < 10**-digits else f"{value:.{digits}f}"


def _all_figures(environment: Environment, outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of the table for documents."""
    target_loss = environment.target_loss
    headings = ["strategy", "steps", "step ms", "exposed ms", "of stock's", "payload MiB/step", "expected"]
    headings += ["held-out loss"] + ([] if target_loss is None else [f"s to {target_loss:g}"])
    rows = [
        [
            f"`{each.strategy}`",
            str(each.steps),
            f"{each.step_ms:.0f}",
            f"{each.exposed_ms:.0f}",
            _number(fraction_of_stock(each, outcomes), 3),
            _number(each.inter_payload_mib_per_step, 2),
            _number(each.inter_predicted_mib_per_step, 2),
            f"{each.held_out_loss:.2f}",
            *([] if target_loss is None else [_number(each.seconds_to(target_loss), 1)]),
        ]
        for each in outcomes
    ]
    return headings, rows


def main() -> None:
    """Print."""
    parser = CommandParser(prog="python -m bench.training.report", description="A table of a training file.")
    parser.add_argument("file", type=content_of(read), help="what bench.training --json wrote")
    parser.add_argument("--strategies", default="", help="only these, separated by commas")
    parser.add_argument("--columns", default="", help="only these beside the strategy, separated by commas")
    parser.add_argument("--text", action="store_true", help="as a training prints it, the verdict last")
    until = "seconds to the held-out loss of this strategy's end, rounded up to two digits"
    parser.add_argument("--loss-of", metavar="STRATEGY", help=until)
    options = parser.parse_args()
    environment, outcomes = options.file
    if options.loss_of is not None:
        ends = {each.strategy: each.held_out_loss for each in outcomes}
        if options.loss_of not in ends:
            parser.error(f"there is no strategy {options.loss_of}; there are {', '.join(ends)}")
        environment = replace(environment, target_loss=ceil(100 * ends[options.loss_of]) / 100)
    headings, rows = (_figures if options.text else _all_figures)(environment, outcomes)
    chosen, columns = ([name for name in each.split(",") if name] for each in (options.strategies, options.columns))
    if unknown := set(columns) - set(headings):
        parser.error(f"there is no column {', '.join(sorted(unknown))}; there are {', '.join(headings)}")
    kept = [place for place, name in enumerate(headings) if not columns or place == 0 or name in columns]
    headings = [headings[place] for place in kept]
    rows = [[row[place] for place in kept] for row in rows if not chosen or row[0].strip("`") in chosen]
    if not options.text:
        print(table(headings, rows))
        return
    print("```text")
    print_rows("", headings, rows, headline(environment, outcomes))
    print("```")


if __name__ == "__main__":
    main()
