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
from commopt import DGC, Aggregator, Compressed, Feedback, Hierarchical, build_preset
from commopt.compress import ErrorFeedback
from commopt.feedback import Layout
from commopt.groups import TeamShape
from tests.chosen import Chooser, Trace, kept
from tests.feedback_training import Served
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
    residual = ErrorFeedback(old, torch.full((9001,), 55.0))
    made = encode(compressor, values, residual=residual)
    p = values + old
    assert slow_read(compressor, made.payload[0], 9001)[0] == selection(p, ceil(0.03 * 9001))
    decoded = decode(compressor, made, 9001)
    assert torch.equal(residual.new, p - decoded)
    assert residual.new[decoded != 0].any() == (dtype != torch.float32)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["value", "residual"])
@pytest.mark.parametrize("place", [0, 4321, 9999])
def test_no_threshold_hides_what_is_not_finite(bad: float, where: str, place: int) -> None:
    """NaN is above no threshold, and one infinity must not push out another row's values."""
    compressor = DGC(0.001)
    values, old = random_values(10_000), torch.zeros(10_000)
    clean = encode(compressor, values, rows=2)
    (values if where == "value" else old)[place] = bad
    residual = ErrorFeedback(old, torch.empty(10_000))
    made = encode(compressor, values, rows=2, residual=residual)
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
    assert DGC() == DGC(0.001, (), torch.bfloat16, 1)
    assert repr(DGC()) == "DGC(density=0.001)"
    assert DGC().start_step == 0
    assert hash(DGC(warmup=((2, 0.5),))) != hash(DGC())


def test_warmup_is_a_schedule_of_densities() -> None:
    compressor = DGC(0.01, warmup=((2, 0.5), (3, 0.1)))
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
    """Integers that the number of ranks divides: every float32 operation is exact."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    integers = {name: torch.randint(-700, 701, shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: (world_size * values).float() for name, values in integers.items()}


def largest(p: Array, count: int) -> npt.NDArray[np.intp]:
    return np.argsort(-np.abs(p), kind="stable")[:count]


@dataclass
class Sender:
    """One rank's side of DGC, arXiv 1712.01887, algorithm 1."""

    config: DGC
    numel: int
    decay: float = 1.0
    v: Array = field(init=False)

    def __post_init__(self) -> None:
        self.v = np.zeros(self.numel)

    def send(self, g: Array, density: float, chunk_numel: int) -> Array:
        """Return what the rank tells the others, chunk by chunk."""
        p = g + self.decay * self.v
        decoded = np.zeros(self.numel)
        for begin in range(0, self.numel, chunk_numel):
            count = max(ceil(density * chunk_numel), ceil(self.config.min_elements * chunk_numel / self.numel))
            chosen = begin + largest(p[begin : begin + chunk_numel], count)
            decoded[chosen] = rounded(p[chosen], self.config.value_dtype)
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
    """Return the result of every step for `gradients` [step][rank], in shares of the average; `chunks` have servers.

    A server sends as many elements of its sum as each rank sends of the chunk.
    """
    numel = len(gradients[0][0])
    chunk_numel = ceil(numel / chunks)
    senders = [Sender(config, numel, decay) for _ in range(ranks)]
    server = Sender(config, numel)
    results = []
    for step, own in enumerate(gradients):
        density = density_at(config, step)
        sent = [sender.send(g, density, chunk_numel) for sender, g in zip(senders, own, strict=True)]
        s = np.sum(sent, axis=0)
        results.append(s if chunks == 1 else server.send(s, density, chunk_numel))
    return results


