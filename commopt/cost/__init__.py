"""What messages cost: curves fitted to measurements, the table of all links, and the price of every aggregator."""

from commopt.cost.aggregator import Cost, Pricing, cost, cost_us, price
from commopt.cost.curve import Curve, Point, Segment
from commopt.cost.formulas import StageTimes, best_chunks, pipelined_us
from commopt.cost.links import Header, LinkKey, Links, WorkKey
from commopt.cost.nominal import Speeds, nominal_links

__all__ = [
    "Cost",
    "Curve",
    "Header",
    "LinkKey",
    "Links",
    "Point",
    "Pricing",
    "Segment",
    "Speeds",
    "StageTimes",
    "WorkKey",
    "best_chunks",
    "cost",
    "cost_us",
    "nominal_links",
    "pipelined_us",
    "price",
]
