# SPDX-License-Identifier: Apache-2.0
"""Predict and measure on eight emulated clusters, and add up how far predictions are off: about 40 minutes.

Two of them have sites that ranks are told: two sites of three nodes, and two racks of four with uplinks of 4 : 1.

    python -m bench.evidence.prediction.matrix --json bench/results/prediction.json

Clusters that are in the file already are left out, so that a run that was stopped can be resumed. Options that are not
listed below go to bench.evidence.prediction.
"""

from __future__ import annotations

import sys

from bench.evidence.matrix import ClusterShape, Entry, Matrix
from bench.evidence.prediction import report
from commopt.cluster import EmulatedSites

_CLUSTERS = (
    (2, 1, "50mbit"),
    (2, 2, "100mbit"),
    (3, 1, "100mbit"),
    (4, 1, "200mbit"),
    (3, 2, "200mbit"),
    (4, 2, "400mbit"),
)
_SITES = (
    ClusterShape(6, 1, "500mbit", EmulatedSites((3, 3), "50mbit", told=True)),
    ClusterShape(8, 1, "200mbit", EmulatedSites((4, 4), "200mbit", told=True)),
)
MATRIX = Matrix(
    "bench.evidence.prediction.matrix",
    (__doc__ or "").splitlines()[0],
    [Entry(each, ("bench.evidence.prediction",)) for each in (*(ClusterShape(*each) for each in _CLUSTERS), *_SITES)],
    report.read,
    report.markdown,
    timeout_s=900.0,
)

if __name__ == "__main__":
    sys.exit(MATRIX.main())