F32: dict[str, Any] = {"value_dtype": torch.float32}
FORMULAS: dict[str, DGC] = {
    "plain": DGC(0.1, **F32),
    "16-bit values": DGC(0.1),
    "warmup": DGC(0.01, warmup=((2, 0.25), (2, 0.1)), **F32),
    "very sparse": DGC(0.001, **F32),
}
THROUGH_SERVERS: dict[str, DGC] = {
    "16-bit values": DGC(0.1),
    "float32": DGC(0.4, **F32),
    "a share of the fewest": DGC(0.01, min_elements=50, **F32),
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


@pytest.mark.parametrize(("world_size", "scaled"), [(2, False), (3, True)])
def test_the_papers_formulas(world_size: int, scaled: bool) -> None:
    aggregators = [Compressed(config) for config in FORMULAS.values()]
    results = run(follow, world_size, aggregators, list(SHAPES), scaled)
    for (name, config), traces in zip(FORMULAS.items(), zip(*results, strict=True), strict=True):
        gradients = shares("matrix", world_size)
        assert_results(traces, "matrix", expected(config, world_size, gradients, 1.0, 1), name)
        assert_results(traces, "bias", [np.sum(own, axis=0) for own in shares("bias", world_size)], name)
        for rank, trace in enumerate(traces):
            sender = Sender(config, NUMEL)
            for step in range(STEPS):
                sender.send(gradients[step][rank], density_at(config, step), NUMEL)
                state = trace.states[step]
                np.testing.assert_array_equal(kept(state, "matrix", NUMEL), sender.v, err_msg=f"{name}: residual")


def test_servers_choose_once_more_and_keep_the_rest() -> None:
    """By the paper's formulas, once on each rank and once on each server, and nothing is lost in between."""
    aggregators = [Served(config) for config in THROUGH_SERVERS.values()]
    results = run(follow, 4, aggregators, ["matrix"], False)
    for (name, config), traces in zip(THROUGH_SERVERS.items(), zip(*results, strict=True), strict=True):
        gradients = shares("matrix", 4)
        want = expected(config, 4, gradients, 1.0, 4)
        assert_results(traces, "matrix", want, name)
        assert not np.array_equal(want[-1], expected(config, 4, gradients, 1.0, 1)[-1])
        residuals = sum(kept(trace.states[-1], "matrix", NUMEL).numpy() for trace in traces)
        np.testing.assert_array_equal(np.sum(gradients, axis=(0, 1)) - np.sum(want, axis=0), residuals, err_msg=name)
        row = config.of_chunk(4).payload_nbytes(NUMEL // 4)
        for trace in traces:
            assert trace.nbytes == [2 * 3 * row] * STEPS


def test_between_nodes_the_nodes_are_the_workers() -> None:
    config = FORMULAS["plain"]
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
    assert_results([traces[0] for traces in results], "matrix", want, "between nodes")


def test_decay_and_no_feedback_at_all() -> None:
    """Decay is for what was not sent; without feedback nothing is remembered."""
    plain = FORMULAS["plain"]
    aggregators = [Compressed(plain, Feedback(decay=0.5)), Compressed(plain, None)]
    halved, forgetful = zip(*run(follow, 2, aggregators, ["matrix"], False), strict=True)
    gradients = shares("matrix", 2)
    assert_results(halved, "matrix", expected(plain, 2, gradients, 0.5, 1), "decay")
    want = [np.sum([Sender(plain, NUMEL).send(g, 0.1, NUMEL) for g in own], axis=0) for own in gradients]
    assert_results(forgetful, "matrix", want, "no feedback")
    assert not forgetful[0].states[-1]["residuals"]


# ------------------------------------------------------------------------------------------------ costs


def ragged(rank: int, world_size: int, aggregators: Sequence[Aggregator], numel: int, steps: int) -> list[Trace]:
    def gradients(step: int) -> dict[str, Tensor]:
        return {"matrix": random_values(numel, 10 * step + rank).view(-1, 10)}

    return [Chooser(each, {"matrix": (numel // 10, 10)}, gradients).run(steps) for each in aggregators]


def test_bytes_follow_the_warmup() -> None:
    """Two steps through servers, as so long rows to all would take longer, and then all rows to all."""
    config = DGC(0.01, warmup=((2, 0.7), (1, 0.1)))
    numel = 10_000
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
def test_rows_go_to_all_while_a_second_collective_takes_longer(world_size: int) -> None:
    """On both sides of the limit: 16 KiB saved for each rank. Two ranks have no use for a server."""
    numel = 20_000

    def saved(density: float) -> int:
        chunk_row = DGC(density).payload_nbytes(ceil(numel / world_size))
        return (world_size - 1) * (DGC(density).payload_nbytes(numel) - 2 * chunk_row)

    densities = [number / 1000 for number in range(5, 995, 5)]
    below = next((each for each in reversed(densities) if saved(each) <= 16 * 1024), 0.5)
    above = next((each for each in densities if saved(each) > 16 * 1024), 0.9)
    results = run(ragged, world_size, [Compressed(DGC(below)), Compressed(DGC(above))], numel, 2)
    for few, many in results:
        assert few.nbytes[-1] == (world_size - 1) * DGC(below).payload_nbytes(numel)
        servers = 2 * (world_size - 1) * DGC(above).payload_nbytes(ceil(numel / world_size))
        assert many.nbytes[-1] == (servers if world_size > 2 else DGC(above).payload_nbytes(numel))


@pytest.mark.parametrize("nodes", [4, 8, 4096])
@pytest.mark.parametrize("preset", ["hierarchical_dgc:density=0.05", "hierarchical_dgc:density=0.01"])
def test_a_node_sends_about_two_rows_however_many_nodes_there_are(nodes: int, preset: str) -> None:
    """Of a message of 100 MB; its fewest elements count once, and not once for each server."""
    layout, aggregator = Layout.anonymous(25_000_000), build_preset(preset)
    assert isinstance(aggregator, Hierarchical)
    assert isinstance(aggregator.inter, Compressed)
    row = aggregator.inter.compressor.payload_nbytes(layout.numel)
    for team in (TeamShape.of((1,) * nodes), TeamShape.of((1,) * nodes, rank=nodes - 1)):
        assert aggregator.wire_bytes(layout, torch.float32, team).inter <= 2.2 * row
    short = Layout.anonymous(100_000)
    by_hand = 2 * (nodes - 1) * 16 * ceil((4 + 4 * ceil(max(1024, 0.01 * 100_000) / nodes)) / 16)
    few = build_preset("hierarchical_dgc:density=0.01").wire_bytes(short, torch.float32, TeamShape.of((1,) * nodes))
    assert few.inter == by_hand or nodes == 4  # whose rows of 4 KiB go to all


def keep(rank: int, world_size: int, aggregator: Aggregator, scaled: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return statistics and saved state after some steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    chooser = Chooser(aggregator, SHAPES, lambda step: dyadic(rank, step, world_size), scaler=scaler)
    trace = chooser.run(4)
    return trace.stats, trace.states[-1]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("served", [False, True])
def test_what_is_kept_is_counted(served: bool, scaled: bool) -> None:
    """A residual, on a server also that of its chunk, and twice with a scaler; nothing more with more ranks."""
    kind = Served if served else Compressed
    numel = NUMEL + (NUMEL // 3 if served else 0)
    for stats, state in run(keep, 3, kind(DGC(0.05)), scaled):
        assert stats["residual_bytes"] == 4 * numel * (2 if scaled else 1)
        if not served:
            assert stats["residual_norm"] == pytest.approx(float(kept(state, "matrix", NUMEL).norm()), rel=1e-5)
