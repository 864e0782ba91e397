"""Train a model for the same time with each strategy, and compare speed, traffic and held-out loss.

    python -m bench.cluster --nodes 2 --ranks-per-node 2 --rate 200mbit \\
        -m bench.training --strategies ddp,flat,hierarchical,hierarchical_bf16 --seconds 40 --json out.json

The model is the example's GPT, or ResNet-50 (--model resnet50). All strategies run in one launch, from the same seed
and with a fresh model each. A run with a hook that returns every bucket unchanged comes first: what a step takes
beyond it is exposed communication. Under plain torchrun (or on real machines) everything works too, but the bytes
between nodes are unknown and reported as null; there COMMOPT_RANKS_PER_NODE says which ranks to treat as one node.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

import argparse
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import commopt
from bench import report
from bench.cluster import Traffic, link_rate, traffic
from bench.environment import command_of, machine
from bench.images import ImageTraining
from bench.report import Environment, Look, Outcome
from examples.train_gpt import (
    STRATEGIES,
    Training,
    add_model_options,
    choose_averaging,
    progress_bar,
    start_process_group,
    strategy_name,
)
from topology import Cluster


def torch_bf16(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call torch's bf16_compress_hook, which DDP refuses by its name on gloo, though gloo reduces bfloat16 well."""
    return default_hooks.bf16_compress_hook(state, bucket)  # type: ignore[arg-type]  # None is the world


TORCH_HOOKS = {"torch_fp16": default_hooks.fp16_compress_hook, "torch_bf16": torch_bf16}
DEFAULT_STRATEGIES = (
    "ddp",
    "hierarchical",
    "hierarchical_bf16",
    "hierarchical_quantized",
    "hierarchical_quantized:bits=4",
    "hierarchical_onebit",
    "hierarchical_dgc:density=0.01",
    "hierarchical_powersgd",
)
KNOWN_STRATEGIES = (*STRATEGIES, *TORCH_HOOKS)
MODELS: dict[str, type[Training | ImageTraining]] = {"gpt": Training, "resnet50": ImageTraining}

# Steps before the first look and before the no-op steps that count: DDP rebuilds its buckets in the first ones.
_FIRST_STEPS = 3

T = TypeVar("T")
Show = Callable[[float, str], None]


def gather(value: T) -> list[T]:
    """Return every rank's value, on every rank."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]  # all are filled


def from_rank_0(value: T) -> T:
    """Return rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def slowest_rank_ms(step_s: list[float]) -> list[float]:
    """Return for each step the time of its slowest rank."""
    return [1000 * max(times) for times in zip(*gather(step_s), strict=True)]


def steps_until_look(step_s: list[float], budget_s: float, look_every_s: float) -> int:
    """Return how many steps to take before the next look at the held-out loss, 0 when the budget is used up.

    The budget is met to the nearest step.
    """
    if not step_s:
        return _FIRST_STEPS
    expected_s = median(step_s[-10:])
    affordable = round((budget_s - sum(step_s)) / expected_s)
    return max(0, min(affordable, max(1, round(look_every_s / expected_s))))


class Run:
    """One strategy's fresh model, and how long each of its steps took on this rank."""

    def __init__(self, strategy: str, options: argparse.Namespace, device: torch.device) -> None:
        self.strategy = strategy
        self.training = MODELS[options.model](options, device)
        self.state: commopt.HookState | None = None
        if strategy in TORCH_HOOKS:
            self.training.ddp.register_comm_hook(None, TORCH_HOOKS[strategy])
        else:
            self.state = choose_averaging(self.training.ddp, strategy, plan=options.plan)
        self.step_s: list[float] = []

    def step(self) -> None:
        """Take one step and time it."""
        start = time.perf_counter()
        self.training.step()
        if self.training.device.type == "cuda":
            torch.cuda.synchronize()
        self.step_s.append(time.perf_counter() - start)

    def train(self, seconds: float, look_every_s: float, show: Show) -> list[Look]:
        """Train for `seconds` of rank 0's step time; evaluation is off the clock. Collective.

        Rank 0 plans from look to look, so that no message but the gradients' is sent while the clock runs.
        """
        curve: list[Look] = []
        message = self.strategy
        while count := from_rank_0(steps_until_look(self.step_s, seconds, look_every_s)):
            for _ in range(count):
                self.step()
                show(sum(self.step_s) / seconds, message)
            look = Look(len(self.step_s), from_rank_0(sum(self.step_s)), self.training.held_out_loss())
            curve.append(look)
            message = f"{self.strategy}: step {look.step}, held-out loss {look.held_out_loss:.3f}"
        show(1.0, message)
        return curve


