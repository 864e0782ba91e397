# SPDX-License-Identifier: Apache-2.0
"""Train a model for the same time with each strategy, and compare speed, traffic and held-out loss.

    python -m bench.cluster --nodes 2 --ranks-per-node 2 --rate 200mbit \\
        -m bench.training --strategies ddp,flat,hierarchical,hierarchical_bf16 --seconds 40 --json out.json

All strategies run in one launch, from the same seed and with a fresh model each: the example's GPT or, with --model,
one of bench.models. A run without communication comes first (DDP: a hook that returns every bucket unchanged; FSDP2:
sharded inside nodes only): what a step takes beyond it is exposed communication. --parallel hsdp and --parallel fsdp
train the GPT under FSDP2, with strategies of their own (docs/fsdp2.md). Under plain torchrun (or on real machines)
everything works too, but the bytes between nodes are unknown and reported as null; there COMMOPT_RANKS_PER_NODE says
which ranks to treat as one node.
"""
