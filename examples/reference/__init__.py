# SPDX-License-Identifier: Apache-2.0
"""An example of every public name, shown in the API reference; `python -m examples.reference` runs all of them.

They run in a process group of one rank. What an example takes for granted, it has as a parameter: `ddp`, a torch
DistributedDataParallel model; `comm`, what `attach` returned for one that has trained for a few steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
from examples.reference import states, strategies


def _ddp() -> DDP:
    return DDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))


def _comm() -> commopt.HookState:
    ddp = _ddp()
    comm = commopt.attach(ddp, "hierarchical_quantized", record=True)
    for _ in range(3):
        ddp(torch.ones(2, 64)).sum().backward()
    return comm


def examples() -> dict[str, Callable[..., None]]:
    """Return all examples, by the public name."""
    found = {**vars(states), **vars(strategies)}
    return {
        name: each for name, each in found.items() if inspect.isfunction(each) and each.__module__.startswith(__name__)
    }


def run(example: Callable[..., None]) -> None:
    """Run one, with what its parameters ask for."""
    make = {"ddp": _ddp, "comm": _comm}
    example(**{name: make[name]() for name in inspect.signature(example).parameters})
