"""The order in which the chunks of a buffer go up, across and down: two levels of the network work at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from commopt.aggregate.routes import Route
from commopt.lanes import Second, Started


def follow(routes: Sequence[Route], second: Second | None) -> Iterator[Tensor]:
    """Run all stages of all `routes`; yield what each `down` returns, in order.

    The first lane runs up(1), up(2), down(1), up(3), down(2), ..., the second across(1), across(2), ... beside it.
    Without a second lane everything runs in one line: up(1), across(1), up(2), across(2), down(1), ... Each team sees
    its collectives in the same order either way, so some ranks may have a second lane and others none. No more than two
    chunks are on their way at a time.
    """
    ahead = None
    for route in routes:
        route.up()
        started = None
        if second is None:
            route.across()
        else:
            started = second.start(route.across)
        if ahead is not None:
            yield _land(*ahead)
        ahead = route, started
    if ahead is not None:
        yield _land(*ahead)


def _land(route: Route, started: Started | None) -> Tensor:
    if started is not None:
        started.join()
    return route.down()
