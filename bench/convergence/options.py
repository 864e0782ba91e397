"""The command line of the convergence benchmark; its ranks read the same one."""

from __future__ import annotations

import argparse
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import bench.convergence
from bench.convergence import plan, tables
from bench.document import around
from commopt.command_line import Parser, output_file, whole


def parse_options() -> argparse.Namespace:
    """Read the command line; a wrong one ends here, before anything is started.

    Beside the options themselves: tasks, contenders and seeds, as plan.cases takes them; settings, of all tasks; the
    command; and link_json, where the times on the slow network go.
    """
    parser = Parser(prog="python -m bench.convergence", description=(bench.convergence.__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--json",
        type=output_file,
        default=Path("build/convergence/convergence.json"),
        metavar="FILE",
        help="JSON lines, written after every training; what is in it already is not done again (default %(default)s)",
    )
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="draw a picture (PNG, SVG, PDF)")
    parser.add_argument("--document", type=Path, metavar="FILE", help="replace the tables in this Markdown file")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="strategies with TEXT in their names, and stock DDP"
    )
    parser.add_argument("--task", choices=[task.name for task in plan.TASKS], help="one task only")
    parser.add_argument("--seeds", type=whole(1), default=len(plan.SEEDS), help="seeds 0, 1, ... (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything with one seed: does it run?")
    parser.add_argument("--no-link", action="store_true", help="do not time steps on emulated nodes")
    parser.add_argument("--report", action="store_true", help="train and time nothing: report what the file has")
    options = parser.parse_args()
    if options.plot and not find_spec("matplotlib"):
        parser.error("--plot needs matplotlib: pip install matplotlib, or leave --plot out")
    tasks = plan.quick(plan.TASKS) if options.quick else plan.TASKS
    options.tasks = tuple(task for task in tasks if options.task in (None, task.name))
    options.settings = plan.settings(tasks)
    options.seeds = range(1 if options.quick else options.seeds)
    try:
        options.contenders = plan.chosen(options.only)
        if options.document:
            around(options.document, tables.BEGIN, tables.END)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    options.link_json = options.json.with_stem(f"{options.json.stem}_{plan.RATE}")
    options.command = shlex.join(["python", "-m", "bench.convergence", *sys.argv[1:]])
    return options
