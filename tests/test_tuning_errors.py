"""What strategies leave out of gradients, against full decompositions and against each compressor itself."""

from __future__ import annotations

from collections.abc import Iterator
from time import process_time

import pytest
import torch
from torch import Tensor

from bench.evidence.compression_error import relative_error
from bench.models import ResNet50
from commopt import ConfigurationError
from commopt.aggregate import Aggregator, Compressed, Flat, Hierarchical, LocalSGD, PowerSGD
from commopt.compress import DGC, Cast, Compressor, OneBit, Quantize
from commopt.feedback import Layout
from commopt.tuning.errors import SAMPLE_NUMEL, unit_energies
from commopt.tuning.spectrum import beyond_rank

MOST_SECONDS = 5.0  # of this process alone; measured: 0.5 s

COMPRESSORS: list[Compressor] = [Quantize(8), Quantize(4), Quantize(2), OneBit(), Cast(), Cast(torch.float16), DGC(0.1)]
SHAPES = {"w1": (48, 100), "b1": (1000,), "w2": (30, 20, 3, 3), "b2": (30,)}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run on one core: several threads wait for each other where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model() -> tuple[dict[str, Tensor], list[tuple[Layout, Tensor]]]:
    """Gradients by name, and in two buffers."""
    by_name = {name: drawn(*shape, seed=seed) for seed, (name, shape) in enumerate(SHAPES.items())}
    return by_name, [in_one_buffer(by_name, names) for names in (("b2", "w2"), ("b1", "w1"))]


def in_one_buffer(by_name: dict[str, Tensor], names: tuple[str, ...]) -> tuple[Layout, Tensor]:
    layout = Layout.of_parameters((name, tuple(by_name[name].shape)) for name in names)
    return layout, torch.cat([by_name[name].flatten() for name in names])


def energies_of(aggregator: Aggregator, gradients: list[tuple[Layout, Tensor]], *names: str) -> list[float]:
    energies, _ = unit_energies({"it": aggregator}, gradients, [(name,) for name in names])
    return energies["it"]


def tail(matrix: Tensor, matrix_rank: int) -> float:
    return float(torch.linalg.svdvals(matrix.double())[matrix_rank:].square().sum())


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_what_a_compressor_leaves_out_of_a_short_tensor(compressor: Compressor) -> None:
    by_name, gradients = model()
    for strategy in (Compressed(compressor), Hierarchical(Compressed(compressor))):
        found = energies_of(strategy, gradients, *SHAPES)
        for (name, gradient), energy in zip(by_name.items(), found, strict=True):
            dense = name == "b2" and not isinstance(compressor, Cast)  # 30 values are less than a block
            if dense or not compressor.suits(SHAPES[name]):
                assert energy == 0, name
            else:
                expected = (relative_error(compressor, gradient.flatten()) * float(gradient.norm())) ** 2
                assert energy == pytest.approx(expected, rel=1e-4), name
                assert energy > 0


def test_eight_bits_by_hand() -> None:
    """Levels are multiples of 127 / 127: the error is what is missing to the nearest whole number."""
    gradient = torch.zeros(1024)
    gradient[:4] = torch.tensor([127.0, 0.25, -3.5 + 0.1, 100.0])
    layout = Layout.of_parameters([("w", (32, 32))])
    assert energies_of(Compressed(Quantize(8)), [(layout, gradient)], "w") == pytest.approx([0.25**2 + 0.4**2])


def test_the_order_and_the_sums_of_units() -> None:
    by_name, gradients = model()
    lossy: dict[str, Aggregator] = {"4 bits": Compressed(Quantize(4)), "rank 2": PowerSGD(2)}
    strategies = lossy | {"flat": Flat(), "two levels": Hierarchical()}
    single, single_squares = unit_energies(strategies, gradients, [(name,) for name in SHAPES])
    joined, squares = unit_energies(strategies, gradients, [("w2", "b2"), ("w1",), ("b1",)])
    w1, b1, w2, b2 = range(4)
    assert list(joined) == list(strategies)
    for name, each in single.items():
        assert joined[name] == pytest.approx([each[w2] + each[b2], each[w1], each[b1]])
    assert single_squares == pytest.approx([float(gradient.square().sum()) for gradient in by_name.values()])
    assert squares == pytest.approx([single_squares[w2] + single_squares[b2], single_squares[w1], single_squares[b1]])
    assert joined["flat"] == joined["two levels"] == [0.0, 0.0, 0.0]


def test_both_levels_of_a_hierarchy_count() -> None:
    _, gradients = model()
    inner, outer = Compressed(Quantize(8)), Compressed(Quantize(2))
    apart = [energies_of(way, gradients, "w1")[0] for way in (inner, outer)]
    assert energies_of(Hierarchical(outer, intra=inner), gradients, "w1") == pytest.approx([sum(apart)])


@pytest.mark.parametrize("strategy", [Compressed(Quantize(2), dense=("w*",)), PowerSGD(1, dense=("w*",))], ids=repr)
def test_dense_patterns_are_honoured(strategy: Aggregator) -> None:
    _, gradients = model()
    found = dict(zip(SHAPES, energies_of(strategy, gradients, *SHAPES), strict=True))
    assert found["w1"] == found["w2"] == 0
    assert (found["b1"] > 0) == isinstance(strategy, Compressed)


