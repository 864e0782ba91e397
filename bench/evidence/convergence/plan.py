# SPDX-License-Identifier: Apache-2.0
"""What is compared: a small GPT with every preset under several optimizers, a larger one, and LocalSGD's periods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from commopt import DGC, Aggregator, LocalSGD, OneBit, PowerSGD, Quantize
from commopt.command_line import CommandParser
from examples import train_gpt

OPTIMIZERS: Mapping[str, Sequence[str]] = {
    "sgd": ("--optimizer", "sgd"),
    "adamw": ("--optimizer", "adamw"),
    "adamw_short": ("--optimizer", "adamw", "--betas", "0.5", "0.95"),
    "muon": ("--optimizer", "muon"),
}
"""What each is on the example's command line."""
NO_FEEDBACK = ":feedback=None"
STOCK = "ddp"
REVERSED = ", windows reversed"
NULL = STOCK + REVERSED
"""Stock DDP on the same batches, whose windows come in reverse order: its sums differ by their rounding alone."""
FACTORS = (0.5, 1.0, 2.0)
"""Of a task's learning rate: what is tried, in shorter trainings with a seed of their own."""
RATE_SEED = 100
_QUICK_STEPS = 20
_QUICK_LOOK_EVERY = 10


@dataclass(frozen=True)
class Entry:
    """A strategy, and what it is tried with."""

    strategy: str
    optimizers: tuple[str, ...]
    aggregator: Aggregator | None = None
    """What averages where the strategy is no preset's name."""
    is_tuned: bool = False
    """Whether its best learning rate is looked for, and trained with beside stock DDP's."""
    turn: int = 0
    """When it is trained: after all entries of an earlier turn, with all seeds."""
    rate: float = 1.0
    """Times the task's learning rate."""

    @property
    def name(self) -> str:
        """What its trainings are called."""
        return self.strategy if self.rate == 1 else f"{self.strategy}, rate x {self.rate:g}"


