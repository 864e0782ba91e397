# SPDX-License-Identifier: Apache-2.0
"""The judge of a run with a parameter server, whose workers go on without each other. A pure function."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

from commopt.chaos.faults import FAULTS
from commopt.chaos.judge import (
    LOSS_WITHIN,
    Reference,
    RunRecord,
    RunVerdict,
    gist,
    hung,
    last_loss,
    named_ranks,
    verdict_on,
)

_LOST = "the parameter server is lost"


def judge_workers(run: RunRecord, reference: Reference, limit_s: float, timeout_s: float) -> RunVerdict:
    """Return how a run ended. Only who is struck, or cut off from the server, may fail, and has to; all others go on.

    limit_s: within which a rank has to notice what it cannot live with. timeout_s: for silence; a longer silence of a
        rank that comes back ends its work as well.
    """
    if (found := hung(run, reference, limit_s)) is not None:
        return found
    fault = FAULTS[run.fault]
    fails, may_fail = _failing(run), _silent(run) if fault.lasts_s >= timeout_s else set()
    workers = [rank for rank in run.left if rank != run.server and run.ranks[rank].digest is not None]
    for rank in run.left:
        mine = run.ranks[rank]
        if rank not in fails | may_fail and mine.error:
            said = f"{_name(run, rank)} could have gone on: {gist(mine.named or mine.error)}"
            return verdict_on(run, "unnamed error" if mine.named is None else "named error", said, ok=False)
        if rank in fails and not mine.error and mine.status == 0:
            return verdict_on(run, "wrong model", f"{_name(run, rank)} went on, and could not have")
        if unnamed := _unnamed(run, rank):
            return verdict_on(run, "unnamed error", unnamed)
    if wrong := _learns_less(run, reference, workers) or _unlike(run) or _miscounted(run):
        return verdict_on(run, "wrong model", wrong)
    told = Counter(_gist(run, rank) for rank in run.left if run.ranks[rank].error)
    words = [f"{count} of them: {text}" if len(told) > 1 else text for text, count in told.items()]
    if not workers:
        return verdict_on(run, "named error", "; ".join(words))
    return verdict_on(run, "right", "; ".join(["same loss, alike in every round", *words]))


def _failing(run: RunRecord) -> set[int]:
    """Return the ranks that cannot go on, those that a worker shares with a struck one included."""
    fault, workers = FAULTS[run.fault], set(range(len(run.ranks))) - {run.server}
    if run.fault == "partition":
        return _separated(run)
    if run.victim == run.server:
        return workers | {run.victim} if fault.fatal and run.fault != "diskfull" else set()
    return workers & set(run.cut) if fault.fatal or run.fault == "nan" else set()


def _separated(run: RunRecord) -> set[int]:
    """Return the ranks that are cut off from the server where the victim's node is."""
    return {rank for rank in range(len(run.ranks)) if (rank in run.cut) != (run.server in run.cut)}


def _silent(run: RunRecord) -> set[int]:
    """Return the workers that lose the server if the fault lasts."""
    workers = set(range(len(run.ranks))) - {run.server}
    if FAULTS[run.fault].of_link:
        return _separated(run)
    return workers if run.victim == run.server else workers & set(run.cut)


def _unnamed(run: RunRecord, rank: int) -> str:
    """Return what is wrong with how a rank ended, "" where it has a name for the fault, or none to tell."""
    mine, fault = run.ranks[rank], FAULTS[run.fault]
    if mine.noticed_s is None:
        return f"{_name(run, rank)} died without a word, with status {mine.status}"
    if not mine.error:
        unsaved = run.fault == "diskfull" and rank == run.victim == run.server  # its last state is in no file
        said = f"{_name(run, rank)} ended with status {mine.status} after its script"
        return "" if mine.status == int(unsaved) else said
    if rank == run.victim and fault.cause:
        says = re.search(fault.cause, mine.error)
        return "" if says else f"{_name(run, rank)} does not say why: {gist(mine.error)}"
    if mine.named is None:
        return f"{_name(run, rank)} raised no error of commopt: {gist(mine.error)}"
    if fault.fatal and not fault.of_link and run.victim != run.server:  # in the world of its worker the first rank is 0
        place = run.victim - min(run.cut)
        return "" if place in named_ranks(mine.named) else f"rank {rank} does not name rank {place}: {gist(mine.named)}"
    expected = "not finite" if run.fault == "nan" else _LOST
    return "" if expected in mine.named else f"{_name(run, rank)} does not name the fault: {gist(mine.named)}"


def _learns_less(run: RunRecord, reference: Reference, workers: Sequence[int]) -> str:
    """Return why the workers that went on have not learned as much as without a fault, "" where they have.

    Which deltas a round has is a matter of time, so losses of a single worker vary. Where a worker is gone, all of them
    have made fewer steps, so the loss is compared with that after as many.
    """
    if not workers:
        return ""
    usual = max(
        fmean(last_loss(each.ranks[rank], min(1.0, _work(run) / _work(each))) for rank in workers)
        for each in reference.runs
    )
    loss = fmean(last_loss(run.ranks[rank]) for rank in workers)
    if loss <= usual * (1 + LOSS_WITHIN):
        return ""
    return f"workers end with a mean loss of {loss:.4g}, and without the fault with {usual:.4g}"


def _work(run: RunRecord) -> int:
    """Return the steps of all workers."""
    return sum(len(each.steps) for rank, each in enumerate(run.ranks) if rank != run.server)


def _unlike(run: RunRecord) -> str:
    """Return which workers had other bits of the same round, "" where none had."""
    seen: dict[int, dict[str, int]] = defaultdict(dict)
    for rank, each in enumerate(run.ranks):
        for number, digest in each.pulled:
            seen[number].setdefault(digest, rank)
    for number, found in sorted(seen.items()):
        if len(found) > 1:
            first, second, *_ = found.values()
            return f"ranks {first} and {second} pulled different parameters of round {number}"
    return ""


def _miscounted(run: RunRecord) -> str:
    """Return what is wrong with the work that the server counted, "" where each step of a worker counts once.

    Nobody knows of the last delta of a worker that is gone whether it counted, nor of its last step.
    """
    assert run.server is not None
    total = run.ranks[run.server].done
    if total is None or run.ranks[run.server].error:
        return ""
    workers = [(each, each.done) for rank, each in enumerate(run.ranks) if rank != run.server]
    counted = [(each, done) for each, done in workers if done is not None]  # one of each worker's ranks
    least = sum(done for _, done in counted)
    unsure = sum(len(each.steps) + 1 - done for each, done in counted if each.digest is None)
    if least <= total <= least + unsure:
        return ""
    most = f" to {least + unsure:g}" if unsure else ""
    return f"the server counts {total:g} steps, and its workers {least:g}{most}"


def _gist(run: RunRecord, rank: int) -> str:
    mine = run.ranks[rank]
    return gist(mine.named or mine.error)


def _name(run: RunRecord, rank: int) -> str:
    return "the server" if rank == run.server else f"rank {rank}"
