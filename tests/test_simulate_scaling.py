"""Scaling: efficiencies by hand, strategies, the smallest batch, and thousands of ranks."""

from __future__ import annotations

from time import process_time

import pytest

from commopt.errors import ConfigurationError
from commopt.simulate import ClusterSpec, Network, Scaling, Stragglers, Workload, gpu, model, of_model, strategy
from commopt.simulate.scaling import DEFAULT, LOSSLESS, LOSSY

CARD = gpu("v100")
CLUSTER = ClusterSpec(4, CARD, Network(10, 50))
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


def test_strong_scaling_shares_one_batch() -> None:
    """E_s(P) = T(P0) P0 / (T(P) P)."""
    rows = scaling().strong([1, 2, 8], [strategy("hierarchical")], 128)
    assert [row.batch for row in rows] == [32, 16, 4]
    alone_us, node_us = by_batch(128).compute_us, rows[0].outcome.step_us
    for row in rows:
        assert row.gpu_efficiency == pytest.approx(alone_us / (row.outcome.step_us * row.ranks))
        assert row.node_efficiency == pytest.approx(node_us * 4 / (row.outcome.step_us * row.ranks))
    with pytest.raises(ConfigurationError, match="128 samples cannot be shared equally by 12 GPUs"):
        scaling().strong([3], [strategy("stock")], 128)


def test_groups_take_the_fastest() -> None:
    members = ["stock", *LOSSLESS, *LOSSY]
    found = {row.strategy: row for row in scaling().weak([8], [strategy(name) for name in members], 8)}
    lossless, lossy = scaling().weak([8], [strategy("lossless"), strategy("lossy")], 8)
    fastest = min((found[name] for name in ("stock", *LOSSLESS)), key=lambda row: row.outcome.step_us)
    assert (lossless.chosen, lossless.outcome) == (fastest.strategy, fastest.outcome)
    fastest = min(found.values(), key=lambda row: row.outcome.step_us)
    assert (lossy.chosen, lossy.outcome) == (fastest.strategy, fastest.outcome)
    assert lossy.outcome.step_us < lossless.outcome.step_us


def test_groups_contain_what_they_say() -> None:
    assert [str(each) for each in strategy("lossless").candidates] == ["stock", "flat", "hierarchical"]
    assert [str(each) for each in strategy("lossy").candidates] == ["stock", "flat", "hierarchical", *LOSSY]
    assert all(not each.build().lossless for each in strategy("lossy").candidates[3:])


def test_stock_has_the_buckets_of_ddp_whatever_the_others_have() -> None:
    assert (
        strategy("stock", "planned").candidates
        == strategy("stock", "ddp").candidates
        == strategy("flat", "ddp").candidates
    )
    row = scaling().weak([2], [strategy("stock")], 8)[0]
    assert len(row.outcome.buckets) == 5


@pytest.mark.parametrize("efficiency", [0.2, 0.6, 0.75, 0.9])
@pytest.mark.parametrize("name", ["stock"])
def test_the_smallest_batch_is_the_first_that_is_enough(name: str, efficiency: float) -> None:
    job = scaling(Stragglers(0.01))
    found = job.smallest_batch(4, strategy(name, "ddp"), efficiency)
    assert found is not None
    tried = [1, found // 2, found - 2, found - 1, found, found + 1, 2 * found]
    rows = [job.weak([4], [strategy(name, "ddp")], batch)[0] for batch in tried]
    assert [row.gpu_efficiency >= efficiency for row in rows] == [False] * 4 + [True] * 3


def test_no_batch_may_be_enough() -> None:
    """Waiting for the slowest of 16 takes more than a hundredth, whatever the batch."""
    assert scaling(Stragglers(0.05)).smallest_batch(4, strategy("stock"), 0.99) is None
    with pytest.raises(ConfigurationError, match=r"between 0 and 1, for example 0\.9"):
        scaling().smallest_batch(4, strategy("stock"), 1.0)


def test_more_nodes_are_never_more_efficient() -> None:
    rows = scaling(Stragglers(0.02)).weak([2**k for k in range(8)], [strategy("hierarchical", "ddp")], 32)
    efficiencies = [row.gpu_efficiency for row in rows]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert all(0 < efficiency < 1 for efficiency in efficiencies)


def test_strategies_that_there_are_not() -> None:
    for name in ("stock:bits=2", "quantized:bits=3", "quantized:bit=4", "auto"):
        with pytest.raises(ConfigurationError):
            strategy(name)
    with pytest.raises(ConfigurationError, match="there are stock, lossless, lossy, auto, dgc, flat"):
        strategy("fastest")


def test_an_unknown_batch_leaves_out_what_needs_one() -> None:
    job = by_batch(8)
    unknown = Workload(job.name, job.units, job.layout, 0)
    row = Scaling(lambda _: unknown, CLUSTER).weak([2], [strategy("stock")], 0)[0]
    assert (row.batch, row.samples_per_s) == (0, 0)
    assert 0 < row.gpu_efficiency < row.node_efficiency < 1


def test_thousands_of_ranks_take_no_longer_than_their_listing() -> None:
    """All default strategies on 4,096 GPUs, in processor seconds: pricing looks at one node's ranks, not at pairs."""
    cluster = ClusterSpec(8, gpu("a100"), Network(25, 200))
    begun_s = process_time()
    rows = Scaling(by_batch, cluster, stragglers=Stragglers(0.02)).weak([512], [strategy(name) for name in DEFAULT], 64)
    assert process_time() - begun_s < 20
    assert {row.ranks for row in rows} == {4096}
