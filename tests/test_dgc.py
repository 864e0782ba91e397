# SPDX-License-Identifier: Apache-2.0
"""DGC: the exact largest elements in a documented row, the paper's formulas step by step, and what it costs."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import commopt
from commopt import DGC, Aggregator, Compressed, Feedback, Hierarchical
from commopt.compress import ErrorFeedback
from tests.catalogue import LAYOUTS
from tests.chosen import Chooser, Trace, kept
from tests.feedback_training import Training, Vectors, momentum_of, total
from tests.hook_training import assert_identical
from tests.payloads import decode, encode
from tests.ranks import run

Array = npt.NDArray[np.float64]
BLOCK = 65536  # elements that 16 bits of index reach
FORMATS = {torch.float32: "f", torch.float16: "e", torch.bfloat16: "H"}


# ------------------------------------------------------------------------------------ rows, by hand


def selection(values: Tensor, count: int) -> list[int]:
    """Return where the `count` largest magnitudes are: of equal ones the first; ascending."""
    order = np.argsort(-values.abs().double().numpy(), kind="stable")
    return sorted(order[:count].tolist())


def slow_read(compressor: DGC, row: Tensor, chunk_numel: int) -> tuple[list[int], Tensor]:
    """Read indices and values from a row as it is documented, and see that the rest of it is zero."""
    count, blocks = ceil(compressor.density * chunk_numel), ceil(chunk_numel / BLOCK)
    data = bytes(row.tolist())
    assert len(data) == compressor.payload_nbytes(chunk_numel)
    ends = struct.unpack_from(f"<{blocks}i", data)
    assert list(ends) == sorted(ends)
    assert ends[-1] == count
    local = struct.unpack_from(f"<{count}H", data, 4 * blocks)
    counts = [end - begin for begin, end in zip((0, *ends), ends, strict=False)]
    bases = [block * BLOCK for block, number in enumerate(counts) for _ in range(number)]
    begin = 4 * blocks + ceil(2 * count / 4) * 4
    dtype = compressor.value_dtype
    values = torch.frombuffer(bytearray(data[begin : begin + count * dtype.itemsize]), dtype=dtype)
    end = 4 * blocks + 2 * count
    assert not any(data[end:begin])
    assert not any(data[begin + count * dtype.itemsize :])
    return [base + index for base, index in zip(bases, local, strict=True)], values


def random_values(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def ties(numel: int) -> Tensor:
    """Few magnitudes of both signs: wherever the threshold falls, many elements have it."""
    return torch.randint(-3, 4, (numel,), generator=torch.Generator().manual_seed(1)).float()


def comb(numel: int) -> Tensor:
    """What any regular sample of every 10th to 1000th element sees is not what there is."""
    values = random_values(numel) * 1e-3
    for stride in (10, 64, 100, 128, 1000):
        values[::stride] *= stride
    return values


VALUES: dict[str, Callable[[int], Tensor]] = {
    "random": random_values,
    "ties": ties,
    "all equal": lambda numel: torch.full((numel,), -0.5),
    "all zero": torch.zeros,
    "ascending": lambda numel: torch.arange(1.0, numel + 1),
    "descending": lambda numel: torch.arange(float(numel), 0.0, -1),
    "few are not zero": lambda numel: random_values(numel) * (torch.arange(numel) % 997 == 5),
    "heavy tail": lambda numel: random_values(numel) ** 9,
    "tiny": lambda numel: random_values(numel) * 1e-39,
    "huge": lambda numel: random_values(numel).sign() * (1e38 + 1e37 * random_values(numel, 1).tanh()),
    "comb": comb,
    "one spike": lambda numel: torch.where(torch.arange(numel) == numel - 1, 3e4, random_values(numel)),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize(
    ("numel", "density", "dtype"),
    [
        (1, 0.5, torch.bfloat16),
        (37, 0.1, torch.float16),
        (BLOCK + 1, 0.3, torch.bfloat16),
        (300_007, 0.001, torch.float32),
    ],
    ids=str,
)
def test_the_largest_elements_are_sent(kind: str, numel: int, density: float, dtype: torch.dtype) -> None:
    if kind == "huge" and dtype == torch.float16:
        pytest.skip("too large for float16")
    compressor, values = DGC(density, value_dtype=dtype), VALUES[kind](numel)
    made = encode(compressor, values)
    indices, sent = slow_read(compressor, made.payload[0], made.chunk_numel)
    assert indices == selection(values, ceil(density * numel))
    assert torch.equal(sent, values[indices].to(dtype))
    by_hand = torch.zeros(numel)
    by_hand[indices] = sent.float()
    assert torch.equal(decode(compressor, made, numel), by_hand)


@pytest.mark.parametrize(("numel", "count"), [(1, 1), (49, 49), (50, 50), (4999, 50), (5001, 51)])
def test_small_chunks_send_more_than_their_density(numel: int, count: int) -> None:
    compressor, values = DGC(0.01, min_elements=50, value_dtype=torch.float32), random_values(numel)
    made = encode(compressor, values)
    sent = decode(compressor, made, numel)
    assert sent.count_nonzero() == count
    assert sent[selection(values, count)].count_nonzero() == count


@pytest.mark.parametrize("numel", [1, 2, 99, 70_001, 131_073])
@pytest.mark.parametrize("density", [1.0, 0.6, 0.02])
def test_short_rows_stay_inside_their_chunk(numel: int, density: float) -> None:
    """Three rows, the last of which holds few real elements, or none."""
    compressor = DGC(density)
    values = ties(numel)
    made = encode(compressor, values, rows=3)
    padded = torch.cat([values, torch.zeros(3 * made.chunk_numel - numel)]).view(3, -1)
    for row, (payload, chunk) in enumerate(zip(made.payload, padded, strict=True)):
        indices, sent = slow_read(compressor, payload, made.chunk_numel)
        assert len(set(indices)) == len(indices)
        assert max(indices) < made.chunk_numel
        real = max(0, min(made.chunk_numel, numel - row * made.chunk_numel))
        nonzero = [index for index in selection(chunk[:real], len(indices)) if chunk[index]]
        assert [index for index, value in zip(indices, sent.tolist(), strict=True) if value] == nonzero
        decoded = torch.zeros(made.chunk_numel)
        decoded[nonzero] = chunk[nonzero]
        assert torch.equal(decode(compressor, made, 3 * made.chunk_numel).view(3, -1)[row], decoded)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_what_is_not_sent_is_kept_bit_by_bit(dtype: torch.dtype) -> None:
    """Of what is sent the residual keeps the rounding."""
    compressor = DGC(0.03, value_dtype=dtype)
    values, old = random_values(9001), random_values(9001, 1)
    carry = ErrorFeedback(old, torch.full((9001,), 55.0))
    made = encode(compressor, values, carry=carry)
    p = values + old
    assert slow_read(compressor, made.payload[0], 9001)[0] == selection(p, ceil(0.03 * 9001))
    decoded = decode(compressor, made, 9001)
    assert torch.equal(carry.new, p - decoded)
    assert carry.new[decoded != 0].any() == (dtype != torch.float32)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["value", "residual"])
@pytest.mark.parametrize("place", [0, 4321, 9999])
def test_no_threshold_hides_what_is_not_finite(bad: float, where: str, place: int) -> None:
    """NaN is above no threshold, and one infinity must not push out another row's values."""
    compressor = DGC(0.001)
    values, old = random_values(10_000), torch.zeros(10_000)
    clean = encode(compressor, values, rows=2)
    (values if where == "value" else old)[place] = bad
    carry = ErrorFeedback(old, torch.empty(10_000))
    made = encode(compressor, values, rows=2, carry=carry)
    spoiled = place // made.chunk_numel
    assert not compressor.finite(made.payload, made.chunk_numel)
    assert not compressor.finite(made.payload[spoiled : spoiled + 1], made.chunk_numel)
    assert compressor.finite(made.payload[1 - spoiled : 2 - spoiled], made.chunk_numel)
    assert torch.equal(made.payload[1 - spoiled], clean.payload[1 - spoiled])
    assert not decode(compressor, made, 10_000).isfinite().all()
    total = torch.empty(made.chunk_numel)
    compressor.accumulate(made.payload, total)
    assert not total.isfinite().all()


