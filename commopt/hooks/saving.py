"""What a checkpoint of a registration holds, and whether it fits the model and the world it is loaded into."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch.distributed as dist

from commopt.bucketing import require_same_parameters
from commopt.errors import ConfigurationError
from commopt.feedback import Ledger, layout_of, pieces_of, restore, save, spread
from commopt.groups import Membership
from commopt.hooks.registration import Registration
from commopt.plan import Plan, Tuned

FORMAT = 1


def part_of(registration: Registration) -> dict[str, Any]:
    """Return this rank's part of a checkpoint."""
    team, plan, tuned = registration.sending.team, registration.planning.plan, registration.planning.tuned
    return {
        "format": FORMAT,
        "aggregator": registration.aggregator_name,
        "steps": registration.steps + registration.planning.turns.steps_away(alike=True),
        "nodes": list(team.wire.nodes),
        "place": team.rank,
        "parameters": dict(registration.layouts.numels),
        "buckets": [pieces_of(layout) for layout in registration.step.buffers],
        "plan": None if plan is None else plan.to_json(),
        "tuned": None if tuned is None else tuned.to_json(),
        **save(registration.ledger),
    }


def gather(part: dict[str, Any], membership: Membership) -> dict[str, Any] | None:
    """Return all ranks' parts on the first rank of the group, None on the others; collective."""
    membership.require_alive()
    group = membership.parent()
    parts: list[Any] | None = [None] * membership.team.size if dist.get_rank(group) == 0 else None
    dist.gather_object(part, parts, group=group, group_dst=0)
    return None if parts is None else {"format": FORMAT, "ranks": parts}


def load(saved: Mapping[str, Any], registration: Registration) -> None:
    """Let a registration go on from one rank's part, or from all of them ("ranks"); collective.

    Raises ConfigurationError when the aggregator is not known yet, when parameters do not match, or when the world
    changed and parts are missing; MismatchError when ranks load different checkpoints.
    """
    if registration.aggregator is None:
        raise ConfigurationError(
            "load_state_dict needs to know the aggregator; use commopt.attach, or HookState(aggregator)"
        )
    membership, owner = registration.sending.membership, registration.sending.owner
    ledger = Ledger(per_step=registration.ledger.per_step)
    own, problem = None, ""
    try:
        own = _fill(ledger, saved, registration)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = str(error) if isinstance(error, ConfigurationError) else repr(error)
    part: Mapping[str, Any] = {} if problem else own or saved["ranks"][0]
    membership.agree(
        f"load_state_dict {next(registration.loads)} of {owner}",
        loading=problem or "works",
        steps=str(part.get("steps")),
        buckets=sha256(repr(part.get("buckets")).encode()).hexdigest(),
        plan=sha256(repr((part.get("plan"), part.get("tuned"))).encode()).hexdigest(),
    )
    if problem:
        raise ConfigurationError(problem)
    buffers, plan, tuned = [], None, None
    if own is not None:  # in another world neither fits
        buffers = [layout_of(pieces) for pieces in own["buckets"]]
        plan = None if own.get("plan") is None else Plan.from_json(own["plan"])
        tuned = None if own.get("tuned") is None else Tuned.from_json(own["tuned"])
    registration.go_on(ledger, part["steps"], buffers, plan, tuned, part["parameters"])


def _fill(ledger: Ledger, saved: Mapping[str, Any], registration: Registration) -> Mapping[str, Any] | None:
    """Fill `ledger`; return the part that was saved in this very place, if any."""
    if not isinstance(saved, Mapping) or saved.get("format") != FORMAT:
        raise ConfigurationError(
            f"this is no state of a HookState in format {FORMAT} but {_kind(saved)}; give every rank what state_dict() "
            f"returned there, or what gathered_state_dict() returned on the first rank"
        )
    parts, team = list(saved["ranks"]) if "ranks" in saved else [saved], registration.sending.team
    nodes, place = list(team.wire.nodes), team.rank
    require_same_parameters(parts[0]["parameters"], registration.layouts.numels)
    _require_same_levels(parts, registration)
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


def _require_same_levels(parts: list[Mapping[str, Any]], registration: Registration) -> None:
    paths = () if registration.aggregator is None else registration.aggregator.residual_paths
    used = {role.rpartition("/")[0] for part in parts for role, pieces in part["residuals"].items() if pieces}
    if not used <= set(paths):
        levels = ", ".join(repr(path) for path in sorted(used - set(paths)))
        raise ConfigurationError(
            f"the checkpoint of {parts[0]['aggregator']} has residuals of level {levels}, which the aggregator here "
            f"does not keep (it keeps {paths or 'none'}): they would be lost; use an aggregator of the same form"
        )
