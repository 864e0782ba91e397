"""Under torchrun: every rank examines its own machine, rank 0 hears all of them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

from commopt.doctor.finding import Finding, in_order, merge
from commopt.doctor.nodes.compare import RankFacts, compare
from commopt.doctor.nodes.reach import Target, listener, peers_of, unreached
from commopt.errors import MismatchError

PATIENCE_S = 120.0
LEAVE_S = 2.0
_PREFIX = "commopt/doctor"


def launched(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as one of several ranks."""
    world = environ.get("WORLD_SIZE", "")
    return world.isdecimal() and int(world) > 1


def gather(facts: RankFacts, findings: Sequence[Finding], patience_s: float = PATIENCE_S) -> list[Finding] | None:
    """Return on rank 0 what all ranks found and what differs between them; None on the others.

    Goes through the launcher's store, without a process group: it works where gloo and NCCL cannot connect.
    Raises MismatchError when not all ranks are there within `patience_s`.
    """
    # Here, because one machine is examined without torch.
    from torch.distributed.rendezvous import rendezvous

    from commopt.groups.membership import exchange_facts
    from commopt.groups.store import limited

    try:
        launcher, rank, world_size = next(iter(rendezvous("env://", timeout=timedelta(seconds=patience_s))))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise MismatchError(f"the ranks did not meet within {patience_s:g} s: {reason}") from error
    ranks, told = range(world_size), False
    try:
        store = limited(launcher, _PREFIX, patience_s)
        with listener() as door:  # open until all others have tried it
            port = door.getsockname()[1]
            mine = {"node": facts.host.node_key, "port": port, "offers": [offer.as_pair() for offer in facts.offers]}
            doors = exchange_facts(store, ranks, rank, "the doctor", mine, patience_s)
            away = [peer for peer in peers_of(rank, world_size) if doors[peer]["node"] != doors[rank]["node"]]
            targets = [Target(peer, doors[peer]["port"], *pair) for peer in away for pair in doors[peer]["offers"]]
            facts = replace(facts, unreached=unreached(targets))
            answer = (facts, [replace(finding, nodes=(facts.node,)) for finding in findings])
            store.set(f"answer/{rank}", pickle.dumps(answer).hex())
            told = True
            exchange_facts(store, ranks, rank, "the doctor's end", {}, patience_s)
        if rank != 0:
            store.set(f"left/{rank}", "")
            return None
        answers = [pickle.loads(bytes.fromhex(store.get(f"answer/{each}").decode())) for each in ranks]
        with suppress(RuntimeError):  # it may hold the store itself: whoever is still at it would complain
            launcher.wait([f"{_PREFIX}/left/{each}" for each in ranks[1:]], timedelta(seconds=LEAVE_S))
    except MismatchError:
        raise
    except RuntimeError as error:
        if told and rank != 0:  # rank 0 may have held the store, heard all, and left
            return None
        reason = str(error).splitlines()[0]
        raise MismatchError(f"a rank went away while the doctor collected its findings: {reason}") from error
    found = [finding for _, theirs in answers for finding in theirs]
    return in_order(merge([*compare([facts for facts, _ in answers]), *found]))
