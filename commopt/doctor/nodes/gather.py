"""Under torchrun: every rank examines its own machine, rank 0 hears all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

from commopt.doctor.finding import Finding, in_order, merge
from commopt.doctor.nodes.compare import RankFacts, compare
from commopt.errors import MismatchError

PATIENCE = timedelta(seconds=120)


def launched(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as one of several ranks."""
    world = environ.get("WORLD_SIZE", "")
    return world.isdecimal() and int(world) > 1


def gather(facts: RankFacts, findings: Sequence[Finding]) -> list[Finding] | None:
    """Return on rank 0 what all ranks found and what differs between them; None on the others.

    Uses gloo, which needs no GPU. Raises MismatchError when not all ranks meet within two minutes.
    """
    import torch.distributed as dist  # here, because one machine is examined without it

    try:
        dist.init_process_group("gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise MismatchError(f"the ranks did not meet within {PATIENCE.seconds} s: {reason}") from error
    try:
        mine = (facts, [replace(finding, nodes=(facts.node,)) for finding in findings])
        everyone: list[tuple[RankFacts, list[Finding]] | None] = [None] * dist.get_world_size()
        dist.gather_object(mine, everyone if dist.get_rank() == 0 else None)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise MismatchError(f"a rank went away while the doctor collected its findings: {reason}") from error
    finally:
        dist.destroy_process_group()
    answers = [answer for answer in everyone if answer is not None]
    if not answers:
        return None
    found = [finding for _, theirs in answers for finding in theirs]
    return in_order(merge([*compare([facts for facts, _ in answers]), *found]))