@pytest.mark.parametrize(
    ("compressor", "values"),
    [
        (DGC(0.01), torch.full((1000,), float("nan"))),
        (DGC(0.01, value_dtype=torch.float16), random_values(1000) * 1e6),  # too large for the wire
    ],
    ids=["all NaN", "float16"],
)
def test_what_cannot_travel_is_plain_to_see(compressor: DGC, values: Tensor) -> None:
    made = encode(compressor, values)
    assert not compressor.finite(made.payload, made.chunk_numel)
    assert not decode(compressor, made, 1000).isfinite().all()


# ------------------------------------------------------------------------------------------- settings


def test_defaults() -> None:
    assert DGC() == DGC(0.001, 0.0, False, True, None, (), torch.bfloat16, 1)
    assert repr(DGC()) == "DGC(density=0.001)"
    assert DGC().start_step == 0
    assert hash(DGC(warmup=((2, 0.5),))) != hash(DGC())


def test_warmup_is_a_schedule_of_densities() -> None:
    compressor = DGC(0.01, momentum=0.9, warmup=((2, 0.5), (3, 0.1)))
    assert compressor.start_step == 5
    for step, density in enumerate((0.5, 0.5, 0.1, 0.1, 0.1)):
        assert compressor.at(step) == replace(compressor, density=density, warmup=())
    assert compressor.at(5) == compressor.at(6) == compressor.at(None) == compressor
    assert [compressor.phase(step) for step in range(7)] == [0, 0, 2, 2, 2, 5, 5]
    quantize = commopt.Quantize(8, start_step=3)  # others start dense
    assert [quantize.at(step) for step in (2, 3, None)] == [None, quantize, quantize]


