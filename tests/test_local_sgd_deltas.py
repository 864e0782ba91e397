# SPDX-License-Identifier: Apache-2.0
"""LocalSGD with an outer optimizer, compression, fragments and delay: against DiLoCo in plain torch."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import BufferContext, ConfigurationError, Flat, Hierarchical, LocalSGD, OneBit, Outer, PowerSGD, Quantize
from commopt.compress import Compressor, Encoding
from commopt.feedback.parameter_buckets import fragments_of
from commopt.groups import Team
from tests.hook_training import Tower, batch_of, digest_of, loss_of, seeded
from tests.plan_changes import heard
from tests.ranks import run
from tests.test_wire_bytes import counting

NESTEROV = Outer(lr=0.7, momentum=0.9, nesterov=True)
STEPS = 10


def attached(average: LocalSGD, **options: Any) -> tuple[Tower, TorchDDP, commopt.HookState, torch.optim.Optimizer]:
    module = seeded(Tower)
    assert isinstance(module, Tower)
    ddp = TorchDDP(module)
    return module, ddp, commopt.attach(ddp, average, **options), optimizer_of(module)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.003)


def train(
    ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Sequence[int], scaler: Any = None
) -> None:
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for step in steps:
        optimizer.zero_grad()
        scaler.scale(loss_of(ddp, batch_of(rank, step))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


# ------------------------------------------------------------------------------------------ the equations


class Reference:
    """Every node's replica in one process, and all of them agreeing now and then: the equations as they stand."""

    def __init__(self, average: LocalSGD, nodes: Sequence[int]) -> None:
        ranks = iter(range(sum(nodes)))
        self._average = average
        self._ranks = [[next(ranks) for _ in range(count)] for count in nodes]
        self.replicas = [seeded(Tower) for _ in nodes]
        self._optimizers = [optimizer_of(replica) for replica in self.replicas]
        self._theta = nn.ParameterList(each.detach().clone() for each in self.replicas[0].parameters())
        self._errors = [[torch.zeros_like(each) for each in self._theta] for _ in nodes]
        outer = average.outer
        self._outer = torch.optim.SGD(self._theta, outer.lr, outer.momentum, nesterov=outer.nesterov)
        self._late: list[tuple[int, list[list[Tensor]]]] = []

    def train(self, steps: int) -> None:
        for step in range(steps):
            self._see_to_rounds(step)
            for replica, optimizer, ranks in zip(self.replicas, self._optimizers, self._ranks, strict=True):
                optimizer.zero_grad()
                for rank in ranks:
                    (loss_of(replica, batch_of(rank, step)) / len(ranks)).backward()
                nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
                optimizer.step()

    @torch.no_grad()
    def _see_to_rounds(self, steps: int) -> None:
        average, world = self._average, sum(map(len, self._ranks))
        if steps and steps % average.period == 0:
            taken = [[each.clone() for each in replica.parameters()] for replica in self.replicas]
            for theta in self._theta:
                theta.grad = torch.zeros_like(theta)
            for node, (values, ranks) in enumerate(zip(taken, self._ranks, strict=True)):
                deltas = [(theta - each) * len(ranks) / world for theta, each in zip(self._theta, values, strict=True)]
                sent = [average.decay * e + d for e, d in zip(self._errors[node], deltas, strict=True)]
                decoded = decode(average.compressor, sent) if isinstance(average.compressor, Compressor) else sent
                self._errors[node] = [a - b for a, b in zip(sent, decoded, strict=True)]
                for theta, each in zip(self._theta, decoded, strict=True):
                    assert theta.grad is not None
                    theta.grad.add_(each)
            self._outer.step()
            learned = [[new - old for new, old in zip(self._theta, values, strict=True)] for values in taken]
            self._late.append((steps + average.delay, learned))
        if self._late and self._late[0][0] == steps:
            for replica, changes in zip(self.replicas, self._late.pop(0)[1], strict=True):
                for parameter, change in zip(replica.parameters(), changes, strict=True):
                    parameter.add_(change, alpha=average.merge)


