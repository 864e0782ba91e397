"""Give a DDP model other buckets while it trains.

DDP makes its buckets when it is constructed and once more after the first backward. With the same private calls it
makes them anew here, with a cap for every bucket (torch >= 2.13), so that a plan's buckets are DDP's own and nothing
has to be copied together. Where torch has no such caps, buckets are merged in the hook instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

_NEEDED = (
    "_bucket_config",
    "_build_params_for_reducer",
    "_ddp_init_helper",
    "_build_debug_param_to_name_mapping",
    "_join_config",
)


def can_rebuild(ddp: TorchDDP, parameters: Iterable[Tensor]) -> bool:
    """Return whether `ddp`, which averages the gradients of `parameters`, can be given other buckets of them now.

    Alike on all ranks, if what is frozen is.
    """
    if not all(hasattr(ddp, name) for name in _NEEDED):
        return False
    # In join() a rank without data makes no forward, which is when buckets change.
    if ddp._use_python_reducer or ddp.mixed_precision is not None or ddp.static_graph or ddp._join_config.enable:
        return False
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    # A new reducer knows what trains now. A parameter that is frozen for a while (a discriminator, while the generator
    # learns) would be left out for ever, and its gradients would never be averaged again.
    trained, known = ddp._build_params_for_reducer()[0], list(parameters)
    return len(trained) == len(known) and set(map(id, trained)) == set(map(id, known))


def rebuild(ddp: TorchDDP, nbytes: Sequence[int]) -> None:
    """Let `ddp` make buckets of `nbytes` each, in the order of backward; between a step and the next forward.

    The next backward has them in another order still (that of the parameters' definition), the one after that as they
    should be, as in the first steps of any DDP model. Every rank must do the same.
    """
    caps = tuple(nbytes)
    if ddp.find_unused_parameters:  # made once, from the first parameter to the last
        caps = caps[::-1]
    ddp._bucket_config = replace(ddp._bucket_config, per_bucket_bytes_caps=caps)  # torch.compile goes by the others
    parameters, expect_sparse_gradient = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, expect_sparse_gradient, names, ddp.static_graph)
    assert ddp.logger is not None  # made by the helper
    for hook, state in ddp._comm_hooks:
        ddp.logger._set_comm_hook_name(hook.__qualname__)  # by which a second registration is refused
        dist._register_comm_hook(ddp.reducer, state, hook)
