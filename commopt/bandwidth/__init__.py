# SPDX-License-Identifier: Apache-2.0
"""Time collectives the way nccl-tests does, and print its table with commopt's columns after it.

    torchrun --nproc-per-node 4 -m commopt bandwidth -b 4K -e 32M -f 2 --aggregator torch,flat,hierarchical
    commopt cluster --nodes 2 --ranks-per-node 2 --rate 200mbit -m commopt bandwidth -b 1M -e 4M -f 2

Every result is compared with an exactly known one before anything is timed. One loop without barriers gives all
times: `time` is its duration per iteration on the slowest rank, p50 and p99 are percentiles over its iterations.
"""
