# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch's FSDP2 that commopt uses; `require_seams` names the one that this torch lacks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.distributed.tensor import DTensor

from commopt.errors import ConfigurationError
from commopt.sharded.layouts import Part
from commopt.version import NEWEST_TESTED_TORCH

_OF_THE_MESHES = ("DataParallelMeshInfo", "DDPMeshInfo", "FSDPMeshInfo")
_OF_A_STATE = ("_root_post_backward_final_callback",)
_OF_A_GROUP = (
    "fsdp_params",
    "mesh_info",
    "device",
    "post_backward",
    "reduce_grads",
    "all_reduce_grads",
    "_all_reduce_hook",
    "_partial_reduce_output",
)
_OF_A_PARAMETER = (
    "sharded_param",
    "sharded_size",
    "padded_sharded_param_size",
    "fsdp_placement",
    "offload_to_cpu",
    "unsharded_accumulated_grad",
    "mp_policy",
    "_orig_size",
    "_module_info",
)
# What wrappers put into the names of modules; `named_parameters` of the plain module knows nothing of it.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
_EXACT_SUMS = (torch.float32, torch.bfloat16)  # of other dtypes FSDP divides by a part before and by the rest after


def require_seams(model: nn.Module) -> None:
    """Raise ConfigurationError when this torch's FSDP2 lacks a name that commopt needs."""
    _require(common, _OF_THE_MESHES)
    for state in _states(model):
        _require(state, _OF_A_STATE)
        if not hasattr(state, "_fsdp_param_groups"):
            _require(state, ("_fsdp_param_group",))
        for raw in _raw_groups(state):
            _require(raw, _OF_A_GROUP)
            for param in raw.fsdp_params:
                _require(param, _OF_A_PARAMETER)


def _require(owner: object, names: Iterable[str]) -> None:
    for name in names:
        if not hasattr(owner, name):
            what = owner.__name__ if isinstance(owner, type(torch)) else type(owner).__name__
            raise ConfigurationError(
                f"torch {torch.__version__} has no {what}.{name}, which commopt needs to average the gradients of a "
                f"model of fully_shard; use torch 2.7 to {NEWEST_TESTED_TORCH}, or tell commopt's authors of this one"
            )


def forget_meshes() -> None:
    """Empty torch's caches of what operations on DTensors give: results would be on an equal mesh of an earlier world.

    Torch finds the groups of a mesh by their names, which are nobody's in this world, or those of other ranks.
    """
    dispatcher: Any = DTensor._op_dispatcher
    with suppress(AttributeError):  # each torch has its own
        dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    with suppress(AttributeError):
        torch._C._clear_DTensor_sharding_propagator_cache()


def _states(model: nn.Module) -> list[Any]:
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return list(dict.fromkeys(states))  # fully_shard([a, b]) gives both the same one


def _raw_groups(state: Any) -> Sequence[Any]:
    several: Sequence[Any] | None = getattr(state, "_fsdp_param_groups", None)  # torch 2.12
    if several is None:
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return several


