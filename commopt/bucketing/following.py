"""The plan that is followed: what each message is averaged by, and DDP's buckets made to fit where that can be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from weakref import ref

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.aggregate import Aggregator
from commopt.bucketing import reducer
from commopt.bucketing.assembly import Assembly
from commopt.bucketing.layouts import Layouts
from commopt.bucketing.messages import Message
from commopt.bucketing.strategies import aggregator_of, require_strategies
from commopt.bucketing.units import Units, are_exact
from commopt.plan import Bucket, Decision, Plan


class Following:
    """Sends what `plan` says; None: what DDP's buckets make of it. changes: how often there was another plan."""

    def __init__(self, assembly: Assembly, layouts: Layouts) -> None:
        self.plan: Plan | None = None
        self.changes = 0
        self._assembly, self._layouts = assembly, layouts
        self._strategies: dict[str, Aggregator] = {}
        self._aggregators: tuple[Aggregator, ...] = ()  # of the plan's buckets
        self._ddp: ref[TorchDDP] | None = None
        self._sees_forwards = False  # not those of torch.compile(ddp)
        self._outdated = False  # whether DDP's own buckets are yet to become those of the plan

    def serve(self, ddp: TorchDDP) -> None:
        """Take note of the model, whose buckets can then be made anew where torch allows it."""
        self._ddp = ref(ddp)

    def choose_from(self, strategies: Mapping[str, Aggregator]) -> None:
        """Learn by their names in plans what can average a bucket; the first is what the user asked for."""
        self._strategies = dict(strategies)

    def require(self, plan: Plan) -> None:
        """Raise ConfigurationError when `plan` is for other parameters, or for strategies that are not to be had."""
        if self._layouts.numels:
            plan.require_names(self._layouts.numels)
        require_strategies(plan, self._strategies)

    def follow(self, plan: Plan) -> None:
        """Send what `plan` says from the next step on."""
        self._aggregators = tuple(aggregator_of(bucket, self._strategies) for bucket in plan.buckets)
        self.plan, self._outdated = plan, True
        self.changes += 1
        self._assembly.follow(plan)

    def heed(self, decision: Decision) -> None:
        """Go by what rank 0 decided: another plan, made of what DDP showed, or what is now expected of this one."""
        if decision.plan is not None:
            self.follow(decision.plan)
        elif self.plan is not None:
            self.plan = decision.updated(self.plan)

    def before_forward(self) -> None:
        """Give DDP the plan's buckets, if it has others; only between a step and a forward can it be."""
        self._sees_forwards = True
        ddp = self._model() if self._outdated else None
        if ddp is not None and self.plan is not None:
            self._outdated = not self._is_up_to_date(ddp, self.plan)

    def leave_to_ddp(self, ddp: TorchDDP) -> Tensor | None:
        """Let `ddp` average by itself, in the buckets it has, if it can be told to and every backward can be counted.

        Returns a parameter that gets a gradient in every step then, else None. Between a step and the next forward.
        """
        parameters = self._layouts.parameters
        names = [[piece.name for piece in layout.pieces] for layout in self._assembly.buckets]
        # With unused parameters there is none that gets a gradient in every step.
        if ddp.find_unused_parameters or not self._adjustable(ddp, chain.from_iterable(names)):
            return None
        if not reducer.can_rebuild(ddp, parameters.values()):
            return None
        self._assembly.forget_gradients()  # or there would be two of each until the hook is back
        self._rebuild(ddp, names, hooked=False)
        return parameters[names[-1][-1]]

    def _is_up_to_date(self, ddp: TorchDDP, plan: Plan) -> bool:
        """Give `ddp` the plan's buckets, if it can have them now; return whether there is nothing left to do."""
        parameters = self._layouts.parameters
        if not parameters:
            return False  # until DDP has shown them
        if not self._adjustable(ddp, plan.names):
            return True  # messages are put together from the buckets there are
        if not reducer.can_rebuild(ddp, parameters.values()):
            return False
        self._rebuild(ddp, [bucket.names for bucket in plan.buckets])
        return True

    def _rebuild(self, ddp: TorchDDP, buckets: Sequence[Sequence[str]], *, hooked: bool = True) -> None:
        parameters = self._layouts.parameters
        reducer.rebuild(ddp, [[parameters[name] for name in names] for names in buckets], hooked=hooked)

    def aggregators(self) -> Iterator[Aggregator]:
        """Iterate over all that may average a buffer now."""
        yield next(iter(self._strategies.values()))
        yield from self._aggregators

    def aggregators_for(self, message: Message) -> list[Aggregator]:
        """Return what averages each buffer of a message: what was asked for, where no plan says otherwise."""
        first = next(iter(self._strategies.values()))
        return [first if share is None else self._aggregators[share] for share in message.shares]

    def messages(self) -> tuple[Bucket, ...]:
        """Return what a step now sends, in the order in which it does."""
        first = next(iter(self._strategies))
        buckets = []
        for layouts, share in self._assembly.messages():
            names = tuple(piece.name for layout in layouts for piece in layout.pieces)
            nbytes = sum(self._layouts.parameters[name].nbytes for name in names)
            planned = None if self.plan is None or share is None else self.plan.buckets[share]
            strategy, chunks = (first, 1) if planned is None else (planned.strategy, planned.chunks)
            buckets.append(Bucket(names, nbytes, strategy, chunks))
        return tuple(buckets)

    def units(self) -> Units:
        """Return what the next plan can put together: gradients where DDP can be given any buckets of them."""
        parameters, buckets, ddp = self._layouts.parameters, self._assembly.buckets, self._model()
        single = False
        if ddp is not None and self._sees_forwards:
            names = [piece.name for bucket in buckets for piece in bucket.pieces]
            single = self._adjustable(ddp, names) and reducer.can_rebuild(ddp, parameters.values())
        return Units.of(buckets, parameters, single=single)

    def _adjustable(self, ddp: TorchDDP, names: Iterable[str]) -> bool:
        """Return whether DDP could ever be given any buckets of the parameters of these names: of all there are."""
        parameters = self._layouts.parameters
        return reducer.supports_rebuild(ddp) and are_exact(parameters) and set(names) == parameters.keys()

    def _model(self) -> TorchDDP | None:
        return None if self._ddp is None else self._ddp()
