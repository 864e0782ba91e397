# SPDX-License-Identifier: Apache-2.0
"""What every rank of the convergence benchmark runs, under torchrun: one training after the other."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from math import isfinite
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import bench.evidence.convergence
import commopt
from bench.environment import gather, slowest_rank_ms
from bench.evidence.convergence import large, plan, report, sparse
from bench.evidence.convergence.plan import Case, Training, cases
from bench.evidence.convergence.report import Point, Run
from bench.training.strategies import enter
from commopt.command_line import CommandParser, output_file, whole
from examples import train_gpt
from examples.train_gpt import progress_bar, start_process_group


def parse_options() -> argparse.Namespace:
    """Read the command line; a wrong one ends here, before anything is started.

    Beside the options themselves: tasks, entries and seeds, as plan.cases takes them; settings, of all tasks; the
    ranks per node and the kind of file; the command; and link_json, where the times on the slow network go.
    """
    parser = CommandParser(
        prog="python -m bench.evidence.convergence",
        description=(bench.evidence.convergence.__doc__ or "").splitlines()[0],
    )
    parser.add_argument(
        "--json",
        type=output_file,
        default=Path("build/convergence/convergence.json"),
        metavar="FILE",
        help="JSON lines, written after every training; what is in it already is not done again (default %(default)s)",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="strategies with TEXT in their names or called TEXT, and torch's own",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--sharded", action="store_true", help="the GPT under FSDP2, HSDP and over all ranks, instead")
    which.add_argument("--large", action="store_true", help="a GPT of 5 million parameters and a ResNet-18 instead")
    which.add_argument(
        "--local-sgd", action="store_true", help="LocalSGD by period and compressor, with AdamW, instead"
    )
    which.add_argument(
        "--second-selection",
        type=whole(3, 64),
        metavar="RANKS",
        help="sparse rows to all against servers, on so many nodes of one rank, instead",
    )
    names = [task.name for task in (*plan.TASKS, *plan.SHARDED_TASKS, *large.TASKS)]
    parser.add_argument("--task", choices=names, help="one task only")
    parser.add_argument("--seeds", type=whole(1), default=len(plan.SEEDS), help="seeds 0, 1, ... (default %(default)s)")
    parser.add_argument("--rates", action="store_true", help="one bit, DGC and stock at several learning rates instead")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything with one seed: does it run?")
    parser.add_argument("--no-link", action="store_true", help="do not time steps on emulated nodes")
    parser.add_argument("--report", action="store_true", help="train and time nothing: report what the file has")
    options = parser.parse_args()
    tasks: Sequence[plan.Task] = plan.TASKS
    known, options.ranks_per_node = plan.RATE_ENTRIES if options.rates else plan.ENTRIES, plan.RANKS_PER_NODE
    if options.sharded:
        tasks, known = plan.SHARDED_TASKS, plan.SHARDED_ENTRIES
    elif options.large:
        tasks, known = (large.RATE_TASKS, large.RATE_ENTRIES) if options.rates else (large.TASKS, large.ENTRIES)
        options.ranks_per_node = large.RANKS_PER_NODE
    elif options.local_sgd:
        tasks, known = (plan.GPT,), plan.LOCAL_ENTRIES
    elif options.second_selection:
        tasks, known, options.ranks_per_node = (plan.GPT,), sparse.ENTRIES, (1,) * options.second_selection
    if options.task not in (None, *(task.name for task in tasks)):
        parser.error(f"--task {options.task} is not among {', '.join(task.name for task in tasks)}")
    tasks = plan.quick(tasks) if options.quick else tasks
    options.tasks = tuple(task for task in tasks if options.task in (None, task.name))
    options.settings = plan.settings(tasks)
    options.seeds = range(1 if options.quick else options.seeds)
    try:
        options.entries = plan.chosen(options.only, known)
    except ValueError as error:
        parser.error(str(error))
    options.kind = f"convergence_large{'_rates' * options.rates}" if options.large else "convergence"
    options.link_json = report.on_link(options.json)
    options.command = shlex.join(["python", "-m", "bench.evidence.convergence", *sys.argv[1:]])
    return options


Show = Callable[[float], None]


def look(training: Training, step: int) -> Point:
    """Return how good the model is now. Collective."""
    accuracy = None
    if isinstance(training, train_gpt.Training):
        loss = training.held_out_loss()
    else:
        accuracy, loss = training.held_out_accuracy()
    return Point(step, loss if isfinite(loss) else None, accuracy)


def train(case: Case, device: torch.device, show: Show) -> Run:
    """Do one training from start to end. Collective."""
    task, entry = case.task, case.entry
    training = task.start(case.optimizer, case.seed, device, entry)
    if entry.aggregator is None:
        _, state = enter(training, entry.strategy, plan="ddp")  # type: ignore[arg-type]  # digits have no .evaluation
    else:
        state = commopt.attach(training.model, entry.aggregator, plan="ddp")
    curve, step_s = [], []
    for step in range(1, task.steps + 1):
        started = time.perf_counter()
        training.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        step_s.append(time.perf_counter() - started)
        if step % task.look_every == 0 or step == task.steps:
            if isinstance(state, commopt.HookState) and step == task.steps:
                state.average_parameters()
            curve.append(look(training, step))
            show(step / task.steps)
    inter = None if state is None else sum(gather(state.stats()["inter_bytes"])) / task.steps
    digest = sha256("".join(gather(digest_of(training.model))).encode()).hexdigest()
    return Run(
        task=task.name,
        optimizer=case.optimizer,
        strategy=entry.name,
        seed=case.seed,
        parameters=sum(parameter.numel() for parameter in training.model.parameters()),
        step_ms=median(slowest_rank_ms(step_s)),
        inter_bytes_per_step=inter,
        curve=curve,
        digest=digest,
        learning_rate=entry.rate * dict(task.learning_rates)[case.optimizer],
    )


def digest_of(model: nn.Module) -> str:
    """Return a digest of all bits of what this rank holds of the parameters."""
    digest = sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        digest.update(local.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def describe(run: Run) -> str:
    """Say in one line what a training came to."""
    last = run.curve[-1]
    accuracy = "" if last.accuracy is None else f", {100 * last.accuracy:.1f} % right"
    return f"{run.task} {run.optimizer} seed {run.seed} {run.strategy}: loss {run.loss:.3f}{accuracy}"


def main() -> None:
    """Do the trainings that the file lacks; rank 0 adds them."""
    options = parse_options()
    device = start_process_group()
    environment, runs = report.read(options.json)
    done = {run.key for run in runs}
    todo = [case for case in cases(options.tasks, options.entries, options.seeds) if case.key not in done]
    weights = [case.task.steps for case in todo]
    with progress_bar() as show:
        message = f"{len(todo)} trainings, {len(done)} done before"
        show(0.0, message)
        for index, case in enumerate(todo):
            show_part = _part(show, sum(weights[:index]), weights[index], sum(weights), message)
            runs.append(train(case, device, show_part))
            message = describe(runs[-1])
            if dist.get_rank() == 0:
                report.write(options.json, environment, runs)
        show(1.0, message)
    dist.destroy_process_group()


def _part(show: Callable[[float, str], None], before: int, steps: int, total: int, message: str) -> Show:
    return lambda fraction: show((before + fraction * steps) / total, message)


if __name__ == "__main__":
    main()
