# SPDX-License-Identifier: Apache-2.0
"""Aggregators, one file each; a new one is one file and one line in AGGREGATORS."""

from commopt.aggregate.adam import Adam, committed_steps, exchange_norm
from commopt.aggregate.auto import Auto, auto_of, families
from commopt.aggregate.base import Action, Aggregator, Buffer, Call, Flat, LocalWork, WorkKind, call, context_for, work
from commopt.aggregate.compressed import Compressed
from commopt.aggregate.hierarchical import Hierarchical
from commopt.aggregate.local_sgd import LocalSGD
from commopt.aggregate.outer import Outer
from commopt.aggregate.powersgd import PowerSGD

AGGREGATORS: dict[str, type[Aggregator]] = {
    "flat": Flat,
    "hierarchical": Hierarchical,
    "compressed": Compressed,
    "powersgd": PowerSGD,
}

__all__ = [
    "AGGREGATORS",
    "Action",
    "Adam",
    "Aggregator",
    "Auto",
    "Buffer",
    "Call",
    "Compressed",
    "Flat",
    "Hierarchical",
    "LocalSGD",
    "LocalWork",
    "Outer",
    "PowerSGD",
    "WorkKind",
    "auto_of",
    "call",
    "committed_steps",
    "context_for",
    "exchange_norm",
    "families",
    "work",
]
