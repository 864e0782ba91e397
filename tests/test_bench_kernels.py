"""The kernel benchmark: every kernel is in it, its bytes are those of the tensors, and it writes what it prints."""

from __future__ import annotations

import ast
import json
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch

from bench.kernels import __main__ as kernels
from bench.kernels.case import KERNEL, REFERENCE
from bench.kernels.cases import RANKS, cases
from bench.turns import times_s
from commopt.compress import Quantize
from commopt.kernels import lowrank, pack, quantize, sparse, unpack

CPU = torch.device("cpu")
NUMEL = 10_007

# Of `finite` there is no kernel, `orthogonalize_each` is what `orthogonalize` calls.
WRAPPERS = {pack, unpack} | {
    getattr(module, name.name)
    for module in (lowrank, quantize, sparse)
    for name in ast.parse(Path(module.__file__ or "").read_text()).body
    if isinstance(name, ast.FunctionDef) and not name.name.startswith("_")
}


def test_every_kernel_is_measured() -> None:
    left_out = {quantize.finite, sparse.finite, lowrank.orthogonalize_each}
    assert {case.kernel for case in cases(NUMEL, CPU)} == WRAPPERS - left_out


def test_kernel_and_reference_do_the_same() -> None:
    """On the CPU the wrapper runs the reference: with the arguments of the benchmark both must write the same bits."""
    for case in cases(NUMEL, CPU):
        calls = case.calls(CPU)
        assert list(calls) == [REFERENCE]
        before = [tensor.clone() for tensor in case.written]
        calls[REFERENCE]()
        expected = [tensor.clone() for tensor in case.written]
        for tensor, old in zip(case.written, before, strict=True):
            tensor.copy_(old)
        case.kernel(*case.arguments)
        for tensor, other in zip(case.written, expected, strict=True):
            assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), case


def test_on_a_gpu_both_are_timed() -> None:
    assert list(next(cases(NUMEL, CPU)).calls(torch.device("cuda"))) == [KERNEL, REFERENCE]


def test_bytes_are_what_a_kernel_must_move() -> None:
    by_name = {(case.name, case.variant): case.nbytes for case in cases(NUMEL, CPU)}
    assert by_name["pack", "64 tensors, float32 and bfloat16"] == (4 + 2) * NUMEL
    codec = Quantize(8).codec
    chunk_numel = -(-NUMEL // (RANKS * codec.block)) * codec.block
    payload_nbytes = RANKS * codec.payload_nbytes(chunk_numel)
    assert by_name["encode", "uniform, 8 bits"] == 3 * 4 * NUMEL + payload_nbytes
    assert by_name["decode", "uniform, 8 bits"] == 4 * NUMEL + payload_nbytes
    assert by_name["subtract", "rank 4"] == 2 * 4 * 100 * 100 + 2 * 4 * 100 * 4


def test_file_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kernels.json"
    arguments = ["--numel", "5000", "--repeats", "2", "--threads", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["bench.kernels", *arguments])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    kernels.main()
    header, *rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert header["kind"] == "kernels"
    assert header["command"].endswith("--numel 5000 --repeats 2 --threads 1 --json " + str(file))
    assert len(rows) == len(list(cases(5000, CPU))) * (2 if torch.cuda.is_available() else 1)
    for row in rows:
        assert 0 < row["best_us"] <= row["median_us"]
        assert row["gbps"] == pytest.approx(row["nbytes"] / row["median_us"] / 1e3)
    assert "5,000 elements" in capsys.readouterr().out


def test_operations_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    taken = times_s([lambda: calls.append("a"), lambda: calls.append("b")], repeats=3)
    assert calls == ["a", "b"] * 4
    assert [len(times) for times in taken] == [3, 3]
    assert min(chain(*taken)) > 0