# ------------------------------------------------------------------------- the paper's formulas, in numpy

SHAPES = {"matrix": (30, 20), "bias": (7,)}
NUMEL = 600
STEPS = 6


def dyadic(rank: int, step: int, world_size: int) -> dict[str, Tensor]:
    """Integers that the number of ranks divides: with a momentum of 1/2 every float32 operation is exact."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    integers = {name: torch.randint(-700, 701, shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: (world_size * values).float() for name, values in integers.items()}


def largest(p: Array, count: int) -> npt.NDArray[np.intp]:
    return np.argsort(-np.abs(p), kind="stable")[:count]


@dataclass
class Sender:
    """One rank's side of DGC, arXiv 1712.01887, algorithms 1 and 4 and equation 4, with momentum masking."""

    config: DGC
    numel: int
    decay: float = 1.0
    u: Array = field(init=False)
    v: Array = field(init=False)

    def __post_init__(self) -> None:
        self.u, self.v = np.zeros(self.numel), np.zeros(self.numel)

    def add(self, g: Array) -> Array:
        """Accumulate, return p."""
        m = self.config.momentum
        if not m:
            return g + self.decay * self.v
        if self.config.nesterov:
            self.u = m * (self.u + g)
            return self.decay * self.v + self.u + g
        self.u = m * self.u + g
        return self.decay * self.v + self.u

    def send(self, g: Array, density: float, chunk_numel: int) -> Array:
        """Return what the rank tells the others, chunk by chunk."""
        p = self.add(g)
        decoded = np.zeros(self.numel)
        for begin in range(0, self.numel, chunk_numel):
            chosen = begin + largest(p[begin : begin + chunk_numel], ceil(density * chunk_numel))
            decoded[chosen] = rounded(p[chosen], self.config.value_dtype)
            if self.config.momentum_masking:
                self.u[chosen] = 0
        self.v = p - decoded
        return decoded


def rounded(values: Array, dtype: torch.dtype) -> Array:
    return torch.from_numpy(values).to(dtype).double().numpy()


def density_at(config: DGC, step: int) -> float:
    for steps, density in config.warmup:
        if step < steps:
            return density
        step -= steps
    return config.density


def expected(config: DGC, ranks: int, gradients: Sequence[Sequence[Array]], decay: float, chunks: int) -> list[Array]:
    """Return the result of every step for `gradients` [step][rank], in shares of the average; `chunks` have servers."""
    numel = len(gradients[0][0])
    chunk_numel = ceil(numel / chunks)
    senders = [Sender(config, numel, decay) for _ in range(ranks)]
    server = Sender(replace(config, momentum=0.0, nesterov=False), numel)
    results = []
    for step, own in enumerate(gradients):
        density = density_at(config, step)
        sent = [sender.send(g, density, chunk_numel) for sender, g in zip(senders, own, strict=True)]
        s = np.sum(sent, axis=0)
        results.append(s if chunks == 1 else server.send(s, density, chunk_numel))
    return results