@dataclass(frozen=True)
class Task:
    """The example's model and data, and how long it learns; the learning rate falls to zero over `steps`."""

    name: str
    steps: int
    look_every: int
    model: tuple[str, ...]
    """Options of the example's command line."""
    learning_rates: tuple[tuple[str, float], ...]
    """By optimizer: stock DDP's best of FACTORS, where rates are tried."""
    windows: int = train_gpt.HELD_OUT_WINDOWS
    """Of the text that is held out."""
    rate_steps: int = 0
    """How long rates are tried."""

    def start(self, optimizer: str, seed: int, device: torch.device, rate: float = 1.0) -> train_gpt.Training:
        """Return the example's fresh model and data. Collective."""
        parser = CommandParser()
        train_gpt.add_model_options(parser)
        chosen = {"seed": seed, "decay-steps": self.steps, "learning-rate": rate * dict(self.learning_rates)[optimizer]}
        options = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
        return train_gpt.Training(parser.parse_args([*self.model, *OPTIMIZERS[optimizer], *options]), device)

    @property
    def for_rates(self) -> Task:
        """The shorter one that learning rates are tried on."""
        return replace(self, name=f"{self.name}-rates", steps=self.rate_steps, look_every=self.rate_steps)

    @property
    def shortened(self) -> Task:
        """A few steps of it: enough to see that everything runs."""
        return replace(self, steps=_QUICK_STEPS, look_every=_QUICK_LOOK_EVERY, rate_steps=_QUICK_STEPS // 2)


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


@dataclass(frozen=True)
class Comparison:
    """One task with several strategies, on nodes of so many ranks."""

    task: Task
    entries: tuple[Entry, ...]
    ranks_per_node: tuple[int, ...]
    seeds: int

    def rate_cases(self) -> list[Case]:
        """Return the trainings that try learning rates."""
        tuned = [replace(entry, rate=factor) for entry in self.entries if entry.is_tuned for factor in FACTORS]
        return [
            Case(self.task.for_rates, optimizer, entry, RATE_SEED) for entry in tuned for optimizer in entry.optimizers
        ]

    def cases(self, losses: Mapping[tuple[str, str, str, int], float]) -> list[Case]:
        """Return every training to compare, seed after seed, so that an interrupted run has compared what it could.

        losses: of `rate_cases`, by key. A strategy whose best rate is another than stock DDP's is trained at both.
        """
        tried: dict[tuple[str, Entry], dict[float, float]] = {}
        for case in self.rate_cases():
            of_entry = tried.setdefault((case.optimizer, replace(case.entry, rate=1.0)), {})
            of_entry[case.entry.rate] = losses[case.key]
        best = {key: min(by_rate, key=by_rate.__getitem__) for key, by_rate in tried.items()}
        stock = {optimizer: rate for (optimizer, entry), rate in best.items() if entry.strategy == STOCK}
        usual = [(optimizer, entry) for entry in self.entries for optimizer in entry.optimizers]
        others = [
            (optimizer, replace(entry, rate=rate / stock[optimizer], turn=entry.turn + 1))
            for (optimizer, entry), rate in best.items()
            if rate != stock[optimizer]
        ]
        return [
            Case(self.task, optimizer, entry, seed)
            for turn in sorted({entry.turn for _, entry in (*usual, *others)})
            for seed in range(self.seeds)
            for optimizer, entry in (*usual, *others)
            if entry.turn == turn
        ]

    def settings(self) -> dict[str, Any]:
        """Return what must be equal for trainings to be comparable, as JSON has it."""
        task = self.task
        found = {
            "steps": task.steps,
            "look_every": task.look_every,
            "model": " ".join(task.model),
            "learning_rates": dict(task.learning_rates),
            "windows": task.windows,
            "rate_steps": task.rate_steps,
        }
        return {task.name: found}


# ---------------------------------------------------------------------------------- every preset, paired

_USUAL = ("sgd", "adamw", "muon")
_tuned = partial(Entry, optimizers=_USUAL, is_tuned=True)
_later = partial(Entry, optimizers=("sgd", "adamw"), turn=2)
_last = partial(Entry, optimizers=("sgd", "adamw"), turn=3)
# With one rank a node a flat preset is the same as its hierarchical_ one.
ENTRIES = (
    _tuned(STOCK, optimizers=tuple(OPTIMIZERS)),
    Entry(NULL, optimizers=tuple(OPTIMIZERS)),
    _later("hierarchical_bf16"),
    _later("hierarchical_quantized"),
    _later("hierarchical_quantized:bits=4", optimizers=_USUAL),
    _tuned("hierarchical_quantized:bits=2"),
    _last("hierarchical_quantized:bits=2:block=512"),
    _tuned("hierarchical_onebit", optimizers=("sgd", "muon")),
    _later("hierarchical_onebit", optimizers=("adamw",)),
    _last("hierarchical_onebit" + NO_FEEDBACK),
    _last("hierarchical_onebit:scale=mean"),
    _last("hierarchical_onebit:start_step=100"),
    _tuned("hierarchical_onebit:adam=True", optimizers=("adamw",)),
    _later("hierarchical_dgc:density=0.05"),
    _tuned("hierarchical_dgc:density=0.01", optimizers=("sgd", "adamw_short", "muon")),
    _later("hierarchical_dgc:density=0.01", optimizers=("adamw",)),
    _last(f"hierarchical_dgc:density=0.01{NO_FEEDBACK}"),
    _later("hierarchical_dgc:min_elements=1"),
    _later("hierarchical_powersgd:matrix_rank=16"),
    _tuned("hierarchical_powersgd"),
    _last("hierarchical_powersgd" + NO_FEEDBACK),
    _later("hierarchical_powersgd:matrix_rank=1"),
    _tuned("torch_powersgd", optimizers=("adamw",)),
    _tuned("onebit_local"),
    _later("onebit_local:delay=4:fragments=4", optimizers=("adamw",)),
)
GPT = Task(
    name="gpt",
    steps=400,
    look_every=40,
    model=("--layers", "2", "--width", "64", "--context", "32", "--batch", "4"),
    learning_rates=(("sgd", 0.05), ("adamw", 3e-3)),
)
"""On four ranks or more, at moderate rates."""
PAIRED = replace(
    GPT,
    steps=300,
    look_every=50,
    model=(*GPT.model[:-1], "8"),
    learning_rates=(("sgd", 0.2), ("adamw", 0.012), ("adamw_short", 0.018), ("muon", 0.024)),
    windows=256,
    rate_steps=150,
)
MAIN = Comparison(PAIRED, ENTRIES, (1, 1), seeds=8)

# ------------------------------------------------------------------------------------ a larger GPT

_adamw = partial(Entry, optimizers=("adamw",))
LARGE = Comparison(
    Task(
        name="gpt-5m",
        steps=2000,
        look_every=100,
        model=("--layers", "4", "--width", "320", "--context", "32", "--batch", "2"),
        learning_rates=(("adamw", 1e-3),),
        windows=256,
    ),
    (
        _adamw(STOCK),
        _adamw(NULL),
        _adamw("hierarchical_onebit:adam=True"),
        _adamw("hierarchical_quantized:bits=2"),
        _adamw("hierarchical_powersgd"),
        _adamw("onebit_local:period=16:delay=4:fragments=4"),
    ),
    (1, 1),
    seeds=3,
)

# -------------------------------- what a period and a compressor cost together, and fragments, delay and merging beside

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


def of_aggregators(aggregators: Iterable[Aggregator], optimizers: tuple[str, ...]) -> list[Entry]:
    """Return an entry for each."""
    return [Entry(repr(each), optimizers, each) for each in aggregators]


_LOCAL = (
    *(LocalSGD(period=period, **options) for options in _OF_DELTAS for period in LOCAL_PERIODS),
    *(LocalSGD(period=16, compressor=OneBit(), **options) for options in _BESIDE),
)
LOCAL_ENTRIES = (_adamw(STOCK), _adamw("hierarchical"), *of_aggregators(_LOCAL, ("adamw",)))
LOCAL = Comparison(GPT, LOCAL_ENTRIES, (2, 2), seeds=3)


def chosen(patterns: Sequence[str], entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return stock DDP, which all are compared with, and the entries whose name has one of `patterns` in it.

    A pattern that is a name stands for that alone. Raises ValueError when a pattern is in none.
    """
    names, wanted = {entry.strategy for entry in entries}, set[str]()
    for pattern in patterns:
        found = {pattern} & names or {name for name in names if pattern in name}
        if not found:
            raise ValueError(f"{pattern!r} is in no strategy's name; known: {', '.join(sorted(names))}")
        wanted |= found
    return tuple(entry for entry in entries if not patterns or entry.strategy in {STOCK, *wanted})
