# SPDX-License-Identifier: Apache-2.0
"""What is timed: collectives on every level, and the work that aggregators do between messages; and the options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from math import ceil, sqrt

import torch
from torch import Tensor

from commopt.compress import COMPRESSORS, Cast, Compressor, Encoding, ErrorFeedback, Exact, Quantize, RngKey
from commopt.cost import LinkKey, WorkKey
from commopt.errors import ConfigurationError, did_you_mean
from commopt.groups import Team
from commopt.hooks import PRESETS
from commopt.kernels import lowrank, packing
from commopt.probe.collectives import Collective, sizes

PARTS = ("sites", "intra", "inter", "world", "work")

_LEAST_NBYTES, _MOST_NBYTES = 64, 2**33  # of a message
_LEAST_WORK_NBYTES, _MOST_WORK_NBYTES = 2**14, 2**26
_ITEMSIZE = torch.float32.itemsize
_ROWS = 4  # whose sum a server encodes
_MATRIX_SIDE = 1024
_MATRIX_RANKS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class ProbeOptions:
    """The options of a probe. All ranks must have the same; raises ConfigurationError for wrong values.

    min_nbytes, max_nbytes, factor: messages grow from the first to the second, each `factor` times the one before. Both
        sides of a collective stay below the largest: all_gather over P ranks stops at a P-th of it.
    budget_s: seconds for everything. Messages stop growing where it ends.
    parts: those of PARTS to measure; "work" is compression, "sites" are looked for where nobody told them.
    warm_up, iterations: calls before and while time is taken; long messages get fewer, at least 1 and 3.
    """

    min_nbytes: int = 2**10
    max_nbytes: int = 2**28
    factor: float = 2.0
    budget_s: float = 120.0
    parts: tuple[str, ...] = PARTS
    warm_up: int = 5
    iterations: int = 20

    def __post_init__(self) -> None:
        smallest, largest = self.min_nbytes, self.max_nbytes
        if not _LEAST_NBYTES <= smallest <= largest:
            raise ConfigurationError(
                f"--min-bytes {smallest} must be at least {_LEAST_NBYTES} and no more than --max-bytes {largest}"
            )
        if largest > _MOST_NBYTES:
            raise ConfigurationError(f"--max-bytes {largest} is more than {_MOST_NBYTES} bytes; pass 8G or less")
        if not 1.1 <= self.factor <= 64:
            raise ConfigurationError(f"--factor {self.factor:g} must be between 1.1 and 64, for example 2")
        if not 0 < self.budget_s < float("inf"):
            raise ConfigurationError(f"--budget {self.budget_s:g} must be a number of seconds above 0, for example 120")
        if not self.parts or not set(self.parts) <= set(PARTS):
            unknown = next(part for part in self.parts if part not in PARTS) if self.parts else ""
            meant = did_you_mean(unknown, PARTS)
            raise ConfigurationError(f"--only {','.join(self.parts)} must name some of {', '.join(PARTS)}{meant}")
        if self.warm_up < 1 or self.iterations < 3:
            raise ConfigurationError(
                f"warm_up={self.warm_up}, iterations={self.iterations}: at least 1 and 3 are needed for a median"
            )

    def sizes(self, most_nbytes: int | None = None) -> tuple[int, ...]:
        """Return the bytes of every message, smallest first, none above `most_nbytes` (but for the first)."""
        limit = self.max_nbytes if most_nbytes is None else min(most_nbytes, self.max_nbytes)
        return tuple(sizes(self.min_nbytes, limit, self.factor))

    def sizes_of(self, collective: Collective, ranks: int) -> tuple[int, ...]:
        """Return the bytes of a collective's messages: two or more, which can be cut into blocks of whole elements."""
        grain = _ITEMSIZE * (ranks if collective.send_blocks else 1)
        gathers = collective.recv_blocks and not collective.send_blocks
        wanted = self.sizes(self.max_nbytes // ranks if gathers else None)
        rounded = tuple(dict.fromkeys(ceil(nbytes / grain) * grain for nbytes in wanted))
        return rounded if len(rounded) > 1 else (*rounded, 2 * rounded[0])


# -------------------------------------------------------------------------------------------- collectives


def call_of(collective: Collective, nbytes: int, device: torch.device, team: Team) -> Callable[[], object]:
    """Return a call of a collective over `team`, with `nbytes` as WireModel's method of that name counts them."""
    count = nbytes // _ITEMSIZE // (team.size if collective.send_blocks else 1)
    send_numel, recv_numel = collective.numels(count, team.size)
    send = _zeros(_ITEMSIZE * send_numel, device)
    recv = _zeros(_ITEMSIZE * recv_numel, device) if collective.blocks else send
    return collective.bind(getattr(team, collective.name), team.rank, send, recv)


@dataclass(frozen=True)
class ConcurrentGroups:
    """Groups of one level that communicate at once: `team` is this rank's, None when it only waits."""

    level: str
    ranks: int
    groups: int
    team: Team | None

    def key(self, primitive: str) -> LinkKey:
        """Return where the curve of a collective belongs."""
        return LinkKey(self.level, primitive, self.ranks, self.groups)


def groups_of(world: Team) -> list[ConcurrentGroups]:
    """Return the groups to time, the same on every rank: of each level one group alone, then all of them at once.

    Levels inside a node come first: they are fast, and leave the rest of the time for the slow ones.
    """
    nodes = world.wire.nodes
    counts = [nodes.count(node) for node in dict.fromkeys(nodes)]
    found: list[ConcurrentGroups] = []
    if world.intra is not None:
        my_node = list(dict.fromkeys(nodes)).index(nodes[world.rank])
        largest = max(counts)
        if largest > 1:
            first = counts.index(largest)
            found.append(ConcurrentGroups("intra", largest, 1, world.intra if my_node == first else None))
            if (alike := counts.count(largest)) > 1:
                found.append(
                    ConcurrentGroups("intra", largest, alike, world.intra if counts[my_node] == largest else None)
                )
        found.append(ConcurrentGroups("inter", len(counts), 1, world.inter if world.intra.rank == 0 else None))
        if world.uniform and largest > 1:
            found.append(ConcurrentGroups("inter", len(counts), largest, world.inter))
    found += _groups_of_sites(world)
    if world.size > 1:
        found.append(ConcurrentGroups("world", world.size, 1, world))
    return found


def _groups_of_sites(world: Team) -> Iterator[ConcurrentGroups]:
    """Iterate over the groups of each level of sites, innermost first: inside the largest site, and between sites."""
    wire, level, at_once = world.wire, "inter", world.leaders
    team, first = world.inter, world.intra is None or world.intra.rank == 0
    below: Sequence[int] = wire.nodes
    for site in wire.sites:
        counts = Counter(of for _, of in dict.fromkeys(zip(below, site, strict=True)))
        largest, mine = max(counts.values()), site[wire.rank]
        intra = team.intra if team is not None and counts[mine] == largest else None
        chosen = first and mine == next(each for each in counts if counts[each] == largest)
        yield ConcurrentGroups(f"{level}.intra", largest, 1, intra if chosen else None)
        if at_once > 1:
            yield ConcurrentGroups(f"{level}.intra", largest, at_once, intra)
        first = first and team is not None and team.intra is not None and team.intra.rank == 0
        at_once, team = at_once * min(counts.values()), None if team is None else team.inter
        yield ConcurrentGroups(f"{level}.inter", len(counts), 1, team if first else None)
        if at_once > 1:
            yield ConcurrentGroups(f"{level}.inter", len(counts), at_once, team)
        level, below = f"{level}.inter", site


def _zeros(nbytes: int, device: torch.device) -> Tensor:
    """Return memory that is really there: zeros that nobody wrote would be one page of it."""
    return torch.empty(nbytes // _ITEMSIZE, dtype=torch.float32, device=device).zero_()


# --------------------------------------------------------------------------------------------------- work


@dataclass(frozen=True)
class TimedWork:
    """Local work of one kind: `prepare(numel, device)` returns a call that does it for so many float32 elements.

    least_nbytes: less of it is never done.
    """

    key: WorkKey
    prepare: Callable[[int, torch.device], Callable[[], None]]
    least_nbytes: int = _LEAST_WORK_NBYTES

    def sizes(self, options: ProbeOptions) -> tuple[int, ...]:
        """Return the bytes to time, two or more."""
        suited = tuple(nbytes for nbytes in options.sizes(_MOST_WORK_NBYTES) if nbytes >= self.least_nbytes)
        if len(suited) > 1:
            return suited
        first = max(self.least_nbytes, options.min_nbytes)
        return (first, round(first * options.factor))


def known_compressors() -> tuple[Compressor, ...]:
    """Return the compressors of the presets, each compressor with its defaults, and quantization to all widths."""
    found: list[Compressor] = [Exact(), Cast(), Cast(torch.float16), Quantize(8), Quantize(4), Quantize(2)]
    found += [kind() for kind in COMPRESSORS.values()]
    for preset in PRESETS.values():
        found += [each for each in _inside(preset.build()) if isinstance(each, Compressor)]
    return tuple(dict.fromkeys(found))


def _inside(value: object) -> Iterator[object]:
    """Yield a configuration and everything it is made of."""
    yield value
    if is_dataclass(value):
        for field in fields(value):
            yield from _inside(getattr(value, field.name))


def work_of(compressors: Iterable[Compressor]) -> list[TimedWork]:
    """Return the work that these compressors make, and that which does not depend on them."""
    found = [
        TimedWork(WorkKey("copy"), _copy),
        TimedWork(WorkKey("pack"), _pack),
        TimedWork(WorkKey("unpack"), _unpack),
    ]
    for compressor in compressors:
        for kind, prepare in (("encode", _encode), ("decode", _decode), ("recode", _recode)):
            found.append(TimedWork(WorkKey(kind, repr(compressor)), partial(prepare, compressor)))
    for matrix_rank in _MATRIX_RANKS:
        least_nbytes = max(4 * (4 * matrix_rank + 1) ** 2, _LEAST_WORK_NBYTES)  # of a matrix worth its factors
        for kind, factorize in (("factor", _factor), ("refresh", _refresh)):
            key = WorkKey(kind, f"PowerSGD({matrix_rank})")
            found.append(TimedWork(key, partial(factorize, matrix_rank), least_nbytes))
    return found


def _copy(numel: int, device: torch.device) -> Callable[[], None]:
    values, copied = _normal(numel, device), _zeros(_ITEMSIZE * numel, device)

    def copy() -> None:
        copied.copy_(values)

    return copy


def _pack(numel: int, device: torch.device) -> Callable[[], None]:
    values, packed, beyond = _packed(numel)

    def pack() -> None:
        packing.pack(values, packed, beyond)

    return pack


def _unpack(numel: int, device: torch.device) -> Callable[[], None]:
    values, packed, beyond = _packed(numel)
    return partial(packing.unpack, packed, beyond[: packing.pack(values, packed, beyond)], values)


def _packed(numel: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers as bfloat16 and where they go, on the CPU: elsewhere nothing is packed."""
    values = _normal(numel, torch.device("cpu")).to(torch.bfloat16)
    nbytes = packing.packed_nbytes(numel), packing.spare_nbytes(numel)
    packed, beyond = (torch.empty(each, dtype=torch.uint8, device="cpu") for each in nbytes)
    return values, packed, beyond


def _encode(compressor: Compressor, numel: int, device: torch.device) -> Callable[[], None]:
    chunk_numel, payload = _rows(compressor, numel, 1, device)
    values, encoding = (
        _normal(numel, device),
        Encoding(chunk_numel, 1 / _ROWS, _residual(numel, device), RngKey(seed=1)),
    )
    return lambda: compressor.compress(values, payload, encoding)


def _decode(compressor: Compressor, numel: int, device: torch.device) -> Callable[[], None]:
    chunk_numel, payload = _rows(compressor, numel, 1, device)
    compressor.compress(_normal(numel, device), payload, Encoding(chunk_numel))
    return partial(compressor.decompress, payload, _zeros(_ITEMSIZE * numel, device), chunk_numel)


def _recode(compressor: Compressor, numel: int, device: torch.device) -> Callable[[], None]:
    chunk_numel, payloads = _rows(compressor, numel, _ROWS, device)
    compressor.compress(_normal(numel, device), payloads, Encoding(chunk_numel))
    sums, sent = min(chunk_numel, numel), torch.zeros_like(payloads[:1])
    encoding = Encoding(chunk_numel, 1.0, _residual(sums, device), RngKey(seed=1))
    return lambda: compressor.recompress(payloads, sent, sums, encoding)


def _factor(matrix_rank: int, numel: int, device: torch.device) -> Callable[[], None]:
    """What PowerSGD does before its first message, and with the result: fill, project, the next basis, the product."""
    matrices, basis, product = _stacks(matrix_rank, numel, device)
    result = matrices.clone()

    def step() -> None:
        torch.add(matrices, result, out=matrices)
        lowrank.project(matrices, basis, product)
        lowrank.orthogonalize(product)
        lowrank.decode(product, basis, result)

    return step


def _refresh(matrix_rank: int, numel: int, device: torch.device) -> Callable[[], None]:
    """What a second message of PowerSGD adds: project back, subtract, and orthogonalize once more."""
    matrices, basis, product = _stacks(matrix_rank, numel, device)

    def step() -> None:
        lowrank.refresh(matrices, basis, product)
        lowrank.orthogonalize(product)

    return step


def _stacks(matrix_rank: int, numel: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return square matrices, up to 1024 x 1024 and then several of them, a basis, and room for a product."""
    side = min(round(sqrt(numel)), _MATRIX_SIDE)
    count = max(numel // side**2, 1)
    basis = lowrank.orthogonalize(_normal(count * side * matrix_rank, device).view(count, side, matrix_rank))
    return _normal(count * side**2, device).view(count, side, side), basis, torch.zeros_like(basis)


def _rows(compressor: Compressor, numel: int, count: int, device: torch.device) -> tuple[int, Tensor]:
    """Return the elements of a chunk, and that many rows of payload."""
    chunk_numel = ceil(numel / (count * compressor.granularity)) * compressor.granularity
    nbytes = compressor.payload_nbytes(chunk_numel)
    return chunk_numel, torch.zeros(count, nbytes, dtype=torch.uint8, device=device)


def _normal(numel: int, device: torch.device) -> Tensor:
    return torch.randn(numel, generator=torch.Generator(device).manual_seed(0), dtype=torch.float32, device=device)


def _residual(numel: int, device: torch.device) -> ErrorFeedback:
    return ErrorFeedback(_normal(numel, device) / 8, torch.zeros(numel, dtype=torch.float32, device=device))
