# SPDX-License-Identifier: Apache-2.0
"""Several connections of gloo between two nodes: the same bits over any number, and every connection is used."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

import commopt
from commopt.cluster import EmulatedCluster
from commopt.groups import choice, connections, join, levels
from commopt.groups.team import Team
from tests.ranks import RankError, run
from tests.speed import limit
from tests.test_groups import message_of

ROOT = Path(__file__).parents[1]


def values_of(rank: int, numel: int, dtype: str) -> Tensor:
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + numel))
    return drawn.to(getattr(torch, dtype))


def call_everything(team: Team, numel: int, dtype: str) -> list[Tensor]:
    """Return what every primitive gives that may be split."""
    own = values_of(team.ranks[team.rank], numel, dtype)
    rows = torch.cat([values_of(rank, numel, dtype) for rank in range(team.size)]).mul_(1 + team.rank)
    added, started, part, gathered, dealt = own.clone(), own.clone(), own.clone(), rows.clone(), rows.clone()
    team.all_reduce(added, scale=0.5)
    if team.starts_all_reduce(started):
        both = [team.start_all_reduce(started, scale=0.5), team.start_all_reduce(other := own.clone(), scale=0.5)]
        for each in both:
            each.future.wait()
            each.finish()
        assert torch.equal(started, other)
    team.reduce_scatter(part, rows.clone())
    team.all_gather(gathered, own)
    team.all_to_all(dealt, rows)
    return [added, started, part, gathered, dealt]


def call_on_all_levels(rank: int, world_size: int, numels: Sequence[int], dtype: str) -> tuple[int, list[Tensor]]:
    team = join().team
    levels = [team] if team.inter is None else [team, team.inter]
    results = [each for level in levels for numel in numels for each in call_everything(level, numel, dtype)]
    return levels[-1].connections, results


@pytest.mark.parametrize("nodes", [(1, 1), (1, 1, 1), (1, 1, 1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_connections_gives_the_bits_of_one(nodes: tuple[int, ...], dtype: str) -> None:
    """Lengths: too short to be split, and split and not divisible by anything."""
    numels = [1, 1000, 200_003]

    def results(count: int) -> list[list[Tensor]]:
        env = {"COMMOPT_CONNECTIONS": str(count)}
        found = run(call_on_all_levels, sum(nodes), numels, dtype, nodes=nodes, env=env)
        assert [counted for counted, _ in found] == [count] * sum(nodes)
        return [tensors for _, tensors in found]

    over_one = results(1)
    for count in (3, 4):
        for ours, expected in zip(results(count), over_one, strict=True):
            assert all(torch.equal(*pair) for pair in zip(ours, expected, strict=True))


def add_up_long(rank: int, world_size: int) -> Tensor:
    values = values_of(rank, 8_000_003, "float32")  # longer than two segments of gloo's ring for each share
    join().team.all_reduce(values)
    return values


def test_shares_longer_than_segments_of_gloo_have_the_bits_of_one() -> None:
    plain, ours = (run(add_up_long, 3, nodes=(1, 1, 1), env={"COMMOPT_CONNECTIONS": count})[0] for count in "12")
    assert torch.equal(plain, ours)


# --------------------------------------------------------------------------------------------- bytes


def sent_by_connection() -> dict[str, int]:
    """Return the payload that each TCP connection of this process has sent."""
    sent = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as own:
                if own.type == socket.SOCK_STREAM and own.family in (socket.AF_INET, socket.AF_INET6):
                    key = f"{own.getsockname()[:2]} {own.getpeername()[:2]}"
                    # tcpi_bytes_sent and tcpi_bytes_retrans of <linux/tcp.h>
                    info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
                    all_bytes, again = struct.unpack_from("2Q", info, 200)
                    sent[key] = all_bytes - again
        except OSError:  # closed meanwhile, or not connected
            continue
    return sent


def count_bytes(rank: int, world_size: int, numel: int) -> dict[str, list[int]]:
    """Return the bytes on each busy connection, by primitive, in increasing order."""
    team = join().team
    apart = team.inter or team
    found = {}
    rows, own = torch.ones(apart.size * numel), torch.ones(numel)
    calls: dict[str, Callable[[], None]] = {
        "all_reduce": lambda: apart.all_reduce(rows),
        "narrow": lambda: apart.all_reduce(rows.bfloat16()),
        "reduce_scatter": lambda: apart.reduce_scatter(own, rows),
        "all_gather": lambda: apart.all_gather(rows, own),
        "all_to_all": lambda: apart.all_to_all(rows, rows.clone()),
    }
    for name, call in calls.items():
        before = sent_by_connection()
        call()
        dist.barrier()  # what others wait for has left this rank
        after = sent_by_connection()
        moved = [nbytes - before.get(key, 0) for key, nbytes in after.items()]
        found[name] = sorted(nbytes for nbytes in moved if nbytes > 4096)  # not the store's, nor announcements
    dist.barrier()  # a rank that is done closes the connections that others still count
    return found


@pytest.mark.parametrize("chosen", ["COMMOPT_CONNECTIONS", "GLOO_SOCKET_IFNAME"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_connection_carries_its_share(world_size: int, chosen: str) -> None:
    numel, count = 1 << 18, 4
    value = str(count) if chosen == "COMMOPT_CONNECTIONS" else ",".join(["lo"] * count)
    for found in run(count_bytes, world_size, numel, nodes=(1,) * world_size, env={chosen: value}):
        for name, nbytes in found.items():
            assert len(nbytes) in {count, count * (world_size - 1)}, (name, nbytes)  # a ring has one peer
            for place in range(0, len(nbytes), count):  # those to one peer
                assert nbytes[place + count - 1] < 1.3 * nbytes[place], (name, nbytes)


# --------------------------------------------------------------------------------- asking for a number


def ask(rank: int, world_size: int, values: Sequence[str]) -> str:
    os.environ["COMMOPT_CONNECTIONS"] = values[rank]
    try:
        return message_of(lambda: join())
    finally:
        os.environ.pop("COMMOPT_CONNECTIONS")


@pytest.mark.parametrize("bad", ["0", "9", "-1", "four", "2.0", "\u0663", "1" * 4000])
def test_a_bad_number_is_refused_on_every_rank(bad: str) -> None:
    ours, theirs = run(ask, 2, [bad, "4"], nodes=(1, 1))
    for text in (ours, theirs):
        assert text.startswith("ConfigurationError")
        assert "neither auto nor a whole number from 1 to 8" in text
        assert "COMMOPT_CONNECTIONS=4" in text


def test_ranks_that_ask_for_different_numbers_are_named() -> None:
    for text in run(ask, 3, ["4", "4", "2"], nodes=(1, 1, 1)):
        assert text.startswith("MismatchError")
        assert "COMMOPT_CONNECTIONS" in text
        assert "rank 2" in text


def train(rank: int, world_size: int) -> tuple[str, dict[str, Any], float]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(600, 500))
    state = commopt.attach(model, "hierarchical_quantized:bits=4")
    for _ in range(3):
        model(torch.ones(2, 600) * (rank + 1)).sum().backward()
    text, figures = state.explain(), state.stats()
    state.close()
    return text, figures, float(next(model.parameters()).grad.double().sum())  # type: ignore[union-attr]


def test_a_training_says_how_many_there_are_and_may_be_checked() -> None:
    results = run(train, 4, nodes=(2, 2), env={"COMMOPT_CONNECTIONS": "4", "COMMOPT_CHECK": "1"})
    for text, figures, _ in results:
        assert text.splitlines()[-1] == "4 connections between two ranks of different nodes: COMMOPT_CONNECTIONS"
        assert figures["connections"] == 4
    plain = run(train, 4, nodes=(2, 2))
    assert "connection" not in plain[0][0]
    assert plain[0][1]["connections"] == 1
    assert len({total for _, _, total in [*results, *plain]}) == 1


def lose_a_peer(rank: int, world_size: int) -> float:
    comm = commopt.Communicator()
    values = torch.ones(1 << 20)
    comm.all_reduce(values)
    if rank == 1:
        os._exit(1)
    begun = time.monotonic()
    assert message_of(lambda: [comm.all_reduce(values) for _ in range(100)]).startswith(("LaneError", "TransportError"))
    return time.monotonic() - begun


def test_a_peer_that_dies_is_noticed_at_once() -> None:
    for took_s in run(lose_a_peer, 3, nodes=(1, 1, 1), env={"COMMOPT_CONNECTIONS": "4"}, dies=[1], fresh=True):
        assert took_s is None or took_s < limit(10.0)


def lost_ranks(rank: int, world_size: int) -> list[int]:
    team = join().team
    team.all_reduce(torch.ones(1 << 20))
    return team.lost_ranks()


def test_no_rank_is_called_lost_while_all_are_there() -> None:
    assert run(lost_ranks, 2, nodes=(1, 1), env={"COMMOPT_CONNECTIONS": "4"}) == [[], []]


# ------------------------------------------------------------------------------------------- choosing

RATE = st.floats(0.001, 400)
GROUPS = st.lists(st.lists(RATE, min_size=4, max_size=4), min_size=1, max_size=4)


@given(GROUPS)
def test_the_choice_is_nowhere_clearly_slower_than_another_and_no_larger_one_is_as_good(
    gbps: list[list[float]],
) -> None:
    count = choice.best(gbps)
    fast = [all(rates[place] >= choice.AS_FAST * max(rates) for rates in gbps) for place in range(len(choice.COUNTS))]
    place = choice.COUNTS.index(count)
    assert fast[place] or count == 1
    assert not any(fast[place + 1 :])


def choose(rank: int, world_size: int, long_us: float, fails: int = -1) -> tuple[str, int, int, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levels, "_may_choose", lambda *_: True)  # over loopback too
        patch.setattr(choice, "LONG_US", long_us)
        patch.setattr(choice, "_BUDGET_US", 0.0)
        if rank == fails:
            patch.setattr(choice, "measure_gbps", lambda group: 1 / 0)
        before = len(c10d._world.pg_map)
        membership = join()
    total = torch.ones(1 << 20)
    membership.team.all_reduce(total)
    apart = membership.team.inter or membership.team
    counted = apart.connections
    assert counted == membership.connections.count
    return membership.connections.reason, counted, len(c10d._world.pg_map) - before, float(total[-1])


@pytest.mark.parametrize("nodes", [(1, 1), (2, 2), (2, 1)], ids=str)
def test_on_a_long_path_it_is_measured_and_alike_on_all_ranks(nodes: tuple[int, ...]) -> None:
    results = run(choose, sum(nodes), 0.0, nodes=nodes)
    assert len({result[:2] for result in results}) == 1
    (reason, count, _, _), *_ = results
    assert count in choice.COUNTS
    assert all(f"over {each}" in reason for each in choice.COUNTS)
    untouched = run(choose, sum(nodes), 1e9, nodes=nodes)
    for (_, _, groups, total), (unmeasured, one, as_many, same) in zip(results, untouched, strict=True):
        assert (unmeasured, one) == (connections.Connections().reason, 1)
        assert (groups, total) == (as_many, same)  # none is left behind


def test_where_one_rank_cannot_measure_all_raise_at_once() -> None:
    begun = time.monotonic()
    with pytest.raises(RankError) as info:
        run(choose, 2, 0.0, fails=1, nodes=(1, 1))
    assert set(info.value.errors) == {0, 1}
    assert "commopt.errors.TransportError: a measurement over ranks (0, 1) failed" in info.value.errors[0]
    assert "ZeroDivisionError" in info.value.errors[1]
    assert time.monotonic() - begun < limit(30.0)


# ------------------------------------------------------------------------------- emulated long paths

LONG_PATH = """
import json, sys, time, torch, torch.distributed as dist
from commopt.groups import join
dist.init_process_group("gloo")
membership = join()
values = torch.ones(1 << 22)
took = []
for _ in range(int(sys.argv[1])):
    dist.barrier()
    begun = time.perf_counter()
    membership.team.all_reduce(values)
    took.append(time.perf_counter() - begun)
