# SPDX-License-Identifier: Apache-2.0
"""Does it still learn? Compare every preset with dense averaging, step by step, over seeds and optimizers.

    python -m bench.evidence.convergence --json bench/results/convergence.json

Trains the examples' models (handwritten digits, a GPT on text) with the real hooks on four local ranks that count as
two nodes of two. How long a step takes where the network is slow is measured afterwards, on emulated nodes, where this
machine has the rights to emulate them. An interrupted run goes on where it stopped.
"""
