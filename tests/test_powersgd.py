# SPDX-License-Identifier: Apache-2.0
"""PowerSGD: a deterministic orthogonalizer, the papers' formulas step by step, and matrices of every shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from commopt import Aggregator, Feedback, Hierarchical, PowerSGD
from commopt.aggregate.exchange import Exchange
from commopt.aggregate.matrices import MatrixPlan, RankRule, matrix_plan
from commopt.feedback import BufferContext, Factors, Layout, Side
from commopt.kernels.lowrank import orthogonalize
from tests.catalogue import LAYOUTS
from tests.chosen import Chooser, Shapes, Trace, blocks_of, kept, threads
from tests.emulator import Emulator, on_the_cpu
from tests.hook_training import assert_identical
from tests.ranks import run

EPS = torch.finfo(torch.float32).eps


def random_values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -------------------------------------------------------------------------------------- orthogonalize


def near_rank_one(scale: float, noise: float) -> Tensor:
    left, right = random_values(20, 300, 1), random_values(20, 1, 4, seed=1)
    return scale * (left @ right + noise * random_values(20, 300, 4, seed=2))


HARD = {
    "random": random_values(20, 300, 4),
    "large": random_values(20, 300, 4) * 1e30,
    "largest": random_values(20, 300, 4).clamp(-3, 3) * 1e38,
    "small": random_values(20, 300, 4) * 1e-30,
    "rank 1": near_rank_one(1.0, 0.0),
    "rank 1, large": near_rank_one(1e30, 0.0),
    "rank 1, small": near_rank_one(1e-30, 0.0),
    "nearly rank 1": near_rank_one(1.0, 1e-6),
    "nearly rank 1, large": near_rank_one(1e30, 1e-4),
    "columns of other sizes": random_values(20, 300, 4) * torch.tensor([1e-6, 1.0, 1e-3, 1e-12]),
    "a zero column": random_values(20, 300, 4) * torch.tensor([1.0, 0.0, 1.0, 1.0]),
    "more columns than rows": random_values(20, 3, 5),
    "one column": random_values(20, 300, 1),
    "one row": random_values(20, 1, 2),
    "one element": random_values(20, 1, 1),
    "many columns": random_values(2, 500, 32),
    "equal columns": random_values(20, 300, 1).expand(20, 300, 4).contiguous(),
}


FULL_RANK = ("random", "large", "largest", "small", "one column", "one element", "many columns")
RANK_ONE = ("rank 1", "rank 1, large", "rank 1, small", "nearly rank 1", "equal columns")


@pytest.mark.parametrize("kind", HARD)
def test_bases_are_orthonormal_and_of_the_same_space(kind: str) -> None:
    """No direction is longer than one: else error feedback with a near-singular factor would blow up."""
    values, bases = HARD[kind].double(), orthogonalize(HARD[kind]).double()
    assert bases.shape == values.shape
    assert bases.isfinite().all()
    longest = torch.linalg.matrix_norm(bases, 2)
    assert float(longest.max()) <= 1 + 1e-5
    assert float(longest.min()) >= 0.999, "a matrix that is not zero has at least one direction"
    if kind in FULL_RANK:
        identity = torch.eye(values.shape[2], dtype=torch.float64)
        assert float((bases.mT @ bases - identity).abs().max()) < 1e-4
    if kind in FULL_RANK + RANK_ONE:
        outside = values - bases @ (bases.mT @ values)
        assert float((outside.norm(dim=(1, 2)) / values.norm(dim=(1, 2))).max()) < 1e-4


def test_zero_stays_zero_beside_others() -> None:
    values = random_values(3, 50, 4)
    values[1] = 0
    bases = orthogonalize(values)
    assert not bases[1].any()
    assert torch.equal(bases[0], orthogonalize(values[:1])[0]), "a matrix depends on its neighbours"
    assert torch.equal(bases[2], orthogonalize(values[2:])[0]), "a matrix depends on its neighbours"


@pytest.mark.parametrize("shape", [(1, 4099, 4), (3, 20_000, 8), (2, 700, 32), (40, 9, 2)], ids=str)
def test_bits_do_not_depend_on_the_threads(shape: tuple[int, ...]) -> None:
    """Every rank orthogonalizes the same sums by itself: its bits decide whether replicas stay alike."""
    values = random_values(*shape)
    with threads(1):
        alone = orthogonalize(values)
    for number in (2, 3, 8):
        with threads(number):
            assert torch.equal(orthogonalize(values), alone), f"{number} threads"


@pytest.mark.parametrize("shape", [(1, 4099, 4), (2, 700, 32), (40, 9, 2)], ids=str)
def test_bits_do_not_depend_on_the_order_of_sums(shape: tuple[int, ...]) -> None:
    """So another processor, whose BLAS adds in another order, comes to the same."""
    values = random_values(*shape)
    order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(1))
    assert torch.equal(orthogonalize(values[:, order].contiguous()), orthogonalize(values)[:, order])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_own_matrix(bad: float) -> None:
    values = random_values(3, 50, 4)
    values[1, 7, 2] = bad
    bases = orthogonalize(values)
    assert not bases[1].isfinite().all()
    assert bases[0].isfinite().all()
    assert bases[2].isfinite().all()


# ------------------------------------------------------------------------------------------- settings


def test_defaults() -> None:
    assert PowerSGD() == PowerSGD(4, 2, 2, Feedback(), ())
    assert PowerSGD().start_step == 2
    assert not PowerSGD().lossless
    assert repr(PowerSGD()) == "PowerSGD(matrix_rank=4)"
    assert PowerSGD(dense=["*.bias"]) == PowerSGD(dense=("*.bias",))  # type: ignore[arg-type]
    assert PowerSGD(start_step=3).phase(1) == 0
    assert [PowerSGD(start_step=3).phase(step) for step in (3, 4, 5, 6)] == [3, 3, 3, 3]


# --------------------------------------------------------------------------- the formulas, in float64

ROWS, COLS, RANK = 24, 40, 3
SHAPES = {"matrix": (ROWS, COLS), "bias": (7,)}
POISONED_STEP = 3


def fresh(rank: int, step: int) -> dict[str, Tensor]:
    return {name: random_values(*shape, seed=100 * step + rank) for name, shape in SHAPES.items()}


def basis(matrix: Tensor) -> Tensor:
    """Return columns that span those of `matrix`: twice Cholesky-QR with the documented ridge, in float64."""
    for _ in range(2):
        gram = matrix.mT @ matrix
        ridge = 100 * EPS * gram.trace() / len(gram)
        factor = torch.linalg.cholesky(gram + ridge * torch.eye(len(gram), dtype=torch.float64))
        matrix = torch.linalg.solve_triangular(factor, matrix.mT, upper=False).mT
    return matrix


def row_space(update: Tensor, rank: int) -> Tensor:
    """Return the `rank` directions in which an update's rows lie, and see that there are no more."""
    _, sizes, directions = torch.linalg.svd(update.double(), full_matrices=False)
    assert float(sizes[rank] / sizes[0]) < 1e-4, "the update's rank is higher"
    space: Tensor = directions[:rank].mT
    return space