def decode(compressor: Compressor, tensors: list[Tensor]) -> list[Tensor]:
    """Return what one message of tensors comes out as: those that compressing would not shorten travel exactly."""
    decoded = [each.clone() for each in tensors]
    chosen = [each for each in decoded if compressor.should_compress(tuple(each.shape))]
    flat = torch.cat([each.reshape(-1) for each in chosen])
    chunk = -(-flat.numel() // compressor.granularity) * compressor.granularity
    payload = torch.zeros(1, compressor.payload_nbytes(chunk), dtype=torch.uint8)
    compressor.compress(flat, payload, Encoding(chunk))
    compressor.decompress(payload, flat, chunk)
    for each, values in zip(chosen, flat.split([each.numel() for each in chosen]), strict=True):
        each.copy_(values.view_as(each))
    return decoded


def beside_reference(rank: int, world_size: int, average: LocalSGD, nodes: Sequence[int]) -> tuple[float, str]:
    module, ddp, _, optimizer = attached(average)
    reference = Reference(average, nodes)
    train(ddp, optimizer, rank, range(STEPS))
    reference.train(STEPS)
    node = next(index for index, ranks in enumerate(reference._ranks) if rank in ranks)
    pairs = list(zip(module.parameters(), reference.replicas[node].parameters(), strict=True))
    start = list(seeded(Tower).parameters())
    off = max(float((got - expected).abs().max()) for got, expected in pairs)
    moved = max(float((got - before).abs().max()) for (got, _), before in zip(pairs, start, strict=True))
    assert moved > 0.01
    return off, digest_of(module)


@pytest.mark.parametrize(
    ("average", "nodes"),
    [
        (LocalSGD(period=3, outer=NESTEROV), (2, 1)),
        (LocalSGD(period=3, outer=Outer(0.8, 0.9)), (2, 2)),
        (LocalSGD(period=3, outer=NESTEROV, delay=2, merge=0.5), (2, 1)),
        (LocalSGD(period=4, delay=1, merge=0.75), (1, 1)),
        (LocalSGD(period=3, compressor=OneBit(), decay=0.9), (1, 1)),
        (LocalSGD(period=4, compressor=Quantize(bits=8), outer=NESTEROV, delay=1), (1, 1)),
        (LocalSGD(period=1), (2, 1)),
        (LocalSGD(period=1), (2, 2)),
    ],
    ids=str,
)
def test_it_is_diloco(average: LocalSGD, nodes: Sequence[int]) -> None:
    for off, _ in run(beside_reference, sum(nodes), average, nodes, nodes=nodes):
        assert off < 3e-4


def shares_of(rank: int, world_size: int) -> list[float | None]:
    """Return what part of all ranks' gradients, as it is told, this rank takes across."""
    seen: list[float | None] = []

    @dataclass(frozen=True, repr=False)
    class Noting(Flat):
        def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
            seen.append(context.share)
            super().all_reduce(buffer, team, scale, context)

    commopt.all_reduce(torch.ones(5), aggregator=Hierarchical(Noting()))
    return seen


def test_a_node_answers_for_as_many_ranks_as_it_has() -> None:
    assert run(shares_of, 3, nodes=(2, 1)) == [[pytest.approx(2 / 3)], [], [pytest.approx(1 / 3)]]


def beside_gradients(rank: int, world_size: int) -> float:
    """Return how far apart low-rank factors of deltas of one step of SGD and those of gradients lead."""
    trained = []
    for average in (
        LocalSGD(1, compressor=PowerSGD(2, start_step=3)),
        Hierarchical(PowerSGD(2)),
    ):  # rounds are from 1 on
        module = seeded(Tower)
        ddp = TorchDDP(module)
        commopt.attach(ddp, average)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(ddp, batch_of(rank, step)).backward()
            optimizer.step()
        ddp(*batch_of(rank, STEPS))  # the last round
        trained.append(list(module.parameters()))
    return max(float((one - other).abs().max()) for one, other in zip(*trained, strict=True))


@pytest.mark.parametrize("nodes", [(1, 1), (2, 2)], ids=["1+1", "2x2"])
def test_deltas_travel_as_low_rank_factors(nodes: Sequence[int]) -> None:
    for off in run(beside_gradients, sum(nodes), nodes=nodes):
        assert off < 5e-4  # factors are rounded to bfloat16, of deltas as of gradients


# -------------------------------------------------------------------------------------- beside training


EVERYTHING = LocalSGD(
    period=4, start_step=1, outer=Outer(0.9, 0.5), compressor=OneBit(), decay=0.9, fragments=3, delay=2
)


def resume(
    rank: int, world_size: int, average: LocalSGD, stop_after: int, looks: bool = False, model_last: bool = False
) -> tuple[str, str]:
    """looks: whether there is another forward before the state is taken, in which a round may come and end."""
    module, ddp, state, optimizer = attached(average)
    train(ddp, optimizer, rank, range(stop_after))
    if looks:
        loss_of(ddp, batch_of(rank, STEPS))
    saved = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "comm": state.state_dict()}
    torch.save(saved, file := io.BytesIO())
    train(ddp, optimizer, rank, range(stop_after, STEPS))
    resumed, ddp, state, optimizer = attached(average)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    loads: list[tuple[str, Any]] = [("model", resumed), ("comm", state)]
    for name, into in reversed(loads) if model_last else loads:
        into.load_state_dict(saved[name])
    optimizer.load_state_dict(saved["optimizer"])
    train(ddp, optimizer, rank, range(stop_after, STEPS))
    return digest_of(module), digest_of(resumed)


