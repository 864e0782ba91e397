# SPDX-License-Identifier: Apache-2.0
"""Predict the steps of several models and strategies from links probed in the same run, and measure them.

    python -m bench.cluster --nodes 2 --ranks-per-node 2 --rate 100mbit -m bench.evidence.prediction --json out.json
    python -m bench.evidence.prediction.report out.json

The simulator is given what the probe measured and when each gradient is ready in steps that do not communicate; it sees
nothing of the steps that do. docs/simulator.md says what it assumes.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch.distributed as dist

import commopt
from bench.environment import run_of
from bench.evidence.models import MODELS, Subject, subject
from bench.evidence.prediction import report
from bench.evidence.prediction.predict import predict, with_own_work
from bench.evidence.prediction.probe import Probe, Probed, Processors, wanted
from bench.evidence.prediction.report import Configuration, Environment
from bench.evidence.training_run import Profile, TrainingRun
from commopt.cluster import cluster_options
from commopt.command_line import CommandParser, number, output_file
from commopt.groups import TeamShape, join
from commopt.probe.prober import link_text, work_text
from examples.train_gpt import progress_bar, start_process_group

_WARM_UP = 3  # steps: DDP makes its buckets anew after the first, and connections are made in the next
_FEWEST, _MOST = 4, 24
_TURNS = 2


@dataclass(frozen=True)
class Contest:
    """What each strategy took, and the same model without communication; of each, the times of some steps."""

    profile: Profile
    trainings: tuple[TrainingRun, ...]


def hold(subject: Subject, strategies: Sequence[str], seconds: float, profile: Profile) -> Contest:
    """Train by every strategy for about `seconds` and four steps or more, after warm-up; collective."""
    options = {"plan": "ddp", "record": True}
    contest = Contest(profile, tuple(TrainingRun(strategy, subject, options) for strategy in strategies))
    runs: tuple[Profile | TrainingRun, ...] = (profile, *contest.trainings)
    counts = [_steps(each_run.turn(_WARM_UP, counts=False), seconds) for each_run in runs]
    for _ in range(_TURNS):
        for each_run, count in zip(runs, counts, strict=True):
            each_run.turn(count // _TURNS)
    return contest


def _steps(warm_up_s: Sequence[float], seconds: float) -> int:
    """Return how many steps to time, the same number in every turn."""
    affordable = round(seconds / median(warm_up_s[1:]))
    return max(_FEWEST, min(_MOST, affordable)) // _TURNS * _TURNS


STRATEGIES = ("flat", "hierarchical", "hierarchical_quantized", "hierarchical_powersgd:start_step=0")
_FIRST_STEPS = 3  # DDP makes its buckets anew after the first
_TEXTS = "NAME[:OPTION=VALUE][,NAME...]"


def parse_options() -> argparse.Namespace:
    """Read the command line; a wrong one ends here, before anything is started."""
    parser = CommandParser(prog="python -m bench.evidence.prediction", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--models", type=_texts, default=list(MODELS), metavar=_TEXTS, help=f"of {', '.join(MODELS)} (default: all)"
    )
    parser.add_argument(
        "--strategies", type=_texts, default=list(STRATEGIES), metavar=_TEXTS, help=f"default: {','.join(STRATEGIES)}"
    )
    parser.add_argument("--probe-seconds", type=number(), default=60.0, help="for the links (default 60)")
    parser.add_argument("--seconds", type=number(), default=8.0, help="of timed steps for each strategy (default 8)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="append JSON lines")
    options = parser.parse_args()
    try:
        options.subjects = [subject(text) for text in options.models]
        options.aggregators = {text: commopt.build_preset(text) for text in options.strategies}
    except commopt.ConfigurationError as error:
        parser.error(str(error))
    return options


def _texts(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    """Probe, measure and predict; rank 0 reports."""
    options = parse_options()
    start_process_group()
    with progress_bar() as show:
        show(0.0, "steps without communication")
        profiles = [Profile(each) for each in options.subjects]
        for profile in profiles:
            profile.turn(_FIRST_STEPS, counts=False)
        membership = join(None)
        counts = tuple(len(node) for node in membership.cluster.nodes)
        shape = TeamShape.of(counts, sites=membership.cluster.site_levels)
        show(0.1, "probe")
        buffers = [bucket for profile in profiles for bucket in profile.buckets]
        without_sites = TeamShape.of(counts)  # what a rank works by itself is measured so
        needed = wanted(options.aggregators.values(), buffers, shape)
        needed |= wanted(options.aggregators.values(), buffers, without_sites)
        probed = Probe(membership, needed, Processors.of_this_machine(shape.size), options.probe_seconds).run()
        environment = describe(shape, probed)
        found: list[Configuration] = []
        for number, (each, profile) in enumerate(zip(options.subjects, profiles, strict=True)):
            show(0.3 + 0.7 * number / len(profiles), f"{each.name} by {', '.join(options.strategies)}")
            contest = hold(each, options.strategies, options.seconds, profile)
            found += compare(each, contest, shape, probed)
    if dist.get_rank() == 0:
        if options.json:  # all at once: the matrix takes a cluster that is in the file to be done
            report.append(options.json, environment, found)
        print(report.markdown([(environment, found)]))
    dist.destroy_process_group()


def compare(subject: Subject, contest: Contest, shape: TeamShape, probed: Probed) -> list[Configuration]:
    """Predict what was measured; every rank has the same numbers."""
    profile = contest.profile
    workload = profile.workload()
    processors = Processors.of_this_machine(shape.size)
    found = []
    for training in contest.trainings:
        aggregator = commopt.build_preset(training.strategy)
        suited = with_own_work(probed, aggregator, profile.buckets, TeamShape.of(shape.ranks_per_node), processors)
        predicted = predict(workload, aggregator, shape, suited, processors.load)
        # Gradients of a bucket are copied out of it while the others are on their way, those of the last in the end.
        simulated = [bucket.nbytes for bucket in predicted.shared.buckets]
        last_us = profile.tail_us(workload) * simulated[-1] / sum(simulated)
        found.append(
            Configuration(
                model=subject.name,
                parameters=sum(parameter.numel() for parameter in training.ddp.parameters()),
                batch=subject.batch,
                strategy=training.strategy,
                measured_ms=1000 * median(training.step_s),
                predicted_ms=(predicted.shared.step_us + last_us) / 1000,
                apart_ms=(predicted.apart.step_us + last_us) / 1000,
                compute_ms=1000 * median(profile.step_s),
                exposed_ms=predicted.shared.exposed_us / 1000,
                communication_ms=predicted.shared.communication_us / 1000,
                lane_ms=training.lane_ms(),
                cpu_ms=1000 * median(training.cpu_s),
                compute_cpu_ms=1000 * median(profile.cpu_s),
                steps_ms=[1000 * step_s for step_s in training.step_s],
                buckets=[4 * bucket.numel for bucket in profile.buckets],
                simulated_buckets=simulated,
                notes=list(predicted.shared.notes),
            )
        )
    return found


def describe(shape: TeamShape, probed: Probed) -> Environment:
    """Say where the numbers are made, and on which curves the predictions rest."""
    named = {link_text(key): (curve, probed.processor.curves[key]) for key, curve in probed.time.curves.items()}
    named |= {work_text(key): (curve, probed.processor.work[key]) for key, curve in probed.time.work.items()}
    return Environment(
        **run_of("bench.evidence.prediction"),
        nodes=list(shape.ranks_per_node),
        sites=shlex.join(cluster_options()),
        probe_s=probed.spent_s,
        links={name: [*time.points[-1], busy.points[-1][1]] for name, (time, busy) in named.items()},
    )


if __name__ == "__main__":
    main()