class ParameterGroup:
    """Parameters whose gradients FSDP reduces together.

    replicas: the process group of the ranks that hold the same shard, None where there are no others.
    shards: that of the ranks which share the parameters, None for replicate().
    """

    def __init__(self, raw: Any, names: Sequence[str]) -> None:
        self._raw = raw
        self._names = dict(zip(map(id, raw.fsdp_params), names, strict=True))
        self._with_gradient: list[Any] = []
        self._ours: dict[str, object] = {}  # what FSDP is to call for this group, by the name it has there
        self._theirs: dict[str, object] = {}  # and what it would have called
        info = raw.mesh_info
        sharded = isinstance(info, common.FSDPMeshInfo)
        self.replicas: dist.ProcessGroup | None = None
        if isinstance(info, common.DDPMeshInfo):
            self.replicas = info.replicate_process_group
        self.shards: dist.ProcessGroup | None = info.shard_process_group if sharded else None
        self.shard_rank: int = info.shard_mesh_rank if sharded else 0
        self.shard_count: int = info.shard_mesh_size if sharded else 1

    @property
    def device(self) -> torch.device:
        """Where its gradients are."""
        device: torch.device = self._raw.device
        return device

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """In which the user wants gradients reduced, None for what FSDP takes then."""
        dtype: torch.dtype | None = self._raw.fsdp_params[0].mp_policy.reduce_dtype
        return dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """In which its weights are computed with, those of the first parameter where they differ."""
        first = self._raw.fsdp_params[0]
        dtype: torch.dtype = first.mp_policy.param_dtype or first.sharded_param.dtype
        return dtype

    @property
    def has_hook(self) -> bool:
        """Whether somebody has set an all-reduce hook."""
        return self._raw._all_reduce_hook is not None

    @property
    def sums(self) -> bool:
        """Whether the user chose what gradients are divided by, so that replicas are to be added up."""
        return getattr(self._raw, "gradient_divide_factor", None) is not None  # torch 2.8

    @property
    def parts(self) -> list[Part]:
        """This rank's parts of the parameters, in their order."""
        return [self._part(param) for param in self._raw.fsdp_params]

    @property
    def parts_with_gradient(self) -> list[Part]:
        """The parts in the current buffer, one after the other."""
        return [self._part(param) for param in self._with_gradient]

    @property
    def shards_by_part(self) -> list[tuple[Part, Tensor]]:
        """This rank's parts with their values: asked anew each time, as FSDP may replace them."""
        return [(self._part(param), param.sharded_param.to_local()) for param in self._raw.fsdp_params]

    @property
    def key(self) -> tuple[int, ...]:
        """Tells one set of `parts_with_gradient` from another."""
        return tuple(map(id, self._with_gradient))

    @property
    def ranks(self) -> set[int]:
        """All ranks that hold something of its parameters, those of tensor parallelism beside it too."""
        meshes = [param.sharded_param.device_mesh for param in self._raw.fsdp_params]
        return {int(rank) for mesh in meshes for rank in mesh.mesh.flatten().tolist()}

    def _part(self, param: Any) -> Part:
        return Part(
            self._names[id(param)],
            tuple(param._orig_size),
            tuple(param.sharded_size),
            param.fsdp_placement.dim,
            param.padded_sharded_param_size.numel(),
        )

    def divided_later(self, dtype: torch.dtype) -> float:
        """Return what FSDP will divide a buffer of `dtype` by, after it was averaged over the replicas."""
        if dtype in _EXACT_SUMS and not getattr(self._raw, "force_sum_reduction_for_comms", False):
            return 1.0
        factor = float(getattr(self._raw, "gradient_divide_factor", None) or self.shard_count)
        before = 1
        while dtype not in _EXACT_SUMS and factor % before == 0 and factor / before > before:
            before *= 2
        return factor / before

    def may_wait(self, buffer: Tensor) -> bool:
        """Return whether gradients will be views of `buffer`, in host memory, and not read before backward ends."""
        return (
            buffer.device.type == "cpu"
            and self.divided_later(buffer.dtype) == 1.0
            and all(
                getattr(param, "sharded_grad_dtype", param.orig_dtype) in (None, buffer.dtype)  # torch 2.15
                and param.sharded_param.grad is None
                and not param.offload_to_cpu
                and not getattr(param.sharded_param, "_post_accumulate_grad_hooks", None)
                for param in self._with_gradient
            )
        )

    def take_partial(self, buffer: Tensor) -> Tensor | None:
        """Return the sum over the shards of backwards that were not to be averaged, and keep it no longer.

        It is laid out as `buffer`, the gradients of this backward.
        """
        raw = self._raw
        partial: Tensor | None = raw._partial_reduce_output
        if partial is None:
            return None
        if partial.is_cuda:  # FSDP made it on another stream
            partial.record_stream(torch.cuda.current_stream(partial.device))
        if hasattr(raw, "_prepare_partial_reduce_output"):  # torch 2.15; before it has the parameters of this backward
            sizes = [param.padded_sharded_param_size.numel() for param in self._with_gradient]
            partial = raw._prepare_partial_reduce_output(self._with_gradient, sizes, buffer.dtype)
        raw._partial_reduce_output = None
        return partial

    def reduce_by(self, average: Callable[[Tensor], None]) -> None:
        """Let `average` do, in place, what FSDP does over the replicas.

        FSDP asks `mesh_info` whether there are any, and calls the hook where there are none. So it is shown another one
        while it reduces. The rest of it, parameters and checkpoints too, sees the user's mesh.
        """
        raw, original = self._raw, self._raw.post_backward
        self._keep("_all_reduce_hook")
        self._ours = {"_all_reduce_hook": average}

        def post_backward(*unused: Any) -> None:
            self._begin_reduction()
            native = raw.mesh_info
            raw.mesh_info = _without_replicas(native) if raw.all_reduce_grads else _with_none_but_this(native)
            try:
                original(*unused)
            finally:
                raw.mesh_info = native

        raw.post_backward = post_backward  # autograd and FSDP's last callback call it through the instance
        raw._all_reduce_hook = average

    def scatter_by(self, model: nn.Module, reduce_scatter: Any) -> None:
        """Let `reduce_scatter` do what its name says."""
        raw, original = self._raw, self._raw.post_backward
        self._keep("_reduce_scatter_comm")
        self._ours |= {"_all_reduce_hook": None, "_reduce_scatter_comm": reduce_scatter}

        def post_backward(*unused: Any) -> None:
            self._begin_reduction()
            original(*unused)

        raw.post_backward = post_backward
        if (module := _only_group_of(model, raw)) is None:
            raw._reduce_scatter_comm = reduce_scatter
        else:
            module.set_custom_reduce_scatter(reduce_scatter)

    @property
    def sends(self) -> bool:
        """Whether the next backward averages what it finds."""
        return bool(self._raw.reduce_grads and self._raw.all_reduce_grads)

    def wrap_scatter(self, wrap: Callable[[Any], Any]) -> None:
        """Let `wrap(reduce_scatter)` stand in the place of FSDP's own within the shards; the first time."""
        if "_reduce_scatter_comm" in self._ours:
            return
        if not hasattr(self._raw, "_reduce_scatter_comm"):
            raise ConfigurationError(
                f"torch {torch.__version__} adds gradients up over the shards before commopt can weigh them; use torch "
                f"2.9 or later, or no weight()"
            )
        self._keep("_reduce_scatter_comm")
        self._raw._reduce_scatter_comm = self._ours["_reduce_scatter_comm"] = wrap(self._raw._reduce_scatter_comm)

    def gather_by(self, model: nn.Module, all_gather: Any) -> None:
        """Let `all_gather` gather the weights."""
        self._keep("_all_gather_comm")
        self._ours["_all_gather_comm"] = all_gather
        if (module := _only_group_of(model, self._raw)) is None:
            self._raw._all_gather_comm = all_gather
        else:
            module.set_custom_all_gather(all_gather)

    def give_back(self) -> None:
        """Let FSDP do by itself again what commopt did for this group; what others have replaced since stays."""
        if not self._ours:
            return
        del self._raw.post_backward  # the class has its own
        for name, theirs in self._theirs.items():
            if getattr(self._raw, name) is self._ours[name]:
                setattr(self._raw, name, theirs)
        self._ours = {}
        self._theirs = {}

    def _keep(self, name: str) -> None:
        self._theirs[name] = getattr(self._raw, name)

    def _begin_reduction(self) -> None:
        """Note what the next buffer holds; raise ConfigurationError where FSDP would not call commopt for it."""
        for name, ours in self._ours.items():
            if getattr(self._raw, name) is not ours:
                raise ConfigurationError(
                    f"the group of {self.parts[0].name} was given another {name.strip('_')} after commopt.attach, and "
                    f"FSDP takes one; leave out set_all_reduce_hook, set_custom_reduce_scatter, set_custom_all_gather "
                    f"and what else replaces FSDP's collectives"
                )
        params = self._raw.fsdp_params
        order = getattr(self._raw, "_reduce_scatter_param_indices", range(len(params)))  # torch 2.15: by dtype
        self._with_gradient = [params[index] for index in order if _has_gradient(params[index], self._raw)]


