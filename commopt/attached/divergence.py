# SPDX-License-Identifier: Apache-2.0
"""`DivergenceCheck`: every N steps ranks compare checksums of what replicas should hold alike, and act on it.

What makes replicas differ changes no collective, so neither DDP nor FSDP notices: a flipped bit, parameters that are
written or trained on some ranks only. A check sends 16 bytes a rank: a checksum of the parameters; half of one of the
buffers, and the norm of the residuals. The result is read when the next backward begins, on all ranks alike.
"""

from __future__ import annotations

import json
import logging
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from commopt.aggregate import Aggregator, LocalSGD
from commopt.aggregate.base import call
from commopt.attached.checksum import as_bytes, checksum, local
from commopt.attached.options import AttachOptions
from commopt.attached.rank_table import RankTable
from commopt.attached.reduction import SentBytes
from commopt.errors import ConfigurationError, MismatchError
from commopt.feedback import ResidualStore, is_average
from commopt.groups import Team
from commopt.groups.team import gather_bytes
from commopt.lanes import LaneClient, Pending
from commopt.schedule.reducer import is_capturing

if TYPE_CHECKING:
    from commopt.attached.registration import Registration

_log = logging.getLogger("commopt")

_WORDS = 2  # int64, for each set of replicas that a rank is in
_LOW = 2**32 - 1
_NAMES_SHOWN = 3
_RANKS_SHOWN = 8

Named = Mapping[str, Tensor]
Ranks = tuple[int, ...]  # global ones


def alike_in(team: Team, aggregator: Aggregator | None) -> Team | None:
    """Return the part of `team` whose ranks should hold the same as this one: with a LocalSGD its node, or nobody."""
    return team.intra if isinstance(aggregator, LocalSGD) else team


@dataclass(frozen=True, eq=False)
class Replicas:
    """This rank and the others of `team`, which should hold the same.

    client: this rank among them, and perhaps others.
    parameters, buffers: return that, by name, in one order on all ranks.
    """

    client: LaneClient
    team: Team
    parameters: Callable[[], Named]
    buffers: Callable[[], Named] = dict


@dataclass(frozen=True)
class Split:
    """Replicas that differ. groups: ranks by what they hold, the largest first, of two as large that of the lowest.

    members: all that should hold the same, also those that take no part.
    """

    groups: tuple[Ranks, ...]
    members: Ranks

    @classmethod
    def of(cls, checksums: Mapping[int, int]) -> Split | None:
        """Return how ranks with these checksums are split, None where they are alike. 0: a rank takes no part."""
        holders: dict[int, list[int]] = {}
        for rank, value in sorted(checksums.items()):
            if value:
                holders.setdefault(value, []).append(rank)
        groups = sorted(map(tuple, holders.values()), key=lambda ranks: (-len(ranks), ranks[0]))
        return cls(tuple(groups), tuple(sorted(checksums))) if len(groups) > 1 else None

    @property
    def deviating(self) -> Ranks:
        """The ranks outside the first group."""
        return tuple(sorted(rank for group in self.groups[1:] for rank in group))

    def in_words(self, what: str) -> str:
        """Return who holds other `what` than whom."""
        most, other = self.groups[:2]
        if len(most) > len(other):
            return f"{_listed(self.deviating)} holds other {what} than {_listed(most)}"
        return (
            f"{' and '.join(map(_listed, self.groups[:3]))} hold different {what}, and no group of them is the largest"
        )