def test_low_rank_leaves_out_the_tail_of_the_spectrum() -> None:
    by_name, gradients = model()
    strategies = {str(rank): PowerSGD(rank, min_compression_rate=1) for rank in (1, 3, 10, 40)}
    energies, _ = unit_energies(strategies, gradients, [(name,) for name in SHAPES])
    # (30, 20, 3, 3) is 30 x 180 or, with fewer rows and columns together, 600 x 9: 30 + 180 is less.
    matrices = {"w1": by_name["w1"], "w2": by_name["w2"].reshape(30, 180)}
    for rank in (1, 3, 10, 40):
        found = dict(zip(SHAPES, energies[str(rank)], strict=True))
        assert found["b1"] == found["b2"] == 0
        for name, matrix in matrices.items():
            rows, cols = matrix.shape
            if (rows + cols) * rank < rows * cols:
                assert found[name] == pytest.approx(tail(matrix, rank), rel=0.05)
            else:
                assert found[name] == 0


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(300, 120), (64, 576), (200, 200), (20, 700)])
def test_beyond_rank_is_within_five_percent(shape: tuple[int, int], decay: float) -> None:
    rows, cols = shape
    least = min(shape)
    left, right = (torch.linalg.qr(drawn(height, least, seed=height)).Q for height in (rows, cols))
    matrix = drawn(*shape) if decay == 0 else (left * torch.arange(1, least + 1) ** -decay) @ right.mT
    errors = beyond_rank(matrix, 16)
    assert len(errors) == 16
    for matrix_rank, error in enumerate(errors, 1):
        exact = tail(matrix, matrix_rank)
        assert (1 - 1e-3) * exact <= error <= 1.05 * exact


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_beyond_rank_of_values_whose_squares_float32_does_not_hold(factor: float) -> None:
    matrix = drawn(60, 40)
    found = [error / factor**2 for error in beyond_rank(matrix * factor, 4)]
    assert found == pytest.approx(beyond_rank(matrix, 4), rel=1e-4)


def test_nothing_lies_beyond_full_rank() -> None:
    exactly_two = drawn(50, 2, seed=1) @ drawn(2, 80, seed=2)
    whole = float(exactly_two.square().sum())
    errors = beyond_rank(exactly_two, 4)
    assert errors[0] == pytest.approx(tail(exactly_two, 1), rel=1e-3)
    assert errors[1:] == pytest.approx([0.0, 0.0, 0.0], abs=1e-5 * whole)
    assert len(beyond_rank(drawn(3, 50), 8)) == 3
    assert beyond_rank(torch.zeros(30, 40), 2) == [0.0, 0.0]


@pytest.mark.parametrize("compressor", [*COMPRESSORS, Quantize(4, block=192)], ids=repr)
def test_a_sample_stands_for_a_long_tensor(compressor: Compressor) -> None:
    numel = 5 * SAMPLE_NUMEL + 1234
    gradient = drawn(numel) * (1 + torch.arange(numel) / numel)  # larger towards the end
    layout = Layout.of_parameters([("w", (2, numel // 2))])
    found = energies_of(Compressed(compressor), [(layout, gradient)], "w")
    expected = (relative_error(compressor, gradient) * float(gradient.norm())) ** 2
    # DGC takes all its elements from the larger end of a long tensor; here and there that is hardly another choice.
    assert found == pytest.approx([expected], rel=0.1)


def test_a_gradient_that_is_not_finite_is_named() -> None:
    for value in (float("nan"), float("-inf")):
        by_name, _ = model()
        by_name["w1"][3, 7] = value
        with pytest.raises(FloatingPointError, match="gradient of 'w1' is not finite"):
            energies_of(Flat(), [in_one_buffer(by_name, tuple(SHAPES))], "w1")


def test_large_values_count_and_what_overflows_on_the_wire_may_not_be_used() -> None:
    """10^5 is beyond float16, and the square of 10^30 beyond float32."""
    for value, wire in ((1e5, torch.float16), (1e30, torch.bfloat16)):
        layout = Layout.of_parameters([("w", (64, 64))])
        energies, squares = unit_energies(
            {"cast": Compressed(Cast(wire))}, [(layout, torch.full((4096,), value))], [("w",)]
        )
        assert squares == pytest.approx([4096 * value**2])
        assert (energies["cast"][0] == float("inf")) == (wire == torch.float16)


def test_what_cannot_be_measured_is_refused() -> None:
    _, gradients = model()
    with pytest.raises(ConfigurationError, match="'other' is in no buffer; give the gradients of all units"):
        energies_of(Flat(), gradients, "other")
    with pytest.raises(ConfigurationError, match=r"LocalSGD.* cannot be measured on one gradient"):
        energies_of(LocalSGD(), gradients, "w1")


def test_resnet50_with_eight_strategies_takes_a_moment() -> None:
    shapes = [(name, tuple(parameter.shape)) for name, parameter in ResNet50().named_parameters()]
    layout = Layout.of_parameters(reversed(shapes))
    compressors = (Quantize(8), Quantize(4), Quantize(2), Cast(), DGC(0.01))
    strategies: dict[str, Aggregator] = {repr(each): Compressed(each) for each in compressors}
    strategies |= {repr(each): each for each in (PowerSGD(1), PowerSGD(4), PowerSGD(16))}
    gradient = drawn(layout.numel)
    begun = process_time()
    energies, squares = unit_energies(strategies, [(layout, gradient)], [(name,) for name, _ in shapes])
    assert process_time() - begun < MOST_SECONDS
    assert sum(squares) == pytest.approx(layout.numel, rel=1e-2)
    assert all(0 < sum(each) < sum(squares) for each in energies.values())
