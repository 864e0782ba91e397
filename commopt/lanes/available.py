"""How many lanes of one device may communicate at the same time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist

_ORDER_VARIABLE = "NCCL_LAUNCH_ORDER_IMPLICIT"
_NCCL_SINCE = (2, 26)
_CUDA_SINCE = (12, 3)


def lanes_available(
    backend: str,
    nccl: Sequence[int] = (),
    cuda: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> int:
    """Return 2 where two process groups of one process may be in use at once, else 1.

    gloo: each group has connections and buffers of its own. NCCL: kernels of two communicators can wait for each other,
    unless NCCL itself launches them in the order of the program, which it does from 2.26 on when asked by
    NCCL_LAUNCH_ORDER_IMPLICIT=1, set before the process starts; with CUDA before 12.3 it then lets one kernel wait for
    the other, so there is nothing to gain. `nccl` and `cuda` are versions, () when unknown.
    """
    if backend == "gloo":
        return 2
    if backend != "nccl":
        return 1
    asked = (environment or {}).get(_ORDER_VARIABLE) == "1"
    return 2 if asked and tuple(nccl) >= _NCCL_SINCE and tuple(cuda) >= _CUDA_SINCE else 1


def lanes_here(backend: str) -> int:
    """Return `lanes_available` for the versions and the environment of this process."""
    if backend != "nccl":
        return lanes_available(backend)
    return lanes_available(backend, *_versions(), os.environ)


@lru_cache(maxsize=1)
def _versions() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the versions of NCCL and CUDA that torch was built with, () where it was built without."""
    if not dist.is_nccl_available():
        return (), ()
    nccl = torch.cuda.nccl.version()[:3]  # its fourth part is a text
    return tuple(nccl), tuple(int(part) for part in (torch.version.cuda or "0").split("."))