class Formula:
    """One step of arXiv 1905.13727 after another, given the column space of the very first update."""

    def __init__(self, first_update: Tensor) -> None:
        self.left = row_space(first_update.mT, RANK)
        self.right: Tensor | None = None

    def __call__(self, parts: Sequence[Tensor], step: int, *, dropped: bool) -> list[Tensor]:
        """Return what each rank's part becomes on the wire."""
        matrix = torch.stack(list(parts)).sum(0)
        left = self.left if self.right is None else basis(matrix @ self.right)
        sent = [left @ (left.mT @ part) for part in parts]
        if not dropped:
            self.right = matrix.mT @ left
        return sent


def follow(rank: int, world_size: int, aggregator: Aggregator, steps: int, scaled: bool, poison: bool) -> Trace:
    def gradients(step: int) -> dict[str, Tensor]:
        values = fresh(rank, step)
        if poison and step == POISONED_STEP and rank == world_size - 1:
            values["matrix"][5, 5] = float("nan")
        return values

    scaler = torch.amp.GradScaler("cpu", init_scale=3.0, growth_interval=2) if scaled else None
    return Chooser(aggregator, SHAPES, gradients, scaler=scaler).run(steps)


@pytest.mark.parametrize(
    ("layout", "between", "scaled", "poison"),
    [("2", False, False, False), ("3", False, True, True), ("2", False, False, True), ("2+1", True, False, False)],
)
def test_the_papers_formulas(layout: str, between: bool, scaled: bool, poison: bool) -> None:
    """Errors, too: each rank keeps its own part less its own decoding. A dropped step counts, and changes nothing."""
    world_size, nodes = LAYOUTS[layout]
    power = PowerSGD(RANK, start_step=0)
    aggregator = Hierarchical(power) if between else power
    steps = 8
    traces = run(follow, world_size, aggregator, steps, scaled, poison, nodes=nodes)
    assert_identical([trace.digest() for trace in traces])
    model = Formula(traces[0].results[0]["matrix"])
    errors = [torch.zeros(ROWS, COLS, dtype=torch.float64) for _ in range(world_size)]
    for step in range(steps):
        own = [fresh(rank, step) for rank in range(world_size)]
        dropped = poison and step == POISONED_STEP
        parts = [each["matrix"].double() / world_size + error for each, error in zip(own, errors, strict=True)]
        sent = model(parts, step, dropped=dropped)
        if dropped:
            assert all(not trace.results[step]["matrix"].isfinite().all() for trace in traces)
            continue
        errors = [part - each for part, each in zip(parts, sent, strict=True)]
        got = traces[0].results[step]
        # The noise that keeps directions from getting lost, a millionth, shifts the next bases a little every time;
        # and between nodes factors are rounded to bfloat16.
        close = 2**-5 if between else 5e-4
        torch.testing.assert_close(got["matrix"].double(), torch.stack(sent).sum(0), rtol=0, atol=close)
        bias = torch.stack([each["bias"].double() for each in own]).mean(0)
        torch.testing.assert_close(got["bias"].double(), bias, rtol=4 * EPS, atol=4 * EPS)
        for trace, error in zip(traces, errors, strict=True):
            residual = kept(trace.states[step], "matrix", ROWS * COLS)
            torch.testing.assert_close(residual.view(ROWS, COLS), error, rtol=0, atol=close)


