"""How often must nodes meet? LocalSGD against stock DDP, on the examples of the convergence benchmark.

    COMMOPT_RANKS_PER_NODE=2 OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 -m bench.convergence.periodic

Four local ranks pass for two nodes of two. Same model, data, steps and learning rates as in bench.convergence; the
parameters are averaged once more before they are judged.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import commopt
from bench.convergence import plan, report, tables
from bench.convergence.ranks import describe, look
from bench.convergence.report import Environment, Run
from bench.document import table, write_between
from bench.environment import machine
from bench.ranks import gather, slowest_rank_ms
from commopt import Hierarchical, LocalSGD
from commopt.command_line import Parser, output_file, whole
from examples.train_gpt import progress_bar, start_process_group

PERIODS = (2, 4, 8, 16)
START_STEPS = (0, 100)
EVERY_STEP = Hierarchical()
"""What the bytes are compared with."""
CONTENDERS = (
    None,  # stock DDP
    EVERY_STEP,
    *(LocalSGD(period, start_step) for start_step in START_STEPS for period in PERIODS),
)
MOMENTUM = 0.9


def train(
    task: plan.Task, optimizer: str, aggregator: commopt.Aggregator | None, seed: int, device: torch.device
) -> Run:
    """Train from start to end, without an aggregator by stock DDP. Collective."""
    training = task.start(optimizer, MOMENTUM, seed, device)
    state = None if aggregator is None else commopt.attach(training.ddp, aggregator, plan="ddp")
    step_s = []
    for _ in range(task.steps):
        started = time.perf_counter()
        training.step()
        step_s.append(time.perf_counter() - started)
    if state is not None:
        state.average_parameters()
    return Run(
        task=task.name,
        optimizer=optimizer,
        strategy=_name(aggregator),
        seed=seed,
        parameters=sum(parameter.numel() for parameter in training.ddp.parameters()),
        step_ms=median(slowest_rank_ms(step_s)),
        inter_bytes_per_step=None if state is None else sum(gather(state.stats()["inter_bytes"])) / task.steps,
        curve=[look(training, task.steps)],
    )


def headings(runs: Sequence[Run]) -> list[str]:
    """Return the headings of `rows`."""
    learned = [f"{task} {optimizer}" for task, optimizer in _kinds(runs)]
    return ["gradients and parameters by", *learned, *(f"bytes, {task}" for task in dict(_kinds(runs)))]


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return a row for every way to average; "!" is outside of the tolerance."""
    summaries = {(each.task, each.optimizer, each.strategy): each for each in report.summarize(runs)}
    found = []
    for strategy in map(_name, CONTENDERS):
        learned = [tables.verdict(summaries.get((*kind, strategy))) for kind in _kinds(runs)]
        found.append([f"`{strategy}`", *learned, *(_share(runs, task, strategy) for task in dict(_kinds(runs)))])
    return found


def _name(aggregator: commopt.Aggregator | None) -> str:
    return plan.STOCK if aggregator is None else repr(aggregator)


def _kinds(runs: Sequence[Run]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((run.task, run.optimizer) for run in runs))


def _share(runs: Sequence[Run], task: str, strategy: str) -> str:
    """Return what is sent between nodes, as a part of what averaging all gradients there takes."""
    sent = {run.strategy: run.inter_bytes_per_step for run in runs if run.task == task}
    mine, every_step = sent.get(strategy), sent.get(_name(EVERY_STEP))
    return "-" if mine is None or not every_step else f"{mine / every_step:.3f}"


def fill_in(document: Path, runs: Sequence[Run]) -> None:
    """Replace what is between the marks in a Markdown file; raises ValueError when there are none."""
    write_between(document, tables.BEGIN, tables.END, table(headings(runs), rows(runs)))


def main() -> None:
    """Do the trainings that the file lacks; rank 0 writes and reports."""
    parser = Parser(prog="bench.convergence.periodic", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=output_file, default=Path("build/convergence/periodic.json"), metavar="FILE")
    parser.add_argument("--document", type=Path, metavar="FILE", help="replace the table in this Markdown file")
    parser.add_argument("--seeds", type=whole(1), default=1, help="seeds 0, 1, ... (default 1)")
    parser.add_argument("--optimizers", nargs="+", choices=plan.OPTIMIZERS, default=["sgd"])
    parser.add_argument("--quick", action="store_true", help="a few steps of everything: does it run?")
    options = parser.parse_args()
    tasks = plan.quick(plan.TASKS) if options.quick else plan.TASKS
    device = start_process_group()
    environment = Environment(
        **machine(),
        command=shlex.join(["torchrun", "--nproc-per-node", "4", "-m", parser.prog, *sys.argv[1:]]),
        ranks_per_node=[len(node) for node in commopt.Communicator().cluster.nodes],
        settings=plan.settings(tasks),
        kind="periodic",
    )
    environment, runs = report.resume(options.json, environment)
    done = {run.key for run in runs}
    todo = [
        (task, optimizer, aggregator, seed)
        for seed in range(options.seeds)
        for task in tasks
        for optimizer in options.optimizers
        for aggregator in CONTENDERS
        if (task.name, optimizer, _name(aggregator), seed) not in done
    ]
    dist.barrier()  # all have read the file
    with progress_bar() as show:
        for index, case in enumerate(todo):
            runs.append(train(*case, device))
            if dist.get_rank() == 0:
                report.write(options.json, environment, runs)
            show((index + 1) / len(todo), describe(runs[-1]))
    if dist.get_rank() == 0:
        print(*(" | ".join(line) for line in (headings(runs), *rows(runs))), sep="\n")
        if options.document:
            fill_in(options.document, runs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
