# SPDX-License-Identifier: Apache-2.0
"""What is compared: the two examples under two optimizers, with every preset, at several strengths; FSDP2 beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from bench.evidence.convergence import resnet
from bench.training.report import STOCK
from commopt import DGC, Aggregator, LocalSGD, OneBit, PowerSGD, Quantize
from commopt.command_line import CommandParser
from examples import train_digits, train_gpt

RANKS_PER_NODE = (2, 2)
RATE = "50mbit"
SEEDS = (0, 1, 2)
OPTIMIZERS = ("sgd", "adamw")
NO_FEEDBACK = ":feedback=None"

_QUICK_STEPS = 20
_QUICK_LOOK_EVERY = 10

Training = train_digits.Training | train_gpt.Training | resnet.Training


@dataclass(frozen=True)
class Entry:
    """A strategy, and what it is tried on."""

    strategy: str
    tasks: tuple[str, ...] = ("digits", "gpt")
    optimizers: tuple[str, ...] = OPTIMIZERS
    on_link: bool = False
    """Whether its step is also timed where the network is slow."""
    aggregator: Aggregator | None = None
    """What averages where the strategy is no preset's name."""
    rate: float = 1.0
    """Times the task's learning rate."""
    betas: tuple[float, float] | None = None
    """Of the GPT's AdamW; None: the example's own."""

    @property
    def kind(self) -> str:
        """What its trainings at every learning rate are called."""
        return self.strategy if self.betas is None else f"{self.strategy}, AdamW's betas {self.betas}"

    @property
    def name(self) -> str:
        """What its trainings are called."""
        return self.kind if self.rate == 1 else f"{self.kind}, rate x {self.rate:g}"


def _local_sgd(optimizer: str, tasks: tuple[str, ...] = ("digits", "gpt"), **options: Any) -> Entry:
    aggregator = LocalSGD(**options)
    return Entry(repr(aggregator), tasks, (optimizer,), aggregator=aggregator)


# Flat presets compress what four ranks exchange; the GPT is for what nodes exchange, and timed on their links as well.
_flat = partial(Entry, tasks=("digits",))
_on_link = partial(Entry, on_link=True)
# Adam's betas in the hook are those of the GPT's AdamW.
_own_adam = partial(Entry, tasks=("gpt",), optimizers=("adamw",))

ENTRIES = (
    _on_link("ddp"),
    _flat("flat"),
    _on_link("hierarchical"),
    _on_link("hierarchical_bf16"),
    _flat("quantized"),
    _on_link("hierarchical_quantized"),
    _on_link("hierarchical_quantized:bits=4"),
    _on_link("hierarchical_quantized:bits=2"),
    _flat("onebit"),
    _on_link("hierarchical_onebit"),
    Entry("hierarchical_onebit" + NO_FEEDBACK),
    Entry("hierarchical_onebit:start_step=100"),
    _own_adam("hierarchical_onebit:adam=True"),
    Entry("hierarchical_onebit:scale=mean"),
    _flat("dgc"),
    _on_link("hierarchical_dgc"),
    Entry("hierarchical_dgc" + NO_FEEDBACK),
    Entry("hierarchical_dgc:warmup=((40,0.25),(40,0.0625))"),
    _on_link("hierarchical_dgc:density=0.05"),
    _on_link("hierarchical_dgc:min_elements=1"),
    _own_adam("hierarchical_dgc:adam=True"),
    _flat("powersgd"),
    _on_link("hierarchical_powersgd"),
    Entry("hierarchical_powersgd" + NO_FEEDBACK),
    Entry("hierarchical_powersgd:start_step=50"),
    _on_link("hierarchical_powersgd:matrix_rank=1"),
    _on_link("hierarchical_powersgd:matrix_rank=16"),
    *(_local_sgd("sgd", period=period, start_step=start) for start in (0, 100) for period in (2, 4, 8, 16)),
    _own_adam("onebit_local"),
    _own_adam("onebit_local:delay=4:fragments=4"),
)

