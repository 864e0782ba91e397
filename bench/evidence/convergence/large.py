# SPDX-License-Identifier: Apache-2.0
"""What is compared with `--large`: a GPT of 5 million parameters for 2,000 steps, and a ResNet-18 on hard images.

One rank is a node: sums inside a node are exact, so that more ranks would cost time and show nothing. Each method has
its own learning rate, the best of several in short trainings with one seed (`--large --rates`).
"""

from __future__ import annotations

from dataclasses import replace

from bench.evidence.convergence import resnet
from bench.evidence.convergence.plan import Entry, Task

RANKS_PER_NODE = (1, 1)
FACTORS = (0.5, 1.0, 2.0)
"""Of a task's learning rate: what is tried."""

GPT_5M = Task(
    name="gpt-5m",
    steps=2000,
    look_every=100,
    model=("--layers", "4", "--width", "320", "--context", "32", "--batch", "2"),
    learning_rates=(("adamw", 1e-3), ("sgd", 0.1)),
)
RESNET = Task("resnet18", 600, 60, (), (("sgd", 0.05), ("adamw", 2e-3)), example=resnet)
TASKS = (GPT_5M, RESNET)
RATE_TASKS = (replace(GPT_5M, steps=150, look_every=150), replace(RESNET, steps=150, look_every=150))

_STRATEGIES = {
    "adamw": (
        "ddp",
        "hierarchical_onebit:adam=True",
        "hierarchical_quantized:bits=2",
        "hierarchical_powersgd",
        "hierarchical_dgc:adam=True",
    ),
    "sgd": (
        "ddp",
        "hierarchical_powersgd",
        "hierarchical_quantized:bits=2",
        "hierarchical_onebit",
        "hierarchical_dgc",
    ),
}

_BEST: dict[tuple[str, str, str], float] = {
    ("gpt-5m", "adamw", "ddp"): 1.0,
}
"""Of FACTORS, by task, optimizer and strategy: the lowest loss in bench/results/convergence_large_rates.json."""

_KINDS = [(task, optimizer) for task in TASKS for optimizer, _ in task.learning_rates]
RATE_ENTRIES = tuple(
    Entry(strategy, (task.name,), (optimizer,), rate=factor)
    for task, optimizer in _KINDS
    for strategy in _STRATEGIES[optimizer]
    for factor in FACTORS
)
ENTRIES = tuple(
    Entry(strategy, (task,), (optimizer,), rate=factor, tuned=True)
    for (task, optimizer, strategy), factor in _BEST.items()
)