class _OnlyThis:
    """Stands for a process group of one rank in FSDP's arithmetic."""

    def size(self) -> int:
        """Return 1."""
        return 1


def _without_replicas(info: Any) -> Any:
    """Return the mesh as if it was one of shards only."""
    shown = copy.copy(info)
    shown.__class__ = common.FSDPMeshInfo if isinstance(info, common.FSDPMeshInfo) else common.DataParallelMeshInfo
    return shown


def _with_none_but_this(info: Any) -> Any:
    """Return the mesh with one replica: FSDP keeps partial sums where there are any, and divides as for one."""
    shown = copy.copy(info)
    shown.replicate_process_group = _OnlyThis()
    return shown


def _has_gradient(param: Any, raw: Any) -> bool:
    """Return whether `post_backward` will put it into the buffer."""
    unsharded = getattr(param, "_unsharded_param", None)
    if unsharded is None:
        return False
    if param.unsharded_accumulated_grad is not None or unsharded.grad is not None:
        return True
    if hasattr(raw, "_get_partial_reduce_grad") and raw._get_partial_reduce_grad(param) is not None:  # torch 2.15
        return True
    return bool(getattr(raw, "reduce_scatter_unused_params", False) and unsharded.requires_grad)  # torch 2.13


def groups_of(model: nn.Module) -> list[ParameterGroup]:
    """Return the parameter groups of a model, in the order of its modules, alike on all ranks."""
    prefixes = {id(module): name for name, module in model.named_modules()}

    def named(param: Any) -> str:
        info = param._module_info
        if id(info.module) not in prefixes:
            raise ConfigurationError(
                f"fully_shard put {type(info.module).__name__}.{info.param_name}, which is not in this model, into a "
                f"group with some of its parameters; attach the model that has all of them"
            )
        parts = [*prefixes[id(info.module)].split("."), info.param_name]
        return ".".join(part for part in parts if part and part not in _WRAPPERS)

    raw_groups = [raw for state in _states(model) for raw in _raw_groups(state)]
    return [ParameterGroup(raw, [named(param) for param in raw.fsdp_params]) for raw in raw_groups]


