# SPDX-License-Identifier: Apache-2.0
"""bench.evidence.records: one row for a strategy with enough seeds, the fastest first, and nothing off the rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.evidence.records import markdown

COMMAND = "python -m bench.cluster -m bench.training --strategies x --seed {seed} --json bench/results/r_{seed}.json"


def training(folder: Path, seed: int, times: dict[str, float], **others: Any) -> Path:
    """Write the file of a training that was down at the loss after so many seconds, by strategy."""
    environment = {
        **{"record": "environment", "kind": "training", "date": "2030-01-02T03:04:05+00:00", "revision": "7fb5530"},
        **{"command": COMMAND.format(seed=seed), "torch": "2", "python": "3", "cpu_count": 2, "device": "cpu"},
        **{"backend": "gloo", "nodes": 2, "ranks_per_node": [2, 2], "emulated_rate": "200mbit", "seconds": 14.0},
        **{"parameters": 4880640, "seed": seed, "compute_ms": 1.0, "evaluation": "", "target_loss": 2.7, **others},
    }
    rows = [
        {
            **{"record": "strategy", "strategy": name, "steps": 2, "seconds": 14.0, "step_ms": 1.0, "step_p90_ms": 1.0},
            **{"exposed_ms": 1.0, "inter_mib_per_step": 1.0, "inter_payload_mib_per_step": 1.0},
            "inter_predicted_mib_per_step": None,
            "curve": [
                {"step": 1, "seconds": 0.0, "held_out_loss": 3.7},
                {"step": 2, "seconds": taken, "held_out_loss": 2.7},
            ],
        }
        for name, taken in times.items()
    ]
    file = folder / f"r_{seed}.json"
    file.write_text("\n".join(map(json.dumps, [environment, *rows])))
    return file


def test_the_fastest_comes_first_with_an_interval(tmp_path: Path) -> None:
    files = [training(tmp_path, seed, {"slow": 10.0 + seed, "fast": 8.0}) for seed in range(3)]
    lines = markdown(files).splitlines()
    assert lines[2] == "| `fast` | 8.0 ±0.0 | 3 | 2030-01-02 | 7fb5530 |"
    assert lines[3] == "| `slow` | 11.0 ±2.5 | 3 | 2030-01-02 | 7fb5530 |"
    assert lines[-1].strip() == "python -m bench.cluster -m bench.training --strategies x --seed SEED --json FILE"


def test_what_is_off_the_rules_is_refused(tmp_path: Path) -> None:
    files = [training(tmp_path, seed, {"fast": 8.0}) for seed in range(3)]
    with pytest.raises(ValueError, match=r"fast has 2 seed\(s\)"):
        markdown(files[:2])
    with pytest.raises(ValueError, match="another file has seed 0"):
        markdown([*files, files[0]])
    with pytest.raises(ValueError, match="500mbit"):
        markdown([*files, training(tmp_path, 7, {"fast": 8.0}, emulated_rate="500mbit")])
