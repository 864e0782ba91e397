"""Ranks compare notes through the rendezvous store before the first collective could hang.

A store exchange, unlike a collective, can say who is missing and carries text of any length.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from commopt.errors import MismatchError

Facts = dict[str, Any]

# How much longer the others wait for rank 0's verdict than rank 0 waits for them.
_VERDICT_MARGIN_S = 5.0


def exchange_facts(
    store: dist.Store,
    ranks: Sequence[int],
    me: int,
    purpose: str,
    facts: Mapping[str, Any],
    timeout_s: float,
    interrupt: Callable[[], None] = lambda: None,
) -> list[Facts]:
    """Return the `facts` (JSON values) of all `ranks`, in their order; every one of them must call it.

    `me` is this process's place in `ranks`, which are global ranks; `store` must be private to them. `interrupt` is
    called while waiting and may raise. Raises MismatchError on every rank when one does not call within `timeout_s`.
    """
    # Equal calls need equal keys. The count lives in the store, so that a process group initialized a second time
    # over the same store (torchrun keeps one) never reads the answers of its predecessor.
    prefix = f"commopt/meeting/{store.add(f'commopt/meetings_of/{me}', 1)}"
    store.set(f"{prefix}/{me}", json.dumps({"purpose": purpose, **facts}))
    if me == 0:
        missing = _wait_for(store, {f"{prefix}/{place}": place for place in range(len(ranks))}, timeout_s, interrupt)
        answers = [] if missing else [_read(store, f"{prefix}/{place}") for place in range(len(ranks))]
        verdict = {"missing": missing, "answers": answers}
        store.set(f"{prefix}/verdict", json.dumps(verdict))
    elif _wait_for(store, {f"{prefix}/verdict": 0}, timeout_s + _VERDICT_MARGIN_S, interrupt):
        # Rank 0 may wait for somebody itself.
        absent = [place for place in range(len(ranks)) if not store.check([f"{prefix}/{place}"])]
        verdict = {"missing": absent or [0]}
    else:
        verdict = _read(store, f"{prefix}/verdict")
    if verdict["missing"]:
        names = ", ".join(str(ranks[place]) for place in verdict["missing"])
        raise MismatchError(
            f"rank {names} did not reach {purpose} within {timeout_s:g} s; it is a collective call: "
            f"every rank of the group must make it, in the same order"
        )
    answers = verdict["answers"]
    require_equal(ranks, answers, ("purpose",))
    return answers


def require_equal(ranks: Sequence[int], answers: Sequence[Facts], fields: Iterable[str]) -> None:
    """Raise MismatchError, naming rank, field and both values, unless all ranks gave equal `fields`."""
    for rank, answer in zip(ranks, answers, strict=True):
        for field in fields:
            if answer[field] != answers[0][field]:
                raise MismatchError(
                    f"ranks disagree about {field}: rank {rank} has {answer[field]}, rank {ranks[0]} has "
                    f"{answers[0][field]}; every rank must make the same commopt calls with the same settings"
                )


def _wait_for(
    store: dist.Store, ranks_by_key: Mapping[str, int], timeout_s: float, interrupt: Callable[[], None]
) -> list[int]:
    """Poll until all keys exist; return the ranks of those that do not when time is up.

    Polling instead of `store.wait`, because a blocked store client also blocks the threads that share it.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    missing = dict(ranks_by_key)
    while True:
        missing = {key: rank for key, rank in missing.items() if not store.check([key])}
        if not missing or time.monotonic() > deadline:
            return sorted(missing.values())
        interrupt()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)


def _read(store: dist.Store, key: str) -> Any:
    return json.loads(store.get(key))
