"""The benchmark of what compressors cost."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from bench import compression
from commopt.compress import COMPRESSORS, DGC
from tests.catalogue import compressors


def test_every_compressor_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compression.json"
    arguments = ["--numel", "9001", "--repeats", "2", "--threads", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["bench.compression", *arguments])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    compression.main()
    record = json.loads(file.read_text())
    assert record["environment"]["command"].endswith("--numel 9001 --repeats 2 --threads 1")
    measured = {row["compressor"] for row in record["rows"]}
    assert {name.partition("(")[0] for name in measured} == {kind.__name__ for kind in COMPRESSORS.values()}
    assert measured >= {repr(compressor) for compressor in compressors() if not isinstance(compressor, DGC)}
    for row in record["rows"]:
        for operation in ("encode", "decode", "recompress"):
            assert 0 < row[operation]["best_ns"] <= row[operation]["median_ns"]
            assert row[operation]["gbps"] == pytest.approx(4 / row[operation]["median_ns"])
            assert row[operation]["of_clones"] > 0
    assert "9,001 elements" in capsys.readouterr().out


def test_the_table_does_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    cost = compression.Cost(1.0, 2.0, 2.0, 0.25)
    compression.print_table([compression.Row("OneBit()", 1.0625, cost, cost, cost)], "title")
    title, headings, line = capsys.readouterr().out.splitlines()
    assert title == "title"
    assert len(headings.split("\t")) == len(line.split("\t"))
    assert line.startswith("OneBit()\t1.062\t1.00\t2.0\t0.25")