if dist.get_rank() == 0:
    print(json.dumps([membership.connections.count, str(membership.connections), took]))
dist.destroy_process_group()
"""


def over_a_long_path(tmp_path: Path, connections: str, repeats: int) -> tuple[int, str, float]:
    script = tmp_path / "script.py"
    script.write_text(LONG_PATH)
    reason = EmulatedCluster.missing(delay="20ms", loss="0.01%")
    if reason is not None:
        pytest.skip(reason)
    with EmulatedCluster(nodes=2, ranks_per_node=1, rate="none", delay="20ms", loss="0.01%") as cluster:
        env = {"PYTHONPATH": str(ROOT), "COMMOPT_CONNECTIONS": connections, "OMP_NUM_THREADS": "1"}
        result = cluster.run([str(script), str(repeats)], timeout_s=limit(300.0), env=env)
    assert result.returncode == 0, result.stderr
    count, text, took = json.loads(result.stdout.strip().splitlines()[-1])
    print(count, text, [round(each, 2) for each in took], file=sys.stderr)
    return count, text, sum(took[repeats // 2 :])  # by then one connection has met losses


@pytest.mark.slow
@pytest.mark.cluster
def test_a_long_path_with_losses_carries_three_times_as_much_over_the_chosen_connections(tmp_path: Path) -> None:
    """A round trip of 40 ms and a loss of 0.01 %: enough bytes for one connection to meet several losses."""
    repeats = 12
    _, _, one_s = over_a_long_path(tmp_path, "1", repeats)
    count, text, several_s = over_a_long_path(tmp_path, "auto", repeats)
    assert count > 1, text
    assert one_s > 3 * several_s