def reshard_between_steps(model: nn.Module) -> None:
    """Let the next forward gather the parameters anew: an evaluation under no_grad() leaves the root's unsharded."""
    if torch._C._current_graph_task_id() == -1:  # in a backward FSDP needs those of its forward
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def watch_backwards(model: nn.Module, ended: Callable[[], None], given_up: Callable[[], None]) -> Callable[[], None]:
    """Call `ended` after every backward, once FSDP has reduced what it will; `given_up` in `reset_iter_state`.

    Returns what undoes that.
    """
    watched: list[tuple[Any, str]] = []

    def watch(state: Any, name: str, called: Callable[[], None]) -> None:
        setattr(state, name, _then(getattr(state, name), called))
        watched.append((state, name))

    def unless_by_hand(state: Any) -> None:
        if not getattr(state._state_ctx, "manual_backward_finalization_active", False):
            ended()

    for state in _states(model):
        watch(state, "_root_post_backward_final_callback", partial(unless_by_hand, state))
        if hasattr(state, "finalize_backward"):  # torch 2.15: what set_manual_backward_finalization leaves to the user
            watch(state, "finalize_backward", ended)
        if hasattr(state, "_reset_iter_state"):  # torch 2.13; before there is no way on after a backward that raised
            watch(state, "_reset_iter_state", given_up)

    def watch_no_more() -> None:
        for state, name in watched:
            delattr(state, name)  # the class has its own

    return watch_no_more


def _then(first: Callable[..., None], second: Callable[[], None]) -> Callable[..., None]:
    def both(**options: Any) -> None:
        first(**options)
        second()

    return both


# ------------------------------------------------------------------------------------------- a 1-D mesh

_DEFAULTS = ("DefaultReduceScatter", "DefaultAllGather")
_COLLECTIVES = ("_reduce_scatter_comm", "_all_gather_comm", "_training_state")  # torch 2.9


def require_collectives(groups: Iterable[ParameterGroup]) -> None:
    """Raise ConfigurationError when this torch's FSDP2 does not let its collectives be replaced, or somebody has."""
    for group in groups:
        for name in _COLLECTIVES:
            if not hasattr(group._raw, name):
                raise ConfigurationError(
                    f"torch {torch.__version__} has no {type(group._raw).__name__}.{name}, which commopt needs for "
                    f"fully_shard on a 1-D mesh; use torch 2.9 to {NEWEST_TESTED_TORCH}, or a 2-D mesh (HSDP)"
                )
        for comm in (group._raw._reduce_scatter_comm, group._raw._all_gather_comm):
            if type(comm).__name__ not in _DEFAULTS:
                raise ConfigurationError(
                    f"this model's collectives were replaced by {type(comm).__name__} already; attach before "
                    f"set_custom_reduce_scatter, set_custom_all_gather, set_symm_mem_for_comm and "
                    f"set_allocate_memory_from_process_group_for_comm, and leave these out"
                )


def replaced_in(model: nn.Module) -> str:
    """Return what somebody has set in the place of FSDP's collectives, as attach does too, "" where nothing was."""
    for group in groups_of(model):
        if group.has_hook:
            return "an all-reduce hook"
        for comm in (getattr(group._raw, name, None) for name in _COLLECTIVES[:2]):
            if comm is not None and type(comm).__name__ not in _DEFAULTS:
                return type(comm).__name__
    return ""


def _only_group_of(model: nn.Module, raw: Any) -> Any:
    """Return the module whose public methods mean this group: one that has no other; None where there is none."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and list(_raw_groups(module._get_fsdp_state())) == [raw]:
            return module
    return None


def is_before_backward(group: ParameterGroup) -> bool:
    """Return whether weights are gathered for a backward: of forward's values, whatever has happened since."""
    return bool(group._raw._training_state == common.TrainingState.PRE_BACKWARD)
