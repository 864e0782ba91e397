# SPDX-License-Identifier: Apache-2.0
"""How a training step scales over ranks and emulated nodes.

    python -m bench.evidence.scaling --worlds 1x1,1x2,2x2,4x2 --rate 200mbit --json bench/results/scaling.json

Starts an emulated cluster for every world, NODESxRANKS_PER_NODE; in each, strategies take turns. Weak scaling keeps the
batch of a rank, strong scaling the batch of the world. All ranks share the processors of this machine, so that a step
without communication gets slower with every rank as well: it is measured in every world too, and its share of a step
(the communication efficiency) says what the network costs.
"""
