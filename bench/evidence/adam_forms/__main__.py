# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m bench.evidence.adam_forms --help`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import product
from math import isfinite
from pathlib import Path

import torch

import bench.evidence.adam_forms
from bench.command_line import add_files
from bench.environment import machine
from bench.evidence.adam_forms.averaging import LEARNING_RATE, train
from bench.evidence.adam_forms.forms import FORMS
from bench.evidence.adam_forms.report import Run, markdown, resume
from bench.evidence.convergence import plan
from bench.output import write_results
from commopt.command_line import Parser, number, whole

RATES = (2.0, 3.0, 4.0, 6.0)


def measure(path: Path, cases: Iterable[tuple[int, str, float]], steps: int) -> None:
    """Do the trainings that a file lacks, of seeds, forms and rates; write it after each."""
    header = {**machine(), "command": "python -m bench.evidence.adam_forms", "steps": steps}
    header, runs = resume(path, header)
    done = {(run.seed, run.form, run.rate) for run in runs}
    for seed, name, rate in cases:
        if (seed, name, rate) in done:
            continue
        replica, averaging = train(FORMS[name], rate, seed, steps)
        loss = replica.held_out_loss()
        runs.append(Run(name, rate, seed, loss if isfinite(loss) else None, averaging.bytes_of_dense))
        print(f"{name}, rate x {rate:g}, seed {seed}: {loss:.4f}", flush=True)
        write_results(path, header, "run", map(asdict, runs))


def main() -> None:
    """Train and write, or print the table of a file."""
    parser = Parser(
        prog="python -m bench.evidence.adam_forms",
        description=(bench.evidence.adam_forms.__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--only", action="append", choices=FORMS, metavar="FORM", help="one form; may be repeated")
    parser.add_argument("--rates", nargs="+", type=number(), default=RATES, help=f"times {LEARNING_RATE}: {RATES}")
    parser.add_argument("--seeds", type=whole(1), default=len(plan.SEEDS), help="seeds 0, 1, ... (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything with one seed: does it run?")
    add_files(parser, markdown, "JSON lines; what is in it is not done again")
    options = parser.parse_args()
    if options.report:
        print(options.report)
        return
    torch.set_num_threads(1)
    (task,) = plan.quick([plan.GPT]) if options.quick else [plan.GPT]
    seeds: Sequence[int] = range(1 if options.quick else options.seeds)
    rates = options.rates[:1] if options.quick else options.rates
    try:
        measure(options.json, product(seeds, options.only or FORMS, rates), task.steps)
    except ValueError as error:
        parser.error(str(error))
    print(markdown(options.json))


if __name__ == "__main__":
    main()