@pytest.mark.parametrize(("stop_after", "nodes"), [(5, (2, 1)), (7, (2, 2)), (6, (1, 1))], ids=["2+1", "2x2", "1+1"])
def test_resuming_in_the_middle_of_a_period_changes_no_bit(stop_after: int, nodes: Sequence[int]) -> None:
    for model_last in (False, True):
        for went_on, resumed in run(resume, sum(nodes), EVERYTHING, stop_after, False, model_last, nodes=nodes):
            assert went_on == resumed


def load_others(rank: int, world_size: int, average: LocalSGD, what: str) -> tuple[str, str, int]:
    """Load others while a round is under way; return digests of these and of what is there then, and its rounds."""
    module, ddp, state, optimizer = attached(average)
    train(ddp, optimizer, rank, range(average.start_step + average.period + 1))
    assert state.state_dict()["rounds"]["underway"]
    part = module.layers[0] if what == "a part" else ddp
    part.load_state_dict({name: torch.full_like(value, 0.125) for name, value in part.state_dict().items()})
    loaded, left = digest_of(module), state.state_dict()["rounds"]["underway"]
    if what == "average":
        state.average_parameters()
    optimizer.param_groups[0]["lr"] = 0.0
    train(ddp, optimizer, rank, range(average.delay + 1))
    return loaded, digest_of(module), len(left)


@pytest.mark.parametrize("what", ["all of it", "average", "a part"])
def test_a_round_under_way_does_not_change_what_the_model_has_loaded_since(what: str) -> None:
    for average in (LocalSGD(period=4, outer=NESTEROV, delay=2), LocalSGD(period=5, delay=3, compressor=OneBit())):
        for loaded, there, left in run(load_others, 2, average, what, nodes=(1, 1)):
            assert there == loaded
            assert left == 0


def load_and_go_back(rank: int, world_size: int) -> list[str]:
    """As for a test with averaged weights; return digests of a run without one and of one with."""
    digests = []
    for looks in (False, True):
        module, ddp, _, optimizer = attached(EVERYTHING)
        for step in range(STEPS):
            train(ddp, optimizer, rank, [step])
            if looks:
                own = {name: value.clone() for name, value in module.state_dict().items()}
                module.load_state_dict({name: torch.zeros_like(value) for name, value in own.items()})
                module.load_state_dict(own)
        digests.append(digest_of(module))
    return digests


