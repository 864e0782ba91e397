# SPDX-License-Identifier: Apache-2.0
"""The table of what was left of AdamW's gap."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from bench.evidence.adam_forms import DENSE, Run, markdown
from bench.output import write_results


def test_what_a_part_costs_is_told_seed_by_seed(tmp_path: Path) -> None:
    losses = {(DENSE, 3.0): (2.0, 4.0, 3.0), (DENSE, 4.0): (2.0, 5.0, 3.0), ("own v", 3.0): (2.02, 4.12, 3.03)}
    runs = [Run(form, rate, seed, loss, 1.0) for (form, rate), each in losses.items() for seed, loss in enumerate(each)]
    runs.append(Run("own v", 4.0, 0, None, 1.0))  # diverged: of one seed, which is no rate to compare
    file = tmp_path / "forms.json"
    write_results(file, {"steps": 400}, "run", map(asdict, runs))
    (price,) = (line for line in markdown(file).splitlines() if line.startswith("| the mean of directions"))
    assert price.split("|")[2].strip() == "+1.7 ± 0.7 % (3)"  # 1, 3 and 1 per cent
    (row,) = (line for line in markdown(file).splitlines() if line.startswith("| own v |"))
    assert row.split("|")[2:6] == [" 3.057 ", " inf (1) ", " +1.7 ± 0.7 % (3) ", " diverged "]
