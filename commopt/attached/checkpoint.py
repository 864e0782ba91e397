# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a registration: their contents, and whether they fit the model and the world they are loaded into."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import sha256
from io import BytesIO
from math import sqrt
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.attached.registration import Registration
from commopt.attached.snapshot import Copy, Snapshot
from commopt.errors import ConfigurationError
from commopt.feedback import Layout, ResidualStore, collect, layout_of, pieces_of, restore, settle
from commopt.feedback.checkpoint import MAX_MAGNITUDE, field, refuse, require_format, required, whole
from commopt.groups import Membership, TeamShape
from commopt.groups.agreement import PATIENCE_S, Facts, require_equal

FORMAT = 1
MESSAGE_NBYTES = 32 * 2**20  # on its way to the first rank

_log = logging.getLogger("commopt")

_ResumeArguments = tuple[int, list[Layout], Mapping[str, int], Any]  # what Registration.resume takes after the store


def snapshot_of(registration: Registration, call: str, *, pinned: bool) -> Snapshot:
    """Return this rank's part of a checkpoint, on its way. call: what the user has called. pinned: as Snapshot.

    What the training thread changes is read now, what the lane changes on the lane: behind all that this step has sent,
    and before what the next one will.
    """
    everyone, lane = registration.everyone, registration.client.lane
    with registration.boundary.between(call):
        whole, store = registration.arrived_steps == registration.steps, registration.store
        extras = registration.extras()
        part = {
            "format": FORMAT,
            "aggregator": registration.aggregator_name,
            "steps": registration.steps,
            "nodes": list(everyone.team.wire.nodes),
            "place": everyone.team.rank,
            "members": list(everyone.ranks),
            "sharding": registration.sharding,
            "parameters": dict(registration.numels),
            "buckets": [pieces_of(layout) for layout in registration.step.buffers],
        }

        def read(copy: Copy) -> dict[str, Any]:
            if lane.failed and not whole:
                lane.require_healthy()
            return {**part, **extras(copy), **collect(store, copy)}

        return Snapshot(lane, read, settle, pinned=pinned)


def part_of(registration: Registration, call: str = "state_dict") -> dict[str, Any]:
    """Return this rank's part of a checkpoint, as `snapshot_of`."""
    return snapshot_of(registration, call, pinned=False).result()