def test_a_round_under_way_arrives_where_the_model_has_gone_back_to_its_own() -> None:
    for without, looked in run(load_and_go_back, 2, nodes=(1, 1)):
        assert without == looked


@pytest.mark.parametrize("stop_after", [4, 5, 6])
def test_a_round_before_the_state_was_taken_does_not_come_again(stop_after: int) -> None:
    for average in (EVERYTHING, LocalSGD(period=4, outer=NESTEROV)):
        for went_on, resumed in run(resume, 2, average, stop_after, True, nodes=(1, 1)):
            assert went_on == resumed


def begin_apart(rank: int, world_size: int, average: LocalSGD) -> tuple[list[str], list[str]]:
    """Return digests of the parameters as the rounds begin and after each, and the warnings."""
    torch.manual_seed(rank)
    ddp = TorchDDP(Tower(), init_sync=False)
    with heard() as messages:
        commopt.attach(ddp, average)
        optimizer, digests = torch.optim.SGD(ddp.parameters(), 0.001), []
        for step in range(5):
            optimizer.zero_grad()
            loss = loss_of(ddp, batch_of(rank, step))
            digests.append(digest_of(ddp.module))
            loss.backward()
            optimizer.step()
    return digests, [message for _, message in messages if "as the rounds" in message]


@pytest.mark.parametrize("average", [LocalSGD(2, outer=NESTEROV), LocalSGD(2, compressor=OneBit())], ids=str)
def test_nodes_that_begin_apart_agree_all_the_same_and_are_told_of(average: LocalSGD) -> None:
    one, other = run(begin_apart, 2, average, nodes=(1, 1))
    assert [a == b for a, b in zip(one[0], other[0], strict=True)] == [True, False, True, False, True]
    assert one[1] == other[1]
    assert len(one[1]) == 1
    assert "rank 1 holds other parameters than rank 0" in one[1][0]


def test_resuming_changes_no_bit_of_low_rank_factors() -> None:
    for went_on, resumed in run(resume, 4, replace(EVERYTHING, compressor=PowerSGD(2, start_step=1)), 7, nodes=(2, 2)):
        assert went_on == resumed


def offloaded(rank: int, world_size: int, average: LocalSGD, scaled: bool) -> list[tuple[str, dict[str, int]]]:
    """Return digests of the model, and the memory that is kept, with and without `offload`."""
    found = []
    for offload in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
        module, ddp, state, optimizer = attached(replace(average, offload=offload), scaler=scaler)
        train(ddp, optimizer, rank, range(STEPS), scaler)
        found.append((digest_of(module), state.stats()["memory"]))
        state.close()
    return found


