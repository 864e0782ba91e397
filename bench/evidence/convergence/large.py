# SPDX-License-Identifier: Apache-2.0
"""What is compared with `--large`: a GPT of 5 million parameters for 2,000 steps, and a ResNet-18 on hard images.

One rank is a node: sums inside a node are exact, so that more ranks would cost time and show nothing. `--large --rates`
tries several learning rates for each method in short trainings.
"""

from __future__ import annotations

from dataclasses import replace

from bench.evidence.convergence import resnet
from bench.evidence.convergence.plan import Entry, Task

RANKS_PER_NODE = (1, 1)
FACTORS = (0.25, 0.5, 1.0, 2.0)
HIGHER_FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Of a task's learning rate: what is tried, and where more may be better."""

GPT_5M = Task(
    name="gpt-5m",
    steps=2000,
    look_every=100,
    model=("--layers", "4", "--width", "320", "--context", "32", "--batch", "2"),
    learning_rates=(("adamw", 1e-3), ("sgd", 0.05)),
)
RESNET = Task("resnet18", 400, 40, (), (("sgd", 0.2), ("adamw", 8e-3)), example=resnet)
TASKS = (GPT_5M, RESNET)
RATE_TASKS = (replace(GPT_5M, steps=150, look_every=50), replace(RESNET, steps=200, look_every=50))

_SHORT_MEMORY = (0.5, 0.95)
"""AdamW's betas with which few elements do not come in lumps: bench/results/convergence_rates.json."""

_DGC = "hierarchical_dgc:density=0.015"
_ADAMW = (
    Entry("ddp"),
    Entry("hierarchical_onebit:adam=True"),
    Entry("hierarchical_quantized:bits=2"),
    Entry("hierarchical_powersgd"),
    Entry("ddp", betas=_SHORT_MEMORY),
    Entry(_DGC, betas=_SHORT_MEMORY),
)
_SGD = (
    Entry("ddp"),
    Entry("hierarchical_powersgd"),
    Entry("hierarchical_quantized:bits=2"),
    Entry("hierarchical_onebit"),
    Entry(_DGC),
)
_METHODS = {
    (GPT_5M.name, "adamw"): (*_ADAMW, Entry("onebit_local:period=16:delay=4:fragments=4")),
    (GPT_5M.name, "sgd"): _SGD,
    (RESNET.name, "sgd"): _SGD,
    (RESNET.name, "adamw"): _ADAMW,
}

RATE_ENTRIES = tuple(
    replace(entry, tasks=(task,), optimizers=(optimizer,), rate=factor)
    for (task, optimizer), entries in _METHODS.items()
    for entry in entries
    for factor in (HIGHER_FACTORS if entry.betas is not None or "adam=" in entry.strategy else FACTORS)
)
# By bench/results/convergence_large_rates.json; all others are best at the task's own rate.
_BEST = {
    ("gpt-5m", "adamw", _DGC): 2.0,
    ("resnet18", "adamw", "hierarchical_onebit:adam=True"): 2.0,
    ("resnet18", "sgd", "hierarchical_quantized:bits=2"): 0.5,
    ("resnet18", "sgd", "hierarchical_onebit"): 0.5,
    ("resnet18", "sgd", _DGC): 0.5,
}
ENTRIES = tuple(
    entry for entry in RATE_ENTRIES if entry.rate == _BEST.get((entry.tasks[0], entry.optimizers[0], entry.strategy), 1)
)
