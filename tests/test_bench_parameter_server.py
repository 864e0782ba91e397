# SPDX-License-Identifier: Apache-2.0
"""The evidence of the parameter server: its arithmetic, and its quick form on emulated nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.evidence.parameter_server import RUNS, STAGES, Run, markdown, rate, read, verdict
from bench.output import write_results
from commopt.cluster import EmulatedCluster


def record(**changed: Any) -> dict[str, Any]:
    found = {"rounds": 3, "quorum": 2, "seconds": 9.0, "longest_step_s": 2.0, "rounds_whose_parameters_differ": 0}
    rates = [[1.0, 2.0], [0.9, 2.0], [1.1, 2.1]]
    return {**found, "steps_per_s": rates, "losses": [[5, 4.0], [10, 2.0]], **changed}


def test_what_is_asked_is_relative_to_the_other_runs(tmp_path: Path) -> None:
    assert rate([0.5, 1.0, 1.5, 2.0, 3.0], 1.0, 3.0) == 1.5
    slower = record(steps_per_s=[[0.9, 2.0], [1.0, 1.0], [1.0, 2.0]], losses=[[11, 2.02]])
    records = [{"run": name, **(slower if name == "disturbed" else record())} for name in RUNS]
    found = verdict(records)
    assert found["throughput_relative_to_undisturbed"] == {"slow": 0.9, "dead": 0.5, "back": 1.0}
    assert found["loss_relative_to_synchronous"] == pytest.approx(1.01)
    file = tmp_path / "found.json"
    write_results(file, {"seed": 5, **found}, "run", records)
    assert read(file) == ({"seed": 5, **found}, records)
    rows = markdown([read(file), read(file)]).splitlines()
    assert rows[4].startswith("| disturbed | 5 | 2 | 3 | 0.90/2.00 | 1.00/1.00 | 1.00/2.00 |")
    assert "no less than 50 % of the undisturbed" in rows[-1]
    assert rows[-1].endswith("+1.0 % (+1.0, +1.0). Rounds that workers began with other bits: 0.")


@pytest.mark.cluster
def test_one_worker_is_slow_killed_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMOPT_SECRET", "a secret")  # the nodes inherit it
    if missing := EmulatedCluster.missing(rate="100mbit"):
        pytest.skip(missing)
    options = [
        "--json",
        str(tmp_path / "found.json"),
        "--steps",
        "90",
        "--pace",
        "0.1",
        "--period",
        "3",
        "--layers",
        "1",
        "--width",
        "32",
    ]
    with EmulatedCluster(4, 1, "100mbit") as cluster:
        found = Run("disturbed", options, cluster, tmp_path).take()
    assert found["rounds_whose_parameters_differ"] == 0
    assert found["longest_step_s"] < 20
    assert found["losses"][-1][0] >= 90
    assert found["losses"][-1][1] < found["losses"][0][1]
    assert len(found["steps_per_s"]) == len(STAGES)
    assert all(each > 0 for stage in found["steps_per_s"] for each in stage)
    assert 2 <= found["rounds_of_the_last_worker"] < found["rounds"]
