# SPDX-License-Identifier: Apache-2.0
"""From counts at 8 to 64 ranks to thousands: what a rank asks is constant, or grows with the number of ranks.

The model, in whole:

    law          requests, files and memory of all ranks = a polynomial of their number n, by least squares: of the
                 first degree if that is nowhere off by more than 3 % (requests 10 %), else of the second
    store        messages of one agreement x processor time of the store for each, as for a short message from 1 to 64
                 clients, or as in the largest crowd; looks that find nothing come on top, 20,000 a second
    late looks   two waits in each agreement; in each the answer is seen late by the first pause between two looks
                 (n / 20,000 s), or a quarter of the wait
    reading      each rank reads the answers of all: measured, of as many ranks
    way          12 requests one after the other, each 0.2 ms to the store and back
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from bench.evidence.scale.counting import POLL

FIRST_LOOKS_PER_S = 20000.0
CLOCKED = 0.1
"""How far off a law of requests may be: rank 0 reads while others arrive, as often as a clock says."""
_ROUND_TRIP_S = 0.2e-3
_ROUND_TRIPS = 12
_MESSAGES = {"get": 2, "multi_get": 2}  # torch's client first waits for the keys
START = ("setup", "attach", "first steps")
"""Phases of a start in which commopt asks the store."""

Row = Mapping[str, Any]


class Law:
    """What all of n ranks ask or hold, from what one does on average: a polynomial of n."""

    def __init__(self, of_one: Mapping[int, float], highest: int = 2, off: float = 0.03) -> None:
        sizes = np.array(list(of_one), float)
        totals = sizes * np.array(list(of_one.values()), float)
        for degree in range(1, highest + 1):
            self._factors = np.polyfit(sizes, totals, degree, w=1 / np.maximum(totals, 1.0))
            misses = np.abs(np.polyval(self._factors, sizes) - totals) / np.maximum(totals, 1.0)
            if misses.max() < off:
                break

    def __call__(self, ranks: int) -> float:
        return float(np.polyval(self._factors, ranks))

    def __str__(self) -> str:
        """The polynomial without its constant, which rank 0 makes."""
        powers = ["", "\u00b2", "\u00b3"][len(self._factors) - 2 :: -1]
        parts = [f"{part:.2g} n{power}" for part, power in zip(self._factors, powers, strict=False)]
        return " + ".join(parts).replace("+ -", "- ")


class Results:
    """The rows of a file of results."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = list(rows)
        self.worlds = {row["ranks"]: {each["phase"]: each for each in row["phases"]} for row in self.of("world")}
        self.crowds = {row["ranks"]: row for row in self.of("crowd")}
        self.answers = {row["ranks"]: row for row in self.of("answers")}

    def of(self, what: str) -> list[Row]:
        """Return the rows of one kind."""
        return [row for row in self._rows if row["what"] == what]

    def each(self, read: Callable[[Mapping[str, Row]], float]) -> dict[int, float]:
        """Return a figure of each world, by its number of ranks."""
        return {ranks: read(phases) for ranks, phases in self.worlds.items()}

    def requests(self, owner: str, phases: Sequence[str]) -> dict[int, float]:
        """Return how many requests a rank makes on average in some phases, without those that found nothing yet."""
        return self.each(lambda world: sum(requests_of(world[name], owner) for name in phases) / _ranks_in(world))

    @property
    def agreements(self) -> int:
        """How many agreements a start has: each has one verdict, which is written once."""
        world = self.worlds[max(self.worlds)]
        return sum(world[name]["requests"].get("commopt compare_set", 0) for name in START)

    @property
    def crowd_message_s(self) -> float:
        """Processor time of the store for a message, with as many connections as the largest crowd has ranks."""
        crowd = self.crowds[max(self.crowds)]
        return float(crowd["host_cpu_s"] / (messages_of(crowd, "commopt") + looks_of(crowd)))

    def agreement_s(self, ranks: int, message_s: float) -> float:
        """Return for how long the store works on one agreement, while ranks that wait look at it too."""
        messages = self.each(lambda world: messages_of(world["agreement 2"], "commopt") / _ranks_in(world))
        return Law(messages, off=CLOCKED)(ranks) * message_s / (1 - FIRST_LOOKS_PER_S * message_s)

    @property
    def message_us(self) -> float:
        """Processor time of the store for a short message, the median over several numbers of clients."""
        return float(median(row["us"] for row in self.of("host") if row["request"] == "check"))

    def lost_rank(self, ranks: int) -> float:
        """Return the requests of all ranks until they know of a lost one: the law, and the most looks in any world."""
        looks = max(looks_of(world["failure"]) / _ranks_in(world) for world in self.worlds.values())
        return Law(self.requests("commopt", ("failure",)), off=CLOCKED)(ranks) + looks * ranks

    def start_s(self, ranks: int, message_s: float | None = None) -> dict[str, float]:
        """Return what commopt adds to the start of a world, by part. message_s: of the store; None: `message_us`."""
        message_s = 1e-6 * self.message_us if message_s is None else message_s
        store_s = self.agreements * self.agreement_s(ranks, message_s)
        return {
            "store": store_s,
            "late looks": max(2 * self.agreements * ranks / FIRST_LOOKS_PER_S, store_s / 4),
            "reading": self.agreements * self.answers[ranks]["read_s"],
            "way": self.agreements * _ROUND_TRIPS * _ROUND_TRIP_S,
        }

    def torch_store_s(self, ranks: int, phases: Sequence[str]) -> float:
        """Return the processor time of the store for what gloo asks to connect all ranks."""
        messages = self.each(lambda world: sum(messages_of(world[name], "torch") for name in phases) / _ranks_in(world))
        return Law(messages)(ranks) * self.message_us * 1e-6

    def torch_gb(self, ranks: int, phase: str) -> float:
        """Return the bytes that gloo's addresses are in the store's answers: each rank's are as long as the world."""
        nbytes = self.each(lambda world: world[phase]["nbytes"].get("torch", 0) / _ranks_in(world))
        return Law(nbytes, highest=3)(ranks) / 1e9

    def files(self, phase: str) -> dict[int, float]:
        """Return the files that a rank has open after a phase, without those it began with."""
        return self.each(lambda world: world[phase]["files"] - world["nothing"]["files"])

    def memory_kib(self, phase: str, before: str) -> dict[int, float]:
        """Return the memory that a rank has taken between the ends of two phases."""
        return self.each(lambda world: world[phase]["kib"] - world[before]["kib"])


def _ranks_in(world: Mapping[str, Row]) -> int:
    return int(world["nothing"]["ranks"])


def requests_of(phase: Row, owner: str) -> int:
    """Return the requests of all ranks in a phase, without those that found nothing yet."""
    return sum(count for kind, count in phase["requests"].items() if kind.startswith(owner) and POLL not in kind)


def looks_of(phase: Row) -> int:
    """Return the requests of all ranks that found nothing yet."""
    return sum(count for kind, count in phase["requests"].items() if POLL in kind)


def messages_of(phase: Row, owner: str) -> int:
    """Return the messages of these requests that the store answers."""
    kinds = {kind: count for kind, count in phase["requests"].items() if kind.startswith(owner) and POLL not in kind}
    return sum(count * _MESSAGES.get(kind.split()[1], 1) for kind, count in kinds.items())
