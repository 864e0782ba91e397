# SPDX-License-Identifier: Apache-2.0
"""Give a DDP model the buckets of a plan while it trains, without communication.

DDP makes its buckets when it is constructed, and once more before the second forward, from the order in which gradients
came. The same private calls (torch >= 2.12, where every bucket may have a cap of its own) make them anew here: a
reducer that is shown the parameters in the order of the plan makes the plan's buckets, for the very next backward.

DDP's rank 0 broadcasts the buckets it makes last. In the next forward this would hang if only some ranks made one. All
ranks have the same plan, so it is done at once, and each rank broadcasts to itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as TorchDDP

_log = logging.getLogger("commopt")

_NEEDED = (
    "_bucket_config",
    "_build_params_for_reducer",
    "_ddp_init_helper",
    "_build_debug_param_to_name_mapping",
    "_comm_hooks",
    "_join_config",
    "_use_python_reducer",
)
_NEEDED_OF_REDUCER = ("_push_all_rebuilt_params", "_rebuild_buckets", "_update_process_group")


class ReducerBuckets:
    """Gives a DDP model the buckets that are wanted, as soon as it can have them.

    ddp: returns the model, or None.
    wanted: the names in each bucket that it is yet to be given, () for none.
    sees_forwards: whether its forwards are seen; those of torch.compile(ddp) are not.
    speaks: whether this rank logs why DDP's own buckets stay.
    parameters: those whose gradients it averages, by name, once they are known.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.ddp: Callable[[], TorchDDP | None] = lambda: None
        self.wanted: Sequence[Sequence[str]] = ()
        self.sees_forwards = self.speaks = False
        self._parameters = parameters

    def why_not(self) -> str:
        """Return why DDP can never be given other buckets, "" if it can."""
        ddp = self.ddp()
        if ddp is None:
            return "the hook does not know its DDP model; use commopt.attach"
        if not self.sees_forwards:
            return "no forward of the DDP model is seen, as where it is compiled from outside; compile the module in it"
        return why_not(ddp, self._parameters, self._wanted_parameters())

    def _wanted_parameters(self) -> list[list[Tensor]]:
        """Return the parameters of each bucket that is wanted, none where names are unknown here."""
        known = set(chain.from_iterable(self.wanted)) == self._parameters.keys()
        return [[self._parameters[name] for name in group] for group in self.wanted] if known else []

    def say_why_not(self) -> str:
        """Return why DDP's own buckets stay, "" if they do not, and log it once."""
        why = self.why_not()
        if why and self.speaks:
            self.speaks = False
            _log.warning("DDP's own buckets stay: %s", why)
        return why

    def can_change(self, shown: Collection[str]) -> bool:
        """Return whether DDP can be given other buckets now, alike on all ranks.

        shown: the parameters in the buckets it has.
        """
        ddp, known = self.ddp(), self._parameters
        if ddp is None or self.why_not() or (shown and set(shown) != known.keys()):
            return False
        if is_capturing():
            return False
        # A new reducer averages the parameters that train now. One that is frozen for a while (a discriminator, while
        # the generator learns) would be left out for ever, and its gradients would never be averaged again.
        trained = ddp._build_params_for_reducer()[0] if all(each.requires_grad for each in known.values()) else []
        return len(trained) == len(known) and set(map(id, trained)) == set(map(id, known.values()))

    def change(self, shown: Collection[str]) -> None:
        """Give DDP the buckets that are wanted, if it can have them now."""
        ddp = self.ddp()
        if set(chain.from_iterable(self.wanted)) != self._parameters.keys():  # a checkpoint's, of another model
            self.wanted = ()
        elif ddp is not None and self.can_change(shown):
            rebuild(ddp, self._wanted_parameters())
            self.wanted = ()


