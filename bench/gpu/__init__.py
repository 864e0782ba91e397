# SPDX-License-Identifier: Apache-2.0
"""Everything that needs a GPU, in one command: `make gpu`, or `python -m bench.gpu` where all is installed.

Steps run one after the other, the most telling first: each in processes of its own, with a time limit and a log, so
that one that fails or hangs takes nothing with it. What they came to is in gpu.json, their own figures beside it.
docs/evidence/gpu.md says what each step shows.
"""
