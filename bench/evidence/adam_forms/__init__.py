# SPDX-License-Identifier: Apache-2.0
"""What is left of AdamW's gap, and where: `python -m bench.evidence.adam_forms --json FILE`, half a minute a training.

Trains the GPT of bench.evidence.convergence in this process as two nodes would, whose gradients are exact means of the
batches of their ranks. What the nodes exchange has several forms: which second moment divides, when momentum is taken,
how directions are lengthened, and how they are encoded. Some ask an oracle, to show what a part of the way costs.
"""