F32: dict[str, Any] = {"value_dtype": torch.float32}
HALF: dict[str, Any] = {"momentum": 0.5, **F32}
FORMULAS: dict[str, DGC] = {
    "plain": DGC(0.1, **F32),
    "16-bit values": DGC(0.1),
    "momentum": DGC(0.1, **HALF),
    "momentum, 16-bit values": DGC(0.1, momentum=0.5),
    "no masking": DGC(0.1, momentum_masking=False, **HALF),
    "nesterov": DGC(0.1, nesterov=True, **HALF),
    "nesterov, no masking": DGC(0.1, nesterov=True, momentum_masking=False, **HALF),
    "warmup": DGC(0.01, warmup=((2, 0.25), (2, 0.1)), **HALF),
    "very sparse": DGC(0.001, **HALF),
}
# From four ranks on, so many elements are more than a dense float32 sum: they go through servers.
THROUGH_SERVERS: dict[str, DGC] = {
    "plain": DGC(0.6, value_dtype=torch.bfloat16),
    "momentum": DGC(0.4, **HALF),
    "nesterov, no masking": DGC(0.4, nesterov=True, momentum_masking=False, **HALF),
}


def follow(
    rank: int, world_size: int, aggregators: Sequence[Aggregator], names: Sequence[str], scaled: bool
) -> list[Trace]:
    traces = []
    for aggregator in aggregators:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) if scaled else None

        def gradients(step: int) -> dict[str, Tensor]:
            return {name: values for name, values in dyadic(rank, step, world_size).items() if name in names}

        shapes = {name: SHAPES[name] for name in names}
        traces.append(Chooser(aggregator, shapes, gradients, scaler=scaler).run(STEPS))
    return traces


def shares(name: str, world_size: int) -> list[list[Array]]:
    """Return the gradients of every step and rank over the number of ranks."""
    return [
        [dyadic(rank, step, world_size)[name].flatten().double().numpy() / world_size for rank in range(world_size)]
        for step in range(STEPS)
    ]


def assert_results(traces: Sequence[Trace], name: str, want: Sequence[Array], context: object) -> None:
    assert_identical([trace.digest() for trace in traces])
    for step, values in enumerate(want):
        got = traces[0].results[step][name].flatten().double().numpy()
        np.testing.assert_array_equal(got, values, err_msg=f"{context}: {name}, step {step}")


def dense_sums(config: DGC, gradients: Sequence[Sequence[Array]]) -> list[Array]:
    senders = [Sender(config, len(gradients[0][0])) for _ in gradients[0]]
    return [np.sum([s.add(g) for s, g in zip(senders, own, strict=True)], axis=0) for own in gradients]


@pytest.mark.parametrize(("world_size", "scaled"), [(2, False), (3, True)])
def test_the_papers_formulas(world_size: int, scaled: bool) -> None:
    aggregators = [Compressed(config) for config in FORMULAS.values()]
    results = run(follow, world_size, aggregators, list(SHAPES), scaled)
    for (name, config), traces in zip(FORMULAS.items(), zip(*results, strict=True), strict=True):
        gradients = shares("matrix", world_size)
        assert_results(traces, "matrix", expected(config, world_size, gradients, 1.0, 1), name)
        assert_results(traces, "bias", dense_sums(config, shares("bias", world_size)), name)
        for rank, trace in enumerate(traces):
            sender = Sender(config, NUMEL)
            for step in range(STEPS):
                sender.send(gradients[step][rank], density_at(config, step), NUMEL)
                state = trace.states[step]
                np.testing.assert_array_equal(kept(state, "matrix", NUMEL), sender.v, err_msg=f"{name}: residual")
                velocity = sender.u if config.momentum else np.zeros(NUMEL)
                got = kept(state, "matrix", NUMEL, momentum=True)
                np.testing.assert_array_equal(got, velocity, err_msg=f"{name}: momentum, step {step}")


