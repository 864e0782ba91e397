# SPDX-License-Identifier: Apache-2.0
"""How much of a step is exposed communication, and which strategies would win most: predicted from measured links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, isqrt, sqrt

import torch

from commopt.aggregate import Aggregator, Buffer, Call, LocalSGD
from commopt.aggregate.learning import LEARNED_LOCAL, steps_to_loss
from commopt.cost import Curve, Links, WorkKey
from commopt.doctor.verdict.facts import Gain, Training
from commopt.doctor.verdict.judge import tried_first
from commopt.doctor.verdict.measure import Found
from commopt.errors import CommoptError, ConfigurationError
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.hooks import build_preset
from commopt.probe.operations import TimedWork, known_compressors, work_of
from commopt.schedule.costs import LARGEST_FACTOR
from commopt.simulate import GPUS, GpuSpec, Model, Parameter, Stragglers, Workload, model, of_model, simulate_step
from commopt.simulate.cluster import gpu_work
from commopt.simulate.scaling import LOSSLESS, LOSSY
from commopt.simulate.step import USUAL_SPREAD, Buckets, SimulatedStep
from commopt.simulate.throughput import usual_batch

CANDIDATES = (*LOSSLESS, *LOSSY, "onebit_local")
SHOWN = 3
WORTH = 0.03
"""The share of a step that a strategy must save to be named."""
TOKENS = 1024
"""In a sample of a model of which only the number of parameters is known."""

_CPU_EFFICIENCY = 0.5  # of the measured rate of products; models do more than products
_GPU_EFFICIENCY = 0.4
_CPU_MEMORY_GB_PER_S = 10.0
_WIDEST = 8192
_HALVINGS = 10


@dataclass(frozen=True)
class Used:
    """What averaged a recorded step: its aggregator, and the names of the parameters in each of its buckets."""

    aggregator: Aggregator
    buckets: Buckets


def sized_model(numel: int) -> Model:
    """Return a model like a transformer of that many parameters: equal matrices, TOKENS tokens in a sample."""
    layers = min(max(12, ceil(numel / _WIDEST**2)), numel)
    side = max(isqrt(numel // layers), 1)
    rest = numel - layers * side**2
    shapes = [(side, side)] * layers + ([(rest,)] if rest else [])
    parameters = tuple(
        Parameter(f"layer{place}.weight", shape, 2.0 * TOKENS * side**2 if len(shape) == 2 else 0.0)
        for place, shape in enumerate(shapes)
    )
    return Model(f"{numel / 1e6:.3g}M parameters", parameters, f"sample of {TOKENS} tokens")


def workload_of(name: str | None, numel: int | None, batch: int | None, device: str, tflops: float) -> Workload:
    """Return a step of a model on this device, without communication.

    device: the name of the GPU, "" for a CPU. tflops: the slowest rank's measured products, for devices that no
    published figures are for.
    """
    subject = model(name) if name is not None else sized_model(numel or 1)
    samples = batch or (usual_batch(name) if name is not None else 8)
    known = next((spec for spec in GPUS.values() if spec.name in device.lower().replace(" ", "")), None)
    if known is not None and name is not None:
        precision = "bf16" if "bf16" in known.tflops else "fp16" if "fp16" in known.tflops else "fp32"
        return of_model(subject, known, samples, precision)
    efficiency = _GPU_EFFICIENCY if device else _CPU_EFFICIENCY
    memory = known.memory_gb_per_s if known is not None else 1000.0 if device else _CPU_MEMORY_GB_PER_S
    measured = GpuSpec(device or "this CPU", {"fp32": tflops}, memory)
    return of_model(subject, measured, samples, "fp32", efficiency)


def needed_work(shape: TeamShape) -> list[TimedWork]:
    """Return the local work of all candidates on this cluster."""
    layout = Layout.of_parameters([("matrix", (1024, 1024))])
    buffer = Buffer(layout, torch.float32, shape.default_device)
    needed: set[WorkKey] = set()
    for aggregator in _runnable(shape).values():
        parts = (aggregator.gradients, aggregator.parameters) if isinstance(aggregator, LocalSGD) else (aggregator,)
        actions = [step for part in parts for step in part.calls(buffer, shape)]
        needed |= {WorkKey(step.kind, step.what) for step in actions if not isinstance(step, Call)}
    return [task for task in work_of(known_compressors()) if task.key in needed]


def _runnable(shape: TeamShape) -> dict[str, Aggregator]:
    """Return the candidates that can run here; where each node has one rank, a level inside it changes nothing."""
    lone = max(shape.ranks_per_node) == 1
    found: dict[str, Aggregator] = {}
    for name in CANDIDATES:
        if lone and name.removeprefix("hierarchical_") in CANDIDATES and name.startswith("hierarchical_"):
            continue
        if name == "hierarchical" and lone:
            continue
        aggregator = build_preset(name)
        if isinstance(aggregator, LocalSGD) and shape.node_count == 1:
            continue
        try:
            aggregator.check(shape)
        except CommoptError:
            continue
        found[name] = aggregator
    return found


def predict(
    workload: Workload,
    shape: TeamShape,
    found: Found,
    device: str = "",
    recorded: Training | None = None,
    used: Used | None = None,
    most: int = SHOWN,
) -> Training:
    """Return a step with stock DDP and the strategies that reach a loss first, from what was measured.

    recorded: the step as it was recorded in a script; it then stands, and prices of messages are corrected by it.
    used: what averaged it, if not stock DDP; strategies are then compared with that.
    most: strategies.
    """
    if found.links is None:
        raise ConfigurationError("no collective was measured, so nothing can be predicted; run without Ctrl-C")
    runnable = _runnable(shape)
    used = used or Used(build_preset("flat"), "ddp")
    known = {**runnable, preset_of(used.aggregator): used.aggregator}
    links = _with_work(found, known, shape, device)
    spread = Stragglers(USUAL_SPREAD)

    def simulated(aggregator: Aggregator, buckets: Buckets, links: Links) -> SimulatedStep:
        return simulate_step(workload, aggregator, shape, links, buckets=buckets, stragglers=spread)

    if recorded is not None:
        links = calibrated(links, 1e3 * recorded.step_ms, lambda own: simulated(used.aggregator, used.buckets, own))
    base = simulated(used.aggregator, used.buckets, links)
    base_to_loss_us = base.step_us * _most_steps(learned(preset_of(used.aggregator), used.aggregator, shape))
    rows = []
    for name, aggregator in runnable.items():
        step_us = simulated(aggregator, used.buckets, links).step_us  # as `commopt run` has them, without a plan
        steps = learned(name, aggregator, shape)
        if aggregator != used.aggregator and step_us < (1 - WORTH) * base.step_us:
            rows.append((step_us * _most_steps(steps), step_us, name, steps))
    base_ms = base.step_us / 1e3 if recorded is None else recorded.step_ms
    gains = tuple(
        Gain(name, base_ms * step_us / base.step_us, runnable[name].lossless, steps)
        for to_loss_us, step_us, name, steps in sorted(rows, key=lambda row: row[0])
        if to_loss_us < (1 - WORTH) * base_to_loss_us
    )
    gains = shown(gains, most)
    if recorded is not None:
        return replace(recorded, gains=gains)
    exposed_ms, compute_ms = base.exposed_us / 1e3, base.compute_us / 1e3
    return Training(workload.name, False, base_ms, compute_ms, exposed_ms, gains=gains, note=workload.note)


def shown(gains: Sequence[Gain], most: int = SHOWN) -> tuple[Gain, ...]:
    """Return so many of the best strategies, among them the one to try first, which learns as exact averages do."""
    if len(gains) <= most:
        return tuple(gains)
    name = tried_first(gains)
    first = next(gain for gain in gains if gain.strategy == name)
    return tuple(gains[:most]) if first in gains[:most] else (*gains[: most - 1], first)


def calibrated(links: Links, step_us: float, simulated: Callable[[Links], SimulatedStep]) -> Links:
    """Return the links whose messages take as many times longer as makes the simulated step as long as the real one.

    What slows the messages of one strategy slows those of all; computing stays as it was.
    """

    def slower(times: float) -> Links:
        curves = {key: curve.scaled(times, times, curve.note) for key, curve in links.curves.items()}
        return replace(links, curves=curves)

    low, high = 1 / LARGEST_FACTOR, LARGEST_FACTOR
    for _ in range(_HALVINGS):
        middle = sqrt(low * high)
        low, high = (low, middle) if simulated(slower(middle)).step_us > step_us else (middle, high)
    return slower(sqrt(low * high))


def preset_of(aggregator: Aggregator) -> str:
    """Return the name of the candidate that an aggregator is, or else its repr."""
    return next((name for name in CANDIDATES if build_preset(name) == aggregator), repr(aggregator))


def assumed_work(shape: TeamShape) -> dict[WorkKey, Curve]:
    """Return the local work of all candidates at the rate of a usual CPU's memory, for where none was measured."""
    cpu = GpuSpec("this CPU", {}, _CPU_MEMORY_GB_PER_S)
    return gpu_work(cpu, list(_runnable(shape).values()), rows=max(shape.node_count, 2))


def _most_steps(steps: tuple[float | None, float | None]) -> float:
    return max([each for each in steps if each is not None], default=1.0)


def learned(name: str, aggregator: Aggregator, shape: TeamShape) -> tuple[float | None, float | None]:
    """Return the steps to a loss with SGD and with AdamW, over those of exact averages; None: nobody measured."""
    if aggregator.lossless:
        return 1.0, 1.0
    local = next((row for row in LEARNED_LOCAL.values() if row.preset == name), None)
    if local is not None:
        return local.sgd, local.adamw
    return steps_to_loss(aggregator, "sgd", shape), steps_to_loss(aggregator, "adamw", shape)


def _with_work(found: Found, runnable: dict[str, Aggregator], shape: TeamShape, device: str) -> Links:
    assert found.links is not None
    known = next((spec for spec in GPUS.values() if spec.name in device.lower().replace(" ", "")), None)
    estimated = {} if known is None else gpu_work(known, list(runnable.values()), rows=max(shape.node_count, 2))
    return replace(found.links, work={**estimated, **found.work})
