# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark: every kernel is in it, its bytes are those of the tensors, and it writes what it prints."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.kernels import __main__ as kernels
from bench.kernels.case import (
    REFERENCE,
    SCALE,
    Case,
    Family,
    Figures,
    Implementation,
    Setting,
    Target,
    Verdict,
    hook_orthogonalize,
    int8_blocks,
    microseconds,
    of_copy,
    times_copy_of,
    times_faster,
    topk_route,
)
from bench.kernels.cases import PEERS, cases, families
from bench.kernels.measure import DeviceCopy, Measurement, Missing, measure, require_written
from bench.timing import Reading, host_clock
from commopt.compress import Quantize
from commopt.kernels import lowrank, quantize, sparse
from commopt.kernels.codec import Encoding
from commopt.kernels.sparse import SparseRow

CPU = torch.device("cpu")
NUMEL = 10_007

# Of `finite` there is no kernel, two are what `orthogonalize` calls, `refresh` is two others on a GPU, and
# `kernels_for` chooses.
WRAPPERS = {
    getattr(module, name.name)
    for module in (lowrank, quantize, sparse)
    for name in ast.parse(Path(module.__file__ or "").read_text()).body
    if isinstance(name, ast.FunctionDef) and not name.name.startswith("_")
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of so small operations wait for each other, the longer the busier the machine is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def every_case() -> Iterator[Case]:
    return cases(NUMEL, CPU)


# ------------------------------------------------------------------------------ what is measured


def test_every_kernel_is_measured() -> None:
    left_out = {quantize.finite, sparse.finite, lowrank.orthogonalize_each, lowrank.orthogonalize_rows}
    left_out |= {lowrank.refresh, lowrank.kernels_for}
    left_out |= {lowrank.begin_all, lowrank.multiply_all}  # which do nothing where there is no GPU
    assert {case.kernel for case in every_case()} == WRAPPERS - left_out


def test_families_know_the_names_of_their_cases() -> None:
    setting = Setting(NUMEL, PEERS, CPU)
    for family in families():
        assert {case.name for case in family.build(setting)} == set(family.names), family.title


def test_kernel_and_reference_do_the_same() -> None:
    """With the arguments of the benchmark both must write the same, on the CPU: the same bits, but for sums' order."""
    for case in every_case():
        before = [tensor.clone() for tensor in case.written]
        case.reference(*case.arguments)
        expected = [tensor.clone() for tensor in case.written]
        for tensor, old in zip(case.written, before, strict=True):
            tensor.copy_(old)
        case.kernel(*case.arguments)
        for tensor, other in zip(case.written, expected, strict=True):
            if case.name == "project":
                torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-4)
            elif any(codec in case.variant for codec in ("sign", "centroids")):  # whose scales are sums
                alike = torch.isclose(tensor, other, rtol=1e-2, atol=1e-3 if tensor.is_floating_point() else 0)
                assert alike.float().mean() > 0.98
            else:
                assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), case


def test_every_contender_writes_all_of_its_output() -> None:
    for case in every_case():
        for implementation in case.implementations(CPU):
            require_written(implementation)
        assert len(case.overwritten) == (0 if case.name == "subtract" else len(case.written))


