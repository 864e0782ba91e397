# SPDX-License-Identifier: Apache-2.0
"""Compare the tuner's choices on twelve emulated clusters and on a link that is not shaped: about half an hour.

    python -m bench.evidence.tuning.matrix --json bench/results/tuning.json

What is in the file already is left out, so that a run that was stopped can be resumed. Options that are not listed
below go to bench.evidence.tuning.
"""

from __future__ import annotations

import sys

from bench.evidence.matrix import ClusterShape, Entry, Matrix
from bench.evidence.tuning import report

_GPT = "gpt:layers=4:width=128"  # 0.9 million parameters
_RESNET = "resnet50:width=16"  # 2.2 million
_VGG = "vgg:hidden=768"  # 2.9 million
_EXACT, _FEW_BITS, _LOW_RANK = ("lossless",), ("lossless", "quantized"), ("lossless", "quantized", "powersgd")


def _comparison(nodes: int, ranks_per_node: int, rate: str, model: str, allow: tuple[str, ...]) -> Entry:
    command = ("bench.evidence.tuning", "--model", model, "--allow", ",".join(allow))
    return Entry(ClusterShape(nodes, ranks_per_node, rate), command, (("model", model), ("allow", list(allow))))


COMPARISONS = (
    _comparison(2, 1, "50mbit", _GPT, _FEW_BITS),
    _comparison(2, 1, "200mbit", _RESNET, _EXACT),
    _comparison(2, 1, "400mbit", _VGG, _LOW_RANK),
    _comparison(2, 2, "100mbit", _GPT, _LOW_RANK),
    _comparison(2, 2, "200mbit", _VGG, _FEW_BITS),
    _comparison(2, 2, "400mbit", _RESNET, _FEW_BITS),
    _comparison(3, 1, "100mbit", _GPT, _EXACT),
    _comparison(3, 1, "200mbit", _VGG, _FEW_BITS),
    _comparison(4, 1, "200mbit", _GPT, _LOW_RANK),
    _comparison(4, 1, "400mbit", _RESNET, _FEW_BITS),
    _comparison(3, 2, "400mbit", _VGG, _EXACT),
    _comparison(4, 2, "400mbit", _GPT, _FEW_BITS),
    _comparison(2, 2, "none", _VGG, _LOW_RANK),
)


MATRIX = Matrix(
    "bench.evidence.tuning.matrix",
    (__doc__ or "").splitlines()[0],
    COMPARISONS,
    report.read,
    report.markdown,
    timeout_s=600.0,
)


if __name__ == "__main__":
    sys.exit(MATRIX.main())
