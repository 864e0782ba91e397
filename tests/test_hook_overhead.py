"""The benchmark of what a bucket costs on the host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import commopt


def test_every_preset_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    options = ["--pairs", "1", "--steps", "2", "--json", str(file)]
    command = [sys.executable, "-m", "bench.evidence.hook_overhead", *options]
    subprocess.run(command, check=True, timeout=240, cwd=Path(__file__).parent.parent)
    rows = json.loads(file.read_text())["rows"]
    assert [row["preset"] for row in rows] == list(commopt.PRESETS)
    for row in rows:
        assert row["buckets"] == 64
        assert row["hook_us_per_bucket"] > 0
