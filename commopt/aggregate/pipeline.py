"""The order in which the chunks of a buffer go up, across and down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from commopt.aggregate.routes import Route


def follow(routes: Sequence[Route]) -> Iterator[Tensor]:
    """Run all stages of all `routes`; yield what each `down` returns, in order."""
    for route in routes:
        route.up()
        route.across()
        yield route.down()
