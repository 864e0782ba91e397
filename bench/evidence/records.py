# SPDX-License-Identifier: Apache-2.0
"""Records: seconds to a held-out loss on two emulated nodes at 200 Mbit/s.

    python -m bench.evidence.records bench/results/records_0.json bench/results/records_1.json ...

A record is a strategy trained with three seeds or more by one command of bench.training, a file for each seed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.document import table
from bench.evidence.convergence.report import interval
from bench.training.report import Environment, Outcome, read
from commopt.command_line import CommandParser
from commopt.document import plain_file

LOSS = 2.7
LEAST_SEEDS = 3
RULES: dict[str, Any] = {
    **{"ranks_per_node": [2, 2], "emulated_rate": "200mbit", "target_loss": LOSS},
    **{"model": "gpt", "parameters": 4880640, "parallel": "ddp"},
}
"""What all files have in common."""

_Runs = dict[int, tuple[Environment, Outcome]]  # by seed


def runs_in(files: Iterable[Path]) -> dict[tuple[str, str], _Runs]:
    """Return the trainings in files, by strategy and command. Raises ValueError for one off the rules."""
    found: dict[tuple[str, str], _Runs] = defaultdict(dict)
    for file in files:
        environment, outcomes = read(file)
        has = {name: getattr(environment, name) for name in RULES}
        if has != RULES:
            raise ValueError(f"{file} has {has}; a record has {RULES}")
        for outcome in outcomes:
            runs = found[outcome.strategy, without_seed(environment.command)]
            if environment.seed in runs:
                raise ValueError(f"{file}: another file has seed {environment.seed} of {outcome.strategy}")
            runs[environment.seed] = environment, outcome
    return found


def without_seed(command: str) -> str:
    """Return a command without what differs between the files of one record."""
    return re.sub(r" --(?:seed|json) \S+", "", command)


def markdown(files: Sequence[Path]) -> str:
    """Return a row for each record, the fastest first. Raises ValueError where there are too few seeds."""
    rows, found = [], runs_in(files)
    for (strategy, _), runs in found.items():
        if len(runs) < LEAST_SEEDS:
            raise ValueError(f"{strategy} has {len(runs)} seed(s); a record has {LEAST_SEEDS} or more")
        times = [outcome.seconds_to(LOSS) for _, outcome in runs.values()]
        rows.append((_mean(times), [f"`{strategy}`", _told(times), str(len(runs)), *_made(runs)]))
    headings = ["strategy", f"seconds to {LOSS}", "n", "day", "revision"]
    commands = dict.fromkeys(command for _, command in found)
    text = "\n".join(f"    {command} --seed SEED --json FILE" for command in commands)
    caption = f"Mean over seeds ± 95 % t-interval; -: a seed did not come so far. By:\n\n{text}"
    return f"{table(headings, [row for _, row in sorted(rows)])}\n\n{caption}"


def _mean(times: Sequence[float | None]) -> float:
    known = [each for each in times if each is not None]
    return sum(known) / len(known) if len(known) == len(times) else float("inf")


def _told(times: Sequence[float | None]) -> str:
    known = [each for each in times if each is not None]
    if len(known) < len(times):
        return "-"
    middle, half = interval(known)
    return f"{middle:.1f} ±{half:.1f}"


def _made(runs: _Runs) -> list[str]:
    environments = [environment for environment, _ in runs.values()]
    days = sorted({environment.date[:10] for environment in environments})
    return [days[-1], ", ".join(sorted({str(environment.revision) for environment in environments}))]


def main() -> None:
    """Print the table of the files on the command line."""
    parser = CommandParser(prog="python -m bench.evidence.records", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=plain_file, nargs="+", help="what bench.training --seed SEED --json FILE wrote")
    try:
        print(markdown(parser.parse_args().files))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