@dataclass(eq=False)
class DivergenceCheck:
    """Compares replicas every `every` steps of one model; `compare`, `look` and `repair` are called on all ranks alike.

    action: what to do about parameters that differ: "warn", "raise" or "resync". Of buffers it warns.
    everyone: all ranks of the model.
    keys: of the sets of ranks that should hold the same, for each rank those that it is in.
    replicas: those sets of this rank, in the same order, but for those that nobody else is in.
    store: returns the residuals.
    sent: counts the payload.
    """

    every: int
    action: str
    everyone: LaneClient
    keys: Sequence[Sequence[int]]
    replicas: Sequence[Replicas]
    store: Callable[[], ResidualStore]
    sent: SentBytes
    checks: int = 0
    equal_after: int | None = None  # steps, of the last check that found replicas equal
    checked_after: int = -1  # steps, of the last check
    residual_norms: list[float] = field(default_factory=list)
    # After how many steps, and what was found, until `look`.
    unread: tuple[int, RankTable] | None = field(default=None, init=False)
    _told: dict[str, list[Split]] = field(default_factory=dict, init=False)
    _repairs: list[Split] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        sets: dict[int, dict[int, int]] = {}
        for rank, keys in zip(self.everyone.team.ranks, self.keys, strict=True):
            for number, key in enumerate(keys):
                sets.setdefault(key, {})[rank] = number
        self._sets = [each for each in sets.values() if len(each) > 1]  # by rank, which of its own it is
        self._width = _WORDS * max(map(len, self.keys))

    @classmethod
    def of(
        cls, registration: Registration, everyone: LaneClient, keys: Sequence[Sequence[int]], own: Sequence[Replicas]
    ) -> DivergenceCheck | None:
        """Return the check that the options of a registration ask for; None where nothing is to be compared.

        Raises ConfigurationError, on all ranks, where `on_divergence` was given all the same.
        """
        options, found = registration.options, ref(registration)

        def store() -> ResidualStore:
            alive = found()
            assert alive is not None  # which has this check
            return alive.store

        if options.check_every == 0 or everyone.team.size == 1:
            return None
        found_keys = Counter(key for each in keys for key in each)
        if max(found_keys.values(), default=0) < 2:
            if options.on_divergence != AttachOptions.on_divergence:
                raise ConfigurationError(
                    f"attach(on_divergence={options.on_divergence!r}) has nothing to compare: no two ranks should hold "
                    f"the same parameters between rounds of {registration.aggregator_name}, which is so inside a node "
                    f"only; leave on_divergence out"
                )
            return None
        sent = registration.sent
        return cls(options.check_every, options.on_divergence, everyone, keys, own, store, sent)

    def forget(self) -> None:
        """Forget what was found: other parameters are loaded."""
        self.unread, self.equal_after, self._told, self._repairs = None, None, {}, []

    def stats(self) -> dict[str, Any]:
        """Return how often replicas were compared, after how many steps they were equal last, and ranks' residuals."""
        found = {"replica_checks": self.checks, "replicas_equal_after": self.equal_after}
        return {**found, "residual_norms": self.residual_norms} if self.checks else {}

    # ------------------------------------------------------------------------------------- comparing

    def compare(self, steps: int, device: torch.device, *, takes_part: bool = True) -> Pending | None:
        """Let the lane compare what ranks hold now, after `steps` steps, if it is time.

        takes_part: False on a rank whose parameters are behind, as one without data in DDP's join(). On CUDA nobody
        waits; parameters must not change before the returned task, or a later one of the lane, has ended.
        """
        if not steps or steps % self.every or self._repairs or is_capturing():
            return None
        team = self.everyone.team
        held = [(replicas.parameters(), replicas.buffers()) for replicas in self.replicas]
        width = self._width
        check = RankTable(torch.zeros(team.size, width, dtype=torch.int64, device=device))

        def run() -> None:
            mine = check.table.new_zeros(width)
            if takes_part and held:
                words = [word for each in held for word in self._words(*each, device)]
                mine[: len(words)] = torch.cat(words)
            check.gather(team, mine)

        read = [local(each) for named in held for tensors in named for each in tensors.values()]
        on_device = [each for each in read if each.device == device]
        self.sent.count_calls(("checksums", width), lambda: call(team, "all_gather", width * 8), team)
        title = f"checksums of the replicas after {steps} steps"
        check.pending = self.everyone.submit(title, run, check.table, on_device)
        self.unread = steps, check
        return check.pending

    def _words(self, parameters: Named, buffers: Named, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the 16 bytes of what this rank holds: a checksum; half of another, and a float32."""
        of_buffers = checksum(map(local, buffers.values()), device)
        norm = _norm(self.store(), device).view(torch.int32).to(torch.int64) & _LOW
        folded = (of_buffers ^ (of_buffers >> 32)) & _LOW
        return checksum(map(local, parameters.values()), device), (folded << 32) | norm

    # ------------------------------------------------------------------------------------- looking at the result

    def look(self) -> None:
        """Act on the `unread` check; when the next backward begins. Raises MismatchError, on all ranks, if it is to."""
        found, self.unread = self.unread, None
        assert found is not None
        steps, check = found
        rows, team = check.rows(), self.everyone.team
        place = {rank: number for number, rank in enumerate(team.ranks)}
        self.checks += 1
        self.checked_after = steps
        self.residual_norms = [_norm_in(row[1]) for row in rows]
        self._look_at_residuals(steps)
        parameters, buffers = list[Split](), list[Split]()
        for numbers in self._sets:
            words = {rank: rows[place[rank]][_WORDS * number :] for rank, number in numbers.items()}
            of_buffers = {rank: each[0] and (each[1] >> 32) & _LOW | 1 << 32 for rank, each in words.items()}
            parameters += filter(None, [Split.of({rank: each[0] for rank, each in words.items()})])
            buffers += filter(None, [Split.of(of_buffers)])
        self._tell_of_buffers(buffers, steps)
        if parameters:
            self._act(parameters, steps)
        else:
            self.equal_after = steps
            self._told.pop("parameters", None)

    def _act(self, splits: list[Split], steps: int) -> None:
        """Raise, warn or prepare `repair` for replicas that differ."""
        known = self._told.get("parameters") == splits
        if known and self.action == "warn":
            return
        self._told["parameters"] = splits
        names, repairable = self._names_of_what_differs(splits, "parameters")
        found = "; ".join(split.in_words("parameters") for split in splits[:_NAMES_SHOWN])
        since = f"it began between step {self.equal_after} and step {steps}"
        since = "no check before found them equal" if self.equal_after is None else since
        text = (
            f"replicas differ after {steps} steps: {found}{names}; {since}. The gradients of different models "
            f"are averaged since then. Perhaps a bit has flipped in memory, or the script writes or trains parameters "
            f"on some ranks only (noise, requires_grad, another checkpoint)"
        )
        if self.action == "raise" or (self.action == "resync" and not repairable):
            cure = ", or pass on_divergence='resync'" if repairable else "; their shapes differ too"
            raise MismatchError(f"{text}; go on from a checkpoint that is older{cure}")
        if self.action == "resync":
            self._repairs = splits
            text += (
                "; at the end of this backward the ranks that deviate get the parameters and buffers of the largest "
                "group, where two are as large of the lowest rank. The state of optimizers stays as it is on each rank"
            )
        self._warn(text, splits)

    def _tell_of_buffers(self, splits: list[Split], steps: int) -> None:
        """Warn of buffers that differ, once: ranks may have them so by design."""
        if splits and "buffers" not in self._told:
            self._told["buffers"] = splits
            names, _ = self._names_of_what_differs(splits, "buffers")
            found = "; ".join(split.in_words("buffers") for split in splits[:_NAMES_SHOWN])
            self._warn(
                f"buffers differ after {steps} steps, and nobody makes them equal: {found}{names}. Ranks that evaluate "
                f"or save the model do not get the same. Statistics of BatchNorm differ as batches do: use "
                f"SyncBatchNorm, or DDP's broadcast_buffers=True; what should differ, DDP can be told to ignore",
                splits,
            )

    def _look_at_residuals(self, steps: int) -> None:
        broken = [
            rank for rank, norm in zip(self.everyone.team.ranks, self.residual_norms, strict=True) if not isfinite(norm)
        ]
        if broken and "residuals" not in self._told:
            self._told["residuals"] = []
            self._warn(
                f"residuals of {_listed(tuple(broken))} are not finite after {steps} steps, and no gradient makes them "
                f"so: its memory is damaged; go on from an older checkpoint",
                [],
                broken,
            )

    def _warn(self, text: str, splits: Iterable[Split], ranks: Iterable[int] = ()) -> None:
        """Warn on the first rank, and on those that deviate."""
        concerned = {*ranks, *(rank for split in splits for rank in split.deviating)}
        if self.everyone.team.rank == 0 or self.everyone.membership.global_rank in concerned:
            _log.warning("%s", text)

    def _names_of_what_differs(self, splits: Sequence[Split], kind: str) -> tuple[str, bool]:
        """Return the names of what differs among this rank's replicas, for messages, and whether shapes are alike.

        Collective over each set of replicas that is split; the host waits.
        """
        names, total, alike = dict[str, None](), 0, True
        for replicas, _ in self._own(splits):
            tensors = replicas.parameters() if kind == "parameters" else replicas.buffers()
            parts: list[bytes] = []
            task = partial(_gather_checksums, parts, replicas.team, tensors)
            replicas.client.run(task, f"checksums of each of the {kind}").wait()
            of_ranks = [json.loads(part) for part in parts]
            first = of_ranks[0]
            alike &= all([(name, each[1:]) for name, each in row.items()] == _shapes(first) for row in of_ranks)
            every_name = dict.fromkeys(name for row in of_ranks for name in row)
            names.update(dict.fromkeys(n for n in every_name if any(row.get(n) != first.get(n) for row in of_ranks)))
            total += len(every_name)
        if not names:
            return "", alike
        shown = ", ".join(map(repr, list(names)[:_NAMES_SHOWN]))
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return f", in {shown}{more} (of {total})", alike

    def _own(self, splits: Sequence[Split]) -> list[tuple[Replicas, Split]]:
        """Return the replicas of this rank that are split."""
        by_members = {split.members: split for split in splits}
        found = ((each, by_members.get(tuple(sorted(each.team.ranks)))) for each in self.replicas)
        return [(each, split) for each, split in found if split is not None]

    # ------------------------------------------------------------------------------------- repairing

    def repair(self, steps: int) -> None:
        """Give ranks that deviate what the others hold; at the end of a backward, before which `steps` were complete.

        The optimizer's step then begins on all ranks with the same parameters.
        """
        if not self._repairs:
            return
        splits, self._repairs = self._repairs, []
        self.equal_after = steps
        for replicas, split in self._own(splits):
            tensors = [*replicas.parameters().values(), *replicas.buffers().values()]
            source = replicas.team.ranks.index(split.groups[0][0])
            deviates = self.everyone.membership.global_rank in split.deviating
            team, nbytes = replicas.team, [local(each).nbytes for each in tensors]
            calls = partial(_broadcasts, team, nbytes, source)
            self.sent.count_calls(("resync", id(team), source), calls, team)
            task = partial(copy_from, tensors, team, source, deviates=deviates)
            replicas.client.run(task, f"parameters of rank {team.ranks[source]} for those that differ").wait()


def _broadcasts(team: Team, nbytes: Sequence[int], source: int) -> list[Any]:
    return [each for length in nbytes if length for each in call(team, "broadcast", length, source)]


def copy_from(tensors: Sequence[Tensor], team: Team, source: int, *, deviates: bool) -> None:
    """Set `tensors` to those of a rank of `team` where they deviate, one after the other."""
    for tensor in map(local, tensors):
        values = as_bytes(tensor).clone()
        if not len(values):
            continue
        team.broadcast(values, source)
        if deviates:  # by way of .data: what a forward has saved for its backward is not used any more
            target, held = tensor.data, values.view(tensor.dtype).view(tensor.shape)
            for dim, stride in enumerate(target.stride()):
                if stride == 0:  # expanded: its elements are one, which is written once
                    target, held = target.narrow(dim, 0, 1), held.narrow(dim, 0, 1)
            target.copy_(held)


def _gather_checksums(parts: list[bytes], team: Team, tensors: Named) -> None:
    """Append to `parts` every rank's checksums of its tensors, with their shapes and dtypes, by name."""
    own = {
        name: (int(checksum([local(each)], each.device)), list(each.shape), str(each.dtype))
        for name, each in tensors.items()
    }
    parts += gather_bytes(team, json.dumps(own).encode())


def _shapes(row: Mapping[str, Sequence[Any]]) -> list[tuple[str, Any]]:
    return [(name, each[1:]) for name, each in row.items()]


def _norm(store: ResidualStore, device: torch.device) -> Tensor:
    """Return the norm of this rank's residuals, float32 [1]. No host sync."""
    values = [each.values for each in store.residuals() if not is_average(each.path) and each.values.numel()]
    norms = [torch.linalg.vector_norm(each, dtype=torch.float32).to(device) for each in values]
    return torch.stack(norms).norm().reshape(1) if norms else torch.zeros(1, dtype=torch.float32, device=device)


def _norm_in(word: int) -> float:
    """Return the float32 in the low half of a word."""
    found: float = struct.unpack("<f", struct.pack("<I", word & _LOW))[0]
    return found


def _listed(ranks: Ranks) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    more = f" and {len(ranks) - _RANKS_SHOWN} more" if len(ranks) > _RANKS_SHOWN else ""
    return f"rank {shown}{more}"
