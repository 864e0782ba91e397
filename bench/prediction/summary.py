"""How far predictions are from measurements, over one run or many.

`python -m bench.prediction.summary FILE` prints what was measured, and the errors, in Markdown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from bench.document import table
from bench.prediction.record import Configuration, Environment, Run, read
from bench.table import print_rows
from commopt.command_line import Parser, content_of


def worst(errors: Sequence[float]) -> float:
    """Return the largest error by amount, with its sign."""
    return max(errors, key=abs)


def typical(errors: Sequence[float]) -> float:
    """Return the median amount."""
    return median(map(abs, errors))


def sentence(runs: Sequence[Run]) -> str:
    """Say how good predictions are over all runs; there must be a configuration."""
    found = [(environment, each) for environment, configurations in runs for each in configurations]
    errors = [each.error for _, each in found]
    apart = [each.apart_error for _, each in found]
    clusters = len({environment.cluster for environment, _ in found})
    models, strategies = len({each.model for _, each in found}), len({each.strategy for _, each in found})
    return (
        f"{len(found)} configurations: {clusters} clusters, {models} models, {strategies} strategies\n"
        f"step time: median error {100 * typical(errors):.1f} %, worst {100 * worst(errors):+.1f} %\n"
        f"as if each rank had processors of its own: median {100 * typical(apart):.1f} %, "
        f"worst {100 * worst(apart):+.1f} %"
    )


def show(runs: Sequence[Run]) -> None:
    """Print every configuration, then the errors by strategy, by model and by cluster."""
    found = [(environment, each) for environment, configurations in runs for each in configurations]
    if not found:
        print("no configurations")
        return
    rows = [_row(environment, each) for environment, each in found]
    headings = ["", "no comm ms", "step ms", "predicted ms", "error %", "apart %", "comm ms", "predicted ms", "steps"]
    print_rows("Step time, predicted from probed links and measured", headings, rows, sentence(runs), width=150)
    for title, key in _GROUPS.items():
        groups: dict[str, list[float]] = {}
        for environment, each in found:
            groups.setdefault(key(environment, each), []).append(each.error)
        lines = [
            [name, str(len(errors)), f"{100 * typical(errors):.1f}", f"{100 * worst(errors):+.1f}"]
            for name, errors in groups.items()
        ]
        if len(lines) > 1:
            print_rows(f"Error by {title}", ["", "number", "median %", "worst %"], lines, width=100)


_GROUPS: dict[str, Callable[[Environment, Configuration], str]] = {
    "strategy": lambda _, each: each.strategy,
    "model": lambda _, each: each.model,
    "cluster": lambda environment, _: environment.cluster,
}


def _row(environment: Environment, each: Configuration) -> list[str]:
    return [
        f"{environment.cluster}: {each.model} {each.strategy}",
        f"{each.compute_ms:.0f}",
        f"{each.measured_ms:.0f}",
        f"{each.predicted_ms:.0f}",
        f"{100 * each.error:+.1f}",
        f"{100 * each.apart_error:+.1f}",
        f"{each.lane_ms:.0f}",
        f"{each.communication_ms:.0f}",
        str(len(each.steps_ms)),
    ]


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
        f"{len(found)} steps on {clusters} clusters: median error {100 * typical(errors):.1f} %, worst "
        f"{100 * worst(errors):+.0f} %; {near} within 10 %, {within} within 25 %."
    )
    return f"{text}\n\n{table(['cluster, link', 'model', *(f'`{name}`' for name in strategies)], rows)}"


def main() -> None:
    """Print."""
    parser = Parser(prog="python -m bench.prediction.summary", description="A table of predictions.")
    parser.add_argument(
        "files", type=content_of(lambda path: read([path])), nargs="+", help="what bench.prediction --json wrote"
    )
    print(markdown([run for runs in parser.parse_args().files for run in runs]))


if __name__ == "__main__":
    main()