def why_not(ddp: TorchDDP, parameters: Mapping[str, Tensor], wanted: Sequence[Sequence[Tensor]] = ()) -> str:
    """Return why `ddp` can never be given other buckets, "" if it can; alike on all ranks, and for good.

    parameters: those whose gradients it averages. wanted: the buckets, where they are known.
    """
    lacks = not all(hasattr(ddp, name) for name in _NEEDED) or not hasattr(dist, "_register_comm_hook")
    lacks = lacks or not all(hasattr(ddp.reducer, name) for name in _NEEDED_OF_REDUCER)
    if lacks or not hasattr(ddp._bucket_config, "per_bucket_bytes_caps"):
        return f"torch {torch.__version__} cannot make DDP's buckets anew, 2.12 can"
    if os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1":  # then torch applies caps from the other end
        return "DDP_SET_LAST_BUCKET_CAP=1 is set"
    if ddp._use_python_reducer or ddp.mixed_precision is not None or ddp.static_graph:
        return "DDP was made with static_graph, mixed_precision or the Python reducer"
    if ddp._join_config.enable:  # in it a rank without data makes no forward, which is when buckets change
        return "DDP.join() was used, and torch keeps its flag afterwards"
    if len(set(map(_kind, parameters.values()))) > 1 and not (wanted and order_for(ddp, wanted)):
        return "parameters have several dtypes or devices, whose buckets interleave"
    return ""


def is_capturing() -> bool:
    """Return whether the current stream is being captured in a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def rebuild(ddp: TorchDDP, buckets: Sequence[Sequence[Tensor]]) -> None:
    """Let `ddp` make `buckets` of all its parameters; between a step and the next forward, if it can.

    Not collective, but every rank must do the same before the next backward.
    """
    # With find_unused_parameters a reducer keeps the buckets it is made with, which come in reverse.
    in_order = buckets if not ddp.find_unused_parameters else buckets[::-1]
    caps = tuple(sum(parameter.nbytes for parameter in bucket) for bucket in in_order)
    ordered = list(chain.from_iterable(in_order))
    if len(set(map(_kind, ordered))) > 1:
        caps, ordered = ddp._bucket_config.per_bucket_bytes_caps, order_for(ddp, buckets)
    sparse = dict(zip(*ddp._build_params_for_reducer(), strict=True))
    names = ddp._build_debug_param_to_name_mapping(ordered)
    before = ddp._bucket_config
    ddp._bucket_config = replace(before, per_bucket_bytes_caps=caps)
    try:
        ddp._ddp_init_helper(ordered, [sparse[parameter] for parameter in ordered], names, ddp.static_graph)
    finally:
        ddp._bucket_config = before  # torch.compile goes by it
    alone = _Alone(0, 1)  # type: ignore[call-arg]  # kept here: the reducer does not keep its Python part
    ddp.reducer._update_process_group(alone)
    ddp.reducer._push_all_rebuilt_params()  # as if gradients had come in this order
    ddp.reducer._rebuild_buckets()
    ddp.reducer._update_process_group(ddp.process_group)
    assert ddp.logger is not None  # made by the helper
    for hook, state in ddp._comm_hooks:
        ddp.logger._set_comm_hook_name(hook.__qualname__)  # by which a second registration is refused
        dist._register_comm_hook(ddp.reducer, state, hook)


def _kind(parameter: Tensor) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def order_for(ddp: TorchDDP, buckets: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return an order of parameters of several dtypes in which `ddp`, by its own caps, makes `buckets`; [] for none.

    Each dtype fills a bucket of its own meanwhile, so caps of their own cannot be given. But buckets that DDP has made
    come back: it looks at the order within each dtype and, where buckets are left half full, at which dtype came first.
    """
    if ddp.find_unused_parameters:  # then it makes them by another rule, the same in every run
        return []
    config, ordered = ddp._bucket_config, list(chain.from_iterable(buckets))
    limits = list(config.per_bucket_bytes_caps) or [config.first_bucket_bytes_cap, config.bucket_bytes_cap]
    firsts = {_kind(parameter): parameter for parameter in reversed(ordered)}
    for chosen in permutations(firsts.values()):
        begin = set(map(id, chosen))
        for order in ([*chosen, *(each for each in ordered if id(each) not in begin)], ordered):
            made, _ = dist._compute_bucket_assignment_by_size(
                order, limits, [False] * len(order), list(range(len(order)))
            )
            if [[id(order[place]) for place in bucket] for bucket in made] == [list(map(id, each)) for each in buckets]:
                return order
    return []


class _Alone(dist.ProcessGroup):
    """A process group of one rank, in which a broadcast is over before it begins; on any device."""

    def broadcast(self, tensors: Sequence[Tensor], options: Any = None) -> c10d.Work:  # type: ignore[override]
        return _Done()


class _Done(c10d.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True
