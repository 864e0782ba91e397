# SPDX-License-Identifier: Apache-2.0
"""The doctor's messages between ranks: JSON in the launcher's store, validated when read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from ipaddress import ip_address
from typing import Any, NamedTuple, TypeVar

from commopt.doctor.finding import LONGEST, Finding
from commopt.errors import MismatchError
from topology.cluster import HostIdentity

MOST_BYTES = 4 << 20
MOST_SETTINGS = 1000
MOST_FINDINGS = 1000
MOST_PEERS = 64
"""Number of other ranks that each rank connects to; in larger jobs each rank is still reached by as many."""
T = TypeVar("T")


class Offer(NamedTuple):
    """An address that a library ("NCCL" or "gloo") on a rank offers to the other ranks."""

    library: str
    address: str


class ListenAddress(NamedTuple):
    """The port and addresses at which a rank listens for the others."""

    node: tuple[str, ...]
    """Equal for ranks of one machine."""
    port: int
    offers: tuple[Offer, ...]


class Unreached(NamedTuple):
    """Another rank's offer that did not answer, and the reason."""

    rank: int
    offer: Offer
    why: str


@dataclass(frozen=True)
class RankFacts:
    """Facts of one rank, sent to the others."""

    host: HostIdentity
    gpu: str | None
    """Bus id of its GPU, or CUDA's name for it; None if it has none, or it is unknown."""
    gpus: int
    """Number of GPUs in its machine."""
    gbps: float | None
    """Sum of the speeds of its machine's ports, in Gb/s."""
    equal: tuple[str | None, ...]
    """Facts that must be the same on every node, in a fixed order; None if unknown."""
    settings: Mapping[str, str]
    offers: tuple[Offer, ...] = ()
    """The known addresses that others connect to."""
    unreached: tuple[Unreached, ...] = ()

    @property
    def node(self) -> str:
        """The readable name of the machine."""
        return self.host.nccl_hostid or self.host.hostname


def as_json(facts: RankFacts, findings: Sequence[Finding]) -> str:
    """Return a rank's facts and findings as JSON for `read_answer`."""
    return json.dumps({"facts": asdict(facts), "findings": [finding.as_dict() for finding in findings]})


def read_answer(text: bytes, rank: int, world_size: int, equal: int) -> tuple[RankFacts, list[Finding]]:
    """Return the facts and findings in a rank's answer, with every value validated.

    Raises MismatchError for anything but a result of `as_json`: other programs may write to the store.

    equal: required number of values in RankFacts.equal.
    """
    try:
        if len(text) > MOST_BYTES:
            raise ValueError(f"longer than {MOST_BYTES >> 20} MiB")
        answer = _dict(json.loads(text), "facts", "findings")
        stated = _dict(answer["facts"], *(row.name for row in fields(RankFacts)))
        host = _dict(stated["host"], "hostname", "boot_id", "nccl_hostid", "local_rank")
        settings = stated["settings"]
        if not isinstance(settings, dict) or len(settings) > MOST_SETTINGS:
            raise ValueError("settings")
        facts = RankFacts(
            HostIdentity(
                _text(host["hostname"]),
                _text(host["boot_id"]),
                _or_none(_text, host["nccl_hostid"]),
                _or_none(_count, host["local_rank"]),
            ),
            _or_none(_text, stated["gpu"]),
            _count(stated["gpus"]),
            _or_none(_rate, stated["gbps"]),
            tuple(_or_none(_text, one) for one in _list(stated["equal"], equal, equal)),
            {_text(name): _text(value) for name, value in settings.items()},
            tuple(_offer(one) for one in _list(stated["offers"], 0, 2)),
            tuple(_unreached(one, world_size) for one in _list(stated["unreached"], 0, 2 * MOST_PEERS)),
        )
        return facts, [Finding.from_dict(one) for one in _list(answer["findings"], 0, MOST_FINDINGS)]
    except (ValueError, RecursionError) as error:
        raise MismatchError(
            f"the answer of rank {rank} to the doctor cannot be read ({str(error)[:80]}): another program writes to "
            f"the launcher's store, or the ranks run different versions of commopt"
        ) from None


def read_listen_address(stated: Mapping[str, Any], rank: int) -> ListenAddress:
    """Return a rank's port and addresses, validated, as this rank connects to them. Raises MismatchError."""
    try:
        node = tuple(_text(part) for part in _list(stated.get("node"), 1, 2))
        port = _count(stated.get("port"))
        if not 0 < port < 1 << 16:
            raise ValueError("port")
        return ListenAddress(node, port, tuple(_offer(one) for one in _list(stated.get("offers"), 0, 2)))
    except ValueError as error:
        raise MismatchError(f"rank {rank} sent the doctor an invalid address ({str(error)[:80]})") from None


def _dict(value: object, *names: str) -> dict[str, Any]:
    if not isinstance(value, dict) or sorted(value) != sorted(names):
        raise ValueError(f"not {', '.join(names)}")
    return value


def _list(value: object, fewest: int, most: int) -> list[Any]:
    if not isinstance(value, list) or not fewest <= len(value) <= most:
        raise ValueError("a list of another length")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > LONGEST:
        raise ValueError("no text, or a long one")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise ValueError("no count")
    return value


def _rate(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e9:
        raise ValueError("no speed")
    return value


def _or_none(read: Callable[[object], T], value: object) -> T | None:
    return None if value is None else read(value)


def _offer(value: object) -> Offer:
    library, address = (_text(part) for part in _list(value, 2, 2))
    if library not in ("NCCL", "gloo"):
        raise ValueError("another library")
    return Offer(library, str(ip_address(address)))


def _unreached(value: object, world_size: int) -> Unreached:
    rank, offer, why = _list(value, 3, 3)
    if _count(rank) >= world_size:
        raise ValueError("a rank that is not there")
    return Unreached(rank, _offer(offer), _text(why))
