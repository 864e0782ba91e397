"""The comparison of periods: its table, from records and into the document."""

from __future__ import annotations

from pathlib import Path

from bench.convergence import periodic, report, tables
from bench.convergence.report import Point, Run

ROOT = Path(__file__).parents[1]


def made(strategy: str, loss: float, inter_bytes: float | None) -> Run:
    return Run("gpt", "sgd", strategy, 0, 1000, 12.5, inter_bytes, [Point(400, loss, None)])


RUNS = [
    made("ddp", 2.0, None),
    made("Hierarchical(inter=Flat())", 2.0, 800.0),
    made("LocalSGD(period=4)", 2.04, 200.0),
]


def test_rows_compare_with_stock_ddp_and_with_every_step() -> None:
    found = {row[0]: row[1:] for row in periodic.rows(RUNS)}
    assert found["`ddp`"] == ["2.000 (+0.0 %)", "-"]
    assert found["`LocalSGD(period=4)`"] == ["2.040 (+2.0 %) !", "0.250"]
    assert found["`LocalSGD(period=8)`"] == ["-", "-"]
    assert len(found) == len(periodic.CONTENDERS)


def test_the_document_holds_what_the_file_says(tmp_path: Path) -> None:
    document = tmp_path / "periodic.md"
    document.write_text(f"before\n{tables.BEGIN}\n{tables.END}\nafter\n")
    _, runs = report.read(ROOT / "bench" / "results" / "periodic.json")
    periodic.fill_in(document, runs)
    table = document.read_text().partition(tables.BEGIN)[2].partition(tables.END)[0]
    assert table in (ROOT / "docs" / "periodic.md").read_text()
