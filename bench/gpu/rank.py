# SPDX-License-Identifier: Apache-2.0
"""Run a module as one of several NCCL ranks that share a GPU: `torchrun ... -m bench.gpu.rank MODULE ARGS...`.

NCCL refuses two ranks of one host on one GPU, so every rank passes for a host of its own, and all traffic goes through
sockets. The ranks take turns on the GPU: this shows that things work, never how fast they are.
COMMOPT_RANKS_PER_NODE says which ranks commopt is to treat as a node.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping

import torch


def shared(environ: Mapping[str, str], gpus: int) -> dict[str, str]:
    """Return the environment of a rank that torchrun started, when there are `gpus` GPUs for all of them."""
    changes = {"NCCL_HOSTID": f"rank-{environ['RANK']}", "NCCL_IB_DISABLE": "1"}
    changes["NCCL_SOCKET_IFNAME"] = environ.get("NCCL_SOCKET_IFNAME", "lo")  # bench.cluster has set its own
    if gpus:
        changes["LOCAL_RANK"] = str(int(environ["LOCAL_RANK"]) % gpus)
    return {**environ, **changes}


def main() -> None:
    """Become the module."""
    if len(sys.argv) < 2:
        sys.exit("usage: torchrun ... -m bench.gpu.rank MODULE ARGS...")
    os.environ.update(shared(os.environ, torch.cuda.device_count()))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