# What a period and a compressor cost together, and what fragments, delay and merging do beside.
LOCAL_PERIODS = (4, 16, 64)
_OF_DELTAS: tuple[dict[str, Any], ...] = (
    {},
    {"compressor": Quantize(bits=4)},
    {"compressor": OneBit()},
    {"compressor": PowerSGD(4, start_step=0)},  # no dense round first: there are few
    {"compressor": DGC(1 / 64), "decay": 0.95},
)
_BESIDE: tuple[dict[str, Any], ...] = (
    {"fragments": 4},
    {"delay": 4},
    {"fragments": 4, "delay": 4},
    {"fragments": 4, "delay": 4, "merge": 0.5},
)
_deltas = partial(_local_sgd, "adamw", ("gpt",))
LOCAL_ENTRIES = (
    _own_adam("ddp"),
    _own_adam("hierarchical"),
    *(_deltas(period=period, **options) for options in _OF_DELTAS for period in LOCAL_PERIODS),
    *(_deltas(period=16, compressor=OneBit(), **options) for options in _BESIDE),
)

# Each at its own best learning rate: what compresses updates may want another than what compresses gradients.
RATES = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
_LOW, _USUAL, _HIGH = RATES[:4], RATES[1:5], RATES[3:7]
# A first moment that forgets sooner, of dense AdamW and of the gradient path too: what do the betas alone do?
_SHORT_MEMORY = (0.5, 0.95)
_AT_RATES = (
    (_own_adam("ddp"), RATES[1:6]),
    (_own_adam("ddp", betas=_SHORT_MEMORY), _HIGH),
    (_own_adam("hierarchical_onebit:scale=mean"), _LOW),
    (_own_adam("hierarchical_onebit:scale=mean:adam=True"), RATES[1:6]),
    (_own_adam("hierarchical_onebit"), _USUAL),
    (_own_adam("hierarchical_onebit", betas=_SHORT_MEMORY), _HIGH),
    (_own_adam("hierarchical_onebit:adam=True"), RATES[1:6]),
    (_own_adam("hierarchical_onebit:adam=(0.5,0.95)"), _HIGH),
    (_own_adam("hierarchical_dgc"), _HIGH),
    (_own_adam("hierarchical_dgc", betas=_SHORT_MEMORY), _HIGH),
    (_own_adam("hierarchical_dgc:adam=True"), _LOW),
    (_own_adam("hierarchical_dgc:adam=(0.5,0.95)"), RATES[3:]),
    (_own_adam("hierarchical_quantized:bits=2"), _USUAL),
    (_own_adam("hierarchical_quantized:bits=2", betas=_SHORT_MEMORY), _HIGH),
    (_own_adam("hierarchical_quantized:bits=2:block=512"), RATES[1:6]),
    (_own_adam("hierarchical_quantized:bits=2:adam=True"), _USUAL),
    (_own_adam("hierarchical_quantized:bits=2:dense=('*norm*','*bias','*mlp.0*','head.0*')"), RATES[1:6]),
    (_own_adam("hierarchical_quantized:bits=4"), RATES[1:6]),
    (_own_adam("hierarchical_quantized:adam=True"), _USUAL),  # nearly exact: what averaging nodes' directions costs
    (_own_adam("hierarchical_powersgd"), _USUAL),
    (_own_adam("hierarchical_powersgd", betas=_SHORT_MEMORY), _HIGH),
)
RATE_ENTRIES = tuple(replace(entry, rate=rate) for entry, rates in _AT_RATES for rate in rates)

_hsdp = partial(Entry, tasks=("hsdp",), optimizers=("adamw",))
_fsdp = partial(Entry, tasks=("fsdp",), optimizers=("adamw",))
_BIT_FOR_BIT = ("hsdp-5m", "hsdp-5m-bf16")
SHARDED_ENTRIES = (
    _hsdp("hsdp", tasks=("hsdp", *_BIT_FOR_BIT)),
    _hsdp("flat", tasks=_BIT_FOR_BIT),
    _hsdp("hierarchical_quantized"),
    _hsdp("hierarchical_quantized:bits=4"),
    _hsdp("hierarchical_powersgd"),
    _fsdp("fsdp"),
    _fsdp("hierarchical_quantized+weights8"),
    _fsdp("hierarchical_quantized:bits=4+weights4"),
)