def test_without_feedback_no_residual_is_kept() -> None:
    traces = run(follow, 2, PowerSGD(RANK, start_step=0, feedback=None), 4, False, False)
    assert_identical([trace.digest() for trace in traces])
    for step, results in enumerate(traces[0].results):
        matrix = torch.stack([fresh(rank, step)["matrix"].double() for rank in range(2)]).mean(0)
        update = results["matrix"].double()
        assert torch.linalg.matrix_rank(update, rtol=1e-4) == RANK
        space = row_space(update.mT, RANK)
        torch.testing.assert_close(update, space @ (space.mT @ matrix), rtol=0, atol=1e-4)
    assert not kept(traces[0].states[-1], "matrix", ROWS * COLS).any()


# ------------------------------------------------------------------------------- gradients of low rank


def constant(rank: int, matrix_rank: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Each rank has its own part of a matrix of `matrix_rank`, which never changes."""
    left = random_values(ROWS, matrix_rank)
    right = random_values(matrix_rank, COLS, seed=1)
    weights = torch.diag(random_values(matrix_rank, seed=2 + rank).abs() + 0.5)
    return {"matrix": scale * (left @ weights @ right), "bias": scale * random_values(7, seed=rank)}


LOW_RANK: dict[str, tuple[PowerSGD, int, float]] = {
    "rank 3": (PowerSGD(3, start_step=0), 3, 1.0),
    "rank 1 of 4": (PowerSGD(4, start_step=0), 1, 1.0),
    "1e30": (PowerSGD(3, start_step=0), 3, 1e30),
    "1e30, rank 1 of 4": (PowerSGD(4, start_step=0), 1, 1e30),
    "1e-30, rank 1 of 4": (PowerSGD(4, start_step=0), 1, 1e-30),
    "after a dense start": (PowerSGD(3), 3, 1.0),
    "no feedback": (PowerSGD(3, start_step=0, feedback=None), 3, 1.0),
}


def recover(rank: int, world_size: int) -> dict[str, Trace]:
    traces = {}
    for name, (aggregator, matrix_rank, scale) in LOW_RANK.items():
        gradients = constant(rank, matrix_rank, scale)
        traces[name] = Chooser(aggregator, SHAPES, lambda step, same=gradients: same).run(10)  # type: ignore[misc]
    return traces


def test_what_has_low_rank_arrives_whole() -> None:
    """Every step is exact in the end, and with feedback what was late has come."""
    results = run(recover, 3)
    for name, (aggregator, matrix_rank, scale) in LOW_RANK.items():
        traces = [mine[name] for mine in results]
        assert_identical([trace.digest() for trace in traces])
        mean = {
            key: torch.stack([constant(rank, matrix_rank, scale)[key].double() for rank in range(3)]).mean(0)
            for key in SHAPES
        }
        told = torch.stack([each["matrix"].double() for each in traces[0].results])
        largest = float(mean["matrix"].abs().max())
        for update in told[6:]:
            assert float((update - mean["matrix"]).abs().max()) < 1e-3 * largest, name
        owed = len(told) * mean["matrix"] - told.sum(0)
        if aggregator.feedback is not None:
            assert float(owed.abs().max()) < 1e-3 * largest, f"{name}: what was late has not come"
        for each in traces[0].results:
            torch.testing.assert_close(each["bias"].double() / scale, mean["bias"] / scale, rtol=1e-6, atol=1e-6)


def late(rank: int, world_size: int) -> Trace:
    def gradients(step: int) -> dict[str, Tensor]:
        return constant(rank, 3, 1.0 if step >= 4 else 0.0)

    return Chooser(PowerSGD(3, start_step=0), SHAPES, gradients).run(10)


def test_zero_is_zero_and_nothing_gets_stuck_there() -> None:
    traces = run(late, 2)
    assert_identical([trace.digest() for trace in traces])
    mean = torch.stack([constant(rank, 3)["matrix"] for rank in range(2)]).mean(0)
    for step, each in enumerate(traces[0].results):
        assert step >= 4 or not each["matrix"].any(), f"step {step}"
    told = torch.stack([each["matrix"] for each in traces[0].results]).sum(0)
    assert float((told - 6 * mean).abs().max()) < 1e-3 * float(mean.abs().max())


def hidden(rank: int, world_size: int) -> list[bool]:
    """Return whether results were finite; a NaN or infinity comes after gradients that leave factors (nearly) zero."""
    places = {2: (0, 0, float("nan")), 3: (ROWS - 1, 0, float("inf")), 5: (3, COLS - 1, float("-inf"))}
    places |= {6: (0, COLS - 1, float("nan")), 8: (ROWS - 1, COLS - 1, float("inf"))}

    def gradients(step: int) -> dict[str, Tensor]:
        values = {"matrix": torch.zeros(ROWS, COLS), "bias": torch.zeros(7)}
        if step == 4:
            values["matrix"][1, 1] = 1.0
        if step in places and rank == step % world_size:
            row, column, value = places[step]
            values["matrix"][row, column] = value
        return values

    chooser = Chooser(PowerSGD(RANK, start_step=0), SHAPES, gradients)
    return [all(bool(values.isfinite().all()) for values in results.values()) for results in chooser.run(10).results]


def test_no_factor_hides_what_is_not_finite() -> None:
    for finite in run(hidden, 2):
        assert finite == [step not in (2, 3, 5, 6, 8) for step in range(10)]


# -------------------------------------------------------------------------------------------- shapes

EVERY_SHAPE: Shapes = {
    "linear": (30, 20),
    "conv": (8, 6, 3, 3),
    "depthwise": (32, 1, 3, 3),
    "pointwise": (16, 12, 1, 1),
    "cube": (10, 10, 10),
    "embedding": (200, 16),
    "one_row": (1, 100),
    "one_column": (100, 1),
    "small": (3, 3),
    "flat": (2, 400),
    "vector": (500,),
    "scalar": (),
    "dense_linear": (30, 20),
}


def becomes_matrix(shape: tuple[int, ...], matrix_rank: int, rate: float) -> bool:
    """Return whether factors of the best split of a shape are smaller than it, by `rate`."""
    if len(shape) < 2:
        return False
    factors = min(prod(shape[:cut]) + prod(shape[cut:]) for cut in range(1, len(shape)))
    return factors * matrix_rank * rate < prod(shape)


def of_every_shape(rank: int, step: int) -> dict[str, Tensor]:
    values = {}
    for number, (name, shape) in enumerate(EVERY_SHAPE.items()):
        values[name] = random_values(*shape, seed=10_000 * number + 100 * step + rank)
    values["embedding"] *= (torch.arange(200) % 40 == (step + rank) % 4).float()[:, None]  # few words occur
    return values


def train_every_shape(rank: int, world_size: int, matrix_rank: int, rate: float, channels_last: bool) -> Trace:
    aggregator = PowerSGD(matrix_rank, rate, start_step=0, dense=("dense_*",))
    chooser = Chooser(aggregator, EVERY_SHAPE, lambda step: of_every_shape(rank, step), channels_last=channels_last)
    return chooser.run(7)


@pytest.mark.parametrize(("matrix_rank", "rate", "last"), [(2, 2, False), (4, 1, True), (40, 2, False), (1, 8, True)])
def test_every_shape(matrix_rank: int, rate: float, last: bool) -> None:
    traces = run(train_every_shape, 2, matrix_rank, rate, last)
    assert_identical([trace.digest() for trace in traces])
    for name, shape in EVERY_SHAPE.items():
        numel = prod(shape)
        own = [[of_every_shape(rank, step)[name].double() for rank in range(2)] for step in range(7)]
        means = [torch.stack(each).mean(0) for each in own]
        told = [each[name].double() for each in traces[0].results]
        compressed = becomes_matrix(shape, matrix_rank, rate) and not name.startswith("dense_")
        stored = {piece for trace in traces for piece in blocks_of(trace.states[-1], "/worker")}
        if not (last and len(shape) == 4):  # stored in another order, which may pay where this one does not
            assert (name in stored) == compressed, f"{name} is a matrix by mistake, or is none"
        if name not in stored:
            for mean, got in zip(means, told, strict=True):
                torch.testing.assert_close(got, mean, rtol=4 * EPS, atol=4 * EPS)
            continue
        left = torch.stack(means).sum(0) - torch.stack(told).sum(0)
        residual = torch.stack([kept(trace.states[-1], name, numel) for trace in traces]).sum(0)
        assert residual.norm() > 0.01
        if last and len(shape) == 4:
            left = left.permute(0, 2, 3, 1)
        torch.testing.assert_close(left.flatten(), residual, rtol=0, atol=1e-4)
        if name == "embedding" and shape[0] > 100:
            never = torch.arange(200) % 40 >= 5
            assert max(float(got[never].abs().max()) for got in told) < 1e-4


# --------------------------------------------------------------------------------------------- costs


def count(rank: int, world_size: int, aggregators: Sequence[Aggregator]) -> list[Trace]:
    return [Chooser(aggregator, SHAPES, lambda step: fresh(rank, step)).run(7) for aggregator in aggregators]


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_of_every_kind_of_step(world_size: int) -> None:
    results = run(count, world_size, [PowerSGD(RANK), PowerSGD(RANK, start_step=3), PowerSGD(RANK, dense=("*",))])
    dense, factors = 4 * (ROWS * COLS + 7), 4 * ((ROWS + COLS) * RANK + 7)
    asking = factors + 4 * ROWS * COLS  # which elements rest, in the first step with factors
    wanted = [[dense] * 2 + [asking] + [factors] * 4, [dense] * 3 + [asking] + [factors] * 3, [dense] * 7]
    for traces, nbytes in zip(zip(*results, strict=True), wanted, strict=True):
        sent = [sum(trace.nbytes[step] for trace in traces) for step in range(7)]
        assert sent == [2 * (world_size - 1) * each for each in nbytes]


def keep(rank: int, world_size: int, scaled: bool) -> Trace:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    return Chooser(PowerSGD(RANK, start_step=0), SHAPES, lambda step: fresh(rank, step), scaler=scaler).run(4)


@pytest.mark.parametrize("scaled", [False, True])
def test_what_is_kept(scaled: bool) -> None:
    """A residual, twice with a scaler; right factors, and those of both sides to begin with. The norm is without."""
    for trace in run(keep, 2, scaled):
        assert trace.stats["residual_bytes"] == 4 * ROWS * COLS * (2 if scaled else 1)
        assert trace.stats["factor_bytes"] == 4 * (ROWS + 2 * COLS) * RANK
        residual = kept(trace.states[-1], "matrix", ROWS * COLS)
        assert trace.stats["residual_norm"] == pytest.approx(float(residual.norm()), rel=1e-5) != 0


# ---------------------------------------------------------------------------------- between the nodes

DIVIDED: dict[str, Shapes] = {
    "one large": {"big": (64, 48), "bias": (5,)},
    "two alike": {"a": (40, 30), "b": (30, 40)},
    "many": {"a": (64, 64), "b": (32, 32), "c": (32, 32), "d": (16, 48), "e": (100,), "f": (3,)},
}


def train_divided(rank: int, world_size: int, case: str, forms: Sequence[Aggregator], low_rank: bool) -> list[Trace]:
    def gradients(step: int) -> dict[str, Tensor]:
        values = {}
        for number, (name, shape) in enumerate(DIVIDED[case].items()):
            seed = 10_000 * number + (0 if low_rank else 100 * step)
            if low_rank and len(shape) == 2:
                left, right = random_values(shape[0], 2, seed=seed), random_values(2, shape[1], seed=seed + 1)
                values[name] = (1 + rank) * left @ right
            else:
                values[name] = random_values(*shape, seed=seed + rank)
        return values

    return [Chooser(aggregator, DIVIDED[case], gradients).run(6) for aggregator in forms]


@pytest.mark.parametrize(("case", "layout"), [("one large", "2x2"), ("two alike", "2x2"), ("many", "3x2")])
def test_the_ranks_of_a_node_share_its_matrices_by_rows(case: str, layout: str) -> None:
    world_size, nodes = LAYOUTS[layout]
    forms = [Hierarchical(PowerSGD(2, start_step=0), form="reduce_scatter")]
    results = run(train_divided, world_size, case, forms, False, nodes=nodes)
    assert_identical([trace.digest() for (trace,) in results])
    blocks = [blocks_of(trace.states[-1], "inter/worker") for (trace,) in results]
    assert blocks[:2] == blocks[2:4], "nodes divide alike"
    whole = {name: prod(shape) for name, shape in DIVIDED[case].items() if len(shape) == 2}
    for name, numel in whole.items():
        covered = sorted(span for mine in blocks[:2] for span in mine.get(name, []))
        assert covered[0][0] == 0
        assert covered[-1][1] == numel
        for (_, end), (begin, _) in pairwise(covered):
            assert end == begin, f"{name}: {covered}"
        assert all(begin % DIVIDED[case][name][1] == 0 for begin, _ in covered), f"{name} is not cut at rows"
    shares = [sum(end - begin for spans in mine.values() for begin, end in spans) for mine in blocks[:2]]
    # Largest first onto the emptiest: no more apart than by what cannot be cut, a row or a matrix that was left whole.
    uncut = [numel for name, numel in whole.items() if any((0, numel) in mine.get(name, []) for mine in blocks[:2])]
    assert max(shares) - min(shares) <= max([*uncut, 64]), f"the ranks of a node hold {shares} elements"
    if case == "two alike":
        assert sorted(len(mine) for mine in blocks[:2]) == [1, 1], "cut without need"
    # Nothing is lost.
    for name, numel in whole.items():
        owed = torch.zeros(DIVIDED[case][name], dtype=torch.float64)
        number = list(DIVIDED[case]).index(name)
        for step in range(6):
            seeds = [10_000 * number + 100 * step + rank for rank in range(world_size)]
            owed += torch.stack([random_values(*DIVIDED[case][name], seed=seed).double() for seed in seeds]).mean(0)
            owed -= results[0][0].results[step][name].double()
        residual = torch.stack([kept(trace.states[-1], name, numel) for (trace,) in results]).sum(0)
        torch.testing.assert_close(owed.flatten(), residual, rtol=0, atol=1e-4)


def test_divided_matrices_of_low_rank_arrive_whole_and_cost_their_factors() -> None:
    power = PowerSGD(2, start_step=0)
    forms = [Hierarchical(power, form="reduce_scatter"), Hierarchical(power, form="leader"), Hierarchical(power)]
    results = run(train_divided, 4, "one large", forms, True, nodes=(2, 2))
    for traces in zip(*results, strict=True):
        assert_identical([trace.digest() for trace in traces])
        mean = 2.5 * random_values(64, 2) @ random_values(2, 48, seed=1)
        told = torch.stack([each["big"] for each in traces[0].results]).sum(0)
        assert float((told - 6 * mean).abs().max()) < 2**-8 * float(mean.abs().max())  # of one step, rounded
    for stats, blocks in ((0, 2), (1, 1), (2, 1)):
        sent = sum(mine[stats].stats["inter_bytes"] for mine in results)
        asked = 2 * 2 * 4 * 64 * 48  # which elements rest, in DDP's first buckets and in its second
        assert sent == asked + 2 * 6 * (2 * (64 * 2 + blocks * 48 * 2) + 4 * 5)  # from two nodes, in six steps


# -------------------------------------------------------------------------------------- equal replicas

LARGE: Shapes = {"wide": (300, 2000), "tall": (3000, 150), "twin": (300, 2000), "bias": (999,)}


def train_with_other_threads(rank: int, world_size: int) -> str:
    torch.set_num_threads(1 + 2 * rank)  # before anything runs in the lane's thread: this process is new

    def gradients(step: int) -> dict[str, Tensor]:
        return {name: random_values(*shape, seed=10 * step + rank) for name, shape in LARGE.items()}

    return Chooser(PowerSGD(8, start_step=0), LARGE, gradients).run(5).digest()


def test_replicas_are_alike_whatever_their_threads() -> None:
    assert_identical(run(train_with_other_threads, 3, fresh=True))


# -------------------------------------------------------------------------------------- warm factors


def save_warm(rank: int, world_size: int, aggregator: Aggregator) -> dict[str, Any] | None:
    chooser = Chooser(aggregator, SHAPES, lambda step: constant(0, RANK))
    chooser.run(6)
    return chooser.comm.gathered_state_dict()


def load_warm(rank: int, world_size: int, aggregator: Aggregator, saved: dict[str, Any]) -> tuple[float, str]:
    """Return how far the first result is from the gradient, in shares of its largest element, and a hash of it."""
    chooser = Chooser(aggregator, SHAPES, lambda step: constant(0, RANK))
    chooser.comm.load_state_dict(saved)
    trace = chooser.run(1)
    wanted = constant(0, RANK)["matrix"]
    return float((trace.results[0]["matrix"] - wanted).abs().max() / wanted.abs().max()), trace.digest()


@pytest.mark.parametrize(("old", "new"), [("2", "3"), ("2x2", "1+1"), ("2x2", "3x2"), ("1+1", "2x2")])
def test_another_world_begins_with_warm_factors(old: str, new: str) -> None:
    """What had settled on a gradient of low rank has settled still: a cold start would miss most of it."""
    power = PowerSGD(RANK, start_step=0, feedback=None)
    aggregator = Hierarchical(power) if "x" in old + new or "+" in old + new else power
    world_size, nodes = LAYOUTS[old]
    saved = run(save_warm, world_size, aggregator, nodes=nodes)[0]
    assert saved is not None
    world_size, nodes = LAYOUTS[new]
    results = run(load_warm, world_size, aggregator, saved, nodes=nodes)
    assert_identical([digest for _, digest in results])
    assert results[0][0] < (1e-3 if nodes is None else 2**-7)  # between nodes factors are rounded to bfloat16


# -------------------------------------------------------------------------------------- factors side by side

BESIDE = [(320, 80), (320, 80), (80, 320), (90, 110), (1300, 40)]


def exchange_of(shapes: list[tuple[int, int]], matrix_rank: int) -> tuple[Exchange, MatrixPlan]:
    layout = Layout.of_parameters([(f"m{number}", shape) for number, shape in enumerate(shapes)])
    plan = matrix_plan(layout, RankRule(matrix_rank, 1.0, ()))
    context = BufferContext.unremembered(layout.numel)
    return Exchange(plan, matrix_rank, None, torch.zeros(layout.numel), torch.float32, 1.0, context), plan


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("noisy", [False, True], ids=["bare", "with noise"])
def test_factors_beside_higher_ones_have_the_bits_that_they_have_alone(
    emulator: Emulator, side: Side, noisy: bool
) -> None:
    """A kernel takes factors of several heights; zeros, NaN and what is in their neighbours change nothing in them."""
    torch.manual_seed(0)
    with on_the_cpu(emulator):
        exchange, plan = exchange_of(BESIDE, 4)
        assert len(plan.padded["left"].stacks) < len(plan.by_height["left"])
        sides: tuple[Side, ...] = ("left", "right")
        initial = {each: exchange._random(each) for each in sides}
        known = Factors(plan.stacked, plan.heights["right"], initial["right"], initial) if noisy else None
        heights = plan.heights[side]
        factors = torch.randn(sum(heights), 4)
        parts = factors.split(heights)
        parts[0].zero_()
        parts[1][5:9] = 0.0
        parts[2][3] = float("nan")
        found = torch.empty_like(factors)
        exchange._orthogonalize(side, factors, found, known)
        for number, (part, got) in enumerate(zip(parts, found.split(heights), strict=True)):
            noise = None
            if known is not None:
                noise = initial[side].split(heights)[number]
                noise = (noise * part.ne(0).any(1, keepdim=True) if side == "left" else noise).unsqueeze(0)
            alone = orthogonalize(part.unsqueeze(0).clone(), initial=noise)[0]
            if noisy and heights[number] in (90, 110):  # not a power of two shorter: the unit of their noise is rounded
                torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-6)
            else:
                assert torch.equal(got.nan_to_num(9.0), alone.nan_to_num(9.0)), heights[number]
