# SPDX-License-Identifier: Apache-2.0
"""What survivors of a failure take into their new world: residuals, averages, factors and counts, from memory.

A residual stays with the rank that has it: it is in units of the average, so the sum stays and nothing is sent.
Averages (Adam's moments, outer momentum) and factors are exchanged, as other ranks may need them now.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.attached.checkpoint import digest, tell_of_learning_rate
from commopt.attached.registration import Registration
from commopt.errors import ConfigurationError
from commopt.feedback import EXP_AVG, EXP_AVG_SQ, Layout, Piece, ResidualStore, is_average, restore_shared, save_shared
from commopt.groups import Team
from commopt.groups.agreement import Facts, require_equal
from commopt.groups.team import gather_bytes

_log = logging.getLogger("commopt")

_NAMES_SHOWN = 3
_UNKNOWN = "unknown, as replicas were never compared (check_every)"


@dataclass(frozen=True)
class Survivors:
    """What the survivors know of each other; alike on all of them.

    first: the place in the new team of the first rank of its process group, whose parameters DDP's constructor gave to
        all: training goes on where it was.
    steps: of each survivor, by its rank in the old world; those whose averages had all arrived.
    optimizer_steps: those of a LocalSGD, of the first.
    plans_alike: whether all followed the same plan.
    lost: ranks of the old world that are not here.
    norms: of the residuals of each rank of the old world, when replicas were last compared; empty if they never were.
    norms_after: the steps before that.
    """

    first: int
    steps: Mapping[int, int]
    optimizer_steps: int
    plans_alike: bool
    lost: tuple[int, ...]
    norms: Sequence[float]
    norms_after: int

    @property
    def step(self) -> int:
        """The steps after which training goes on."""
        return list(self.steps.values())[self.first]

    @property
    def apart(self) -> bool:
        """Whether some had finished a step that others had not."""
        return len(set(self.steps.values())) > 1


def meet(before: Registration, now: Registration) -> Survivors:
    """Let the survivors find out who is left; collective over the ranks of `now`.

    Raises, on every rank, ConfigurationError when `before` of any rank does not fit `now`, MismatchError when ranks
    come from different worlds.
    """
    problem: Exception | None = None
    try:
        _require_fit(before, now)
    except ConfigurationError as error:
        problem = error
    old, new, check = before.everyone, now.everyone, before.divergence
    averages = before.averages
    facts: Facts = {
        "old world": old.name,
        "rank there": old.global_rank,
        "steps": before.arrived_steps,
        "optimizer steps": 0 if averages is None else averages.optimizer_steps.count,
        "plan": digest(before.planned()[1]),
        "norms": [] if check is None else [norm if isfinite(norm) else None for norm in check.residual_norms],
        "norms after": -1 if check is None else check.checked_after,
    }
    answers = now.client.agree("rebuild", problem, **facts).wait()
    require_equal(new.ranks, answers, ["old world"])
    group = new.parent()
    assert group is not None  # they have just met in it
    first = new.ranks.index(dist.get_process_group_ranks(group)[0])
    steps = {answer["rank there"]: answer["steps"] for answer in answers}
    latest = max(answers, key=lambda answer: int(answer["norms after"]))
    return Survivors(
        first,
        steps,
        answers[first]["optimizer steps"],
        len({answer["plan"] for answer in answers}) == 1,
        tuple(sorted(set(old.ranks) - steps.keys())),
        [float("nan") if norm is None else norm for norm in latest["norms"]],
        latest["norms after"],
    )


def _require_fit(before: Registration, now: Registration) -> None:
    """Raise ConfigurationError unless this rank can go on in `now` with what it has of `before`."""
    if type(before) is not type(now):
        raise ConfigurationError(
            f"the state is a {before.kind} of another kind of model than the new one; wrap or shard the model as before"
        )
    if before.everyone.parent() is now.everyone.parent():
        raise ConfigurationError(
            f"the model is in the process group of before, of ranks {before.everyone.ranks}; make one of the "
            f"survivors, wrap or shard the model in it, and pass that"
        )
    now.require_same_parameters(before.numels)
    owned = [[layout for _, layout in each.shares()] for each in (before, now)]
    if before.sharding != now.sharding or owned[0] != owned[1]:
        raise ConfigurationError(
            f"this rank held {before.sharding or 'all of the model'} and now holds {now.sharding or 'all of it'}, or "
            f"another shard: what it keeps belongs to the shard it had; give each rank the shard that it had, in whole "
            f"replicas, or go on from a checkpoint (gathered_state_dict)"
        )


def take_over(before: Registration, now: Registration, survivors: Survivors) -> None:
    """Let `now` go on where the survivors of `before` are; collective over its ranks. Says what is lost."""
    old, store = before.store, ResidualStore(per_step=now.store.transaction.per_step)
    with old.lock:
        for residual in old.residuals():
            if not is_average(residual.path):
                store.add(residual.path, residual.layout, residual.values.float())
    numels = {**now.numels, **before.numels}  # a new DDP model may show fewer parameters, where some are frozen
    names, lost = set[str](), list[str]()
    for client, owned in now.shares():
        exchange = _SurvivorExchange(client.team, owned, numels, old, store)
        client.run(exchange, "averages and factors of the survivors").wait()
        names |= exchange.names
        lost += exchange.lost
    now.resume(store, survivors.step, (), numels, before.planned()[0] if survivors.plans_alike else None)
    if now.averages is not None:
        now.averages.optimizer_steps.resume(survivors.optimizer_steps)
    if now.everyone.team.rank == survivors.first:
        _tell(before, survivors, sorted(names), lost)
        old_size, size = before.everyone.team.size, now.everyone.team.size
        tell_of_learning_rate(old_size, size, "the world before")


@dataclass(eq=False)
class _SurvivorExchange:
    """Fills `store` with what ranks of `team`, which hold the same elements, `owned`, keep alike; runs on the lane.

    old: what this rank had.
    names: parameters of which any rank has a residual.
    lost: averages of which no rank has all elements, in words.
    """

    team: Team
    owned: Layout
    numels: Mapping[str, int]
    old: ResidualStore
    store: ResidualStore
    names: set[str] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)

    def __call__(self) -> None:
        """Exchange factors, counts and averages."""
        averages, buffer = self._averages(), BytesIO()
        kept = {name for each in self.old.residuals() if not is_average(each.path) for name in each.layout.names}
        mine = {"averages": list(averages), "kept": list(kept), **save_shared(self.old)}
        torch.save(mine, buffer)
        parts = [
            torch.load(BytesIO(part), map_location="cpu", weights_only=True)
            for part in gather_bytes(self.team, buffer.getvalue())
        ]
        restore_shared(self.store, parts, self.numels)
        self.names = {name for part in parts for name in part["kept"]}
        known = {tuple(key) for part in parts for key in part["averages"]}
        # A parameter whose moments are lost has a count all the same.
        counted = self.store.counts.named
        moments = {path for path, _ in known if path.endswith((EXP_AVG, EXP_AVG_SQ))}
        known |= {(path, piece.name) for path in moments for piece in self.owned.pieces if counted.get(piece.name)}
        pieces = {piece.name: piece for piece in self.owned.pieces}
        for path, name in sorted(known):
            if name in pieces:
                self._average(path, pieces[name], averages.get((path, name), []))

    def _averages(self) -> dict[tuple[str, str], list[tuple[Piece, Tensor]]]:
        """Return the pieces of this rank's averages, by path and name."""
        found: dict[tuple[str, str], list[tuple[Piece, Tensor]]] = {}
        for each in self.old.residuals():
            if is_average(each.path):
                for offset, piece in zip(each.layout.offsets, each.layout.pieces, strict=True):
                    values = each.values[offset : offset + piece.numel]
                    found.setdefault((each.path, piece.name), []).append((piece, values))
        return found

    def _average(self, path: str, owned: Piece, held: Sequence[tuple[Piece, Tensor]]) -> None:
        """Store the mean, of one parameter, over the ranks that have it, as of a checkpoint of another world."""
        # Of equal values the mean is exact in float64.
        both = torch.zeros(2 * owned.numel, dtype=torch.float64, device=self.team.default_device)
        total, holders = both.chunk(2)
        for piece, values in held:
            place = slice(piece.begin - owned.begin, piece.end - owned.begin)
            total[place] += values.to(both.device)
            holders[place] += 1
        self.team.all_reduce(both)
        mean, missing = total / holders.clamp(min=1), holders == 0
        gone = int(missing.sum())
        if gone:
            self.lost.append(f"{path.rpartition('.')[2]} of {gone} elements of {owned.name}")
        if gone == owned.numel:
            self.store.counts.named[owned.name] = 0  # its moments begin anew, bias correction and all
        elif gone and path.endswith(EXP_AVG_SQ):
            mean[missing] = mean[~missing].mean()  # to divide by the root of zero would make a step of any length
        if gone < owned.numel:
            self.store.add(path, Layout((owned,)), mean.float())


