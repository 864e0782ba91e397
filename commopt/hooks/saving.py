"""What a checkpoint of a registration holds, and whether it fits the model and the world it is loaded into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from commopt.bucketing import require_same_parameters
from commopt.errors import ConfigurationError
from commopt.feedback import Layout, Ledger, pieces_of, restore, save, spread
from commopt.groups import Membership
from commopt.plan import Plan

FORMAT = 1


def describe_rank(
    ledger: Ledger,
    aggregator: str,
    steps: int,
    membership: Membership,
    numels: Mapping[str, int],
    buckets: Sequence[Layout],
    plan: Plan | None,
) -> dict[str, Any]:
    """Return one rank's part of a checkpoint."""
    return {
        "format": FORMAT,
        "aggregator": aggregator,
        "steps": steps,
        "nodes": list(membership.team.wire.nodes),
        "place": membership.team.rank,
        "parameters": dict(numels),
        "buckets": [pieces_of(layout) for layout in buckets],
        "plan": None if plan is None else plan.to_json(),
        **save(ledger),
    }


def gather(part: dict[str, Any], membership: Membership) -> dict[str, Any] | None:
    """Return all ranks' parts on the first rank of the group, None on the others; collective."""
    membership.require_alive()
    group = membership.parent()
    parts: list[Any] | None = [None] * membership.team.size if dist.get_rank(group) == 0 else None
    dist.gather_object(part, parts, group=group, group_dst=0)
    return None if parts is None else {"format": FORMAT, "ranks": parts}


def load_into(
    ledger: Ledger,
    saved: Mapping[str, Any],
    membership: Membership,
    numels: Mapping[str, int],
    paths: tuple[str, ...],
) -> Mapping[str, Any] | None:
    """Fill `ledger` from one rank's part, or from all of them ("ranks"); return the part that fits exactly, if any.

    numels: the parameters of the model, empty when they are not known yet. paths: where residuals will be used.
    Raises ConfigurationError when parameters do not match, or when the world changed and parts are missing.
    """
    if not isinstance(saved, Mapping) or saved.get("format") != FORMAT:
        raise ConfigurationError(
            f"this is no state of a HookState in format {FORMAT} but {_kind(saved)}; give every rank what state_dict() "
            f"returned there, or what gathered_state_dict() returned on the first rank"
        )
    parts = list(saved["ranks"]) if "ranks" in saved else [saved]
    nodes, place = list(membership.team.wire.nodes), membership.team.rank
    require_same_parameters(parts[0]["parameters"], numels)
    _require_same_levels(parts, paths)
    own = next((part for part in parts if part["nodes"] == nodes and part["place"] == place), None)
    if own is not None:
        restore(ledger, own)
    elif len(parts) == len(parts[0]["nodes"]):
        spread(ledger, parts, parts[0]["parameters"], len(nodes))
    else:
        # Alike on every rank, so that all raise the same.
        raise ConfigurationError(
            f"this is the state of a rank in another place, saved on nodes {parts[0]['nodes']} (here: {nodes}); give "
            f"every rank its own state, or all of them what gathered_state_dict() returned before the world changed"
        )
    return own


def _kind(saved: object) -> str:
    return f"of format {saved.get('format')!r}" if isinstance(saved, Mapping) else type(saved).__name__


def _require_same_levels(parts: list[Mapping[str, Any]], paths: tuple[str, ...]) -> None:
    used = {role.rpartition("/")[0] for part in parts for role, pieces in part["residuals"].items() if pieces}
    if not used <= set(paths):
        levels = ", ".join(repr(path) for path in sorted(used - set(paths)))
        raise ConfigurationError(
            f"the checkpoint of {parts[0]['aggregator']} has residuals of level {levels}, which the aggregator here "
            f"does not keep (it keeps {paths or 'none'}): they would be lost; use an aggregator of the same form"
        )