def measure(run: Run, options: argparse.Namespace, cluster: Cluster, compute_ms: float, show: Show) -> Outcome:
    """Train by one strategy and return what it took. Collective."""
    dist.barrier()
    before = _node_traffic()
    curve = run.train(options.seconds, options.look_every, show)
    dist.barrier()
    after = _node_traffic()
    step_ms, steps = slowest_rank_ms(run.step_s), len(run.step_s)
    inter = inter_payload = predicted = None
    if before is not None and after is not None:
        moved = gather(after - before)
        speakers = [node[0] for node in cluster.nodes]  # the counters belong to the node: read them once
        inter = sum(moved[rank].link.tx_bytes for rank in speakers) / steps
        inter_payload = sum(moved[rank].link_payload_bytes for rank in speakers) / steps
    if run.state is not None:
        predicted = sum(gather(run.state.stats()["inter_bytes"])) / steps
    return Outcome(
        strategy=run.strategy,
        steps=steps,
        seconds=curve[-1].seconds,
        step_ms=median(step_ms),
        step_p90_ms=quantiles(step_ms, n=10)[-1],
        exposed_ms=median(step_ms) - compute_ms,
        inter_mib_per_step=_mib(inter),
        inter_payload_mib_per_step=_mib(inter_payload),
        inter_predicted_mib_per_step=_mib(predicted),
        curve=curve,
    )


def _node_traffic() -> Traffic | None:
    return traffic() if link_rate() else None


def _mib(nbytes: float | None) -> float | None:
    return None if nbytes is None else nbytes / 2**20


def describe(
    options: argparse.Namespace, cluster: Cluster, training: Training | ImageTraining, compute_ms: float
) -> Environment:
    """Say where and how the numbers are made; `training` is any of those compared."""
    device = training.device
    ranks_per_node = [len(node) for node in cluster.nodes]
    return Environment(
        **machine(),
        command=command_of("bench.training", ranks_per_node),
        device=torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        backend=dist.get_backend(),
        nodes=len(cluster.nodes),
        ranks_per_node=ranks_per_node,
        emulated_rate=link_rate(),
        parameters=sum(parameter.numel() for parameter in training.ddp.parameters()),
        seconds=options.seconds,
        seed=options.seed,
        compute_ms=compute_ms,
        evaluation=f"{training.evaluation}, shared out over all ranks",
    )


def parse_options() -> argparse.Namespace:
    """Read the command line; a wrong one ends here, before anything is started."""
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--strategies",
        type=lambda names: names.split(","),
        default=list(DEFAULT_STRATEGIES),
        metavar="NAME[:OPTION=VALUE][,NAME...]",
        help=f"of {', '.join(KNOWN_STRATEGIES)} (default: {','.join(DEFAULT_STRATEGIES)})",
    )
    parser.add_argument("--seconds", type=float, default=25.0, help="for each strategy (default 25)")
    parser.add_argument("--look-every", type=float, default=5.0, metavar="S", help="evaluate so often (default 5 s)")
    parser.add_argument("--model", choices=MODELS, default="gpt", help="what to train (default gpt)")
    parser.add_argument("--pixels", type=int, default=32, help="resnet50's images are so high and wide (default 32)")
    parser.add_argument(
        "--plan",
        choices=("ddp", "adaptive"),
        default="ddp",
        help="of the buckets: DDP's own, so that strategies alone differ (default), or adaptive",
    )
    parser.add_argument("--noop-steps", type=int, default=30, help="steps without communication (default 30)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines: the environment, then strategies")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture (PNG, SVG, PDF)")
    add_model_options(parser)
    options = parser.parse_args()
    for name in options.strategies:
        try:
            name in TORCH_HOOKS or strategy_name(name)
        except argparse.ArgumentTypeError as error:
            parser.error(f"strategy {name!r} is unknown; known: {', '.join(KNOWN_STRATEGIES)} ({error})")
    if options.plot and not find_spec("matplotlib"):
        parser.error("--plot needs matplotlib: pip install 'commopt[plot]', or leave --plot out")
    return options


def main() -> None:
    """Measure the no-op step, then every strategy, and report on rank 0."""
    options = parse_options()
    device = start_process_group()
    is_reporter = dist.get_rank() == 0
    cluster = commopt.Communicator().cluster
    if is_reporter and not link_rate():
        print(f"{cluster}; not on bench.cluster, so the bytes between nodes are unknown", file=sys.stderr)
    outcomes: list[Outcome] = []
    with progress_bar() as show:
        show(0.0, "steps without communication")
        baseline = Run("noop", options, device)
        for _ in range(_FIRST_STEPS + options.noop_steps):
            baseline.step()
        compute_ms = median(slowest_rank_ms(baseline.step_s)[_FIRST_STEPS:])
        environment = describe(options, cluster, baseline.training, compute_ms)
        for index, strategy in enumerate(options.strategies):
            show_part = _part(show, index, len(options.strategies))
            outcomes.append(measure(Run(strategy, options, device), options, cluster, compute_ms, show_part))
            if is_reporter and options.json:  # after each, so that an interrupted run keeps what it has
                report.write(options.json, environment, outcomes)
    if is_reporter:
        report.print_table(environment, outcomes)
        if options.plot:
            from bench import plot

            plot.draw(environment, outcomes, options.plot)
            print(f"picture: {options.plot}")
    dist.destroy_process_group()


def _part(show: Show, index: int, count: int) -> Show:
    return lambda fraction, message: show((index + min(fraction, 1.0)) / count, message)


if __name__ == "__main__":
    main()
