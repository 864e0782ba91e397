"""Aggregators, one file each; a new one is one file and one line in AGGREGATORS."""

from commopt.aggregate.auto import Auto
from commopt.aggregate.base import Aggregator
from commopt.aggregate.compressed import Compressed
from commopt.aggregate.flat import Flat
from commopt.aggregate.hierarchical import Hierarchical
from commopt.aggregate.periodic import PeriodicAverage
from commopt.aggregate.powersgd import PowerSGD

AGGREGATORS: dict[str, type[Aggregator]] = {
    "flat": Flat,
    "hierarchical": Hierarchical,
    "compressed": Compressed,
    "powersgd": PowerSGD,
}

__all__ = ["AGGREGATORS", "Aggregator", "Auto", "Compressed", "Flat", "Hierarchical", "PeriodicAverage", "PowerSGD"]
