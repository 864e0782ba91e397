"""What training runs to plan its buckets, at 4,096 ranks of a process group that only pretends to have peers.

A HookState cannot be set up here: its ranks exchange names through the rendezvous store, and 4,095 of them are absent.
So DDP is real, the shape of the cluster is given, and from DDP's buckets to the decision it is what rank 0 runs.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the types themselves.

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from commopt.bucketing.prices import prices_from_links
from commopt.bucketing.strategies import strategies_for
from commopt.bucketing.units import Units
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.hooks import build_preset
from commopt.plan import Adaptation, Bucket, Costs, Estimate, Observed, Plan, Window
from commopt.simulate import Network, ddp_buckets

NODES, PER_NODE = 512, 8
RANKS = NODES * PER_NODE
SHAPE = TeamShape.of((PER_NODE,) * NODES)
STEPS = 10
NAMES = ["hierarchical", "hierarchical_quantized:bits=4", "hierarchical_powersgd", "powersgd", "hierarchical_dgc"]


@dataclass
class Seen:
    """The parameters of each bucket of one backward, in the order of their launch."""

    buckets: list[list[nn.Parameter]] = field(default_factory=list)


def look(state: Seen, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Take note of a bucket, and average it as if all ranks had the same."""
    state.buckets.append(list(bucket.parameters()))  # type: ignore[arg-type]
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.fixture(scope="module")
def ddp() -> Iterator[DistributedDataParallel]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    model = nn.Sequential(*(nn.Linear(640, 640) for _ in range(24)))
    yield DistributedDataParallel(model)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def layouts(ddp: DistributedDataParallel) -> tuple[Layout, ...]:
    """Return DDP's buckets as they are from the second step on."""
    seen = Seen()
    ddp.register_comm_hook(seen, look)
    for _ in range(3):
        seen.buckets.clear()
        ddp(torch.ones(2, 640)).sum().backward()
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    return tuple(
        Layout.of_parameters([(names[id(each)], tuple(each.shape)) for each in bucket]) for bucket in seen.buckets
    )


def window_of(units: Units, buckets: tuple[Bucket, ...], costs: Costs) -> Window:
    """Return what a run with these buckets would have measured, had it taken what the costs say."""
    timed = [replace(unit, ready_us=20_000.0 + 500 * place) for place, unit in enumerate(units.untimed())]
    lane_us = [costs.lane_us(each.nbytes, each.strategy, each.chunks, len(each.names)) for each in buckets]
    home = {unit.names[0]: unit for unit in timed}
    free_us = 0.0
    for bucket, time_us in zip(buckets, lane_us, strict=True):
        free_us = max(free_us, *(home[name].ready_us for name in bucket.names)) + time_us
    compute_us = timed[-1].ready_us
    observed = [
        Observed(bucket, Estimate(time), len(bucket.names)) for bucket, time in zip(buckets, lane_us, strict=True)
    ]
    return Window(
        tuple(timed),
        (0.0,) * len(timed),
        (max(free_us, compute_us),) * STEPS,
        (max(free_us - compute_us, 0.0),) * STEPS,
        tuple(observed),
    )


def test_ddp_makes_the_buckets_that_the_simulator_expects(
    ddp: DistributedDataParallel, layouts: tuple[Layout, ...]
) -> None:
    assert dist.get_world_size() == RANKS
    units = Units.of(layouts, dict(ddp.module.named_parameters()), single=True).untimed()
    expected = [[unit.names[0] for unit in members] for members in ddp_buckets(units)]
    assert [[piece.name for piece in layout.pieces] for layout in layouts] == expected
    assert len(layouts) > 2


@pytest.mark.parametrize("name", NAMES)
def test_plans_are_made_for_4096_ranks(name: str, ddp: DistributedDataParallel, layouts: tuple[Layout, ...]) -> None:
    parameters = dict(ddp.module.named_parameters())
    units = Units.of(layouts, parameters, single=True)
    strategies = strategies_for(build_preset(name), SHAPE)
    whole = Layout(tuple(piece for layout in layouts for piece in layout.pieces))
    costs = Costs(prices_from_links(strategies, whole, units.dtype, SHAPE, Network(25, 200).links(SHAPE)), 100.0)
    first = next(iter(strategies))
    found = tuple(Bucket(tuple(p.name for p in each.pieces), 4 * each.numel, first) for each in layouts)
    window = window_of(units, found, costs)
    decision = Adaptation(costs).decide(window, Adaptation.first.meet_at)
    assert decision.calendar.measure_from > Adaptation.first.meet_at
    if decision.plan is None:
        assert "gains too little" in decision.reason
        return
    decision.plan.require_names(parameters)
    assert Plan.from_json(decision.plan.to_json()) == decision.plan
    assert decision.plan.predicted is not None
    assert decision.plan.predicted.finish_us < window.step.value
    assert decision.plan.digest() == Plan.from_json(decision.plan.to_json()).digest()


def test_some_plan_changes_something(ddp: DistributedDataParallel, layouts: tuple[Layout, ...]) -> None:
    """8 ms of latency for a message of all ranks: fewer buckets than DDP's pay."""
    units = Units.of(layouts, dict(ddp.module.named_parameters()), single=True)
    strategies = strategies_for(build_preset("hierarchical_quantized"), SHAPE)
    whole = Layout(tuple(piece for layout in layouts for piece in layout.pieces))
    costs = Costs(prices_from_links(strategies, whole, units.dtype, SHAPE, Network(25, 200).links(SHAPE)), 100.0)
    first = next(iter(strategies))
    found = tuple(Bucket(tuple(p.name for p in each.pieces), 4 * each.numel, first) for each in layouts)
    decision = Adaptation(costs).decide(window_of(units, found, costs), Adaptation.first.meet_at)
    assert decision.plan is not None
    assert len(decision.plan.buckets) < len(found)


@pytest.mark.parametrize("name", ["flat", *NAMES])
def test_first_and_last_node_know_what_they_send(name: str, layouts: tuple[Layout, ...]) -> None:
    aggregator = build_preset(name)
    sent = []
    for rank in (0, PER_NODE - 1, RANKS - PER_NODE, RANKS - 1):
        shape = SHAPE.seen_from(rank)
        assert aggregator.calls(layouts[0], torch.float32, shape)
        sent.append(aggregator.wire_bytes(layouts[0], torch.float32, shape))
    everything = 4 * layouts[0].numel
    assert all(each.inter + each.intra > 0 for each in sent)
    if name == "flat":  # only the last rank of a node has its neighbour on another one
        assert [each.inter > 0 for each in sent] == [False, True, False, True]
        assert sent[1].inter == pytest.approx(2 * (RANKS - 1) / RANKS * everything, rel=1e-3)
