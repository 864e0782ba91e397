# SPDX-License-Identifier: Apache-2.0
"""Milliseconds per step that averaging gradients takes beside the network: `python -m bench.compressors --json FILE`.

Every preset, in a team that sends nothing, beside torch's own hooks, in a world of one rank, on the gradients of whole
models in the buckets that DDP makes of them.
"""
