# SPDX-License-Identifier: Apache-2.0
"""The predictions of scaling: their file, their picture, and what must hold in them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import pytest

import commopt
from bench.evidence.scaling import predicted
from bench.evidence.scaling.predicted import GBPS, STRATEGIES, Assumptions, predictions, read
from bench.plot.pictures import drawings


def given() -> Assumptions:
    return Assumptions("a test", commopt.__version__)


def test_more_gpus_are_less_efficient_and_faster_networks_more() -> None:
    found = list(predictions(given(), ["vgg16"], [1, 8, 64]))
    assert len(found) == 3 * len(GBPS) * len(STRATEGIES)
    by = {(each.gbps, each.gpus, each.strategy): each.efficiency for each in found}
    for name in STRATEGIES:
        for gbps in GBPS:
            assert by[gbps, 8, name] >= by[gbps, 64, name] >= by[gbps, 512, name]
        for gpus in (64, 512):
            assert by[10, gpus, name] <= by[25, gpus, name] <= by[100, gpus, name]
    # What may be chosen from more is never worse.
    for gbps in GBPS:
        for gpus in (8, 64, 512):
            assert by[gbps, gpus, "stock"] <= by[gbps, gpus, "lossless"] <= by[gbps, gpus, "lossy"] <= 1


def test_file_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scaling_predicted.json"
    small = patch.multiple(predicted, BATCHES={"resnet50": 64}, NODES=(1, 8), SHOWN_GPUS=(8, 64))
    with small, patch("sys.argv", ["predicted", "--json", str(path)]):
        predicted.main()
    assert "resnet50" in capsys.readouterr().out
    assumptions, found, needed = read(path)
    assert len(found) == 2 * len(GBPS) * len(STRATEGIES)
    assert len(needed) == len(STRATEGIES)
    ((picture, files, output),) = drawings([path], tmp_path)
    assert output.name == "scaling_predicted.png"
    picture.draw(files, output)
    assert output.stat().st_size > 10_000
    path.write_text(json.dumps(asdict(assumptions) | {"kind": "other"}) + "\n")
    with pytest.raises(ValueError, match=r"bench\.evidence\.scaling\.predicted"):
        read(path)
