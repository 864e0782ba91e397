# SPDX-License-Identifier: Apache-2.0
"""What messages cost: curves fitted to measurements, the table of all links, and the price of every aggregator."""

from commopt.cost.curve import Curve, LineSegment, Point
from commopt.cost.links import PRIMITIVES, LinkCost, LinkKey, Links, LinksHeader, WorkKey, ring
from commopt.cost.nominal import Speeds, nominal_links, tree_us
from commopt.cost.price_table import PriceTable
from commopt.cost.pricing import Cost, Pricing, cost, first_node, price

__all__ = [
    "PRIMITIVES",
    "Cost",
    "Curve",
    "LineSegment",
    "LinkCost",
    "LinkKey",
    "Links",
    "LinksHeader",
    "Point",
    "PriceTable",
    "Pricing",
    "Speeds",
    "WorkKey",
    "cost",
    "first_node",
    "nominal_links",
    "price",
    "ring",
    "tree_us",
]
