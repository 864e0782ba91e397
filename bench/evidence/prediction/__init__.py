"""What the simulator predicts against what a step takes: `python -m bench.cluster ... -m bench.evidence.prediction`."""
