"""The kernels of low-rank factors, run on the CPU: orthogonality, extremes, slices, tails."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from commopt.kernels import lowrank
from tests.emulator import Emulator
from tests.lowrank_cases import SHAPES, Check, orthonormal, spread


@pytest.fixture
def check(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Check:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    torch.manual_seed(0)
    return Check(emulator, "cpu")


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_orthogonalize(
    check: Check, emulator: Emulator, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], last_first: bool
) -> None:
    monkeypatch.setattr(emulator, "last_first", last_first)
    factors = spread(*shape, smallest=0.1)
    check.like_the_reference(factors, None)
    check.like_the_reference(factors, orthonormal(*shape))
    result = check.orthogonalize(factors)
    assert torch.equal(check.orthogonalize(factors, in_place=True), result)
    gram = result.double().mT @ result.double()
    torch.testing.assert_close(gram, torch.eye(shape[2], dtype=torch.float64).expand_as(gram), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e30, 3e38])
def test_the_scale_is_of_no_consequence(check: Check, shape: tuple[int, int, int], scale: float) -> None:
    """One factor is large or small, the others are not."""
    factors = spread(*shape, smallest=0.1)
    factors /= factors.abs().amax((1, 2), keepdim=True)
    factors[0] *= scale
    check.like_the_reference(factors, orthonormal(*shape))


@pytest.mark.parametrize("smallest", [1e-2, 1e-4, 1e-10])
@pytest.mark.parametrize("shape", [(4, 50, 4), (2, 3500, 8), (3, 300, 32)], ids=str)
def test_nearly_singular(check: Check, shape: tuple[int, int, int], smallest: float) -> None:
    """No singular value exceeds 1 (checked in every call), the largest is kept, and noise fills up what is missing."""
    factors = spread(*shape, smallest=smallest)
    for initial in (None, orthonormal(*shape)):
        result = check.orthogonalize(factors, initial)
        assert result.isfinite().all()
        largest = torch.linalg.svd(factors).U[..., :1]
        assert (result.mT @ largest).norm(dim=1).min() > 0.999


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_largest_may_be_in_any_slice(check: Check, scale: float) -> None:
    factors = spread(2, 5000, 4, smallest=0.1)
    factors[1, :2000] = 0.0
    factors[1, -1000:] *= scale
    factors[1, 2000:-1000] = 0.0
    check.like_the_reference(factors, None)


def test_rank_one(check: Check) -> None:
    for _ in range(10):
        factors = torch.randn(5, 60, 1) * torch.randn(5, 1, 4)
        assert check.orthogonalize(factors).isfinite().all()


def test_zeros(check: Check) -> None:
    """Zeros stay zero, whatever their neighbours are; or become the initial factor."""
    factors = spread(3, 3500, 4, smallest=0.1)
    factors[1] = -0.0
    assert (check.orthogonalize(factors)[1] == 0).all()
    initial = orthonormal(3, 3500, 4)
    torch.testing.assert_close(check.orthogonalize(factors, initial)[1], initial[1], rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_not_finite(check: Check, bad: float) -> None:
    factors = spread(3, 3500, 4, smallest=0.1)
    factors[1, 2000, 2] = bad
    finite = check.orthogonalize(factors, orthonormal(3, 3500, 4)).isfinite()
    assert finite[[0, 2]].all()
    assert not finite[1].all()


@pytest.mark.parametrize(
    ("count", "rows", "cols", "matrix_rank"),
    [(1, 1, 1, 1), (3, 5, 7, 2), (2, 64, 128, 4), (2, 65, 129, 32), (1, 130, 300, 33), (1, 20, 30, 70)],
)
def test_multiply(check: Check, count: int, rows: int, cols: int, matrix_rank: int) -> None:
    check.multiply(count, rows, cols, matrix_rank)


@pytest.mark.usefixtures("check")
def test_wrapper_hands_everything_on(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right, initial = spread(2, 50, 3, 0.1), torch.randn(2, 60, 3), orthonormal(2, 50, 3)
    matrices = torch.randn(2, 50, 60)
    results = []
    for loader in (None, emulator):
        monkeypatch.setattr(lowrank, "_loader", lambda _, loader=loader: loader)
        decoded, rest = torch.empty(2, 50, 60), matrices.clone()
        lowrank.decode(left, right, decoded)
        lowrank.subtract(rest, left, right)
        results.append((lowrank.orthogonalize(left, initial=initial), decoded, rest))
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.0, atol=2e-5)


@pytest.mark.usefixtures("check")
def test_a_gram_matrix_that_roundings_made_indefinite(emulator: Emulator) -> None:
    """Exact arithmetic knows no such matrix; the root of a negative pivot would be NaN."""
    factors = torch.randn(1, 5, 2)
    gram = torch.tensor([[1.0, 1.0], [1.0, 1.0 - 2.0**-10]])
    emulator.launch("factor_solve", 1, 256, 0, (factors.data_ptr(), 5, 2, gram.data_ptr(), 1, 1e-6, 0))
    assert factors.isfinite().all()
