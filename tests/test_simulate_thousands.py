"""What training runs to plan its buckets, at 4,096 ranks of a process group that only pretends to have peers.

A HookState cannot be set up here: its ranks exchange names through the rendezvous store, and 4,095 of them are absent.
So DDP is real, the shape of the cluster is given, and from DDP's buckets to the decision it is what rank 0 runs.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the types themselves.

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.hooks import build_preset
from commopt.schedule import Costs, Plan, Unit, Window, simulate
from commopt.schedule.calibration import prices_from_links
from commopt.schedule.candidates import replaceable
from commopt.schedule.estimate import Estimate
from commopt.schedule.prices import Observed
from commopt.schedule.search import Search
from commopt.schedule.trials import Option
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


def units_of(layouts: tuple[Layout, ...]) -> list[Unit]:
    pieces = [piece for layout in layouts for piece in layout.pieces]
    return [
        Unit((each.name,), 4 * each.numel, 20_000.0 + 500 * place, "torch.float32") for place, each in enumerate(pieces)
    ]


def searched(name: str, layouts: tuple[Layout, ...]) -> tuple[Search, Window]:
    """Return a search, and what a run with DDP's buckets would have measured, had it taken what the costs say."""
    strategies = replaceable(build_preset(name), SHAPE)
    whole = Layout(tuple(piece for layout in layouts for piece in layout.pieces))
    links = Network(25, 200).links(SHAPE)
    costs = Costs(prices_from_links(strategies, whole, torch.float32, SHAPE, links), 100.0)
    units, first = units_of(layouts), next(iter(strategies))
    found = Plan(tuple(tuple(piece.name for piece in each.pieces) for each in layouts), first, "found")
    predicted = simulate(units, found.groups, first, costs)
    sent = [4 * each.numel for each in layouts]
    observed = tuple(Observed(nbytes, first, Estimate(costs.lane_us(nbytes, first))) for nbytes in sent)
    window = Window(
        found,
        tuple(units),
        (0.0,) * len(units),
        (predicted.finish_us,) * STEPS,
        (predicted.exposed_us,) * STEPS,
        observed,
    )
    return Search([Option(each, each) for each in strategies], costs), window


def test_ddp_makes_the_buckets_that_the_simulator_expects(
    ddp: DistributedDataParallel, layouts: tuple[Layout, ...]
) -> None:
    assert dist.get_world_size() == RANKS
    units = units_of(layouts)
    expected = [[unit.names[0] for unit in members] for members in ddp_buckets(units)]
    assert [[piece.name for piece in layout.pieces] for layout in layouts] == expected
    assert len(layouts) > 2


@pytest.mark.parametrize("name", NAMES)
def test_plans_are_made_for_4096_ranks(name: str, ddp: DistributedDataParallel, layouts: tuple[Layout, ...]) -> None:
    search, window = searched(name, layouts)
    decision = search.decide(window, Search.first.meet_at)
    assert decision.calendar.measure_from > Search.first.meet_at
    if decision.plan is None:
        assert "nothing else saves" in decision.reason
        return
    decision.plan.require_names(dict(ddp.module.named_parameters()))
    assert Plan.from_json(decision.plan.to_json()) == decision.plan
    assert decision.plan.predicted is not None
    assert decision.plan.predicted.finish_us < window.step.value


def test_some_plan_changes_something(layouts: tuple[Layout, ...]) -> None:
    """8 ms of latency for a message of all ranks: fewer buckets than DDP's pay."""
    search, window = searched("hierarchical_quantized", layouts)
    decision = search.decide(window, Search.first.meet_at)
    assert decision.plan is not None
    assert len(decision.plan.groups) < len(layouts)


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
