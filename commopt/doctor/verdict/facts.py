# SPDX-License-Identifier: Apache-2.0
"""What `commopt doctor --measure` measured, as plain data: the only input of the judgement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from commopt.document import load, one_line_each, read_as, read_text, write_whole
from commopt.errors import ConfigurationError
from topology.network import Network

FORMAT = 1


@dataclass(frozen=True)
class InterfaceRates:
    """One interface of a node, by plain TCP connections to the other nodes at the same interface.

    Rates are Gb/s of payload; None where no other node was reached. The best of several partners counts, so a node that
    is fast itself does not look slow beside a slow one.

    used: whether gloo or NCCL sends through it.
    partners: other nodes that were tried.
    send_gbps, receive_gbps: with one connection, in both directions at once.
    several_gbps: the lower of both directions with `connections`.
    latency_us: of a connection's round trip.
    expected_gbps, source: what it should carry, and who says so; None where nobody does.
    """

    node: str
    interface: str
    used: bool
    partners: int
    send_gbps: float | None
    receive_gbps: float | None
    several_gbps: float | None = None
    latency_us: float | None = None
    expected_gbps: float | None = None
    source: str = ""

    @property
    def one_gbps(self) -> float | None:
        """The lower of both directions with one connection."""
        if self.send_gbps is None or self.receive_gbps is None:
            return None
        return min(self.send_gbps, self.receive_gbps)

    @property
    def gbps(self) -> float | None:
        """The rate of the interface, however many connections it takes."""
        return max((each for each in (self.one_gbps, self.several_gbps) if each is not None), default=None)


@dataclass(frozen=True)
class Level:
    """Collectives of one level: "intra" inside a node, "inter" or "world" between nodes.

    rates: Gb/s by collective, at the largest message: of a node's link to others, or of a rank's inside a node.
    latency_us: of the shortest all_reduce.
    """

    level: str
    ranks: int
    rates: tuple[tuple[str, float], ...]
    latency_us: float
    expected_gbps: float | None = None
    source: str = ""

    @property
    def between_nodes(self) -> bool:
        """Whether its messages leave a node."""
        return self.level != "intra"

    @property
    def best_gbps(self) -> float:
        """The rate of the fastest collective."""
        return max((gbps for _, gbps in self.rates), default=0.0)


WRONG, FAILS, HANGS = "adds up wrong numbers", "fails", "hangs"
"""How a fault begins."""


@dataclass(frozen=True)
class TrialOutcome:
    """What came of an all_reduce: Gb/s of each rank, None if it did not end well, or why it cannot be trusted."""

    gbps: float | None = None
    fault: str = ""


@dataclass(frozen=True)
class Direct:
    """All_reduce with one kind of direct access between devices, and without.

    name: of the node whose GPUs took part, or "all nodes", of which one GPU each did.
    what: the kind.
    variable, off: the variable, and its value, that switches it off.
    used: whether NCCL may use it as things are.
    """

    name: str
    what: str
    variable: str
    off: str
    with_it: TrialOutcome
    without: TrialOutcome
    used: bool


@dataclass(frozen=True)
class Pace:
    """Matrix products of one rank by itself, in TFLOP/s."""

    rank: int
    node: str
    tflops: float


@dataclass(frozen=True)
class Gain:
    """One strategy on the model, predicted from the measured links.

    step_ms: of a step.
    steps: that it needs to a loss over those of exact averages, with SGD and with AdamW; None: nobody measured.
    """

    strategy: str
    step_ms: float
    exact: bool
    steps: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True)
class Training:
    """A step of the model with stock DDP.

    recorded: whether the step was recorded in the script; predicted otherwise.
    late_rank, late_ms: the rank that delays the others most, and by how much; -1 for none.
    gains: the best strategies, the best first.
    note: what the time of computation rests on.
    late_host_busy: the share of the time in which a program of that rank's host waited for a CPU; None: not known.
    strategy: that averaged; "" for stock DDP.
    late_node: of late_rank, "" where only `paces` tell it.
    late_place: where in a step late_rank falls behind, "" for not known.
    """

    name: str
    recorded: bool
    step_ms: float
    compute_ms: float
    exposed_ms: float
    late_rank: int = -1
    late_ms: float = 0.0
    gains: tuple[Gain, ...] = ()
    note: str = ""
    late_host_busy: float | None = None
    strategy: str = ""
    late_node: str = ""
    late_place: str = ""

    @property
    def exposed_share(self) -> float:
        """The part of a step in which nothing but communication goes on."""
        return self.exposed_ms / self.step_ms if self.step_ms > 0 else 0.0


@dataclass(frozen=True)
class Leg:
    """One leg of a recorded step's messages.

    level: as the recording has it: "intra", "inter" or "world", with sites also "inter.inter" and so on.
    name: for people.
    form: of the values on the wire: a dtype, "4 bits", ...; "" for not known.
    nbytes: that a node sends to others in a step, or a rank inside its node.
    gbps: at which these went while they did.
    taken_ms: by them, in a step.
    hidden_share: of that time, what was before the last gradient of their ranks.
    expected_gbps, source: what the leg should carry, and who says so; None where nobody does.
    largest_nbytes: of its collectives.
    """

    level: str
    name: str
    form: str
    nbytes: int
    gbps: float
    taken_ms: float
    hidden_share: float
    expected_gbps: float | None = None
    source: str = ""
    largest_nbytes: int = 0


@dataclass(frozen=True)
class Overlap:
    """How the messages of a recorded step and its backward overlap; times are means over ranks.

    messages: of a step.
    movable: whether a plan can give DDP other buckets.
    planned: whether one has.
    transfer_ms: of all messages, without waiting for other ranks.
    hidden_share: of what it takes on all legs.
    waiting_ms: for other ranks, after a rank's own last gradient.
    hosts_busy: the largest share of the time in which a program of a host waited for a CPU; None: not known.
    local_ms: of all transfer, packing, compressing and adding up.
    window_ms: from the first message's gradients to the last, in which messages can be hidden.
    passes_ms: from the begin of the forward to the last gradient; None where it was not noted.
    last_ms, last_queue_ms, last_share: of the last message: its transfer, its wait for messages before it, its bytes.
    last_label: its parameters.
    """

    messages: int
    movable: bool
    planned: bool
    transfer_ms: float
    hidden_share: float
    waiting_ms: float
    hosts_busy: float | None
    local_ms: float
    window_ms: float
    passes_ms: float | None
    last_ms: float
    last_queue_ms: float
    last_share: float
    last_label: str


@dataclass(frozen=True)
class Problem:
    """A finding of the checks that matters for the verdict: an error or a warning."""

    check: str
    severity: str
    value: str
    remedy: str


@dataclass(frozen=True)
class Measurements:
    """Everything that was measured.

    nodes: names of the nodes; "" for none.
    ranks: on each node.
    backend: "gloo" or "nccl".
    unmeasured: why something is missing, "" if nothing is.
    network: the sites that were found; None where they were told, or where there are too few nodes for any.
    direct: trials of direct access between devices.
    connections: number of connections of gloo between two ranks of different nodes.
    split: whether commopt chose several by itself, so that its collectives tell nothing on one, which others have.
    legs, overlap: of a training that was recorded to its end.
    unrecorded: what of its communication was not, "" for nothing.
    """

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    backend: str = "gloo"
    wires: tuple[InterfaceRates, ...] = ()
    levels: tuple[Level, ...] = ()
    paces: tuple[Pace, ...] = ()
    problems: tuple[Problem, ...] = ()
    training: Training | None = None
    unmeasured: str = ""
    date: str = ""
    network: Network | None = None
    direct: tuple[Direct, ...] = ()
    connections: int = 1
    split: bool = False
    legs: tuple[Leg, ...] = ()
    overlap: Overlap | None = None
    unrecorded: str = ""

    @property
    def used(self) -> tuple[InterfaceRates, ...]:
        """The interfaces that the library uses."""
        return tuple(wire for wire in self.wires if wire.used)

    def node_of(self, rank: int) -> str:
        """Return the node of a rank, with ranks in the order of nodes unless paces say otherwise."""
        return next((pace.node for pace in self.paces if pace.rank == rank), "")

    def as_document(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write a JSON file for `load`."""
        write_whole(path, one_line_each(self.as_document()).encode())

    @classmethod
    def load(cls, path: str | Path) -> Measurements:
        """Read a file of `save`. Raises ConfigurationError, naming the fault, for anything else."""
        try:
            return cls.read(load(read_text(path), "the file", FORMAT))
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}; measure again with --save") from None

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Measurements:
        """Read the values of `as_document`. Raises ConfigurationError, naming the fault, for others."""
        found: Measurements = read_as(cls, document, "measurements")
        return found


def median_of_others(values: Mapping[str, float], name: str) -> float | None:
    """Return the median of all values but one; None where there is no other."""
    others = [value for each, value in values.items() if each != name]
    return median(others) if others else None
