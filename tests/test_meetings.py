# SPDX-License-Identifier: Apache-2.0
"""Ranks find each other anew after whatever went wrong before; the store is asked with a limit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt.errors import TransportError
from commopt.groups import build, join
from commopt.groups.agreement import exchange_facts
from commopt.groups.levels import LevelGroups
from commopt.groups.store import LimitedStore, _StoreConnection, limited
from tests.ranks import run
from tests.speed import limit
from tests.test_groups import message_of

# ------------------------------------------------------------------------------ one rank alone has a problem


def lack_a_file(rank: int, world_size: int) -> list[str]:
    messages = []
    for _ in range(2):  # before and after commopt's groups exist
        ddp = TorchDDP(nn.Linear(4, 4))
        links = "/nowhere/links.json" if rank == 1 else None
        messages.append(message_of(partial(commopt.attach, ddp, "flat", links=links, plan="ddp")))
        commopt.attach(ddp, "flat", plan="ddp")
        ddp(torch.ones(1, 4)).sum().backward()
    return messages


def test_a_file_that_one_rank_lacks_is_every_ranks_error_and_forgotten_by_the_next_call() -> None:
    for rank, messages in enumerate(run(lack_a_file, 3, timeout_s=30)):
        for message in messages:
            assert message.startswith("ConfigurationError"), message
            assert "/nowhere/links.json" in message
            assert rank == 1 or "rank 1 cannot take part in" in message


def stay_away_once(rank: int, world_size: int) -> list[str]:
    """Rank 1 fails in the user's own code, twice: before the first setup and before the second HookState."""
    messages = []
    for _ in range(2):
        if rank == 1:
            messages.append(message_of(lambda: None))
        else:
            messages.append(message_of(lambda: commopt.HookState(commopt.Flat(), timeout=1)))
        dist.barrier()
        state = commopt.HookState(commopt.Flat(), timeout=1)  # of the same owner's name on all ranks
        names = [None] * world_size
        dist.all_gather_object(names, state._registration.client.name)
        assert len(set(names)) == 1
        dist.barrier()
    return messages


def test_a_call_that_one_rank_never_made_leaves_nothing_behind() -> None:
    results = run(stay_away_once, 3, timeout_s=60)
    assert results[1] == ["no error", "no error"]
    for rank in (0, 2):
        for message in results[rank]:
            assert "rank 1 did not reach" in message


def load_alone_once(rank: int, world_size: int) -> list[str]:
    ddp = TorchDDP(nn.Linear(4, 4))
    state = commopt.attach(ddp, "flat", plan="ddp", timeout=2)
    ddp(torch.ones(1, 4)).sum().backward()
    saved = state.state_dict()
    alone = message_of(partial(state.load_state_dict, saved)) if rank == 0 else ""
    dist.barrier()
    return [alone, message_of(partial(state.load_state_dict, saved))]


def test_a_load_that_one_rank_never_made_leaves_nothing_behind() -> None:
    results = run(load_alone_once, 2, timeout_s=60)
    assert "rank 1 did not reach load_state_dict" in results[0][0]
    assert [after for _, after in results] == ["no error"] * 2


def fail_to_make_groups(rank: int, world_size: int) -> str:
    make, before = LevelGroups._team, len(c10d._world.pg_map)

    def make_and_fail(*arguments: Any) -> None:
        make(*arguments)
        raise RuntimeError("too many open files")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(LevelGroups, "_team", make_and_fail)
        with pytest.raises((RuntimeError, commopt.ConfigurationError)) as info:
            commopt.Communicator(timeout=10)
    assert len(c10d._world.pg_map) == before
    assert commopt.all_reduce(torch.ones(3), op="sum").tolist() == [world_size] * 3
    return str(info.value)


def test_groups_that_one_rank_cannot_make_are_every_ranks_error_and_do_not_stay() -> None:
    for message in run(fail_to_make_groups, 3, timeout_s=60):
        assert "too many open files" in message


def wait_for_one_that_failed(rank: int, world_size: int) -> list[str]:
    known, other = join(), join(timeout_s=5)
    if rank == 1:
        known.publish_failure("rank 1 (here) ended with an exception: disk on fire")
        return []
    return [message_of(partial(commopt.Communicator, timeout=6)), message_of(partial(other.exchange, "a purpose"))]


