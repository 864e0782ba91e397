# SPDX-License-Identifier: Apache-2.0
"""Tables of what was counted, measured and extrapolated."""

from __future__ import annotations

from collections.abc import Callable

from bench.document import table
from bench.evidence.scale.counting import POLL
from bench.evidence.scale.job import BEATS
from bench.evidence.scale.law import CLOCKED, Law, Results, Row, looks_of, requests_of
from commopt.groups.membership import paced_interval_s

LARGE = (64, 512, 1024, 4096)
_BEAT_S = 5.0


def counted(results: Results) -> str:
    """Return what one rank asks the store in each phase, and the law of it."""
    worlds = sorted(results.worlds)
    rows = []
    for title, owner, phases in (
        ("torch's group of gloo", "torch", ("torch",)),
        ("commopt's groups of gloo", "torch", ("setup",)),
        ("groups: `join`", "commopt", ("setup",)),
        ("one agreement", "commopt", ("agreement 2",)),
        ("`attach`", "commopt", ("attach",)),
        ("first steps", "commopt", ("first steps",)),
        ("a lost rank, until all know", "commopt", ("failure",)),
    ):
        counts = results.requests(owner, phases)
        rows.append([title, *(f"{counts[ranks]:.1f}" for ranks in worlds), str(Law(counts, off=CLOCKED))])
    beats = results.each(
        lambda world: requests_all(world["heartbeat"], "heartbeat") / world["nothing"]["ranks"] / BEATS
    )
    rows.append(["heartbeat, an interval", *(f"{beats[ranks]:.1f}" for ranks in worlds), str(Law(beats, off=CLOCKED))])
    return table(["requests of a rank", *(f"{ranks} ranks" for ranks in worlds), "law of all"], rows)


def requests_all(phase: Row, owner: str) -> int:
    """Return all requests in a phase, with those that find nothing."""
    return requests_of(phase, owner) + int(phase["requests"].get(f"{owner} {POLL}", 0))


def seconds(results: Results) -> str:
    """Return how long each phase took on this machine, whose processors all ranks share."""
    worlds = sorted(results.worlds)
    phases = {"groups: `join`": "setup", "one agreement": "agreement 2", "`attach`": "attach"}
    phases |= {"a lost rank, until all know": "failure"}
    rows = [
        [title, *(f"{results.worlds[ranks][name]['seconds']:.2f}" for ranks in worlds)]
        for title, name in phases.items()
    ]
    named = [f"{results.worlds[ranks]['failure']['named']} of {ranks - 1}" for ranks in worlds]
    rows.append(["ranks that name the lost one", *named])
    return table(["seconds", *(f"{ranks} ranks" for ranks in worlds)], rows)


def crowd(results: Results) -> str:
    """Return what an agreement of ranks that are threads asks of a store, and the work of the store."""
    rows = []
    for ranks, row in sorted(results.crowds.items()):
        polls = looks_of(row)
        asked = sum(row["requests"].values()) - polls
        rows.append(
            [
                f"{ranks:,}",
                f"{asked / ranks:.1f}",
                f"{polls / ranks:.1f}",
                f"{row['nbytes'] / 1e6:.2f}",
                f"{1e3 * row['host_cpu_s']:.0f}",
            ]
        )
    headings = [
        "ranks",
        "requests of a rank",
        "looks that found nothing",
        "MB in all",
        "processor time of the store, ms",
    ]
    return table(headings, rows)


def host(results: Results) -> str:
    """Return what one request costs the store."""
    rows = [[row["request"], str(row["clients"]), f"{row['us']:.1f}"] for row in results.of("host")]
    return table(["request", "clients", "work of the store, us"], rows)


def large(results: Results) -> str:
    """Return the cost of everything at thousands of ranks."""
    begun, own = results.files("torch"), results.files("setup")
    # The first connection of each rank is there from the start.
    host_files = results.each(
        lambda w: 1 + (w["setup"]["host_files"] - w["nothing"]["host_files"]) / w["nothing"]["ranks"]
    )
    joined_kib = results.memory_kib("setup", "torch")
    crowded_s = results.crowd_message_s
    rows: list[tuple[str, Callable[[int], str]]] = [
        ("agreements of a start, s", lambda n: f"{sum(results.start_s(n).values()):.2f}"),
        ("the same, the store's machine overloaded, s", lambda n: f"{sum(results.start_s(n, crowded_s).values()):.2f}"),
        ("of the first the store's work, s", lambda n: f"{results.start_s(n)['store']:.2f}"),
        ("of the first late looks, s", lambda n: f"{results.start_s(n)['late looks']:.2f}"),
        ("of the first reading all answers, s", lambda n: f"{results.start_s(n)['reading']:.2f}"),
        ("answers that each rank reads, KB", lambda n: f"{results.answers[n]['packed_nbytes'] / 1e3:.1f}"),
        ("the same of all ranks, MB", lambda n: f"{n * results.answers[n]['packed_nbytes'] / 1e6:,.1f}"),
        ("the same without packing, MB", lambda n: f"{n * results.answers[n]['plain_nbytes'] / 1e6:,.0f}"),
        ("heartbeat, requests a second", lambda n: f"{3 * n / paced_interval_s(_BEAT_S, n):,.0f}"),
        ("a lost rank, requests in 3 s", lambda n: f"{results.lost_rank(n):,.0f}"),
        ("files of the store's process", lambda n: f"{Law(host_files)(n):,.0f}"),
        ("gloo: files of a rank, torch's", lambda n: f"{Law(begun)(n) / n:,.0f}"),
        ("gloo: with commopt's", lambda n: f"{Law(own)(n) / n:,.0f}"),
        ("gloo: memory of commopt's, MB a rank", lambda n: f"{Law(joined_kib)(n) / n / 1024:.0f}"),
        ("gloo: torch's work at the store, s", lambda n: f"{results.torch_store_s(n, ('torch',)):.1f}"),
        ("gloo: its addresses through the store, GB", lambda n: f"{results.torch_gb(n, 'torch'):,.2f}"),
        ("gloo: commopt's groups at the store, s", lambda n: f"{results.torch_store_s(n, ('setup',)):.1f}"),
    ]
    cells = [[title, *(figure(ranks) for ranks in LARGE)] for title, figure in rows]
    return table(["cost", *(f"{ranks:,} ranks" for ranks in LARGE)], cells)


TABLES: dict[str, Callable[[Results], str]] = {
    "counted": counted,
    "seconds": seconds,
    "crowd": crowd,
    "host": host,
    "large": large,
}