@dataclass(frozen=True)
class Task:
    """An example's model and data, and how long it learns; the learning rate falls to zero over `steps`."""

    name: str
    steps: int
    look_every: int
    model: tuple[str, ...]
    """Options of the example's command line."""
    learning_rates: tuple[tuple[str, float], ...]
    one_seed: bool = False
    example: ModuleType = train_gpt
    """What trains it."""

    def start(self, optimizer: str, seed: int, device: torch.device, entry: Entry) -> Training:
        """Return the example's fresh model and data, with an entry's learning rate and betas. Collective."""
        parser = CommandParser()
        self.example.add_model_options(parser)
        chosen = {"optimizer": optimizer, "seed": seed, self._decay: self.steps}
        chosen["learning-rate"] = entry.rate * dict(self.learning_rates)[optimizer]
        options = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
        if entry.betas is not None:
            options += ["--betas", *map(str, entry.betas)]
        training: Training = self.example.Training(parser.parse_args([*self.model, *options]), device)
        return training

    @property
    def _decay(self) -> str:
        return "decay-steps" if self.example is train_gpt else "steps"


DIGITS = Task("digits", 600, 60, (), (("sgd", 0.04), ("adamw", 3e-3)), example=train_digits)
GPT = Task(
    name="gpt",
    steps=400,
    look_every=40,
    model=("--layers", "2", "--width", "64", "--context", "32", "--batch", "4"),
    learning_rates=(("sgd", 0.05), ("adamw", 3e-3)),
)
TASKS = (DIGITS, GPT)
_HSDP = replace(GPT, name="hsdp", steps=500, look_every=50, model=(*GPT.model, "--parallel", "hsdp"))
_HSDP_5M = replace(
    _HSDP,
    name="hsdp-5m",
    steps=50,
    look_every=25,
    model=("--parallel", "hsdp", "--batch", "1", "--context", "16"),
    one_seed=True,
)
SHARDED_TASKS = (
    _HSDP,
    replace(_HSDP, name="fsdp", model=(*GPT.model, "--parallel", "fsdp")),
    _HSDP_5M,
    replace(_HSDP_5M, name="hsdp-5m-bf16", model=(*_HSDP_5M.model, "--bf16")),
)


def quick(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Return tasks that end after a few steps: enough to see that everything runs."""
    return tuple(replace(task, steps=_QUICK_STEPS, look_every=_QUICK_LOOK_EVERY) for task in tasks)


@dataclass(frozen=True)
class Case:
    """One training."""

    task: Task
    optimizer: str
    entry: Entry
    seed: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What tells it from the others in a file."""
        return self.task.name, self.optimizer, self.entry.name, self.seed


def cases(tasks: Sequence[Task], entries: Sequence[Entry], seeds: Sequence[int]) -> list[Case]:
    """Return every training, seed after seed, so that an interrupted run has compared as much as it could."""
    return [
        Case(task, optimizer, entry, seed)
        for seed in seeds
        for task in tasks
        for optimizer, _ in task.learning_rates
        for entry in entries
        if task.name in entry.tasks and optimizer in entry.optimizers and not (task.one_seed and seed != seeds[0])
    ]


def chosen(patterns: Sequence[str], entries: Sequence[Entry] = ENTRIES) -> tuple[Entry, ...]:
    """Return torch's own averages, which all are compared with, and the entries whose name has one of `patterns` in it.

    A pattern that is a name stands for that alone. Raises ValueError when a pattern is in none.
    """
    kinds, wanted = {entry.kind for entry in entries}, set[str]()
    for pattern in patterns:
        found = {pattern} & kinds or {kind for kind in kinds if pattern in kind}
        if not found:
            raise ValueError(f"{pattern!r} is in no strategy's name; known: {', '.join(sorted(kinds))}")
        wanted |= found
    return tuple(entry for entry in entries if not patterns or entry.strategy in STOCK or entry.kind in wanted)


def settings(tasks: Sequence[Task]) -> dict[str, Any]:
    """Return what must be equal for trainings to be comparable, as JSON has it."""
    return {
        task.name: {
            "steps": task.steps,
            "look_every": task.look_every,
            "model": " ".join(task.model),
            "learning_rates": dict(task.learning_rates),
        }
        for task in tasks
    }
