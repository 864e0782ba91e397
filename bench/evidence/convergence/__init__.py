# SPDX-License-Identifier: Apache-2.0
"""Does it still learn? Compare presets with dense averaging, seed by seed: same weights and batches, another exchange.

    python -m bench.evidence.convergence --json bench/results/convergence.json

Trains the examples' GPT with the real hooks on local ranks that stand for nodes, under several optimizers, and each
method at its own best learning rate too. An interrupted run goes on where it stopped.
"""
