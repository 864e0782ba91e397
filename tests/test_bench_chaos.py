# SPDX-License-Identifier: Apache-2.0
"""The evidence of faults and of long jobs: its tables, and what counts as grown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.evidence import chaos, soak
from bench.output import write_results


def test_the_table_shows_every_run_and_lists_failures(tmp_path: Path) -> None:
    common = {"job": "DDP, 2 x 2", "strategy": "hierarchical_quantized:bits=4"}
    records: list[dict[str, Any]] = [
        {**common, "fault": "stop", "outcome": "right", "ok": True, "seconds": 4.25, "said": "same bits"},
        {**common, "fault": "kill", "outcome": "named error", "ok": True, "seconds": 2.0, "said": "rank 3 | is gone"},
        {**common, "fault": "nan", "outcome": "wrong model", "ok": False, "seconds": 1.0, "said": "residuals changed"},
    ]
    file = tmp_path / "chaos.json"
    write_results(file, {"cpu_count": 2}, "run", records)
    header, read = chaos.read(file)
    assert read == records
    lines = chaos.markdown(header, read).splitlines()
    assert lines[0] == "| job | strategy | stop | kill | nan |"
    assert lines[2] == "| DDP, 2 x 2 | hierarchical_quantized:bits=4 | 4.2 | 2.0 *e* | **wrong model** |"
    assert lines[4].startswith("2 of 3 runs ended right")
    assert "| kill | rank 3 \\| is gone |" in lines
    assert lines[-1] == "| DDP, 2 x 2 | hierarchical_quantized:bits=4 | nan | wrong model | residuals changed |"


def test_runs_that_are_made_again_take_the_places_of_the_earlier_ones() -> None:
    before = [{"job": "DDP", "strategy": "flat", "fault": fault, "ok": False} for fault in ("kill", "stop", "nan")]
    again = [{**before[1], "ok": True}, {**before[0], "fault": "oom"}]
    found = chaos.continued(before, again)
    assert [(each["fault"], each["ok"]) for each in found] == [
        ("kill", False),
        ("stop", True),
        ("nan", False),
        ("oom", False),
    ]


def note(step: int, rank: int = 0, **changed: Any) -> dict[str, Any]:
    found = {"strategy": "flat", "rank": rank, "step": step, "memory_nbytes": 300 * 2**20, "handles": 20}
    return {**found, "threads": 11, "files": 1, "store_keys": 12, "residual_norm": 0.5, **changed}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"memory_nbytes": 317 * 2**20}, "memory_nbytes of rank 1 from"),
        ({"handles": 21}, "handles of rank 1 from 20 after step 200 to 21 after step 800"),
        ({"threads": 12}, "threads of rank 1"),
        ({"files": 2}, "files of rank 1"),
        ({"store_keys": 500}, "store_keys of rank 1"),
        ({"residual_norm": 1.6}, "residual_norm of rank 1"),
        ({"residual_norm": float("nan")}, "residual_norm of rank 1"),
        ({"memory_nbytes": 310 * 2**20, "handles": 19, "residual_norm": 0.6}, None),
    ],
)
def test_what_has_grown_since_the_first_quarter(changed: dict[str, Any], says: str | None) -> None:
    steps = range(100, 900, 100)
    records = [note(step, rank) for rank in range(soak.RANKS) for step in steps]
    records[0].update(handles=50, store_keys=0)  # before the end of the first quarter
    records[-1].update(changed)
    found = soak.grown(records, "flat")
    assert len(found) == (says is not None)
    assert not found or found[0].startswith(str(says))
    assert ("Nothing has grown" in soak.markdown({}, records)) == (says is None)


@pytest.mark.slow
def test_hundreds_of_steps_leave_nothing_behind(tmp_path: Path) -> None:
    arguments = ["--strategies", "hierarchical_quantized:bits=4", "--steps", "400", "--every", "50"]
    records = soak.measured(soak.parse_options(arguments))
    assert len(records) == 8 * soak.RANKS
    assert soak.grown(records, "hierarchical_quantized:bits=4") == []
    assert all(record["residual_norm"] > 0 for record in records)
