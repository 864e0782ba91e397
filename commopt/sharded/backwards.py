# SPDX-License-Identifier: Apache-2.0
"""A step for every backward of FSDP2: messages in an order that ranks compare, and what is committed at its end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commopt import lanes
from commopt.aggregate import Aggregator
from commopt.aggregate.base import call
from commopt.attached.checks import warn_of_unknown_scaler
from commopt.attached.layouts import Layouts
from commopt.attached.options import AttachOptions
from commopt.attached.registration import Registration
from commopt.errors import ConfigurationError, MismatchError, TransportError
from commopt.feedback import Layout, ResidualStore
from commopt.lanes import LaneClient
from commopt.recording import MessageRecorder
from commopt.sharded.layouts import numels_of
from commopt.sharded.seams import ParameterGroup, watch_backwards

_END = "the end of a backward"
_VERDICT_NBYTES = 4
_ALIKE = (
    "In one backward the same parameters must get gradients on all ranks that average them: let all of them take part "
    "in the loss, or call model.set_reduce_scatter_unused_params(True) (torch 2.13)"
)


@dataclass(eq=False)
class MessageOrder:
    """The order of the messages of a backward, which must be the same on all ranks of `client`.

    last: the last message of the current backward, None before the first.
    known: pairs of messages that followed each other on all ranks.
    """

    client: LaneClient
    last: Layout | None = None
    known: set[tuple[Layout | None, Layout | None]] = field(default_factory=set)

    @contextmanager
    def turn(self, layout: Layout, store: ResidualStore) -> Iterator[None]:
        """Compare the message of `layout` with the other ranks' before it is sent; for the lane.

        At its end look at its results, since FSDP may change or free them. A TransportError says why a rank may be
        missing.
        """
        try:
            self.follow(layout)
            yield
            store.transaction.check_results()
        except TransportError as error:
            raise TransportError(f"{error}\nIf a rank did not come here: {_ALIKE[0].lower()}{_ALIKE[1:]}") from error

    def follow(self, layout: Layout | None) -> None:
        """Compare, on the lane, which message (None: the end) follows which, the first time it does.

        FSDP sends nothing for a group without gradients. Were that so on some ranks only, they would wait for each
        other, or add up gradients of different layers. Raises MismatchError then.
        """
        if (self.last, layout) not in self.known:
            what = _END if layout is None else f"the gradients of {layout.title}"
            after = "" if self.last is None else f" after those of {self.last.title}"
            pieces = "" if layout is None else sha256(", ".join(map(str, layout.pieces)).encode()).hexdigest()
            try:
                self.client.membership.agree(what + after, parameters=pieces)
            except MismatchError as error:
                raise MismatchError(f"{error}. {_ALIKE}") from None
            self.known.add((self.last, layout))
        self.last = layout


def _sharding_of(group: ParameterGroup) -> str:
    """Return how a group is sharded, in words that are alike on all ranks."""
    ranks = [] if group.shards is None else sorted(dist.get_process_group_ranks(group.shards))
    steps = sorted({after - before for before, after in pairwise(ranks)})
    return f"{group.shard_count} shards, every {steps} ranks, {'no ' if group.replicas is None else ''}replicas"


@dataclass(frozen=True)
class Request:
    """A call of `attach`. options: `checked` ones. groups: those of `model` to reduce."""

    options: AttachOptions
    aggregator: Aggregator
    model: nn.Module
    groups: Sequence[ParameterGroup]


class Backwards(Registration):
    """The common part of FSDP2's registrations: reductions are numbered, and `end` ends every backward.

    `steps` are backwards in which anything was averaged. deferred: how many reductions backward did not wait for.
    """

    kind = "ShardedState"

    def __init__(self, asked: Request) -> None:
        self.groups = asked.groups
        self.weights = asked.options.weights
        self.deferred = 0
        self._model = asked.model
        self._layouts = Layouts(asked.model)
        numels: dict[str, int] = {}
        for group in self.groups:
            for part in group.parts:
                self._layouts.also_called(part.name, part.called(group.shard_rank, group.shard_count))
            numels |= numels_of(group.parts, group.shard_count)
        super().__init__(asked.options, asked.aggregator, self._layouts.parameters, numels)
        self.sharding = str(sorted({_sharding_of(group) for group in self.groups}))
        self.store.transaction.per_step &= bool(asked.aggregator.residual_paths)  # else there is nothing to commit
        self._drops_with: LaneClient | None = None  # ranks that drop a step together, and must tell each other
        self._number: int | None = None  # of the next reduction of the backward under way
        self._undo: list[Callable[[], None]] = []  # what makes the model FSDP's own again

    @property
    @abstractmethod
    def _orders(self) -> Collection[MessageOrder]:
        """The order of messages among the ranks that this one sends gradients to: one for each group of them."""

    def _watch(self) -> None:
        self._undo.append(watch_backwards(self._model, self.end, self.give_up))
        self._undo.append(self._model.register_forward_pre_hook(lambda *_: self._forward_begins()).remove)
        self._undo += [group.give_back for group in self.groups]

    def _forward_begins(self) -> None:
        self.recorder.forward_begins()
        if self.averages is None and torch.is_grad_enabled() and all(group.sends for group in self.groups):
            self.begin_weights()

    def leave_model(self) -> None:
        """Make the model FSDP's own again, which may be attached again."""
        undo, self._undo = self._undo, []
        for each in undo:
            each()

    def scale_by(self, scaler: Any) -> None:
        """Take note of another GradScaler. Raises ConfigurationError where there was none at attach, or is none now."""
        if self.keeps_residuals and (scaler is not None and scaler.is_enabled()) != self.store.transaction.per_step:
            raise ConfigurationError(
                "whether there is a GradScaler must be known when commopt.attach is called, since shards drop a step "
                "together; pass it there: commopt.attach(model, ..., scaler=scaler)"
            )
        super().scale_by(scaler)

    # ------------------------------------------------------------------------------------- every backward

    def _is_first(self, device: torch.device) -> bool:
        """Return whether a reduction, whose gradients are on `device`, is the first of a backward, which begins."""
        if self._number is not None:
            return False
        if self.divergence is not None and self.divergence.unread is not None:
            self.divergence.look()
        self.boundary.begin("a backward")
        self._number = 0
        self.device = self.device or device
        self.recorder.begin_step(self.steps, device)
        return True

    def _next(self, layout: Layout, nbytes: int) -> tuple[int, MessageRecorder | None]:
        """Return the number of a reduction, and where its times go if anybody asks for them."""
        assert self._number is not None
        number, recorded = self._number, None
        self._number += 1
        if self.recorder.enabled:
            self.recorder.bucket(number, layout.title, nbytes)
            recorded = self.recorder.message((number,), layout.title, nbytes)
        return number, recorded

    def end(self) -> None:
        """End a backward: wait for what was not waited for, and commit or drop what it leaves."""
        if self._number is None:
            lanes.require_healthy()
            return
        self._number = None
        self.recorder.compute_ends()
        if self.reduced_steps == 0 and self.scaler is None and self.keeps_residuals:
            warn_of_unknown_scaler()
        if self._drops_with is not None:
            team = self._drops_with.team
            self.sent.count_calls("verdict", lambda: call(team, "all_reduce", _VERDICT_NBYTES), team)
        # After all that backward has sent, on the same lane, so nothing else has to be waited for.
        self.client.run(self._commit, _END, self.device).wait()
        self._compare_replicas()
        self.end_weights()
        self.steps += 1
        self.reduced_steps += 1
        self.boundary.end()
        for log in self.logs:
            log()

    def _compare_replicas(self) -> None:
        """Compare replicas at the end of a backward, to which all ranks have come; the optimizer's step comes later."""
        if (divergence := self.divergence) is None:
            return
        assert self.device is not None
        divergence.repair(self.steps + 1)
        if (pending := divergence.compare(self.steps, self.device)) is not None:
            pending.wait()  # on CUDA the current stream does: the optimizer's step follows

    def _commit(self) -> None:
        for order in self._orders:
            if order.last is not None:
                order.follow(None)
        if self._drops_with is not None:
            fine = torch.ones(1, dtype=torch.bool, device=self.device)
            flags = [flag.reshape(1) for flag in self.store.transaction.check_results()]
            broken = (~torch.stack([fine, *flags]).all(0)).float()
            self._drops_with.team.all_reduce(broken)
            self.store.transaction.flags.append(broken[0] == 0)
        self.store.transaction.end_bucket((), last=True)

    def give_up(self) -> None:
        """Forget the backward under way, as FSDP does: what it has staged is dropped when the next begins."""
        self._number = None
        self.step_weights.end()
        self.client.run(self._forget, "the end of a backward that was given up", self.device).wait()
        self.boundary.end()

    def _forget(self) -> None:
        for order in self._orders:
            order.last = None
        self.store.transaction.begin_step()

    @property
    def title(self) -> str:
        """The name of the model's class, as the user gave it."""
        return type(self._model).__name__.removeprefix("FSDP")