def test_whoever_waits_for_a_rank_hears_what_it_reported_anywhere() -> None:
    for rank, messages in enumerate(run(wait_for_one_that_failed, 3, timeout_s=60)):
        assert len(messages) == (0 if rank == 1 else 2)
        for message in messages:
            assert message.startswith("LaneError")
            assert "disk on fire" in message


def close_alone(rank: int, world_size: int) -> list[str]:
    state = commopt.attach(TorchDDP(nn.Linear(4, 4)), "flat")
    if rank == 0:
        state.close()
    messages = [message_of(lambda: commopt.attach(TorchDDP(nn.Linear(4, 4)), "flat"))]
    state.close()
    state, other = commopt.attach(TorchDDP(nn.Linear(4, 4)), "flat"), commopt.Communicator(timeout=50)
    if rank == 2:  # which keeps the other groups
        state.close()
    messages.append(message_of(commopt.Communicator))
    state.close()
    assert commopt.Communicator().all_reduce(torch.ones(1), op="sum").item() == world_size
    other.close()
    return messages


def test_groups_that_one_rank_alone_has_closed_are_every_ranks_error() -> None:
    for first, second in run(close_alone, 3, timeout_s=60):
        assert first.startswith("MismatchError: rank 1, 2 has process groups of commopt from before, and rank 0 has no")
        assert second.startswith("MismatchError: rank 0, 1 has process groups of commopt with these settings from bef")
        assert "now on rank 1, 2 too" in first
        assert "rank 2 has none" in second


# ------------------------------------------------------------------------------ how a meeting ends


def meet(store: LimitedStore, me: int, outcomes: dict[int, str], *arguments: Any) -> threading.Thread:
    """Let a thread be one of three ranks, and note what it hears."""

    def attend() -> None:
        try:
            exchange_facts(store, [0, 1, 2], me, "setup", {}, *arguments)
            outcomes[me] = "no error"
        except BaseException as error:
            outcomes[me] = f"{type(error).__name__}: {error}"

    thread = threading.Thread(target=attend)
    thread.start()
    return thread


@pytest.mark.parametrize("why", ["time is over", "interrupted"])
def test_a_meeting_that_one_rank_left_fails_on_all(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commopt.groups.agreement._VERDICT_MARGIN_S", 1.0)
    server, outcomes = dist.HashStore(), dict[int, str]()
    store = limited(server, "keys", 30)

    def interrupt() -> None:
        if why == "interrupted" and "facts" in (store.read("seat/1") or ""):
            raise KeyboardInterrupt

    rank_0 = meet(store, 0, outcomes, 8.0)
    meet(store, 1, outcomes, 1.0, interrupt).join(20)
    assert outcomes.pop(1).startswith("MismatchError" if why == "time is over" else "KeyboardInterrupt")
    for thread in (meet(store, 2, outcomes, 8.0), rank_0):
        thread.join(30)
    assert len(outcomes) == 2
    for message in outcomes.values():
        assert message.startswith("MismatchError: rank "), outcomes


def test_meetings_do_not_fill_the_store() -> None:
    server, counts = dist.HashStore(), []
    store = limited(server, "keys", 30)
    for _ in range(4):
        outcomes = dict[int, str]()
        for thread in [meet(store, me, outcomes, 30.0) for me in range(3)]:
            thread.join(30)
        assert list(outcomes.values()) == ["no error"] * 3
        counts.append(server.num_keys())
    assert len(set(counts)) == 1, counts


# ------------------------------------------------------------------------------ restarts

RESTARTED_SCRIPT = """
    import os, sys, time
    from pathlib import Path
    import torch, torch.distributed as dist
    import commopt
    from commopt.groups.levels import LevelGroups
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    store, rank, world_size = next(dist.rendezvous("env://"))
    # Torch itself may read addresses of the attempt before, and then fails: not what this is about.
    for key in store.list_keys():
        if "commopt" not in key:
            store.delete_key(key)
    Path(sys.argv[1], f"{attempt}-{rank}").touch()
    while len(list(Path(sys.argv[1]).glob(f"{attempt}-*"))) < world_size:
        time.sleep(0.02)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    if attempt == 0 and rank == 1:
        os._exit(3)  # before anything of commopt, where the other waits
    if attempt == 1 and rank == 1:
        LevelGroups._team = lambda *arguments: os._exit(4)  # in the middle of it
    try:
        x = torch.ones(3)
        commopt.Communicator(timeout=20).all_reduce(x, op="sum")
        print(f"rank {rank}, attempt {attempt}: {x.tolist()}", flush=True)
    except Exception as error:
        print(f"rank {rank}, attempt {attempt}: {error}", flush=True)
        raise
"""


def test_a_restart_by_torchrun_sees_nothing_of_the_attempts_before(tmp_path: Path) -> None:
    """Its store outlives them, with all that they wrote."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(RESTARTED_SCRIPT))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    torchrun += ["--max-restarts=2", "--monitor-interval=0.1", f"--log-dir={tmp_path / 'log'}"]
    root = str(Path(__file__).parents[1])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": root}
    command = [*torchrun, str(script), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank}, attempt 2: [2.0, 2.0, 2.0]" in done.stdout


# ------------------------------------------------------------------------------ whose timeout


def timeouts(rank: int, world_size: int) -> list[float]:
    three_hours = dist.new_group(timeout=timedelta(hours=3))
    found = [join(three_hours).timeout_s, join(three_hours, timeout_s=7).timeout_s, join().timeout_s]
    world: Any = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(world), "_get_backend", lambda group, device: object())
        return [*found, build._timeout_of(world)]


def test_the_timeout_is_that_of_the_process_group_or_where_torch_hides_it_600_s() -> None:
    assert run(timeouts, 2, timeout_s=50) == [[3 * 3600.0, 7.0, pytest.approx(limit(50)), 600.0]] * 2


def test_groups_are_made_and_destroyed_without_a_word_of_torch(tmp_path: Path) -> None:
    """Where another backend was registered, as torch._dynamo does, groups of several names have no default one."""
    script = """
        import sys, torch, torch.distributed as dist, torch._dynamo
        import commopt
        from torch.testing._internal.distributed import fake_pg
        dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
        commopt.all_reduce(torch.ones(3))
        dist.barrier()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=60)
        assert rank.returncode == 0, said
        assert "No backend" not in said


