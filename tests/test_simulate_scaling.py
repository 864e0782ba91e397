# SPDX-License-Identifier: Apache-2.0
"""Scaling: efficiencies by hand, strategies, the smallest batch, and thousands of ranks."""

from __future__ import annotations

from time import process_time

import pytest

from commopt.errors import ConfigurationError
from commopt.simulate import ClusterSpec, NetworkSpec, Scaling, Stragglers, Workload, gpu, model, of_model, strategy
from commopt.simulate.scaling import DEFAULT, LOSSLESS, LOSSY
from tests.speed import limit

CARD = gpu("v100")
CLUSTER = ClusterSpec(4, CARD, NetworkSpec(10, 50))
RESNET50 = model("resnet50")


def by_batch(batch: int) -> Workload:
    return of_model(RESNET50, CARD, batch)


def scaling(stragglers: Stragglers | None = None) -> Scaling:
    return Scaling(by_batch, CLUSTER, stragglers=stragglers)


def test_weak_scaling_compares_steps_of_equal_batches() -> None:
    rows = scaling().weak([1, 4], [strategy("stock")], 16)
    alone_us, (node_us, cluster_us) = by_batch(16).compute_us, [row.outcome.step_us for row in rows]
    assert [row.ranks for row in rows] == [4, 16]
    assert [row.gpu_efficiency for row in rows] == pytest.approx([alone_us / node_us, alone_us / cluster_us])
    assert [row.node_efficiency for row in rows] == pytest.approx([1, node_us / cluster_us])
    assert rows[1].samples_per_s == pytest.approx(16 * 16 / cluster_us * 1e6)
    assert rows[1].exposed_share == pytest.approx(1 - alone_us / cluster_us)


def test_groups_take_the_fastest() -> None:
    members = ["stock", *LOSSLESS, *LOSSY]
    found = {row.strategy: row for row in scaling().weak([8], [strategy(name) for name in members], 8)}
    lossless, lossy = scaling().weak([8], [strategy("lossless"), strategy("lossy")], 8)
    fastest = min((found[name] for name in ("stock", *LOSSLESS)), key=lambda row: row.outcome.step_us)
    assert (lossless.chosen, lossless.outcome) == (fastest.strategy, fastest.outcome)
    fastest = min(found.values(), key=lambda row: row.outcome.step_us)
    assert (lossy.chosen, lossy.outcome) == (fastest.strategy, fastest.outcome)
    assert lossy.outcome.step_us < lossless.outcome.step_us


def test_stock_has_the_buckets_of_ddp_whatever_the_others_have() -> None:
    assert strategy("stock", "planned").choices == strategy("stock", "ddp").choices == strategy("flat", "ddp").choices
    row = scaling().weak([2], [strategy("stock")], 8)[0]
    assert len(row.outcome.buckets) == 5


def test_strategies_that_there_are_not() -> None:
    for name in ("stock:bits=2", "quantized:bits=3", "quantized:bit=4", "auto"):
        with pytest.raises(ConfigurationError):
            strategy(name)
    with pytest.raises(ConfigurationError, match="there are stock, lossless, lossy, auto, dgc, diloco, flat"):
        strategy("fastest")


def test_an_unknown_batch_leaves_out_what_needs_one() -> None:
    job = by_batch(8)
    unknown = Workload(job.name, job.units, job.layout, 0)
    row = Scaling(lambda _: unknown, CLUSTER).weak([2], [strategy("stock")], 0)[0]
    assert (row.batch, row.samples_per_s) == (0, 0)
    assert 0 < row.gpu_efficiency < row.node_efficiency < 1


def test_thousands_of_ranks_take_no_longer_than_their_listing() -> None:
    """All default strategies on 4,096 GPUs, in processor seconds: pricing looks at one node's ranks, not at pairs."""
    cluster = ClusterSpec(8, gpu("a100"), NetworkSpec(25, 200))
    begun_s = process_time()
    rows = Scaling(by_batch, cluster, stragglers=Stragglers(0.02)).weak([512], [strategy(name) for name in DEFAULT], 64)
    assert process_time() - begun_s < limit(20)
    assert {row.ranks for row in rows} == {4096}