def test_bytes_are_what_a_kernel_must_move() -> None:
    by_name = {(case.name, case.variant): case.nbytes for case in every_case()}
    codec = Quantize(8).codec
    chunk_numel = -(-NUMEL // (PEERS * codec.block)) * codec.block
    payload_nbytes = PEERS * codec.payload_nbytes(chunk_numel)
    assert by_name["encode", "uniform, 8 bits"] == 3 * 4 * NUMEL + payload_nbytes
    assert by_name["decode", "uniform, 8 bits"] == 4 * NUMEL + payload_nbytes
    # 20 blocks of 512 elements hold them all: 10240 codes of a bit and 20 scales, in each of 8 rows.
    row_nbytes = 10_240 // 8 + 20 * 4
    assert by_name["accumulate", "sign_rms, 1 bit, 8 peers"] == 4 * 10_240 + 8 * row_nbytes
    assert by_name["recode", "sign_rms, 1 bit, 8 peers"] == 2 * 4 * NUMEL + 9 * row_nbytes
    # 11 of 10007: an end, 11 indices and a gap of 2 bytes, 11 values, padding.
    assert by_name["select", "0.1% as bfloat16"] == 3 * 4 * NUMEL + 64
    assert by_name["accumulate sparse", "0.1% as bfloat16, 8 peers"] == 4 * NUMEL + 8 * 64
    assert by_name["subtract", "rank 4"] == 2 * 4 * 100 * 100 + 2 * 4 * 100 * 4
    assert by_name["orthogonalize", "50 of 2048 x 4"] == 3 * 4 * 50 * 2048 * 4


# ------------------------------------------------------------------------------ what others offer


def test_the_topk_route_sends_and_keeps_what_select_does() -> None:
    setting = Setting(NUMEL, 1, CPU)
    values, residual = setting.values, setting.residual
    row = SparseRow.of(NUMEL, 0.01, torch.bfloat16)
    payload = torch.zeros(1, row.nbytes, dtype=torch.uint8)
    sparse.select(row, values, payload, SCALE, residual)
    selected = torch.zeros(NUMEL)
    sparse.scatter(row, payload, selected)
    new, sent = torch.empty(NUMEL), torch.empty(row.count, dtype=torch.bfloat16)
    chosen = topk_route(values, residual.old, new, sent, SCALE)
    assert row.count == 101
    assert torch.equal(torch.zeros(NUMEL).index_copy_(0, chosen, sent.float()), selected)
    # What is kept differs by what rounding took from the elements sent.
    assert torch.equal(new, residual.new.index_fill(0, chosen, 0.0))
    assert torch.allclose(new, residual.new, rtol=0, atol=2.0**-8 * float(selected.abs().max()))


def test_plain_int8_blocks_agree_with_the_codec() -> None:
    codec = Quantize(8).codec
    setting = Setting(6 * codec.block, 1, CPU)
    values, residual = setting.values, setting.residual
    payload = torch.zeros(1, codec.payload_nbytes(setting.numel), dtype=torch.uint8)
    quantize.encode(codec, values, payload, Encoding(setting.numel, SCALE, residual))
    decoded = torch.empty_like(values)
    quantize.decode(codec, payload, decoded, setting.numel)
    codes, steps, new = int8_blocks(values, residual.old, SCALE, codec.block)
    assert codes.dtype == torch.int8
    assert int(codes.abs().max()) == 127
    # Both round to the nearest of the same levels, so they differ where an element is half way between two.
    apart = (codes * steps - decoded.view(-1, codec.block)).abs()
    assert bool((apart <= 1.001 * steps).all())
    assert float((apart > 0.001 * steps).float().mean()) < 0.001
    p = values * SCALE + residual.old
    assert torch.allclose(new.view(-1), p - (codes * steps).view(-1), rtol=0, atol=1e-6)
    assert bool((new.abs() <= 0.501 * steps).all())


@pytest.mark.parametrize("matrix_rank", [2, 4])
def test_the_hook_spans_what_our_factors_span(matrix_rank: int) -> None:
    factors = torch.randn(3, 64, matrix_rank, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(factors)
    before = factors.clone()
    hook_orthogonalize(factors, out)
    ours = lowrank.orthogonalize(factors)
    assert torch.equal(factors, before)
    for basis in (out, torch.linalg.qr(factors).Q):
        # Columns are the same up to their signs, whose product with ours is then a diagonal of ones.
        assert torch.allclose((basis.transpose(1, 2) @ ours).abs(), torch.eye(matrix_rank), atol=1e-4)


# ------------------------------------------------------------------------------ how it is measured


class FakeClock:
    """Has a time for each operation, and notes what was targets of it."""

    def __init__(self, taken_s: dict[Callable[[], object], float]) -> None:
        self.taken_s = taken_s
        self.targets: list[tuple[float, int]] = []

    def __call__(self, operation: Callable[[], object], calls: int) -> Reading:
        each_s = self.taken_s.get(operation, 8e-6)  # the copy is not known before
        self.targets.append((each_s, calls))
        return Reading(calls * each_s, calls * 1e-6, queued=each_s < 1e-3)


def case_of(*others: Implementation, targets: tuple[Any, ...] = ()) -> Case:
    values, out = torch.ones(1000), torch.empty(1000)
    return Case(
        "double", "all", torch.add, lambda a, b: out.copy_(a + b), (values, values), (values,), (out,), others, targets
    )


def test_figures_are_of_one_call() -> None:
    fast, slow = (lambda: None), (lambda: None)
    case = case_of(Implementation("fast", fast), Implementation("slow", slow))
    clock = FakeClock({fast: 10e-6, slow: 5e-3})
    records = measure(case, DeviceCopy(CPU), CPU, 3, clock)
    reference, quick, long = (record for record in records if isinstance(record, Measurement))
    assert [each.implementation for each in (reference, quick, long)] == [REFERENCE, "fast", "slow"]
    assert case.nbytes == 8000
    assert (quick.calls, long.calls) == (20, 1)
    assert (quick.best_us, quick.median_us) == pytest.approx((10, 10))
    assert quick.gbps == pytest.approx(0.8)
    assert quick.copy_gbps == pytest.approx(1.0)  # 8000 bytes in 8 us
    assert quick.of_copy == pytest.approx(0.8)
    assert quick.host_us == pytest.approx(1.0)
    assert long.median_us == pytest.approx(5000)
    assert long.host_us is None
    # One call to see how long it takes, a round that does not count, three that do.
    assert clock.targets.count((10e-6, 1)) == 1
    assert clock.targets.count((10e-6, 20)) == 4


def test_who_fails_does_not_keep_others_from_being_measured() -> None:
    def fail() -> None:
        raise ValueError("no such\nthing")

    out = torch.zeros(3)
    lazy = Implementation("lazy", lambda: out[:2].fill_(1.0), (out,))
    case = case_of(Implementation("broken", fail), lazy, Implementation("fine", lambda: None))
    found = list(measure(replace(case, reference=torch.sin), DeviceCopy(CPU), CPU, 1, host_clock))
    missing = {each.implementation: (each.failed, each.why) for each in found if isinstance(each, Missing)}
    assert missing.pop(REFERENCE)[0]  # a sine has one argument
    assert missing == {
        "broken": (False, "ValueError: no such thing"),
        "lazy": (False, "RuntimeError: 4 of 12 bytes were not written"),
    }
    assert [each.implementation for each in found if isinstance(each, Measurement)] == ["fine"]


@pytest.mark.parametrize(("nbytes", "moved"), [(8003, 8000), (80, 80), (3, 8)])
def test_a_copy_moves_as_many_bytes(nbytes: int, moved: int) -> None:
    call, moved_nbytes = DeviceCopy(CPU).moving(nbytes)
    target = call()
    assert isinstance(target, Tensor)
    assert moved_nbytes == moved == 2 * target.nbytes


@pytest.mark.parametrize(
    ("target", "verdict"),
    [
        (of_copy(0.8), Verdict("of copy", ">=", 0.8, 0.75, False)),
        (of_copy(0.75), Verdict("of copy", ">=", 0.75, 0.75, True)),
        (times_copy_of(1.4, 2000, "so much"), Verdict("times a copy of so much", "<=", 1.4, 2.0, False)),
        (microseconds(4.0), Verdict("us", "<=", 4.0, 4.0, True)),
        (times_faster(2, "torch"), Verdict("times faster than torch", ">=", 2, 2.5, True)),
        (times_faster(2, "somebody"), Verdict("times faster than somebody", ">=", 2, None, None)),
    ],
)
def test_what_is_asked_is_judged(target: Target, verdict: Verdict) -> None:
    """A copy moves 1000 bytes in a microsecond; the kernel takes 4 us for its 3000 bytes."""
    assert target.judge(Figures(3000, 1.0, 4.0, {"kernel": 4.0, "torch": 10.0})) == verdict


# ------------------------------------------------------------------------------ the program


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.kernels", *arguments])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    kernels.main()


def test_file_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kernels.json"
    arguments = ["--numel", "5000", "--repeats", "2", "--threads", "1", "--only", "encode,scatter", "--json", str(file)]
    run(monkeypatch, *arguments)
    header, *rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert header["kind"] == "kernels"
    assert header["command"].endswith("--numel 5000 --repeats 2 --threads 1 --only encode,scatter --json " + str(file))
    assert (header["numel"], header["peers"]) == (5000, PEERS)
    assert header["events_us"] == 0  # on a CPU
    measured = [row for row in rows if row["record"] == "kernel" and row["implementation"] == REFERENCE]
    expected = [case for case in cases(5000, CPU) if case.name in ("encode", "scatter")]
    assert [(row["name"], row["variant"]) for row in measured] == [(case.name, case.variant) for case in expected]
    for row in measured:
        assert 0 < row["best_us"] <= row["median_us"]
        assert row["gbps"] == pytest.approx(row["nbytes"] / row["median_us"] / 1e3)
        assert row["of_copy"] == pytest.approx(row["gbps"] / row["copy_gbps"])
    printed = capsys.readouterr()
    assert "5,000 elements" in printed.out
    assert "scatter, 1.0% as bfloat16" in printed.err


def test_a_family_that_cannot_be_built_is_told_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(setting: Setting) -> Iterator[Case]:
        raise RuntimeError("out of memory")

    known = [family for family in families() if "scatter" in family.names]
    monkeypatch.setattr(kernels, "families", lambda: [Family("odd ones", ("scatter",), build), *known])
    file = tmp_path / "kernels.json"
    with pytest.raises(SystemExit) as left:
        run(monkeypatch, "--numel", "5000", "--repeats", "1", "--only", "scatter", "--json", str(file))
    assert left.value.code == 1
    _, first, *rest = [json.loads(line) for line in file.read_text().splitlines()]
    assert (first["record"], first["name"], first["why"]) == ("missing", "odd ones", "RuntimeError: out of memory")
    assert [row["record"] for row in rest if row.get("implementation") == REFERENCE] == ["kernel", "kernel"]
    assert "out of memory" in capsys.readouterr().out
