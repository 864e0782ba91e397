# SPDX-License-Identifier: Apache-2.0
"""What the simulator predicts against what a step takes: `python -m bench.cluster ... -m bench.evidence.prediction`."""