@pytest.mark.parametrize("nodes", [(2, 1), (2, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("average", [EVERYTHING, LocalSGD(period=3, outer=NESTEROV, merge=0.5)], ids=str)
def test_offloading_changes_no_bit(average: LocalSGD, scaled: bool, nodes: Sequence[int]) -> None:
    ranks = run(offloaded, sum(nodes), average, scaled, nodes=nodes)
    for (plain, kept), (moved, left) in ranks:
        assert plain == moved
        assert left["residuals"] == left["averages"] == 0
        assert left["offloaded"] <= kept["residuals"] + kept["averages"]  # no memory for steps that are dropped
        assert left["scratch"] >= kept["scratch"]
    assert max(left["offloaded"] for _, (_, left) in ranks) > 0


def test_resuming_changes_no_bit_of_what_is_offloaded() -> None:
    for went_on, resumed in run(resume, 4, replace(EVERYTHING, offload=True), 7, nodes=(2, 2)):
        assert went_on == resumed


def carry_on(rank: int, world_size: int) -> tuple[str, str, dict[str, float], tuple[int, int], dict[str, Any]]:
    """Return digests before and after an average between rounds, and what this rank has kept and sent."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with counting() as sent:
        module, ddp, state, optimizer = attached(EVERYTHING, scaler=scaler)
        train(ddp, optimizer, rank, range(7), scaler)
        apart = digest_of(module)
        state.average_parameters()
        stats = state.stats()
        between_nodes = (stats["inter_bytes"], sum(each.inter for each in sent))
    together = digest_of(module)
    part = state.state_dict()
    kept = {role: sum(float(v.double().sum()) for v in values.values()) for role, values in part["residuals"].items()}
    gathered = state.gathered_state_dict()
    damaged = {**part, "rounds": {"anchored": True, "underway": {"nobody": torch.ones(3)}}}
    with pytest.raises(ConfigurationError, match="'nobody'"):
        state.load_state_dict(damaged)
    train(ddp, optimizer, rank, range(7, STEPS), scaler)
    state.average_parameters()
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    return apart, together, kept, between_nodes, {"comm": gathered, "model": module.state_dict()}


def in_another_world(rank: int, world_size: int, saved: dict[str, Any]) -> tuple[float, list[str]]:
    """Load what more ranks saved; return the sum of the residuals, and digests of the model after the next rounds."""
    module, ddp, state, optimizer = attached(EVERYTHING)
    module.load_state_dict(saved["model"])
    state.load_state_dict(saved["comm"])
    owed = sum(float(v.sum()) for v in state.state_dict()["residuals"]["inter/worker"].values())
    train(ddp, optimizer, rank, range(5))
    assert state.stats()["parameter_averages"] > 0
    state.average_parameters()
    return owed, [digest_of(module)]


def test_between_rounds_it_averages_saves_and_moves_to_another_world() -> None:
    results = run(carry_on, 3, nodes=(2, 1))
    assert len({apart for apart, *_ in results}) == 2  # nodes
    assert len({together for _, together, *_ in results}) == 1
    roles = {"inter/worker", "inter.anchor/worker", "inter.momentum_buffer/worker"}
    assert [set(kept) for _, _, kept, *_ in results] == [roles, set(), roles]  # once per node
    assert sum(promised for *_, (promised, _), _ in results) == sum(counted for *_, (_, counted), _ in results) > 0
    saved = results[0][-1]
    owed = sum(kept.get("inter/worker", 0.0) for _, _, kept, *_ in results)
    moved = run(in_another_world, 2, saved, nodes=(1, 1))
    assert sum(each for each, _ in moved) == pytest.approx(owed, rel=1e-4, abs=1e-6)
    assert moved[0][1] == moved[1][1]


# ------------------------------------------------------------------------------------------- fragments


def test_fragments_are_of_about_as_many_bytes_and_have_rounds_of_their_own() -> None:
    tensors = {str(index): torch.zeros(numel) for index, numel in enumerate([100, 1, 1, 30, 30, 40, 100])}
    fragments = fragments_of(tensors, 3)
    assert fragments == [["0", "1"], ["2", "3", "4", "5"], ["6"]]
    assert [len(each) for each in fragments_of(tensors, 7)] == [1] * 7
    with pytest.raises(ConfigurationError, match=r"fragments=8\) is more"):
        fragments_of(tensors, 8)
    names = ["embedding", "norm0.weight", "h.0.mlp.0.weight", "h.0.mlp.1.weight", "h.1.mlp.0.weight", "h.1.b", "head"]
    model = {name: torch.zeros(10) for name in names}
    assert fragments_of(model, 3) == [names[:2], names[2:4], names[4:]]  # blocks stay whole
    assert [len(each) for each in fragments_of(model, 6)] == [1, 1, 2, 1, 1, 1]  # more than there are blocks
    average = LocalSGD(period=4, start_step=1, fragments=3)
    assert [average.due(steps) for steps in range(10)] == [(), (), (1,), (2,), (), (0,), (1,), (2,), (), (0,)]
    assert [average.round_after(steps) for steps in (2, 3, 5, 6, 9)] == [1, 1, 1, 2, 2]