def test_more_than_a_dense_sum_goes_through_owners() -> None:
    aggregators = [Compressed(config) for config in THROUGH_SERVERS.values()]
    results = run(follow, 4, aggregators, ["matrix"], False)
    for (name, config), traces in zip(THROUGH_SERVERS.items(), zip(*results, strict=True), strict=True):
        want = expected(config, 4, shares("matrix", 4), 1.0, 4)
        assert_results(traces, "matrix", want, name)
        assert not np.array_equal(want[-1], expected(config, 4, shares("matrix", 4), 1.0, 1)[-1])
        row = config.payload_nbytes(NUMEL // 4)
        for trace in traces:
            assert trace.nbytes == [2 * 3 * row] * STEPS


@pytest.mark.parametrize("name", ["plain", "momentum", "nesterov"])
def test_between_nodes_the_nodes_are_the_workers(name: str) -> None:
    """Momentum lives on the shards of the nodes' sums."""
    config = FORMULAS[name]
    results = run(follow, 4, [Hierarchical(Compressed(config))], ["matrix"], False, nodes=(2, 2))
    nodes = [[own[0] + own[1], own[2] + own[3]] for own in shares("matrix", 4)]
    want = [
        np.concatenate(parts)
        for parts in zip(
            *(
                expected(config, 2, [[node[part] for node in own] for own in nodes], 1.0, 1)
                for part in (slice(0, NUMEL // 2), slice(NUMEL // 2, NUMEL))
            ),
            strict=True,
        )
    ]
    assert_results([traces[0] for traces in results], "matrix", want, name)


def test_momentum_goes_on_where_everything_travels_dense() -> None:
    """By name, because nothing would be saved, and with nesterov."""
    dense = [
        Compressed(FORMULAS["momentum"], dense=("*",)),
        Compressed(FORMULAS["nesterov"], dense=("mat*",)),
        Compressed(DGC(1.0, **HALF)),
    ]
    results = run(follow, 2, dense, list(SHAPES), False)
    for aggregator, traces in zip(dense, zip(*results, strict=True), strict=True):
        assert isinstance(aggregator.compressor, DGC)
        for name in SHAPES:
            assert_results(traces, name, dense_sums(aggregator.compressor, shares(name, 2)), aggregator)
            for trace in traces:
                assert not kept(trace.states[-1], name, len(shares(name, 2)[0][0])).any()
                assert kept(trace.states[-1], name, len(shares(name, 2)[0][0]), momentum=True).any()


def test_decay_and_no_feedback_at_all() -> None:
    """Decay is for what was not sent; without feedback nothing is remembered."""
    decaying, plain = FORMULAS["momentum"], DGC(0.1, **F32)
    aggregators = [Compressed(decaying, Feedback(decay=0.5)), Compressed(plain, None)]
    halved, forgetful = zip(*run(follow, 2, aggregators, ["matrix"], False), strict=True)
    gradients = shares("matrix", 2)
    assert_results(halved, "matrix", expected(decaying, 2, gradients, 0.5, 1), "decay")
    want = [np.sum([Sender(plain, NUMEL).send(g, 0.1, NUMEL) for g in own], axis=0) for own in gradients]
    assert_results(forgetful, "matrix", want, "no feedback")
    assert not forgetful[0].states[-1]["residuals"]


# ------------------------------------------------------------------------------------------------ costs


def ragged(rank: int, world_size: int, aggregators: Sequence[Aggregator], numel: int, steps: int) -> list[Trace]:
    def gradients(step: int) -> dict[str, Tensor]:
        return {"matrix": random_values(numel, 10 * step + rank).view(-1, 10)}

    return [Chooser(each, {"matrix": (numel // 10, 10)}, gradients).run(steps) for each in aggregators]


def test_bytes_follow_the_warmup() -> None:
    """Two steps through servers, as so dense rows to all would be too much, and then all rows to all."""
    config = DGC(0.01, warmup=((2, 0.7), (1, 0.1)))
    numel = 3330
    for (trace,) in run(ragged, 4, [Compressed(config)], numel, 6):
        servers = 2 * 3 * config.at(0).payload_nbytes(ceil(numel / 4))  # type: ignore[union-attr]
        to_all = [3 * DGC(density).payload_nbytes(numel) for density in (0.1, 0.01)]
        assert trace.nbytes == [servers, servers, to_all[0], to_all[1], to_all[1], to_all[1]]
        # A quarter of the elements at a time, or what one rank sends up to what four ranks do.
        most = [4 * ceil(0.7 * ceil(numel / 4))] * 2 + [4 * ceil(density * numel) for density in (0.1, *[0.01] * 3)]
        least = [most[0] // 2] * 2 + [nonzero // 4 for nonzero in most[2:]]
        for results, low, high in zip(trace.results, least, most, strict=True):
            assert low <= results["matrix"].count_nonzero() <= high


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_rows_go_to_all_while_that_costs_no_more_than_a_dense_sum(world_size: int) -> None:
    """The rule's formula on both sides of its limit, which lies at 8/P bytes of row per element."""
    numel, limit = 20_000, 8 / world_size
    below, above = DGC((limit - 0.02) / 4), DGC(min((limit + 0.02) / 4, 0.98))
    results = run(ragged, world_size, [Compressed(below), Compressed(above)], numel, 2)
    for few, many in results:
        assert few.nbytes[-1] == (world_size - 1) * below.payload_nbytes(numel)
        servers = 2 * (world_size - 1) * above.payload_nbytes(ceil(numel / world_size))
        assert many.nbytes[-1] == (servers if world_size > 2 else above.payload_nbytes(numel))


def keep(rank: int, world_size: int, scaled: bool) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return, without and with momentum, statistics and saved state after some steps."""
    found = []
    for momentum in (0.0, 0.9):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
        aggregator = Compressed(DGC(0.05, momentum=momentum))
        trace = Chooser(aggregator, SHAPES, lambda step: dyadic(rank, step, world_size), scaler=scaler).run(4)
        found.append((trace.stats, trace.states[-1]))
    return found


@pytest.mark.parametrize("scaled", [False, True])
def test_what_is_kept_is_counted(scaled: bool) -> None:
    """A residual, momentum also of what travels dense, and both twice with a scaler; nothing more with more ranks."""
    times = 2 if scaled else 1
    for (plain, _), (stats, state) in run(keep, 3, scaled):
        assert plain["residual_bytes"] == 4 * NUMEL * times
        assert "momentum_norm" not in plain
        assert stats["residual_bytes"] == 4 * (NUMEL + NUMEL + 7) * times
        momentum = torch.cat([kept(state, "matrix", NUMEL, momentum=True), kept(state, "bias", 7, momentum=True)])
        assert momentum.any()
        assert stats["residual_norm"] == pytest.approx(float(kept(state, "matrix", NUMEL).norm()), rel=1e-5)
        assert stats["momentum_norm"] == pytest.approx(float(momentum.norm()), rel=1e-5)


# --------------------------------------------------------------------------------------------- clipping

CLIP_SHAPES = {"matrix": (20, 10), "bias": (8,)}


def steep(rank: int, step: int) -> dict[str, Tensor]:
    """Half of the elements are zero, so that all others are sent; ranks are above and below the limit."""
    matrix = random_values(200, 100 * step + rank) * (torch.arange(200) % 2)
    values = {"matrix": matrix.view(20, 10), "bias": random_values(8, 100 * step + rank + 50)}
    return {name: each * (0.01 if rank == 0 else 5.0 * rank) for name, each in values.items()}


def clip(rank: int, world_size: int, clip_norm: float, scaled: bool, poison: bool) -> Trace:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1) if scaled else None

    def gradients(step: int) -> dict[str, Tensor]:
        values = steep(rank, step)
        if step == 2:
            values = {name: torch.zeros_like(each) for name, each in values.items()}
        if poison and step == 1 and rank == 1:
            values["matrix"][3, 3] = float("inf")
        return values

    return Chooser(Compressed(DGC(0.5, clip_norm=clip_norm)), CLIP_SHAPES, gradients, scaler=scaler).run(3)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_each_worker_clips_its_own_gradient(world_size: int, scaled: bool) -> None:
    clip_norm = 3.0
    limit = clip_norm * world_size**0.5  # of the gradient; that of its part of the average is W times smaller
    traces = run(clip, world_size, clip_norm, scaled, False)
    assert_identical([trace.digest() for trace in traces])
    for step in range(2):
        want = {name: torch.zeros(shape).double() for name, shape in CLIP_SHAPES.items()}
        for rank in range(world_size):
            own = steep(rank, step)
            norm = float(torch.cat([each.flatten().double() for each in own.values()]).norm())
            assert (norm > limit) == (rank > 0), "both kinds must occur"
            for name, each in own.items():
                want[name] += each.double() * min(1.0, limit / norm) / world_size
        for name, values in want.items():
            got = traces[0].results[step][name].double()
            # What bfloat16 rounded away in the first step comes in the second.
            torch.testing.assert_close(got, values, rtol=2**-7, atol=2**-7 * float(values.abs().max()))
    for values in traces[0].results[2].values():
        assert values.isfinite().all(), "a gradient of zero has no norm to divide by"


def test_clipping_hides_no_infinity() -> None:
    for trace in run(clip, 2, 3.0, True, True):
        assert not all(values.isfinite().all() for values in trace.results[1].values())
        for name, shape in CLIP_SHAPES.items():
            numel = int(np.prod(shape))
            assert torch.equal(kept(trace.states[0], name, numel), kept(trace.states[1], name, numel))
        assert all(values.isfinite().all() for values in trace.results[2].values())


# --------------------------------------------------------------------------------- momentum and state

MOMENTUM = {
    "flat": Compressed(DGC(0.05, momentum=0.9)),
    "between nodes": Hierarchical(Compressed(DGC(0.05, momentum=0.9))),
}


def test_momentum_has_a_path_of_its_own() -> None:
    assert Compressed(DGC()).residual_paths == ("",)
    assert set(MOMENTUM["flat"].residual_paths) == {"", "momentum"}
    assert set(MOMENTUM["between nodes"].residual_paths) == {"inter", "inter.momentum"}
    assert Compressed(DGC(), feedback=None).residual_paths == ()


def save_momentum(rank: int, world_size: int, kind: str) -> tuple[Vectors, dict[str, Any] | None]:
    training = Training(rank, world_size, MOMENTUM[kind])
    for _ in range(4):
        training.step()
    return momentum_of(training.comm.state_dict()), training.comm.gathered_state_dict()


def load_momentum(rank: int, world_size: int, kind: str, saved: dict[str, Any]) -> tuple[Vectors, str, bool]:
    training = Training(rank, world_size, MOMENTUM[kind])
    training.comm.load_state_dict(saved)
    loaded = momentum_of(training.comm.state_dict())
    for _ in range(4):
        training.step()
    later = momentum_of(training.comm.state_dict())
    return loaded, training.digest(), all(bool(values.isfinite().all()) for values in later.values())


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("flat", "3", "2"),
        ("between nodes", "2x2", "3x2"),
        ("between nodes", "2x2", "1+1"),
        ("between nodes", "2x2", "2+1"),
    ],
)
def test_another_world_takes_over_the_momentum(kind: str, old: str, new: str) -> None:
    world_size, nodes = LAYOUTS[old]
    saved = run(save_momentum, world_size, kind, nodes=nodes)
    state = saved[0][1]
    assert state is not None
    left = total([vectors for vectors, _ in saved])
    assert all(values.abs().max() > 0.1 for values in left.values()), "also what travels dense has momentum"
    world_size, nodes = LAYOUTS[new]
    results = run(load_momentum, world_size, kind, state, nodes=nodes)
    loaded = total([vectors for vectors, _, _ in results])
    for name, values in left.items():
        torch.testing.assert_close(loaded[name], values, rtol=1e-5, atol=1e-5)
    assert_identical([digest for _, digest, _ in results])
    assert all(fine for _, _, fine in results)


def watch_momentum(rank: int, world_size: int, kind: str, scaled: bool) -> list[tuple[bool, bool]]:
    """Return, for steps with and without a NaN, whether the momentum on this rank changed."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    training = Training(rank, world_size, MOMENTUM[kind], scaler=scaler)
    for _ in range(4):
        training.step()
    changes = []
    for step in range(6):
        before = momentum_of(training.comm.state_dict())
        # In one bucket the NaN comes with what is compressed, in another with what travels dense.
        poison = ((step // 2) % world_size, ("third.weight", "second.weight")[step // 2 % 2], 5, float("nan"))
        finite = training.step(poison if step % 2 else None)
        after = momentum_of(training.comm.state_dict())
        hit = [poison[1]] if not scaled else list(before)
        changed = any(not torch.equal(before[name], after[name]) for name in hit)
        changes.append((finite, changed))
    return changes


@pytest.mark.parametrize(("kind", "layout"), [("flat", "3"), ("between nodes", "2x2")])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_dropped_step_leaves_no_momentum(kind: str, layout: str, scaled: bool) -> None:
    world_size, nodes = LAYOUTS[layout]
    results = run(watch_momentum, world_size, kind, scaled, nodes=nodes)
    for changes in results:
        assert [finite for finite, _ in changes] == [True, False] * 3
        assert not any(changed for finite, changed in changes if not finite)
    for step in (0, 2, 4):
        assert any(changes[step][1] for changes in results), "momentum never changes"
