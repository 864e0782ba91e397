# SPDX-License-Identifier: Apache-2.0
"""What every rank of the convergence benchmark runs, under torchrun: one training after the other."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from math import isfinite
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bench.evidence.convergence
import commopt
from bench.environment import gather, slowest_rank_ms
from bench.evidence.convergence import mask, plan, report, sparse
from bench.evidence.convergence.mask import LocalMask
from bench.evidence.convergence.plan import Case, Comparison
from bench.evidence.convergence.report import Point, Run
from bench.training.strategies import enter
from commopt.command_line import CommandParser, output_file, whole
from examples.train_gpt import progress_bar, start_process_group

STAGES = ("rates", "comparison")
"""Learning rates are tried before anything is compared at the best."""


def parse_options() -> argparse.Namespace:
    """Read the command line; a wrong one ends here, before anything is started.

    Beside the options themselves: the plan.Comparison, and the command.
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
        help="strategies with TEXT in their names or called TEXT, and stock DDP",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--large", action="store_true", help="a GPT of 5 million parameters with AdamW instead")
    which.add_argument("--local-sgd", action="store_true", help="LocalSGD by period and compressor instead")
    which.add_argument(
        "--second-selection",
        type=whole(3, 64),
        metavar="RANKS",
        help="sparse rows to all against servers, on so many nodes of one rank, instead",
    )
    which.add_argument(
        "--local-mask",
        choices=tuple(mask.DENSITIES),
        metavar="RATE",
        help="deltas of LocalSGD by what bfloat16 sees and by size, at this rate of AdamW (%(choices)s), instead",
    )
    parser.add_argument("--seeds", type=whole(1), help="seeds 0, 1, ... (default: 8 or 3)")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything with one seed: does it run?")
    parser.add_argument("--jobs", type=whole(1), default=1, metavar="N", help="so many trainings at a time (default 1)")
    parser.add_argument("--stage", choices=STAGES, default=STAGES[-1], help=argparse.SUPPRESS)
    parser.add_argument("--job", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--report", action="store_true", help="train nothing: report what the file has")
    options = parser.parse_args()
    which_one = plan.LARGE if options.large else plan.LOCAL if options.local_sgd else plan.MAIN
    if options.second_selection:
        which_one = sparse.comparison(options.second_selection)
    elif options.local_mask:
        which_one = mask.comparison(options.local_mask)
    try:
        entries = plan.chosen(options.only, which_one.entries)
    except ValueError as error:
        parser.error(str(error))
    options.comparison = replace(
        which_one,
        task=which_one.task.shortened if options.quick else which_one.task,
        entries=entries,
        seeds=1 if options.quick else options.seeds or which_one.seeds,
    )
    options.command = shlex.join(["python", "-m", "bench.evidence.convergence", *sys.argv[1:]])
    return options


Show = Callable[[float], None]


def train(case: Case, device: torch.device, show: Show) -> Run:
    """Do one training from start to end. Collective."""
    task, entry = case.task, case.entry
    training = task.start(case.optimizer, case.seed, device, entry.rate)
    state: commopt.CommState | None
    if entry.strategy.endswith(plan.REVERSED):
        assert isinstance(training.model, DistributedDataParallel)
        reverse_windows(training.model.module)
    if entry.aggregator is None:
        _, state = enter(training, entry.strategy.removesuffix(plan.REVERSED), plan="ddp")
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
            loss = training.held_out_loss(task.windows)
            curve.append(Point(step, loss if isfinite(loss) else None, None))
            show(step / task.steps)
    inter = None if state is None else sum(gather(state.stats()["inter_bytes"]))
    density = None
    if isinstance(entry.aggregator, LocalMask):
        densities, nbytes = zip(*gather(entry.aggregator.take_sent()), strict=True)
        density, inter = mean(densities), (inter or 0) + sum(nbytes)
    digest = sha256("".join(gather(digest_of(training.model))).encode()).hexdigest()
    return Run(
        task=task.name,
        optimizer=case.optimizer,
        strategy=entry.name,
        seed=case.seed,
        parameters=sum(parameter.numel() for parameter in training.model.parameters()),
        step_ms=median(slowest_rank_ms(step_s)),
        inter_bytes_per_step=None if inter is None else inter / task.steps,
        curve=curve,
        digest=digest,
        learning_rate=entry.rate * dict(task.learning_rates)[case.optimizer],
        density=density,
    )


def reverse_windows(model: nn.Module) -> None:
    """Let a model see the windows of a batch in reverse order, and return what it makes of them in the usual one."""
    model.register_forward_pre_hook(lambda module, tokens: tokens[0].flip(0))
    model.register_forward_hook(lambda module, tokens, logits: logits.flip(0))


def digest_of(model: nn.Module) -> str:
    """Return a digest of all bits of the parameters."""
    digest = sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def todo(comparison: Comparison, stage: str, runs: Sequence[Run], job: int = 0, jobs: int = 1) -> list[Case]:
    """Return the trainings of a job's part of a stage that are not in `runs`; no other job adds any of these."""
    losses = {run.key: run.loss for run in runs}
    cases = comparison.rate_cases() if stage == STAGES[0] else comparison.cases(losses)
    return [case for case in cases[job::jobs] if case.key not in losses]


def main() -> None:
    """Do this job's part of the trainings that the file lacks; rank 0 adds them."""
    options = parse_options()
    device = start_process_group()
    cases = todo(options.comparison, options.stage, report.read(options.json)[1], options.job, options.jobs)
    message = f"{len(cases)} trainings"
    with progress_bar() as show:
        for index, case in enumerate(cases):
            run = train(case, device, _part(show, index, len(cases), message))
            message = f"{' '.join(map(str, run.key))}: loss {run.loss:.3f}"
            if dist.get_rank() == 0:
                report.add(options.json, run)
        show(1.0, message)
    dist.destroy_process_group()


def _part(show: Callable[[float, str], None], before: int, total: int, message: str) -> Show:
    return lambda fraction: show((before + fraction) / total, message)


if __name__ == "__main__":
    main()
