# SPDX-License-Identifier: Apache-2.0
"""Timelines of made-up training, of which every number is known."""

from __future__ import annotations

import random
from collections.abc import Callable

from commopt.recording import BucketRecord, MessageRecord, Span, StepRecord
from commopt.timeline.recordings import Timeline


def training(
    ranks: int = 4,
    nodes: int = 2,
    buckets: int = 4,
    steps: int = 8,
    forward_us: float = 10_000.0,
    bucket_us: float = 5_000.0,
    transfer_us: float = 6_000.0,
    delay_us: Callable[[int, int, int], float] = lambda step, rank, bucket: 0.0,
    jitter_us: float = 0.0,
    seed: int = 0,
    name: str = "layer{}",
) -> Timeline:
    """Each rank computes a forward and bucket after bucket; a message needs all ranks, then takes `transfer_us`.

    A message is local work (a tenth), intra (three tenths) and inter (the rest). delay_us(step, rank, bucket): what a
    rank needs longer for a bucket; bucket -1 is its forward. Jitter is uniform, on every piece of computing.
    """
    dice = random.Random(seed)
    clock = [0.0] * ranks
    recorded = []
    for step in range(steps):
        forwards, ready = list(clock), [[0.0] * buckets for _ in range(ranks)]
        for rank in range(ranks):
            now = clock[rank] + forward_us + delay_us(step, rank, -1) + dice.uniform(0, jitter_us)
            for bucket in range(buckets):
                now += bucket_us + delay_us(step, rank, bucket) + dice.uniform(0, jitter_us)
                ready[rank][bucket] = now
        lane, messages = list(clock), [[] for _ in range(ranks)]  # type: list[float], list[list[MessageRecord]]
        for bucket in range(buckets):
            starts = [max(lane[rank], ready[rank][bucket]) for rank in range(ranks)]
            end = max(starts) + transfer_us
            for rank, start in enumerate(starts):
                spans = (
                    Span("intra", "reduce_scatter", 100, start + 0.1 * transfer_us, end - 0.6 * transfer_us),
                    Span("inter", "all_reduce", 50, end - 0.6 * transfer_us, end),
                )
                queued = ready[rank][bucket]
                messages[rank].append(MessageRecord((bucket,), name.format(bucket), 1000, queued, start, end, spans))
                lane[rank] = end
        records = []
        for rank in range(ranks):
            own = tuple(BucketRecord(b, name.format(b), 1000, ready[rank][b]) for b in range(buckets))
            records.append(StepRecord(step, forwards[rank], ready[rank][-1], own, tuple(messages[rank])))
            clock[rank] = records[-1].completed_us
        recorded.append(tuple(records))
    return Timeline(
        tuple(range(ranks)), tuple(rank * nodes // ranks for rank in range(ranks)), (0.0,) * ranks, tuple(recorded)
    )
