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
FACTORS = (0.5, 1.0, 2.0)
"""Of a task's learning rate: what is tried."""

GPT_5M = Task(
    name="gpt-5m",
    steps=2000,
    look_every=100,
    model=("--layers", "4", "--width", "320", "--context", "32", "--batch", "2"),
    learning_rates=(("adamw", 1e-3), ("sgd", 0.1)),
)
RESNET = Task("resnet18", 400, 40, (), (("sgd", 0.05), ("adamw", 2e-3)), example=resnet)
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

_KINDS = [
    (task.name, optimizer, strategy)
    for task in TASKS
    for optimizer, _ in task.learning_rates
    for strategy in _STRATEGIES[optimizer]
]
RATE_ENTRIES = tuple(
    Entry(strategy, (task,), (optimizer,), rate=factor) for task, optimizer, strategy in _KINDS for factor in FACTORS
)
# All that were tried are best at the task's own rate: bench/results/convergence_large_rates.json.
ENTRIES = tuple(entry for entry in RATE_ENTRIES if entry.rate == 1)
