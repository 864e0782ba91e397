"""What every rank of the convergence benchmark runs, under torchrun: one training after the other."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

import time
from collections.abc import Callable
from math import isfinite
from statistics import median

import torch
import torch.distributed as dist

from bench.convergence import report
from bench.convergence.options import parse_options
from bench.convergence.plan import Case, Training, cases
from bench.convergence.report import Point, Run
from bench.ranks import gather, slowest_rank_ms
from examples import train_digits
from examples.train_gpt import choose_averaging, progress_bar, start_process_group

Show = Callable[[float], None]


def look(training: Training, step: int) -> Point:
    """Return how good the model is now. Collective."""
    accuracy = None
    if isinstance(training, train_digits.Training):
        accuracy, loss = training.held_out_accuracy()
    else:
        loss = training.held_out_loss()
    return Point(step, loss if isfinite(loss) else None, accuracy)


def train(case: Case, device: torch.device, show: Show) -> Run:
    """Do one training from start to end. Collective."""
    task, contender = case.task, case.contender
    training = task.start(case.optimizer, contender.momentum, case.seed, device)
    state = choose_averaging(training.ddp, contender.strategy, plan="ddp")
    curve, step_s = [], []
    for step in range(1, task.steps + 1):
        started = time.perf_counter()
        training.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        step_s.append(time.perf_counter() - started)
        if step % task.look_every == 0 or step == task.steps:
            curve.append(look(training, step))
            show(step / task.steps)
    inter = None if state is None else sum(gather(state.stats()["inter_bytes"])) / task.steps
    return Run(
        task=task.name,
        optimizer=case.optimizer,
        strategy=contender.strategy,
        seed=case.seed,
        parameters=sum(parameter.numel() for parameter in training.ddp.parameters()),
        step_ms=median(slowest_rank_ms(step_s)),
        inter_bytes_per_step=inter,
        curve=curve,
    )


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
    todo = [case for case in cases(options.tasks, options.contenders, options.seeds) if case.key not in done]
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
