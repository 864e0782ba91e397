"""What the simulator says a step takes: from steps without communication, and links probed in the same world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

import torch
import torch.distributed as dist

import commopt
from bench.prediction.links import Probe
from bench.prediction.own_work import with_own_work
from bench.prediction.predict import predict
from bench.prediction.sharing import Processors
from bench.prediction.wanted import wanted
from bench.training.contenders import AUTO
from bench.training.run import Run
from commopt.bucketing.readiness import Readiness
from commopt.feedback import Layout
from commopt.groups import TeamShape, join
from commopt.plan import Unit
from commopt.simulate import Workload, ddp_buckets

_STEPS = 6
_US = 1e6


def workload_of(noop: Run, samples: int) -> Workload:
    """Take steps without communication and return when each gradient is ready in them, on the last rank; collective.

    Counted from the end of a reduction, as the simulator does: what follows the last gradient, the optimizer's step,
    comes first. Every step begins on all ranks at once, as reductions would make them.
    """
    parameters = dict(noop.training.ddp.module.named_parameters())
    readiness = Readiness(noop.training.device)
    readiness.start(parameters)
    begins_us, ends_us = [], []
    for number in range(_STEPS):
        dist.barrier()
        begins_us.append(perf_counter() * _US)
        noop.step()
        ends_us.append(perf_counter() * _US)
        readiness.end_step(number)
    times_us = readiness.times_us()
    readiness.stop()
    rows = []
    for number, (begin_us, end_us) in enumerate(zip(begins_us, ends_us, strict=True)):
        optimizer_us = end_us - max(times_us[number].values())
        rows.append([optimizer_us + times_us[number][name] - begin_us for name in parameters])
    ready_us = torch.tensor(rows, dtype=torch.float64)
    dist.all_reduce(ready_us, op=dist.ReduceOp.MAX)
    usual_us = dict(zip(parameters, ready_us.median(dim=0).values.tolist(), strict=True))
    units = [
        Unit((name,), parameters[name].nbytes, usual_us[name], str(parameters[name].dtype))
        for name in sorted(parameters, key=lambda name: usual_us[name])
    ]
    layout = Layout.of_parameters((unit.names[0], tuple(parameters[unit.names[0]].shape)) for unit in units)
    return Workload(noop.strategy, tuple(units), layout, samples)


def predicted_ms(
    strategies: Sequence[str], noop: Run, noop_ms: float, samples: int, probe_s: float
) -> Mapping[str, float]:
    """Return the predicted step of each preset with DDP's buckets; collective.

    Beyond a step without communication, `noop_ms`, it takes what the simulator adds to one. Nothing is said about
    hooks that are not commopt's, nor about what tunes itself, nor about a rank alone.
    """
    simulated = set(commopt.PRESETS) - {AUTO}
    aggregators = {name: commopt.build_preset(name) for name in strategies if name.partition(":")[0] in simulated}
    membership = join(None)
    shape = TeamShape.of(tuple(len(node) for node in membership.cluster.nodes))
    if shape.size == 1:
        return {}
    workload = workload_of(noop, samples)
    shapes = {piece.name: piece.shape for piece in workload.layout.pieces}
    buffers = [
        Layout.of_parameters((unit.names[0], shapes[unit.names[0]]) for unit in bucket)
        for bucket in ddp_buckets(workload.units)
    ]
    processors = Processors.of_this_machine(shape.size)
    probed = Probe(membership, wanted(aggregators.values(), buffers, shape), processors, probe_s).run()
    found = {}
    for name, aggregator in aggregators.items():
        suited = with_own_work(probed, aggregator, buffers, shape, processors)
        step_us = predict(workload, aggregator, shape, suited, processors.load).shared.step_us
        found[name] = noop_ms + (step_us - workload.compute_us) / 1000
    return found