def merged_state(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state made of those that state_dict() returned on the ranks of a world, for load_state_dict.

    Every rank of whatever world loads the same one. Parts may be missing, those of a node that is gone: what their
    ranks had not sent yet is lost, and nothing else; a warning names them. Not collective.
    Raises ConfigurationError when parts are not of one checkpoint.
    """
    if isinstance(parts, Mapping) or not isinstance(parts, Iterable):
        raise ConfigurationError(
            f"merged_state takes the states of several ranks and got a {type(parts).__name__}; pass a list of what "
            f"state_dict() returned, merged_state([state])"
        )
    found = _checked_parts(list(parts))
    members, nodes = found[0].get("members"), found[0]["nodes"]
    missing = sorted(set(range(len(nodes))) - {part["place"] for part in found})
    if missing:
        names = ", ".join(f"{place if members is None else members[place]} (node {nodes[place]})" for place in missing)
        _log.warning(
            "the states of %d of %d ranks are missing: rank %s; what these had not sent yet is lost, and nothing else",
            len(missing),
            len(nodes),
            names,
        )
    return {"format": FORMAT, "ranks": sorted(found, key=lambda part: part["place"])}


# ------------------------------------------------------------------------------------------- gathering


def gather(
    registration: Registration, what: str = "gathered_state_dict", patience_s: float = PATIENCE_S
) -> dict[str, Any] | None:
    """Return all ranks' parts on the first rank of the group, None on the others; collective.

    what: the call that every rank must make, for messages.
    patience_s: after which a warning names the ranks that have not made it.

    One rank after the other sends its part to the first one, in messages of MESSAGE_NBYTES at most, over the backend of
    the CPU. Where there is none they go through the memory of the GPUs, which never hold more than one.
    """
    registration.require_open(what)
    membership = registration.everyone
    membership.require_alive()
    group = membership.parent()
    assert group is not None  # alive
    part, buffer = part_of(registration, what), BytesIO()
    parts = [part]
    torch.save(part, buffer)
    call, nbytes = f"{what} after {registration.steps} steps", str(len(buffer.getbuffer()))
    answers = registration.client.agree(call, patience_s=patience_s, nbytes=nbytes).wait()
    lengths = [0] * membership.team.size
    for rank, answer in zip(membership.ranks, answers, strict=True):
        lengths[dist.get_group_rank(group, rank)] = int(answer["nbytes"])
    device = torch.device("cpu")
    if "cpu:" not in str(dist.get_backend_config(group)):
        device = torch.device("cuda", torch.cuda.current_device())
        # Of messages between two ranks, NCCL wants none to be the first use of a communicator.
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=group)
    if dist.get_rank(group) != 0:
        _pass_on(dist.isend, torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8), 0, group, device)
        return None
    for peer in range(1, len(lengths)):
        data = torch.empty(lengths[peer], dtype=torch.uint8, device="cpu")
        _pass_on(dist.irecv, data, peer, group, device)
        parts.append(torch.load(BytesIO(data.numpy().data), map_location="cpu", weights_only=True))
    return {"format": FORMAT, "ranks": sorted(parts, key=lambda each: each["place"])}


def _pass_on(
    operation: Callable[..., Any], data: Tensor, peer: int, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Send `data` to a peer, or receive it, piece by piece."""
    for piece in data.split(MESSAGE_NBYTES):
        message = piece.to(device)
        # Batched, though it is one: by itself NCCL would make a communicator for every two ranks.
        for work in dist.batch_isend_irecv([dist.P2POp(operation, message, group=group, group_peer=peer)]):
            work.wait()
        piece.copy_(message)


# ------------------------------------------------------------------------------------------- loading


def load(read: Callable[[], object], registration: Registration) -> None:
    """Let a registration go on from what `read` returns, one rank's part or all of them ("ranks"); collective.

    Raises ConfigurationError, on every rank if on any, when the aggregator is not known yet, when `read` raises, when
    the state is damaged or does not fit, or when the world changed and parts are missing; MismatchError when ranks load
    different checkpoints. Nothing has changed then.
    """
    if registration.aggregator is None:
        raise ConfigurationError(
            "load_state_dict needs to know the aggregator; use commopt.attach, or HookState(aggregator)"
        )
    membership = registration.everyone
    store = ResidualStore(per_step=registration.store.transaction.per_step)
    loaded, facts, problem = None, dict[str, str](), ""
    try:
        loaded, facts = _fill(store, read(), registration)
    except ConfigurationError as error:
        problem = str(error)
    except Exception as error:  # whatever it is, the other ranks must learn of it
        problem = f"the checkpoint cannot be read ({error!r}); load what state_dict() returned, or start without it"
    in_sites = _divisions_in_sites(store, membership.team)
    answers = registration.client.agree("load_state_dict", refused=problem, **dict[str, Any](facts | in_sites)).wait()
    _require_no_problem({rank: str(each["refused"]) for rank, each in zip(membership.ranks, answers, strict=True)})
    assert loaded is not None  # else there was a problem
    require_equal(membership.ranks, answers, facts)
    _require_equal_in_sites(membership, answers, list(in_sites))
    if membership.team.rank == 0:
        tell_of_learning_rate(int(facts["ranks"]), membership.team.size)
    registration.resume(store, *loaded)
    if registration.averages is not None:
        registration.averages.optimizer_steps.resume(int(facts["optimizer steps"]))


def tell_of_learning_rate(ranks_then: int, ranks_now: int, before: str = "the checkpoint") -> None:
    """Say what the field does about the learning rate when the batch of a step has grown or shrunk with the world."""
    if ranks_then != ranks_now:
        factor = ranks_now / ranks_then
        _log.warning(
            "%s is of %d ranks and here are %d: with equal batches on each a step takes %.3g times as many "
            "samples. The usual rules multiply the learning rate by %.3g for SGD (Goyal et al., arXiv 1706.02677) and "
            "by %.3g for Adam (Malladi et al., arXiv 2205.10287); commopt leaves it alone",
            before,
            ranks_then,
            ranks_now,
            factor,
            factor,
            sqrt(factor),
        )


def _require_no_problem(problems: Mapping[int, str]) -> None:
    """Raise one ConfigurationError, the same on every rank, when any rank has a problem."""
    first = next((problem for problem in problems.values() if problem), "")
    ranks = [rank for rank, problem in problems.items() if problem == first]
    if first and len(ranks) < len(problems):
        raise ConfigurationError(f"rank {', '.join(map(str, ranks))} cannot load its state: {first}")
    if first:
        raise ConfigurationError(first)


def _fill(store: ResidualStore, saved: object, registration: Registration) -> tuple[_ResumeArguments, dict[str, str]]:
    """Fill `store`; return what else a registration goes on with, and the facts in which ranks must be alike."""
    parts = _parts_of(saved)
    first, team = parts[0], registration.everyone.team
    nodes, place, numels = list(team.wire.nodes), team.rank, first["parameters"]
    registration.require_same_parameters(numels)
    _require_same_levels(parts, registration)
    largest = partial(_largest, registration)
    whole_world = len(parts) == len(first["nodes"])
    alone = isinstance(saved, Mapping) and "ranks" not in saved
    here = [part for part in parts if part["nodes"] == nodes and part.get("sharding", "") == registration.sharding]
    own = next((part for part in here if part["place"] == place), None)
    buffers: list[Layout] = []
    extras, alike, source = None, None, "each rank's own part"
    if own is not None and (alone or whole_world):
        restore(store, own, numels, largest)
        buffers = _buffers(own)
        extras, alike = registration.read_extras(own)
    elif not alone or whole_world:  # neither buckets nor plan fit
        registration.take_share(store, parts, largest)
        source = f"parts {[part['place'] for part in parts]} of {len(first['nodes'])}"
    else:
        # Alike on every rank, so that all raise the same.
        raise ConfigurationError(
            f"this is the state of another rank: of place {first['place']}, saved on nodes {first['nodes']} (here: "
            f"{nodes}), or of a model sharded otherwise; give every rank its own state, or all of them "
            f"commopt.merged_state() of the states of all ranks that there are, which is what gathered_state_dict() "
            f"returns"
        )
    facts = {
        "ranks": str(len(first["nodes"])),
        "steps": str(first["steps"]),
        "optimizer steps": str(registration.optimizer_steps_of(first)),
        "residuals": source,
        "parameters": digest(sorted(numels.items())),
        "buckets": digest([pieces_of(layout) for layout in buffers]),
        "divisions": _divisions(store, 0),
        "plan": digest(alike),
    }
    return (first["steps"], buffers, numels, extras), facts


def _divisions(store: ResidualStore, depth: int) -> str:
    """Return a digest of the divisions at paths below so many levels of sites."""
    known = (item for item in store.divisions.items() if max(item[0].split(".").count("inter") - 1, 0) == depth)
    return digest(sorted(f"{path} {divisions}" for path, divisions in known))


def _divisions_in_sites(store: ResidualStore, team: TeamShape) -> dict[str, str]:
    """Return digests of the divisions of shards, for each level of sites."""
    return {f"divisions in sites, {depth}": _divisions(store, depth) for depth in range(1, team.sites_above + 1)}


def _require_equal_in_sites(membership: Membership, answers: Sequence[Facts], names: Sequence[str]) -> None:
    """Raise MismatchError, on every rank, unless ranks at the same place of their nodes (and sites) divide alike.

    They have the same shards of every buffer, and move the residuals of these together.
    """
    wire, ranks = membership.team.wire, membership.ranks
    places: list[tuple[int, ...]] = [()] * len(ranks)
    for name, units in zip(names, (wire.nodes, *wire.sites), strict=False):
        before: Counter[object] = Counter()
        for member, unit in enumerate(units):
            before[unit, places[member]] += 1
            places[member] += (before[unit, places[member]] - 1,)
        for place in set(places):
            alike = [member for member, other in enumerate(places) if other == place]
            require_equal([ranks[member] for member in alike], [answers[member] for member in alike], [name])


def digest(what: object) -> str:
    return sha256(repr(what).encode()).hexdigest()


def _parts_of(saved: object) -> list[Mapping[str, Any]]:
    """Return the ranks' parts that a state has, one or several of the same checkpoint."""
    if isinstance(saved, Mapping) and "format" in saved:
        require_format(saved["format"], FORMAT)
    if not _is_state(saved):
        kind = f"of type {type(saved).__name__}"
        if isinstance(saved, Mapping):
            kind = f"a dict with the keys {list(saved)!r:.80}"
        raise ConfigurationError(
            f"this is not what state_dict() returned, in format {FORMAT}, but {kind}; give every rank its own "
            f"state_dict(), or all of them what gathered_state_dict() or commopt.merged_state() returned"
        )
    return _checked_parts(field(saved, "ranks", list) if "ranks" in saved else [saved])


def _is_state(saved: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether this looks like a state of this format, of one rank or of all."""
    number = saved.get("format") if isinstance(saved, Mapping) else None
    return isinstance(number, int) and number == FORMAT  # in this order: it may be anything


def _checked_parts(parts: list[Any]) -> list[Mapping[str, Any]]:
    """Return parts of one checkpoint. Raises ConfigurationError when that is not what they are."""
    if not parts:
        raise ConfigurationError("there is no state to load, but an empty list; give the states of one rank or more")
    for part in parts:
        if isinstance(part, Mapping) and "format" in part:
            require_format(part["format"], FORMAT)
        if not _is_state(part) or "ranks" in part:
            refuse("a rank's part", part, f"what state_dict() returned there, in format {FORMAT}")
        field(part, "aggregator", str)
        whole(field(part, "steps", int), "steps")
        nodes, place = field(part, "nodes", list), whole(field(part, "place", int), "place")
        for node in nodes:
            whole(node, "nodes")
        if place >= len(nodes):
            refuse("place", place, f"below {len(nodes)}, as many ranks as nodes has entries")
        for name, numel in field(part, "parameters", dict).items():
            whole(numel, f"parameters[{required(name, str, 'a name in parameters')!r}]")
        members = part.get("members", nodes)
        if not isinstance(members, list) or len(members) != len(nodes):
            refuse("members", members, f"a list of {len(nodes)} ranks, as many as nodes has entries")
    for key in ("steps", "nodes", "parameters"):
        for part in parts:
            if part[key] != parts[0][key]:
                raise ConfigurationError(
                    f"the states of places {parts[0]['place']} and {part['place']} are not of one checkpoint: they "
                    f"differ in {key}; load those that were saved after the same step"
                )
    places = [part["place"] for part in parts]
    if len(set(places)) < len(places):
        refuse("places of its parts", places, "different: give each rank's state once")
    return parts


def _buffers(part: Mapping[str, Any]) -> list[Layout]:
    """Return the layouts of the buckets, which hold whole parameters, each once."""
    numels = part["parameters"]
    buffers = [layout_of(pieces, numels, "buckets") for pieces in field(part, "buckets", list)]
    seen: set[str] = set()
    for piece in (piece for layout in buffers for piece in layout.pieces):
        if piece.numel != numels[piece.name] or piece.name in seen:
            refuse("a piece in buckets", str(piece), "a whole parameter that is in no other bucket")
        seen.add(piece.name)
    return buffers


def _require_same_levels(parts: list[Mapping[str, Any]], registration: Registration) -> None:
    paths = registration.residual_paths
    roles = (item for part in parts for item in field(part, "residuals", dict).items())
    used = {str(role).rpartition("/")[0] for role, pieces in roles if required(pieces, dict, f"residuals[{role!r}]")}
    # With more or fewer levels of sites the same residuals are at another depth, to which the store moves them.
    if not {_above_nodes(path) for path in used} <= {_above_nodes(path) for path in paths}:
        levels = ", ".join(repr(path) for path in sorted(used - set(paths)))
        raise ConfigurationError(
            f"the checkpoint of {parts[0]['aggregator']} has residuals of level {levels}, which the aggregator here "
            f"does not keep (it keeps {paths or 'none'}): they would be lost; use an aggregator of the same form"
        )
    directions = registration.aggregator is not None and registration.aggregator.adam is not None
    if directions != ("adam=" in parts[0]["aggregator"]):
        raise ConfigurationError(
            f"the checkpoint is of {parts[0]['aggregator']} and this is {registration.aggregator_name}: one sends "
            f"Adam's directions, the other gradients, in other units; use the same, or start without it"
        )


def _above_nodes(path: str) -> str:
    """Return a path with all levels above the nodes as one."""
    return re.sub(r"inter(\.int(er|ra))+", "inter", path)


def _largest(registration: Registration, name: str) -> float:
    """Return the magnitude that a residual of a parameter may have.

    What is added to a gradient must not become inf in the narrowest dtype on its way: else no step would ever be
    finite, and nothing could get better. Training itself gets near to that with float16, so no more is asked.
    """
    parameter = registration.parameters.get(name)
    dtypes = [torch.float32 if parameter is None else parameter.dtype, *_dtypes_in(registration.aggregator)]
    return min(MAX_MAGNITUDE, *(torch.finfo(dtype).max for dtype in dtypes))


def _dtypes_in(description: object) -> Iterator[torch.dtype]:
    """Iterate over the dtypes in which an aggregator is told to keep or send something."""
    if is_dataclass(description):
        for each in fields(description):
            value = getattr(description, each.name)
            if isinstance(value, torch.dtype):
                yield value
            else:
                yield from _dtypes_in(value)