# ------------------------------------------------------------------------------ the store


class Silent:
    """A store that answers nothing until it is `mended`, and stands for its clone."""

    def __init__(self) -> None:
        self.mended = threading.Event()
        self.answers = 0

    def clone(self) -> Silent:
        return self

    def check(self, keys: list[str]) -> bool:
        self.answers += self.mended.wait(30)
        return True


def test_a_store_that_does_not_answer_is_waited_for_once_and_heard_again() -> None:
    silent: Any = Silent()
    store = LimitedStore(_StoreConnection(silent, 10), "keys/", 0.2)
    with pytest.raises(TransportError, match=r"has not answered for 0\.2 s"):
        store.check(["key"])
    started = time.monotonic()
    for _ in range(100):
        with pytest.raises(TransportError, match="has not answered"):
            store.check(["key"])
    assert time.monotonic() - started < limit(2)
    assert store.silent_s > 0
    silent.mended.set()
    deadline = time.monotonic() + 10
    while store.silent_s and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.check(["key"])
    assert silent.answers == 2, "calls that nobody waits for any more are not made"


def test_who_has_more_time_waits_longer_for_a_silent_store_but_not_for_a_closed_one() -> None:
    silent: Any = Silent()
    store = LimitedStore(connection := _StoreConnection(silent, 10), "keys/", 20)
    with pytest.raises(TransportError, match="has not answered"):
        store.until(time.monotonic()).check(["key"])
    threading.Timer(0.3, silent.mended.set).start()
    assert store.check(["key"])
    connection.close()
    with pytest.raises(TransportError, match="is closed"):
        store.check(["key"])


def test_a_connection_ends_with_its_last_user() -> None:
    others = set(threading.enumerate())  # connections of memberships that an earlier test left in this process
    store: LimitedStore | None = LimitedStore(_StoreConnection(dist.HashStore(), 10), "keys/", 10)
    assert store is not None
    assert store.read("key") is None
    store.set("key", "value")
    assert store.read("key") == "value"
    threads = [each for each in threading.enumerate() if each.name == "commopt-store" and each not in others]
    assert threads
    store = None
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_store_that_is_gone_is_an_error_of_commopt() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = LimitedStore(_StoreConnection(server, 10), "keys/", 10)
    store.set("key", "value")
    del server
    with pytest.raises(TransportError, match="has probably died:"):
        store.read("key")