def _tell(before: Registration, survivors: Survivors, names: Sequence[str], lost: Sequence[str]) -> None:
    """Say who is gone, and what with them."""
    membership, gone = before.everyone, survivors.lost
    node_of = dict(zip(membership.ranks, membership.team.wire.nodes, strict=True))
    without = ", ".join(f"rank {rank} (node {node_of[rank]})" for rank in gone) or "losing a rank"
    norms = dict(zip(membership.ranks, survivors.norms, strict=False))
    known = ", ".join(f"{norms[rank]:.3g} (rank {rank})" for rank in gone if rank in norms)
    shown = ", ".join(map(repr, names[:_NAMES_SHOWN])) + (", ..." if len(names) > _NAMES_SHOWN else "")
    if not (gone and names):
        what = "nothing is lost" if not gone else "no residuals were kept, so nothing is lost"
    else:
        when = f"{known} after {survivors.norms_after} steps, when last compared" if known else _UNKNOWN
        what = (
            f"lost is what was not sent there yet, and nothing else: residuals of up to {len(names)} parameters "
            f"({shown}), of norm {when}"
        )
    if lost:
        more = f" and {len(lost) - _NAMES_SHOWN} more" if len(lost) > _NAMES_SHOWN else ""
        what += f". No survivor had {', '.join(lost[:_NAMES_SHOWN])}{more}: these averages begin anew"
    left = f"{len(survivors.steps)} of {membership.team.size} ranks go on after step {survivors.step}"
    _log.warning("%s, without %s; %s", left, without, what)
