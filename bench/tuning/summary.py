"""How good the tuner's choices are, over one run or many; `python -m bench.tuning.summary FILE...` in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.document import table
from bench.prediction.lines import World
from bench.table import print_rows
from bench.tuning.record import Configuration, Run, read
from commopt.command_line import Parser, content_of


def sentence(runs: Sequence[Run]) -> str:
    """Say how the tuner does over all runs; there must be a configuration."""
    found = [each for _, configurations in runs for each in configurations]
    to_best, to_stock = ([getattr(each, name) for each in found] for name in ("to_best", "to_stock"))
    untuned = sum(not each.tuned for each in found)
    return (
        f"{len(found)} configurations, {untuned} of them not tuned in time; {max(each.steps for each in found)} steps "
        f"at most\n"
        f"of the fastest of all choices: median {median(to_best):.3f}, worst {max(to_best):.3f}\n"
        f"of stock DDP: median {median(to_stock):.3f}, worst {max(to_stock):.3f}"
    )


def show(runs: Sequence[Run]) -> None:
    """Print every configuration."""
    found = [(environment, each) for environment, configurations in runs for each in configurations]
    if not found:
        print("no configurations")
        return
    headings = ["", "no comm ms", "stock ms", "best ms", "tuned ms", "of best", "of stock", "exposed share", "steps"]
    rows = [_row(environment, each) for environment, each in found]
    print_rows("A tuned step against every choice there was", headings, rows, sentence(runs), width=150)


def _row(environment: World, each: Configuration) -> list[str]:
    exposed = each.exposed_to_stock
    return [
        f"{environment.cluster}: {each.model}, {'+'.join(each.allow)}: {each.tuned or 'not tuned'}; best {each.best}",
        f"{each.compute_ms:.0f}",
        f"{each.stock_ms:.0f}",
        f"{each.best_ms:.0f}",
        f"{each.tuned_ms:.0f}",
        f"{each.to_best:.3f}",
        f"{each.to_stock:.3f}",
        "-" if exposed is None else f"{exposed:.3f}",
        str(each.steps),
    ]


def markdown(runs: Sequence[Run]) -> str:
    """Return a table of every configuration; milliseconds of a step."""
    headings = [
        "cluster, link",
        "model",
        "allowed",
        "computing alone",
        "stock DDP",
        "fastest of all tried",
        "`auto` chose",
    ]
    headings += ["of fastest", "of stock", "beyond computing, of stock's", "steps"]
    rows = []
    for environment, configurations in runs:
        for each in configurations:
            exposed = each.exposed_to_stock
            allowed = ", ".join(name for name in each.allow if name != "lossless") or "exact"
            shares = [f"{each.to_best:.2f}", f"{each.to_stock:.2f}", "-" if exposed is None else f"{exposed:.3f}"]
            best = f"{each.best_ms:.0f}: `{each.best}`, of {len(each.candidates_ms)}"
            tuned = f"{each.tuned_ms:.0f}: {each.tuned or 'nothing yet'}"
            alone = [f"{each.compute_ms:.0f}", f"{each.stock_ms:.0f}"]
            rows.append(
                [environment.cluster, f"`{each.model}`", allowed, *alone, best, tuned, *shares, str(each.steps)]
            )
    return table(headings, rows)


def main() -> None:
    """Print."""
    parser = Parser(prog="python -m bench.tuning.summary", description="A table of tunings.")
    parser.add_argument(
        "files", type=content_of(lambda path: read([path])), nargs="+", help="what bench.tuning --json wrote"
    )
    print(markdown([run for runs in parser.parse_args().files for run in runs]))


if __name__ == "__main__":
    main()
