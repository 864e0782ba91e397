# SPDX-License-Identifier: Apache-2.0
"""`ParameterAverages`, the rounds of a LocalSGD: parameters leave before a forward, and come back before one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.aggregate import Aggregator, LocalSGD
from commopt.attached.checksum import comparable
from commopt.attached.optimizer_steps import OptimizerSteps
from commopt.attached.reduction import Reduction, SentBytes, Step
from commopt.attached.rounds import Flight, Rounds, Underway, digest_of, factor_of_node, part_from, weights_from
from commopt.attached.snapshot import Copy, StepBoundary
from commopt.errors import ConfigurationError
from commopt.feedback import Layout, Piece, ResidualStore
from commopt.feedback.checkpoint import field, refuse, required, whole
from commopt.feedback.parameter_buckets import Named, ParameterBucket, fragments_of, parameter_buckets
from commopt.lanes import Agreement, LaneClient
from commopt.schedule import reducer

_log = logging.getLogger("commopt")


class ParameterAverages:
    """The parameters of one model that a LocalSGD averages.

    A forward of `module` with gradients first takes the turn that is due. An evaluation under no_grad() does not: one
    rank may evaluate alone. All ranks compare, before anything is sent, which round this is.

    read: returns the parameters whose gradients are averaged, or this rank's part of them, under constant names.
    parameters: those that optimizers step.
    scaler: returns the GradScaler, None for none.
    boundary: is told while parameters come and go.
    pieces: describes the parameters that are not whole.
    store: keeps residuals, and the parameters that nodes have agreed on.
    client: this rank among those that have the same parts, None before it has joined them.
    before_write: called before the parameters get other values.
    nodes_agree: returns whether all ranks of a node hold the same; in DDP's join() they may not.
    sent: counts the payload.
    times: how often the parameters were averaged.
    """

    def __init__(
        self,
        average: LocalSGD,
        module: nn.Module | None,
        read: Callable[[], Named],
        store: ResidualStore,
        parameters: Named,
        scaler: Callable[[], Any],
        boundary: StepBoundary,
        pieces: Mapping[str, Piece] | None = None,
        before_write: Callable[[], None] = lambda: None,
        nodes_agree: Callable[[], bool] = lambda: True,
    ) -> None:
        self.sent = SentBytes()
        self.times = 0
        self.client: LaneClient | None = None
        found = ref(self)  # so that it ends with its model, and the hook on that with it

        def nodes() -> dict[int, int]:
            alive = found()
            return {} if alive is None else alive._nodes()

        self.optimizer_steps = OptimizerSteps(parameters, scaler, nodes, str(average))
        self._average = average
        self._boundary = boundary
        self._module = None if module is None else ref(module)
        self._read = read
        self._pieces = pieces or {}
        # Chosen once: what is frozen later has become different on the nodes all the same.
        self._fragments = fragments_of(read(), average.fragments)
        self._store = store
        self._anchored = not average.parameters.residual_paths
        self._underway: Underway = {}
        self._layouts: dict[Layout, Layout] = {}
        self._turn = -1  # the steps before the last one
        self._before_write = before_write
        self._nodes_agree = nodes_agree
        self._weights: list[float] | None = None  # of this node since each fragment's round; None: nobody gives any
        self._averaged_at: int | None = 0  # the backwards after which all nodes have been given the same
        self._first_round: Agreement | None = None
        self._looked = False  # whether nodes were seen to learn by themselves
        self._left_as: str | None = None  # the digest of the parameters that a state was taken of, until it is compared
        self._digest_before_load: str | None = None  # of the parameters that a round is under way for
        if not self._anchored:
            _require_float32_holds(average, read())
        if module is not None:  # before FSDP's own, which gathers the parameters
            hooks = ExitStack()
            turn = _TurnBeforeForward(self, ParameterAverages.take_turn)
            note = _Hook(self, ParameterAverages.before_load)
            hooks.callback(module.register_forward_pre_hook(turn, prepend=True).remove)
            for part in module.modules():  # each may be loaded by itself
                hooks.callback(part.register_load_state_dict_pre_hook(note).remove)
            self._forget_module = finalize(self, hooks.close)
            self._forget_module.atexit = False

    @property
    def steps(self) -> int:
        """How many optimizer steps are complete, with those before the checkpoint it goes on from."""
        return self.optimizer_steps.count

    @property
    def apart(self) -> bool:
        """Whether nodes may hold different parameters: they have learned since all were given the same."""
        alone = self.client is None or self.client.team.node_count == 1
        # Not the steps: one that a node has dropped is counted there in the next forward.
        return not alone and self._averaged_at != self.optimizer_steps.backwards

    def close(self) -> None:
        """Take no turn any more."""
        self.optimizer_steps.close()
        if self._module is not None:
            self._forget_module()

    def _nodes(self) -> dict[int, int]:
        team = None if self.client is None else self.client.team
        return {} if team is None else dict(zip(team.ranks, team.wire.nodes, strict=True))

    def take_turn(self) -> None:
        """Do what is due and not done; all ranks must ask before the next step.

        Returns when the parameters are there (on CUDA: for the current stream). Raises ConfigurationError when the
        model is not known, or a CUDA graph is captured that would repeat what is not due, and MismatchError, before
        anything is sent, when ranks are not all at the same round.
        """
        self.optimizer_steps.update()
        average, steps, client = self._average, self.steps, self.client
        if self._module is None:
            raise ConfigurationError(
                f"{average} averages parameters and does not know the model; use commopt.attach(ddp, ...), or "
                f"HookState(aggregator, module=ddp.module)"
            )
        if client is None:
            return
        if self._left_as is not None and client.team.node_count > 1:
            self._compare_with_state(client)
        self._drop_if_replaced()
        if self._turn == steps:
            return
        begins = not self._anchored and steps >= average.start_step
        leave, land = average.due(steps), average.due(steps - average.delay)
        if not (begins or leave or land):
            return
        if reducer.is_capturing():
            average.check_capture(steps, client.team)
        self._turn = steps
        if client.team.node_count == 1:
            return
        with self._boundary.inside("a round of the parameters"):
            self._exchange(client, leave, land, begins=begins)

    def _exchange(self, client: LaneClient, leave: Sequence[int], land: Sequence[int], *, begins: bool) -> None:
        """Let fragments leave and land. begins: whether these are the first."""
        average, steps = self._average, self.steps
        if begins or leave:
            self._averaged_at = None
            number = average.round_after(steps)
            call = f"round {number} of the parameters, after {steps} optimizer steps, {self._numel_in_words()}"
            weights = None if self._weights is None else [self._weights[each] for each in leave]
            agreement = self._agree_on(client, call, weights, begins=begins)
            if begins:
                self._begin_alike(client, agreement)
                self._drop_anchor(client, agreement)
            for place, fragment in enumerate(leave):
                weight = None if weights is None else partial(factor_of_node, client, agreement, place)
                self._underway[fragment] = [
                    self._send(client, bucket, by, number, agreement, weight=weight)
                    for bucket, by in self._buckets(fragment)
                ]
                if self._weights is not None:
                    self._weights[fragment] = 0.0
        for fragment in land:
            self._land(fragment)

    def add_weight(self, weight: float) -> None:
        """Take note of what the gradients of this node counted for in a step."""
        before = [0.0] * self._average.fragments if self._weights is None else self._weights
        self._weights = [each + weight for each in before]

    def run(self, client: LaneClient, call: str) -> None:
        """Take the exact mean now, whatever is due and without changing it; collective. Returns as `take_turn` does.

        call: its name, and when it is made. Raises MismatchError when not all ranks have made it.
        """
        if client.team.node_count == 1:
            return
        agreement = client.agree(f"{call}, {self._numel_in_words()}")
        agreement.wait()
        with self._boundary.inside(call):
            self._drop_if_replaced()
            for fragment in list(self._underway):
                self._land(fragment)
            self._take_mean(client, agreement)
        self.times += 1
        self._averaged_at = self.optimizer_steps.backwards

    def _take_mean(self, client: LaneClient, agreement: Agreement) -> None:
        """Give all ranks the exact mean of what they hold."""
        flights = [
            self._send(client, bucket, self._average.exact, 0, agreement, adds=False)
            for bucket in parameter_buckets({**self._read(), **self._buffers()}, self._pieces)
        ]
        self._before_write()
        for flight in flights:
            flight.bucket.put(flight.end())

    def _numel_in_words(self) -> str:
        """Return what travels, for the name of a call: messages of ranks with other parameters would not fit."""
        named = {**self._read(), **self._buffers()}
        return f"{sum(each.numel() for each in named.values())} elements of {len(named)} tensors"

    # ------------------------------------------------------------------------------------- looking at others

    def _agree_on(self, client: LaneClient, call: str, weights: list[float] | None, *, begins: bool) -> Agreement:
        """Let all ranks find out whether they are at the same round, and the weights of its fragments.

        As rounds begin, and in the first one, also what they hold.
        """
        if self._looked and not begins:
            return client.agree(call, weights=weights)
        agreement = client.agree(call, parameters=digest_of(self._read()), weights=weights)
        if not begins:
            self._looked, self._first_round = True, agreement
        return agreement

    def _begin_alike(self, client: LaneClient, agreement: Agreement) -> None:
        """Let all ranks go on from their mean, and warn, when they do not hold the same as the rounds begin.

        What nodes agree on would else be different on each, and deltas to it would never bring them together.
        """
        held = [answer["parameters"] for answer in agreement.wait()]
        others = [rank for rank, each in zip(client.team.ranks, held, strict=True) if each != held[0]]
        if others:
            if client.team.rank == 0 or client.membership.global_rank in others:
                _log.warning(
                    "rank %s holds other parameters than rank %d as the rounds of %s begin, so all go on from the mean "
                    "over the ranks; seed all ranks alike, or load the same checkpoint on each",
                    ", ".join(map(str, others)),
                    client.team.ranks[0],
                    self._average,
                )
            self._take_mean(client, agreement)

    def _look_at_first_round(self) -> None:
        """Warn when nodes hold the same though they were to learn by themselves."""
        if self._first_round is None:
            return
        held = {answer["parameters"] for answer in self._first_round.wait()}
        self._first_round = None
        if len(held) == 1:
            _log.warning(
                "all nodes hold the same parameters after %d steps of their own with %s: either all train with the "
                "same batches, or something sends parameters between nodes (an optimizer, a wrapper of one); what "
                "nodes learn by themselves is lost then",
                self.steps,
                self._average,
            )

    def _compare_with_state(self, client: LaneClient) -> None:
        """Warn when some ranks go on with other parameters than those that their state was taken of."""
        left_as, self._left_as = self._left_as, None
        same = left_as in ("", digest_of(self._read()))
        answers = client.agree("the first step after load_state_dict", same=same).wait()
        others = [rank for rank, answer in zip(client.team.ranks, answers, strict=True) if not answer["same"]]
        if others:
            _log.warning(
                "rank %s goes on with other parameters than those that its state was taken of, so what its node had "
                "learned since the last round is lost: let every rank save and load its own model, or call "
                "average_parameters() on every rank before the model and the state are saved",
                ", ".join(map(str, others)),
            )

    # ------------------------------------------------------------------------------------- rounds

    def _drop_anchor(self, client: LaneClient, agreement: Agreement) -> None:
        """Keep the parameters, which are those of all nodes now, as agreed on."""
        average, alone, by = self._average, client.team.intra, self._average.parameters
        flights = []
        for fragment in range(average.fragments):
            for bucket in parameter_buckets(self._tensors(fragment), self._pieces):
                flight = Flight(bucket, bucket.values(copy=True), adds=False, agreement=agreement)
                # The sum over a node is to be what one rank holds, exactly.
                silent = alone is not None and alone.rank > 0
                flights.append(self._submit(client, flight, by, 0, 1.0, silent=silent))
        for flight in flights:
            flight.end()
        self._anchored = True

    def _send(
        self,
        client: LaneClient,
        bucket: ParameterBucket,
        by: Aggregator,
        number: int,
        agreement: Agreement,
        adds: bool | None = None,
        weight: Callable[[], float] | None = None,
    ) -> Flight:
        average = self._average
        if adds is None:
            adds = average.delay > 0 or average.merge < 1
        # A copy even of a parameter that travels alone: where the round fails, the model is as it was.
        flight = Flight(bucket, bucket.values(copy=True), adds, agreement)
        alone, ranks = client.team.intra, client.team.size
        if by.residual_paths and alone is not None and self._nodes_agree():
            # From one rank: a sum of equals may be rounded, and the delta of what nobody has changed is to be zero.
            return self._submit(client, flight, by, number, alone.size / ranks, weight, silent=alone.rank > 0)
        return self._submit(client, flight, by, number, 1.0 / ranks, weight)

    def _submit(
        self,
        client: LaneClient,
        flight: Flight,
        by: Aggregator,
        number: int,
        scale: float,
        weight: Callable[[], float] | None = None,
        *,
        silent: bool = False,
    ) -> Flight:
        """Queue the message of a flight, of round `number` of its bucket. silent: this rank adds zeros to it."""
        values, agreement = flight.values, flight.agreement
        assert agreement is not None  # nothing is sent without one
        layout = flight.bucket.layout
        layout = self._layouts.setdefault(layout, layout)  # one object for all rounds
        base = values.clone() if flight.adds else None
        if silent:
            values.zero_()
        step = Step(number, self._store if by.residual_paths else None, weight=weight)
        title = "average of the parameters"
        reduction = Reduction(values, layout, step, by, client.team, title=title, scale=scale, base=base)
        flight.pending = reduction.submit(client, self.sent, agreement)
        return flight

    def _land(self, fragment: int) -> None:
        """Wait for a round, and let the model have what came of it."""
        flights = self._underway.pop(fragment, ())
        if flights:
            self._look_at_first_round()
            self._before_write()
        for flight in flights:
            values = flight.end()
            if flight.adds:
                flight.bucket.add(values, self._average.merge)
            else:
                flight.bucket.put(values)
        self.times += bool(flights)

    def before_load(self) -> None:
        """Take note that the model is about to load parameters, while a round of those it has is under way.

        Not between load_state_dict and the first turn: there the round is the checkpoint's, as the parameters will be.
        """
        if self._underway and self._digest_before_load is None and self._left_as is None:
            self._digest_before_load = digest_of(self._read())

    def _replaced(self) -> bool:
        """Return whether the model has loaded others than it had; it may have gone back to these, as after a test."""
        return self._digest_before_load is not None and self._digest_before_load != digest_of(self._read())

    def _drop_if_replaced(self) -> None:
        """Drop what is under way if it would change parameters that are gone.

        Nodes have agreed on it all the same: their next deltas are to that.
        """
        if self._replaced():
            for flight in [flight for flights in self._underway.values() for flight in flights]:
                flight.end()  # its memory is in use until then
            self._underway.clear()
        self._digest_before_load = None

    def _buckets(self, fragment: int) -> list[tuple[ParameterBucket, Aggregator]]:
        """Return what travels in a round, and by what: buffers with the last fragment, always exactly."""
        average, tensors, pieces = self._average, self._tensors(fragment), self._pieces
        buffers = self._buffers() if fragment == average.fragments - 1 else {}
        if average.parameters is average.exact:
            return [(bucket, average.exact) for bucket in parameter_buckets({**tensors, **buffers}, pieces)]
        own = [(bucket, average.parameters) for bucket in parameter_buckets(tensors, pieces)]
        return [*own, *((bucket, average.exact) for bucket in parameter_buckets(buffers, pieces))]

    def _tensors(self, fragment: int) -> Named:
        everything = self._read()
        return {name: everything[name] for name in self._fragments[fragment]}

    def _buffers(self) -> dict[str, Tensor]:
        module = None if self._module is None else self._module()
        if module is None or not self._average.buffers:
            return {}
        # By the names that DDP goes by for buffers. Asked each time: a module may put other tensors in their place.
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        floating = {name: b for name, b in module.named_buffers() if b.is_floating_point() and name not in ignored}
        return comparable(floating)

    # ------------------------------------------------------------------------------------- checkpoints

    def state(self) -> Callable[[Copy], dict[str, Any]]:
        """Return what reads, behind what was sent, all that a checkpoint holds beside the store.

        Whether that has what was agreed on, and what is under way: by name, what is to be added when the round is over.
        Also the optimizer steps, those before the last turn, and a digest of the parameters.
        """
        self.optimizer_steps.update()
        underway = {} if self._replaced() else self._underway
        flights = [flight for flights in underway.values() for flight in flights]
        differ = self.client is not None and self.client.team.node_count > 1
        counted = {"steps": self.optimizer_steps.count_to_save, "parameters": digest_of(self._read()) if differ else ""}
        counted["turn"] = None if self._turn < 0 else self._turn
        weights = None if self._weights is None else list(self._weights)
        anchored = self._anchored

        def read(copy: Copy) -> dict[str, Any]:
            underway: dict[str, Tensor] = {}
            for flight in flights:
                underway |= {name: copy(part) for name, part in flight.bucket.parts(flight.end()).items()}
            return {"anchored": anchored, "underway": underway, "weights": weights, **counted}

        return read

    def read(self, saved: Mapping[str, Any]) -> Rounds:
        """Return what `state` returned as `resume` takes it; raises ConfigurationError for what is damaged."""
        anchored, values = field(saved, "anchored", bool, "rounds"), dict(field(saved, "underway", dict, "rounds"))
        underway: Underway = {}
        for fragment in range(self._average.fragments):
            for bucket, _ in self._buckets(fragment):
                if values.keys().isdisjoint(bucket.tensors):
                    continue
                parts = [part_from(values.pop(name, None), name, tensor) for name, tensor in bucket.tensors.items()]
                joined = torch.cat([each.reshape(-1).to(bucket.device, bucket.dtype) for each in parts])
                underway.setdefault(fragment, []).append(Flight(bucket, joined, adds=True))
        if values:
            refuse("a name in rounds['underway']", next(iter(values)), "one of the model's")
        left_as = required(saved.get("parameters", ""), str, "rounds['parameters']")
        weights = weights_from(saved.get("weights"), self._average.fragments)
        turn = -1 if saved.get("turn") is None else whole(saved["turn"], "rounds['turn']")
        return anchored or not self._average.parameters.residual_paths, underway, left_as, weights, turn

    def resume(self, steps: int, store: ResidualStore, rounds: Rounds | None) -> None:
        """Resume after `steps` optimizer steps: the parameters are a checkpoint's now, or will be at the next forward.

        rounds: None for one of another world. There nodes agree on the parameters as they are then.
        """
        self.optimizer_steps.resume(steps)
        self._store = store
        self._averaged_at = self._digest_before_load = None
        new: Rounds = (not self._average.parameters.residual_paths, {}, None, None, -1)
        self._anchored, self._underway, self._left_as, self._weights, self._turn = rounds or new


def _require_float32_holds(average: LocalSGD, parameters: Named) -> None:
    for name, parameter in parameters.items():
        if parameter.dtype == torch.float64:
            raise ConfigurationError(
                f"{average} keeps what nodes agreed on in float32, and parameter {name!r} is torch.float64; use "
                f"float32 parameters, or a LocalSGD without outer and compressor, which is exact"
            )


def warn_of_broadcasts(aggregator: Aggregator, ddp: TorchDDP) -> None:
    """Say it when DDP will send buffers between the nodes in every forward."""
    if isinstance(aggregator, LocalSGD) and ddp.broadcast_buffers and any(True for _ in ddp.module.buffers()):
        _log.warning(
            "DDP broadcasts this model's buffers from rank 0 in every forward, between nodes too; use "
            "DistributedDataParallel(..., broadcast_buffers=False) and LocalSGD(buffers=True)"
        )


class _Hook:
    """A hook of the module DDP wraps, or of a part of it; a copy, in a copied or saved model, does nothing."""

    def __init__(self, averages: ParameterAverages, method: Callable[[ParameterAverages], None]) -> None:
        found = ref(averages)

        def call_if_alive() -> None:
            alive = found()
            if alive is not None:
                method(alive)

        # Traced, it would be compiled anew whenever a counter in it changes.
        self._call: Callable[[], None] | None = torch.compiler.disable(call_if_alive)

    def __call__(self, module: nn.Module, *inputs: Any) -> None:
        if self._call is not None:
            self._call()

    def __getstate__(self) -> dict[str, Any]:
        return {"_call": None}


class _TurnBeforeForward(_Hook):
    """Before a forward. Unlike the DDP model's it is called under torch.compile, and in any form of registration."""

    def __call__(self, module: nn.Module, *inputs: Any) -> None:
        if torch.is_grad_enabled():
            super().__call__(module, *inputs)
