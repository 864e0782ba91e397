# SPDX-License-Identifier: Apache-2.0
"""The parameter server: the same bits as LocalSGD, and whoever is slow, late, dead or wrong harms nobody else."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
import commopt.__main__
from commopt import (
    ConfigurationError,
    LocalSGD,
    MismatchError,
    OneBit,
    Outer,
    ParameterServer,
    TransportError,
    UnsupportedTensorError,
    server_commands,
)
from commopt.compress import DGC, Cast, Compressor, Quantize
from commopt.feedback import Layout
from commopt.groups import gloo
from commopt.server import Scheduler, Server, Worker
from commopt.server import worker as worker_module
from commopt.server.connection import _open as connections
from commopt.server.ranks import WorkerRanks
from commopt.server.rounds import window_s
from commopt.server.scheduler import ServerRegistration, connect_to_scheduler, find_server
from commopt.server.shared import SharedParameters
from tests.hook_training import Tower, digest_of, seeded
from tests.ranks import run
from tests.speed import limit
from tests.test_local_sgd_deltas import NESTEROV, optimizer_of, train

ROOT = Path(__file__).parents[1]
BY_HAND = 10**6  # a period that never ends by itself


@contextmanager
def hosted(
    workers: int = 1, timeout: float = limit(20.0), state_dict: dict[str, Any] | None = None
) -> Iterator[Server]:
    """Have scheduler and server in this process."""
    scheduler = Scheduler(timeout=timeout)
    server = Server(scheduler.address, workers=workers, state_dict=state_dict)
    server.address = scheduler.address  # type: ignore[attr-defined]
    try:
        yield server
    finally:
        server.close()
        scheduler.close()


@contextmanager
def hosted_by_first(rank: int, workers: int, timeout: float = limit(20.0)) -> Iterator[tuple[str, Server | None]]:
    """Have them in the first rank's process; yield the address on all ranks, and the server there."""
    told = [""]
    if rank:
        dist.broadcast_object_list(told, src=0)
        yield told[0], None
        dist.barrier()
        return
    with hosted(workers, timeout) as server:
        told = [address_of(server)]
        dist.broadcast_object_list(told, src=0)
        yield told[0], server
        dist.barrier()


def address_of(server: Server) -> str:
    address: str = server.address  # type: ignore[attr-defined]
    return address


def joined(address: str, **settings: Any) -> tuple[nn.Module, Worker]:
    module = seeded(Tower)
    return module, commopt.attach(module, ParameterServer(address, **settings))


def both_joined(server: Server, **settings: Any) -> list[tuple[nn.Module, Worker]]:
    """Join twice; a server that waits for two lets neither begin before the other."""
    with ThreadPoolExecutor() as pool:
        coming = [pool.submit(joined, address_of(server), **settings) for _ in range(2)]
        return [each.result() for each in coming]


def learn(module: nn.Module, amount: float) -> None:
    """Take a step whose result is known: no two parameters move by the same."""
    for index, parameter in enumerate(module.parameters()):
        parameter.grad = torch.linspace(-1, 2 + index, parameter.numel()).view_as(parameter)
    torch.optim.SGD(module.parameters(), lr=amount).step()


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().double().reshape(-1) for each in module.parameters()])


# ------------------------------------------------------------------------------------- the same bits


def beside_local_sgd(rank: int, world_size: int, outer: Outer) -> tuple[str, int, str]:
    """Return what LocalSGD comes to on this rank, which of the workers this was, and what that came to."""
    steps, period = range(10), 3
    expected = seeded(Tower)
    ddp = TorchDDP(expected)
    state = commopt.attach(ddp, LocalSGD(period=period, outer=outer))
    with patch.object(gloo, "uses_gloo_ring", return_value=False):  # which adds in another order
        train(ddp, optimizer_of(expected), rank, steps)
    assert state.stats()["parameter_averages"] == 3
    with hosted_by_first(rank, world_size) as (address, _):
        module, worker = joined(address, period=period, outer=outer, staleness=0)
        place = worker.number - 1  # sums are in the order in which workers came; the server is number 0
        train(module, optimizer_of(module), place, steps)
        assert (worker.round, worker.refused) == (3, 0)
    return digest_of(expected), place, digest_of(module)


@pytest.mark.parametrize(("world_size", "outer"), [(2, Outer()), (3, Outer()), (3, NESTEROV)], ids=str)
def test_with_all_workers_it_is_local_sgd(world_size: int, outer: Outer) -> None:
    """The same bits, where both add in the order of ranks."""
    results = run(beside_local_sgd, world_size, outer, nodes=(1,) * world_size)
    found = {place: digest for _, place, digest in results}
    assert [found[place] for place in range(world_size)] == [expected for expected, *_ in results]
    assert len(set(found.values())) == world_size  # each has made a step since the last round


def node_and_worker(rank: int, world_size: int) -> tuple[str, int]:
    node = dist.new_group([0, 1])
    with hosted_by_first(rank, 2) as (address, _):
        torch.manual_seed(rank // 2)  # what is not the first worker's is to be overwritten
        module = Tower()
        model = TorchDDP(module, process_group=node) if rank < 2 else module
        worker = commopt.attach(model, ParameterServer(address, period=3, compressor=OneBit()))
        train(model, optimizer_of(module), rank, range(6))
        found = digest_of(module), worker.round
        worker.close()
        train(model, optimizer_of(module), rank, range(3))  # as if it had never joined
        return found


def with_a_mistake_on_one_rank(rank: int, world_size: int) -> list[str]:
    """Return the errors of this rank where the other one has another setting, a worker already, or an option."""
    errors = []
    with hosted_by_first(rank, 1) as (address, _):
        free, taken = TorchDDP(seeded(Tower)), TorchDDP(seeded(Tower))
        if rank == 1:
            worker_module._attached[taken.module] = object()  # type: ignore[assignment]
        tries: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = [
            (free, {"period": 2 + rank}, {}),
            (free, {"compressor": None if rank else OneBit()}, {}),
            (taken, {}, {}),
            (free, {}, {"timeout": 5} if rank else {}),
        ]
        for model, settings, options in tries:
            with pytest.raises((MismatchError, ConfigurationError)) as caught:
                commopt.attach(model, ParameterServer(address, **settings), **options)
            errors.append(str(caught.value))
        assert commopt.attach(free, ParameterServer(address)).round == 0
    return errors


def test_a_mistake_of_one_rank_of_a_worker_is_raised_on_all() -> None:
    first, second = run(with_a_mistake_on_one_rank, 2)
    assert first[:2] == second[:2]
    assert first[0].startswith("ranks disagree about period: rank 1 has 3, rank 0 has 2")
    assert first[1].startswith("ranks disagree about compressor: rank 1 has None, rank 0 has OneBit(")
    for theirs, mine, said in zip(first[2:], second[2:], ("is a worker already", "takes no options"), strict=True):
        assert said in mine
        assert theirs.startswith("rank 1 cannot take part in")
        assert mine in theirs


def failing_leader(rank: int, world_size: int) -> str:
    def fail() -> None:
        raise RuntimeError("out of memory")

    try:
        WorkerRanks(dist.group.WORLD).run_on_first(fail)
    except TransportError as error:
        return str(error)
    return ""


def test_an_error_of_the_first_rank_is_raised_on_all() -> None:
    for said in run(failing_leader, 2):
        assert said.endswith("RuntimeError: out of memory")


def test_a_ddp_model_is_one_worker() -> None:
    assert len(set(results := run(node_and_worker, 3))) == 1
    assert results[0][1] == 2


# ------------------------------------------------------------------------------------- slow and dead


def lose_a_rank_of_a_worker(rank: int, world_size: int) -> tuple[str, str]:
    """Return what this rank makes of the death of the other one, and the reason that the server noted."""
    with ExitStack() as stack:
        told = [""]
        if rank == 0:
            server = stack.enter_context(hosted())
            told = [address_of(server)]
        dist.broadcast_object_list(told, src=0)
        module = seeded(Tower)
        ddp = TorchDDP(module)
        worker = commopt.attach(ddp, ParameterServer(told[0], period=3))
        try:
            for step in range(100):
                if rank == 1 and step == 4:
                    os._exit(0)
                train(ddp, optimizer_of(module), rank, [step])
        except Exception as error:
            named = commopt.failure_of(error)
            worker.close()
            until(lambda: not server.workers)
            return str(named), server.failure
    return "", ""


@pytest.mark.slow
def test_a_dead_rank_of_a_worker_is_named_and_the_server_goes_on() -> None:
    found = run(lose_a_rank_of_a_worker, 2, dies=[1], fresh=True)
    assert found[0][0].startswith("rank 0 lost rank 1")
    assert found[0][1] == ""


def at_a_pace(rank: int, world_size: int) -> tuple[int, int]:
    """Return how many rounds late the last delta came, and how many deltas were refused."""
    step_s = 0.09 if rank == 2 else 0.03
    with hosted_by_first(rank, world_size) as (address, _):
        module, worker = joined(address, period=5, quorum=2)
        for _ in range(4 if rank == 2 else 12):
            for _ in range(5):
                learn(module, 1e-3)
                time.sleep(step_s)
        worker.close()
        return worker.staleness, worker.refused


def test_a_slow_worker_does_not_delay_the_others() -> None:
    (first, _), (second, _), (late, refused) = run(at_a_pace, 3)
    assert late >= 1  # the others have gone on
    assert first == second == 0
    assert refused == 0


def test_a_round_waits_for_who_is_usually_there() -> None:
    assert window_s([], 3.0) == 0
    assert window_s([1.0, 1.0, 1.0], 3.0) == pytest.approx(1.03)
    assert window_s([0.8, 1.0, 1.1, 1.3, 9.0], 2.0) == pytest.approx(1.1 + 2 * 0.2)


def train_until(rank: int, world_size: int, address: str, done: str) -> int:
    """Train until there is a file, or until this process ends itself; return how many rounds there were."""
    module, worker = joined(address, period=2, quorum=None, compressor=OneBit())
    for step in range(10**6):
        train(module, optimizer_of(module), rank, [step])
        time.sleep(0.01)
        if rank == 2 and worker.round == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if Path(done).exists():
            break
    worker.close()  # the other one may have made a step more, and wait for this worker
    return worker.round


def test_a_worker_that_is_killed_comes_back(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with hosted(3) as server, ThreadPoolExecutor() as pool:
        others = pool.submit(run, train_until, 3, address_of(server), str(done), dies=[2])
        until(lambda: len(server.workers) == 3)
        until(lambda: len(server.workers) == 2)
        fell_at = server.round
        until(lambda: server.round > fell_at + 3)  # the others go on at once
        module, worker = joined(address_of(server), period=2, compressor=OneBit())
        begun = worker.round
        assert begun > fell_at
        learn(module, 1e-3)
        learn(module, 1e-3)
        assert worker.round == server.round == begun + 1  # the next one waits for this worker
        public = torch.cat(server._rounds.parameters().public)
        done.touch()
        worker.close()
        assert min(each or begun for each in others.result()) >= begun
        assert torch.equal(public, torch.cat([each.reshape(-1) for each in module.parameters()]))


def until(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit(limit_s)
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_who_gives_no_sign_of_life_is_gone() -> None:
    with hosted(2, timeout=3.0) as server:
        (module, worker), (silent, silent_worker) = both_joined(server, period=BY_HAND)
        assert silent_worker._connection is not None
        silent_worker._connection._channel.send_heartbeat = lambda **_: None  # type: ignore[method-assign]  # as a process that hangs
        learn(module, 1e-3)
        worker.push()
        begin = time.monotonic()
        worker.pull()
        assert 1 < time.monotonic() - begin < limit(15)
        learn(silent, 1e-3)
        with pytest.raises(TransportError, match="continues without this worker: gave no sign of life for 3 s"):
            silent_worker.push()


def test_a_server_that_gives_no_sign_of_life_is_lost() -> None:
    """As one whose process stands still, whatever its other threads could send."""
    with hosted(2, timeout=1.0) as server:
        (module, worker), _ = both_joined(server, period=BY_HAND)
        server._peers[worker.number].channel.send_heartbeat = lambda **_: None  # type: ignore[method-assign]
        learn(module, 1e-3)
        worker.push()
        with pytest.raises(TransportError, match="the parameter server is lost: gave no sign of life for 1 s"):
            worker.pull()


def test_a_heartbeat_without_words_takes_none_away() -> None:
    """The words tell for whom the server waits, and come from another thread than the other heartbeats."""
    with hosted() as server:
        _module, worker = joined(address_of(server), period=BY_HAND)
        assert worker._connection is not None
        sends, hears = server._peers[worker.number].channel, worker._connection._channel
        sends.send_heartbeat(waits_for="worker 9")
        sends.send_heartbeat()
        until(lambda: hears._received >= sends._sent)
        assert worker._connection._status == {"waits_for": "worker 9"}


def test_without_scheduler_all_of_them_end(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(timeout=3.0)
    server = Server(scheduler.address)
    module, worker = joined(scheduler.address, period=BY_HAND)
    scheduler.close()
    until(lambda: bool(server.failure))
    assert "does not answer any more" in server.failure
    learn(module, 1e-3)
    with pytest.raises(TransportError, match="the parameter server is lost"):
        worker.push()
    server.close()
    monkeypatch.setattr("commopt.server.scheduler._CONNECT_S", 0.5)
    with pytest.raises(TransportError, match=r"no scheduler answers at 127.0.0.1:\d+ within"):
        joined(scheduler.address)


# ------------------------------------------------------------------------------------- late deltas


@pytest.mark.parametrize("compressor", [None, OneBit(block=64), Quantize(bits=4, rounding="stochastic")], ids=str)
@pytest.mark.parametrize("staleness", [2, 1])
def test_nothing_is_lost(compressor: Compressor | None, staleness: int) -> None:
    """One worker makes two rounds alone while the other is at its first: too much for a staleness of 1."""
    with hosted(2) as server:
        settings = {"period": BY_HAND, "quorum": 1, "staleness": staleness, "compressor": compressor}
        (fast, fast_worker), (slow, slow_worker) = both_joined(server, **settings)
        begin, learned = flat(fast), torch.zeros(flat(fast).numel(), dtype=torch.float64)

        def push(module: nn.Module, worker: Worker, amount: float) -> None:
            nonlocal learned
            before = flat(module)
            learn(module, amount)
            learned += before - flat(module)
            worker.push()

        for amount in (1e-3, 2e-3):
            push(fast, fast_worker, amount)
            fast_worker.pull()
        push(slow, slow_worker, 5e-3)
        slow_worker.pull()
        refused = staleness < 2
        assert (slow_worker.staleness, slow_worker.refused) == (2, int(refused))
        assert server.round == (2 if refused else 3)
        fast_worker.pull()
        assert digest_of(slow) == digest_of(fast)

        def owed() -> torch.Tensor:
            kept = (torch.cat(worker._residuals).double() for worker in (fast_worker, slow_worker))
            theta = torch.cat([each.double().reshape(-1) for each in server.state_dict()["parameters"].values()])
            return begin - theta + sum(kept)

        torch.testing.assert_close(owed(), learned, rtol=0, atol=3e-6)
        if refused:
            assert float((torch.cat(slow_worker._residuals)).abs().max()) > 1e-3
            push(slow, slow_worker, 1e-3)
            slow_worker.pull()
            assert slow_worker.refused == 1
            torch.testing.assert_close(owed(), learned, rtol=0, atol=3e-6)
            if compressor is None:
                assert float((torch.cat(slow_worker._residuals)).abs().max()) == 0


@pytest.mark.parametrize("compressor", [None, OneBit(), Cast()], ids=str)
@pytest.mark.parametrize("numel", [1, 3, 4, 17])
def test_a_model_may_have_any_number_of_elements(numel: int, compressor: Compressor | None) -> None:
    """Rows are padded, to whole vectors of kernels."""
    with hosted() as server:
        module = nn.ParameterList([torch.arange(1.0, numel + 1)])
        worker = commopt.attach(module, ParameterServer(address_of(server), period=1, compressor=compressor))
        begin = flat(module)
        learn(module, 0.5)
        assert worker.round == 1
        if compressor is None:
            torch.testing.assert_close(flat(module), begin - 0.5 * torch.linspace(-1, 2, numel).double())
        theta = server.state_dict()["parameters"]["0"].double()
        torch.testing.assert_close(theta, flat(module), rtol=1e-2, atol=1e-2)


def test_steps_between_push_and_pull_are_kept() -> None:
    with hosted() as server:
        module, worker = joined(address_of(server), period=BY_HAND)
        begin = flat(module)
        learn(module, 1e-3)
        worker.push()
        learn(module, 1e-3)
        worker.pull()
        expected = flat(module)
        worker.weight(5)
        worker.push()
        worker.pull()
        torch.testing.assert_close(flat(module), expected)
        assert float((begin - expected).abs().max()) > 1e-3
        with pytest.raises(ConfigurationError, match="no step was made"):
            worker.push()
        learn(module, 1e-3)
        expected = flat(module)
        worker.pull()  # without a push
        torch.testing.assert_close(flat(module), expected)


def test_weights_are_numbers_and_a_push_needs_one_above_zero() -> None:
    with hosted() as server:
        module, worker = joined(address_of(server), period=BY_HAND)
        wrongs: list[Any] = [-1, float("nan"), float("inf"), True, "8", None]
        for wrong in wrongs:
            with pytest.raises(ConfigurationError, match=r"weight\(.*\) must be a number from 0 to"):
                worker.weight(wrong)
        learn(module, 1e-3)
        worker.weight(0)
        with pytest.raises(ConfigurationError, match=r"weight\(0\) in each"):
            worker.push()
        worker.weight(2)
        worker.push()
        worker.pull()


def test_workers_weigh_what_they_did() -> None:
    with hosted(2) as server:
        (first, worker), (second, other) = both_joined(server, period=BY_HAND)
        begin = flat(first)
        for module, each, amount in ((first, worker, 3.0), (second, other, 1.0)):
            learn(module, 1e-3 * amount)
            each.weight(amount)
            each.push()
        learned = begin - flat(second)
        worker.pull()
        other.pull()
        torch.testing.assert_close(begin - flat(first), (3 * 3 + 1 * 1) / 4 * learned, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------------- what is refused


def test_settings_are_compared_when_a_worker_joins() -> None:
    with hosted() as server:
        module, worker = joined(address_of(server), period=BY_HAND, compressor=OneBit())
        cases: tuple[tuple[dict[str, Any], str], ...] = (
            ({"period": 7}, "period differs: this worker has 7, the others of this parameter server have 1000000"),
            ({"compressor": None}, r"compressor differs: this worker has None, .* have OneBit\(block=512\)"),
            ({"outer": NESTEROV}, r"outer differs: this worker has Outer\(lr=0.7, .* have Outer\(lr=1.0\)"),
            ({"quorum": 3}, "quorum differs: this worker has 3"),
        )
        for changed, message in cases:
            with pytest.raises(MismatchError, match=message):
                joined(address_of(server), **{"period": BY_HAND, "compressor": OneBit(), **changed})
        settings = ParameterServer(address_of(server), period=BY_HAND, compressor=OneBit())
        with pytest.raises(MismatchError, match=r"'layers.0.weight' differs: .* \[9, 9\], .* \[\d+, \d+\]"):
            commopt.attach(Tower(9), settings)
        with pytest.raises(MismatchError, match=r"'layers.0.weight' differs: .* torch.bfloat16 .* torch.float32"):
            commopt.attach(Tower().bfloat16(), settings)
        with pytest.raises(MismatchError, match=r"'extra' differs: this worker has torch.float32 \[3\], .* have none"):
            commopt.attach(with_extra(Tower()), settings)
        learn(module, 1e-3)
        worker.push()
        worker.pull()
        assert worker.round == 1


def with_extra(module: nn.Module) -> nn.Module:
    module.register_parameter("extra", nn.Parameter(torch.ones(3)))
    return module


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"period": 0}, r"ParameterServer\(period=0\) must be a whole number, 1 or more"),
        ({"quorum": 0}, r"quorum=0"),
        ({"staleness": -1}, r"staleness=-1"),
        ({"decay": 1.5}, r"decay=1.5\) must be above 0 and at most 1"),
        ({"grace": 0}, r"grace=0"),
        ({"outer": 0.7}, r"outer=0.7\) must be a commopt.Outer"),
        ({"compressor": "onebit"}, r"must be a compressor"),
        ({"address": 5}, r"address=5\) must be text"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ParameterServer(**settings)


@pytest.mark.parametrize(
    "compressor", [None, OneBit(), Cast(torch.bfloat16), Quantize(bits=4), DGC(0.1, warmup=((3, 0.5),))], ids=str
)
def test_the_server_reads_what_workers_tell(compressor: Compressor | None) -> None:
    settings = ParameterServer(period=7, compressor=compressor, outer=NESTEROV, quorum=2, decay=0.9)
    assert ParameterServer.read(settings.as_text()) == settings


def test_the_server_runs_nothing_that_it_is_told() -> None:
    text = {**ParameterServer().as_text(), "compressor": "exit(3)"}
    with pytest.raises(ConfigurationError, match=r"knows no exit; .* commopt.COMPRESSORS"):
        ParameterServer.read(text)


def test_models_that_cannot_be() -> None:
    with hosted() as server:
        settings = ParameterServer(address_of(server))
        with pytest.raises(UnsupportedTensorError, match=r"parameter 'layers.0.weight' is torch.float64"):
            commopt.attach(Tower().double(), settings)
        with pytest.raises(ConfigurationError, match="ReLU has no parameters"):
            commopt.attach(nn.ReLU(), settings)
        with pytest.raises(ConfigurationError, match="attach takes no options with it"):
            commopt.attach(Tower(), settings, timeout=5)  # type: ignore[call-overload]
        module, _worker = joined(address_of(server), period=1)
        with pytest.raises(UnsupportedTensorError, match=r"parameter 'layers.0.weight' is not finite after step 1"):
            learn(module, float("nan"))
    with pytest.raises(ConfigurationError, match="COMMOPT_SCHEDULER is not set"):
        commopt.attach(Tower(), ParameterServer())
    with pytest.raises(ConfigurationError, match="is not host:port"):
        commopt.attach(Tower(), ParameterServer("nowhere"))


@pytest.mark.parametrize("value", [0, -1, float("nan"), "30", True, None, timedelta(seconds=30)], ids=str)
def test_what_is_no_timeout_and_no_number_of_workers(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"timeout .* is not between 0 and"):
        Scheduler(timeout=value)
    with pytest.raises(ConfigurationError, match=r"Server\(workers=\) is .*whole number >= 1"):
        Server("127.0.0.1:1", workers=value)


def test_there_is_one_server() -> None:
    with hosted(timeout=limit(3.0)) as server:
        with pytest.raises(ConfigurationError, match="has a server already"):
            Server(address_of(server))
        server.close()
        after = Server(address_of(server))  # once the other is gone
        joined(address_of(server))
        after.close()


def test_a_request_that_makes_no_sense_ends_its_worker_alone() -> None:
    with hosted(2, timeout=limit(5.0)) as server:
        (_, odd), (module, other) = both_joined(server, quorum=1)
        assert odd._connection is not None
        odd._connection.ask("knock")
        with pytest.raises(TransportError):
            odd.pull()
        until(lambda: server.workers == [other.number])
        learn(module, 1.0)
        other.push()
        other.pull()
        assert server.round == 1


def test_without_a_server_nobody_waits_for_ever() -> None:
    scheduler = Scheduler(timeout=3.0)
    with pytest.raises(TransportError, match=r"no parameter server has answered for 6 s; .* commopt server"):
        joined(scheduler.address)
    scheduler.close()


# ------------------------------------------------------------------------------------- who waits, and for whom


def test_a_scheduler_that_stands_still_ends_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """A little longer than its timeout, as a machine that was paused; then a new server finds the place free."""
    timeout_s = limit(2)
    with command("scheduler", "--port", "0", "--timeout", f"{timeout_s:g}") as process:
        assert process.stdout is not None
        address = "127.0.0.1:" + re.findall(r"port (\d+)", process.stdout.readline())[0]
        server = Server(address)
        process.send_signal(signal.SIGSTOP)
        until(lambda: bool(server.failure))
        process.send_signal(signal.SIGCONT)
        assert f"does not answer any more (gave no sign of life for {timeout_s:g} s)" in server.failure
        until(lambda: not own_threads())
        again = Server(address)
        module, worker = joined(address)
        assert worker.round == 0
        del module
        again.close()


def own_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("commopt-")]


def test_a_scheduler_that_is_held_up_for_less_changes_nothing() -> None:
    with command("scheduler", "--port", "0", "--timeout", "6") as process:
        assert process.stdout is not None
        address = "127.0.0.1:" + re.findall(r"port (\d+)", process.stdout.readline())[0]
        server = Server(address)
        module, worker = joined(address, period=1)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        learn(module, 1e-3)
        assert worker.round == 1
        link, timeout_s = find_server(address, "")
        link.close()
        assert timeout_s == 6
        assert not server.failure
        server.close()


def test_who_waits_says_for_whom(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("commopt.server.connection.LOG_EVERY_S", 0.3)
    monkeypatch.setattr("commopt.server.server.LOG_EVERY_S", 0.3)
    with ThreadPoolExecutor() as pool, hosted(2, timeout=limit(2.0)) as server:
        first = pool.submit(joined, address_of(server), period=BY_HAND)
        until(lambda: "waiting for 2 workers, of which 1 have joined" in caplog.text)  # the server's
        until(lambda: "worker 1 is waiting for 2 workers, of which 1 have joined" in caplog.text)
        slow, slow_worker = joined(address_of(server), period=BY_HAND)
        module, worker = first.result()
        learn(module, 1e-3)
        worker.push()
        pulled = pool.submit(worker.pull)
        until(lambda: f"worker {worker.number} is waiting for worker {slow_worker.number} of round 0" in caplog.text)
        assert server.stats()["waits_for"] == f"worker {slow_worker.number} of round 0"
        learn(slow, 1e-3)
        slow_worker.push()
        pulled.result()


def test_a_worker_that_is_started_twice_is_not_two() -> None:
    with ThreadPoolExecutor() as pool, hosted(2, timeout=limit(5.0)) as server:  # which ends those who wait
        for _ in range(2):
            waits = pool.submit(joined, address_of(server))
            until(lambda: len(server.stats()["workers"]) == 1 == len(connections))
            assert server.workers == []  # the first round has not begun
            for connection in list(connections):
                connection._channel.close()  # as if its process had been killed
            with pytest.raises(TransportError):
                waits.result()
            until(lambda: not server.stats()["workers"])
        both_joined(server)
        assert len(server.workers) == 2


# ------------------------------------------------------------------------------------- one process, several workers


def test_a_cell_that_is_run_twice() -> None:
    """The model of the first time is gone when the second one attaches, though its worker is still there."""
    with hosted(timeout=limit(2.0)) as server:
        for _ in range(2):
            module = seeded(Tower)
            worker = commopt.attach(module, ParameterServer(address_of(server), period=1))
            learn(module, 1e-3)
        assert server.stats()["workers"] == [worker.number]
        assert server.round == 2


def test_a_second_attach_is_refused_by_name() -> None:
    with hosted(timeout=limit(2.0)) as server:
        module, worker = joined(address_of(server), period=BY_HAND)
        with pytest.raises(ConfigurationError, match=r"this Tower is a worker already; close\(\) the Worker"):
            commopt.attach(module, ParameterServer(address_of(server), period=BY_HAND))
        with pytest.raises(ConfigurationError, match=f"waits for worker {worker.number}, which is in this process too"):
            joined(address_of(server), period=BY_HAND)
        worker.close()
        assert commopt.attach(module, ParameterServer(address_of(server), period=BY_HAND)).round == 0


def test_a_model_keeps_its_worker() -> None:
    with hosted() as server:
        module = seeded(Tower)
        commopt.attach(module, ParameterServer(address_of(server), period=1))  # nobody keeps what it returns
        gc.collect()
        learn(module, 1e-3)
        assert server.round == 1
        del module
        gc.collect()
        until(lambda: not server.workers)


def waiting_longer_than_the_group(rank: int, world_size: int) -> tuple[int, str]:
    """Rank 0 and 1 are a worker; its group waits for 3 s, and the other worker comes after 6."""
    node = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    with hosted_by_first(rank, 2) as (address, _):
        module = seeded(Tower)
        if rank == 2:
            time.sleep(6.0)
        model = TorchDDP(module, process_group=node) if rank < 2 else module
        worker = commopt.attach(model, ParameterServer(address, period=1))
        train(model, optimizer_of(module), 0, range(1))
        return worker.round, digest_of(module)


def test_a_ddp_model_outlives_its_groups_timeout() -> None:
    assert len(set(results := run(waiting_longer_than_the_group, 3))) == 1
    assert results[0][0] == 1


# ------------------------------------------------------------------------------------- models and loops that change


def test_layers_that_are_frozen_and_unfrozen() -> None:
    with hosted() as server:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        module[1].requires_grad_(False)
        worker = commopt.attach(module, ParameterServer(address_of(server), period=1))
        learn(module, 1e-3)
        module[0].bias.requires_grad_(False)
        learn(module, 1e-3)
        assert worker.round == 2
        module[1].requires_grad_(True)
        with pytest.raises(ConfigurationError, match=r"parameter '1.weight' is trainable, and was not at attach"):
            learn(module, 1e-3)
        worker.close()
        module[1].requires_grad_(False)
        module[0].bias.requires_grad_(True)
        worker = commopt.attach(module, ParameterServer(address_of(server), period=1))
        module[0].weight = nn.Parameter(torch.ones(4, 3))
        with pytest.raises(ConfigurationError, match=r"'0.weight' was torch.float32 \[3, 3\] .* and is .* \[4, 3\]"):
            worker.pull()


@pytest.mark.parametrize("data", [False, True])
def test_a_loop_without_an_optimizer_is_refused_or_exchanges_by_hand(data: bool) -> None:
    with hosted() as server:
        module, worker = joined(address_of(server), period=2)

        def step() -> None:
            sum(each.square().sum() for each in module.parameters()).backward()  # type: ignore[union-attr]
            with torch.no_grad():
                for each in module.parameters():
                    assert each.grad is not None
                    (each.data if data else each).sub_(each.grad, alpha=1e-3)

        for _ in range(3):
            step()
        with pytest.raises(ConfigurationError, match=r"no optimizer of torch.optim has made a step since attach"):
            step()
        worker.close()
        worker = commopt.attach(module, ParameterServer(address_of(server), period=2))
        for _ in range(6):
            step()
            worker.weight(1)
            worker.push()
            worker.pull()
        assert worker.round == 6


def test_optimizers_of_parts_count_as_one() -> None:
    """Whichever has the model's first parameter, and if none has."""
    with hosted() as server:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        worker = commopt.attach(module, ParameterServer(address_of(server), period=2))
        optimizers = [torch.optim.SGD(module[place].parameters(), lr=1e-3) for place in (2, 1)]
        for _ in range(4):
            module(torch.ones(2, 3)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        assert worker.round == 2


def test_a_refused_delta_keeps_its_weight() -> None:
    with hosted(2) as server:
        (fast, fast_worker), (slow, slow_worker) = both_joined(server, period=BY_HAND, quorum=1, staleness=0)
        learn(fast, 1e-3)
        fast_worker.push()
        fast_worker.pull()
        learn(slow, 1e-3)
        slow_worker.weight(7)
        slow_worker.push()
        slow_worker.pull()
        assert (slow_worker.refused, slow_worker.done) == (1, 0)
        before = server.done
        slow_worker.weight(2)
        slow_worker.push()
        slow_worker.pull()
        assert server.done - before == slow_worker.done == 7 + 2
        assert server.done == fast_worker.done + slow_worker.done


def test_memory_is_told_and_bounded() -> None:
    """Without a compressor theta alone is held between rounds, and rounds that somebody still trains from."""
    with hosted(2) as server:
        settings = {"period": BY_HAND, "quorum": 1, "staleness": 16}
        (fast, fast_worker), (_, slow_worker) = both_joined(server, **settings)
        model_nbytes = 4 * flat(fast).numel()
        for rounds in range(1, 6):
            learn(fast, 1e-3)
            fast_worker.push()
            fast_worker.pull()
            found = server.stats()
            assert found["rounds"] == rounds
            expected = {"parameters": model_nbytes, "momentum": 0, "sent": 0, "deltas": 0}
            assert found["memory_nbytes"] == {**expected, "earlier_rounds": model_nbytes}  # the slow one's
        slow_worker.close()
        learn(fast, 1e-3)
        fast_worker.push()
        fast_worker.pull()
        assert server.stats()["memory_nbytes"]["earlier_rounds"] == 0


def test_a_round_that_would_not_be_finite_ends_the_server_and_changes_nothing() -> None:
    with hosted() as server:
        module, worker = joined(address_of(server), period=BY_HAND, outer=Outer(lr=3e38))
        before = server.state_dict()
        learn(module, 1.0)
        worker.push()
        with pytest.raises(TransportError, match="round 0 could not be closed: the parameters would not be finite"):
            worker.pull()
        assert "the parameters are as before" in server.failure
        after = server.state_dict()
        assert all(torch.equal(after["parameters"][name], each) for name, each in before["parameters"].items())


# ------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("where", ["parameters", "momentum"])
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_checkpoint_that_is_not_finite_changes_nothing(where: str, value: float) -> None:
    layout = Layout.of_parameters([("a", (2, 2)), ("b", (3,))])
    shared = SharedParameters(ParameterServer(outer=NESTEROV), [layout], [torch.arange(7.0)])
    saved, before = shared.state(), shared.state()
    saved["round"] = 5
    saved[where]["b"][1] = value
    with pytest.raises(ConfigurationError, match=rf"{where}\['b'\]"):
        shared.load(saved)
    assert shared.round == 0
    assert all(torch.equal(shared.state()[where][name], each) for name, each in before[where].items())


def test_a_checkpoint_is_the_model() -> None:
    with hosted() as server:
        with pytest.raises(ConfigurationError, match="no worker has joined yet"):
            server.state_dict()
        module, worker = joined(address_of(server), period=1, outer=NESTEROV, compressor=OneBit())
        for amount in (1e-3, 2e-3):
            learn(module, amount)
        saved = server.state_dict()
        worker.close()
    assert saved["round"] == 2
    with hosted(state_dict=saved) as server:
        module, worker = joined(address_of(server), period=1, outer=NESTEROV, compressor=OneBit())
        assert worker.round == 2
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, saved["parameters"][name])
        again = server.state_dict()
        assert all(torch.equal(again["momentum"][name], each) for name, each in saved["momentum"].items())
        assert any(float(each.abs().max()) > 0 for each in saved["momentum"].values())
    with hosted(state_dict=saved) as server:
        with pytest.raises(MismatchError, match=r"the checkpoint's parameters .* 'extra'"):
            commopt.attach(with_extra(Tower()), ParameterServer(address_of(server)))
        joined(address_of(server))


def test_a_worker_that_waits_for_a_server_gets_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is admitted before the server is complete, however long that takes after others can find it."""
    with hosted() as server:
        module, worker = joined(address_of(server), period=1)
        learn(module, 1e-3)
        saved = server.state_dict()
        worker.close()
    usual, present = ServerRegistration.listen, list[str]()

    def slow(registration: ServerRegistration) -> None:
        time.sleep(1.0)
        present.extend(scheduler.present.values())
        usual(registration)

    monkeypatch.setattr(ServerRegistration, "listen", slow)
    scheduler = Scheduler(timeout=limit(20))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(joined, scheduler.address, period=1)
        server = Server(scheduler.address, state_dict=saved)
        _module, worker = waiting.result()
    assert (worker.round, present) == (1, ["server"])
    server.close()
    scheduler.close()


@pytest.mark.parametrize("failure", ["", "its rounds have failed"])
def test_a_server_that_waits_for_another_resumes_from_what_that_saves_last(failure: str) -> None:
    """However that one ends: while it saves, no other server can take its place."""
    saved, asks = list[dict[str, Any]](), "commopt.server.scheduler.connect_to_scheduler"

    def save() -> None:
        learn(module, 1e-3)
        worker.push()
        until(lambda: first.stats()["memory_nbytes"]["deltas"] > 0)
        saved.append(first.state_dict())  # without this delta, whose worker hears that the server has ended

    with hosted() as first, ThreadPoolExecutor() as pool:
        module, worker = joined(address_of(first), period=BY_HAND)
        learn(module, 1e-3)
        worker.push()
        worker.pull()
        first.on_end = save
        with patch(asks, wraps=connect_to_scheduler) as asked:
            coming = pool.submit(Server, address_of(first), state_dict=lambda: saved[-1])
            until(lambda: asked.call_count > 1)  # so it was told to wait
        ending = pool.submit(first.close, failure)
        until(first._ending.is_set)
        first.close()  # waits for the end of the other call
        assert len(saved) == 1
        ending.result()
        second = coming.result()
        module, worker = joined(address_of(first), period=BY_HAND)
        assert worker.round == 1
        second.close()


def test_a_server_that_cannot_read_its_state_leaves_the_place_to_another() -> None:
    scheduler = Scheduler(timeout=limit(20))
    for wrong, error in ((full, OSError), (lambda: {"round": 1}, ConfigurationError)):
        threads = own_threads()
        with pytest.raises(error):
            Server(scheduler.address, state_dict=wrong)
        until(lambda: not scheduler.present)
        until(lambda: own_threads() == threads)  # noqa: B023
    Server(scheduler.address, state_dict=lambda: None).close()
    scheduler.close()


# ------------------------------------------------------------------------------------- command lines

BEFORE = """
import sys, time, torch, commopt
torch.manual_seed(int(sys.argv[1]))
model = torch.nn.Linear(4, 4)
"""
TRAIN = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(sys.argv[2])):
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("round", comm.round, flush=True)
    time.sleep(0.003)
"""


def documented() -> str:
    """Return a script with the lines that docs/periodic.md shows, which have a period of 16."""
    text = (ROOT / "docs" / "periodic.md").read_text().partition("## A machine may be slow or die")[2]
    shown: str = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)[0]
    return BEFORE + shown.replace("...  # train\n", TRAIN)


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    with subprocess.Popen([sys.executable, "-m", "commopt", *arguments], **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def test_checkpoints_are_whole_and_the_last_two_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "model.pt"
    scheduler = Scheduler(timeout=limit(10.0))
    address = scheduler.address
    with command("server", "--scheduler", address, "--checkpoint", str(checkpoint), "--every", "1") as process:
        module, worker = joined(address, period=1)
        for rounds in (1, 2, 3):
            learn(module, 1e-3)
            until(lambda: checkpoint.exists() and saved_round(checkpoint) == rounds)  # noqa: B023
        worker.close()
        process.terminate()
        assert process.wait(30) == 0
    previous = tmp_path / "model.pt.previous"
    assert saved_round(previous) == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.pt", "model.pt.previous"]
    whole = checkpoint.read_bytes()
    odd = torch.load(checkpoint, weights_only=True)
    odd["parameters"]["layers.0.weight"][0, 0] = float("nan")
    damages: tuple[Any, ...] = (whole[:100], b"", odd, {"parameters": {}}, [1])
    for damaged in damages:
        if isinstance(damaged, bytes):
            checkpoint.write_bytes(damaged)
        else:
            torch.save(damaged, checkpoint)
        said = refused(capsys, "server", "--scheduler", address, "--checkpoint", str(checkpoint))
        assert "model.pt cannot be read: " in said
        assert f"put {previous} in its place, or move it away to start anew" in said
    scheduler.close()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line that a command says when it does not begin."""
    assert commopt.__main__.main(list(arguments)) == 2
    line, rest = capsys.readouterr().err.split("\n")
    assert not rest
    assert line.startswith(f"commopt {arguments[0]}: ")
    return line


def saved_round(path: Path) -> int:
    found: int = torch.load(path, weights_only=True)["round"]
    return found


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_checkpoint_that_cannot_be_written_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next attempt follows after as many rounds, and at the end."""
    path = tmp_path / "model.pt"
    checkpoint = server_commands._Checkpoint(path, 2)
    with hosted() as server:
        module, _worker = joined(address_of(server), period=1)
        for rounds in range(1, 6):
            learn(module, 1e-3)
            with monkeypatch.context() as patched:
                if rounds == 4:
                    patched.setattr("torch.save", full)
                checkpoint.save_if_due(server)
            assert (path.exists() and saved_round(path)) == (0, 2, 2, 2, 2)[rounds - 1]
            assert checkpoint.failed == (rounds in (4, 5))
        assert caplog.text.count("could not be written") == 1
        assert "the checkpoint of round 4 could not be written: [Errno 28] No space left" in caplog.text
        checkpoint.finish(server)
    assert not checkpoint.failed
    assert saved_round(path) == 5
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.pt", "model.pt.previous"]


@pytest.mark.parametrize("room_again", [True, False])
def test_a_server_whose_last_state_is_in_no_file_fails(
    room_again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, stopped = tmp_path / "model.pt", threading.Event()
    scheduler = Scheduler(timeout=limit(20))

    def until_stopped(_: float) -> None:
        if stopped.wait(0.01):
            raise KeyboardInterrupt

    monkeypatch.setattr(server_commands, "_until_interrupted", lambda: suppress(KeyboardInterrupt))
    monkeypatch.setattr(server_commands, "time", SimpleNamespace(sleep=until_stopped))
    with ThreadPoolExecutor() as pool:
        options = ["server", "--scheduler", scheduler.address, "--checkpoint", str(path), "--every", "1"]
        status = pool.submit(commopt.__main__.main, options)
        module, worker = joined(scheduler.address, period=1)
        with monkeypatch.context() as patched:
            patched.setattr("torch.save", full)
            learn(module, 1e-3)
            worker.close()
            until(lambda: "the checkpoint of round 1 could not be written" in caplog.text)
            if not room_again:
                stopped.set()
                status.result()
        stopped.set()
        assert status.result() == int(not room_again)
    assert path.exists() == room_again
    scheduler.close()


class Rounds:
    """A server as its checkpoint sees it."""

    def __init__(self, number: int) -> None:
        self.round = number

    def state_dict(self) -> dict[str, Any]:
        return {"round": self.round, "done": 1.0, "parameters": {"w": torch.ones(2)}, "momentum": {}}


def checkpoint_at(path: Path, begun: int, *, every: int = 1) -> Any:
    """Return the checkpoint of a server that has resumed from round `begun`."""
    checkpoint: Any = server_commands._Checkpoint(path, every)
    found = checkpoint.resume()
    assert (0 if found is None else found["round"]) == begun
    return checkpoint


@pytest.mark.parametrize("trained", [True, False])
def test_a_server_that_was_given_up_leaves_the_file_to_the_next(
    trained: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the next one has only read it."""
    path, beside = tmp_path / "model.pt", tmp_path / "model.pt.round-7"
    first = checkpoint_at(path, 0)
    first.save_if_due(Rounds(5))
    second = checkpoint_at(path, 5)
    if trained:
        second.save_if_due(Rounds(30))
    first.save_if_due(Rounds(7))
    assert first.failed
    assert f"{path} is no longer the file that this server has read or written" in caplog.text
    assert f"round 7 is written to {beside}" in caplog.text
    first.finish(Rounds(8))
    assert saved_round(path) == (30 if trained else 5)
    assert saved_round(beside) == 8
    second.save_if_due(Rounds(40))
    assert not second.failed
    assert saved_round(path) == 40
    names = ["model.pt", "model.pt.previous", "model.pt.round-7", "model.pt.round-7.previous"]
    assert sorted(each.name for each in tmp_path.iterdir()) == names


def test_what_the_server_before_saves_last_is_resumed_from(tmp_path: Path) -> None:
    """Though a damaged file is found before the server waits for its turn."""
    first = checkpoint_at(tmp_path / "model.pt", 0)
    first.save_if_due(Rounds(5))
    waiting = server_commands._Checkpoint(tmp_path / "model.pt", 10)
    first.finish(Rounds(8))
    found = waiting.resume()
    assert found is not None
    assert found["round"] == 8
    waiting.save_if_due(Rounds(17))  # type: ignore[arg-type]
    assert saved_round(tmp_path / "model.pt") == 8
    waiting.save_if_due(Rounds(18))  # type: ignore[arg-type]
    assert saved_round(tmp_path / "model.pt") == 18


def test_a_save_that_is_interrupted_after_the_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is still this server's."""
    checkpoint = checkpoint_at(tmp_path / "model.pt", 0)

    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("commopt.checkpoint_files.sync_folder", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save_if_due(Rounds(5))
    checkpoint.finish(Rounds(5))
    assert not checkpoint.failed
    assert not list(tmp_path.glob("*.round-*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scheduler", "--host", "127.0.0.1", "--port", "1"), r"cannot listen on 127.0.0.1:1: .*; pass another --port"),
        (("scheduler", "--host", "0.0.0.0"), r"no secret; set COMMOPT_SECRET, or pass --secret-file FILE, alike"),
        (("scheduler", "--host", "no such host"), r"'no such host' is not an address of this machine"),
        (("server", "--scheduler", "127.0.0.1:1"), r"no scheduler answers at 127.0.0.1:1 .*\(Connection refused\)"),
    ],
)
def test_what_cannot_begin_says_so_in_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMMOPT_SECRET", raising=False)
    monkeypatch.setattr("commopt.server.scheduler._CONNECT_S", 0.5)
    with ExitStack() as stack:
        if "1" in arguments:  # a port that is taken
            taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = str(taken.getsockname()[1])
            arguments = tuple(port if each == "1" else each for each in arguments)
            message = message.replace(":1:", f":{port}:")
        assert re.search(message, refused(capsys, *arguments))


def test_command_lines(tmp_path: Path) -> None:
    script, checkpoint = tmp_path / "train.py", tmp_path / "model.pt"
    script.write_text(documented())
    with ExitStack() as stack:

        def start(*arguments: str) -> subprocess.Popen[str]:
            return stack.enter_context(command(*arguments))

        limit_s = round(limit(8))
        scheduler = start("scheduler", "--port", "0", "--timeout", str(limit_s))
        assert scheduler.stdout is not None
        at = ("--scheduler", "127.0.0.1:" + re.findall(r"port (\d+)", scheduler.stdout.readline())[0])
        server = start("server", *at, "--workers", "2", "--checkpoint", str(checkpoint), "--every", "1")
        both = [start("worker", *at, str(script), seed, "48") for seed in ("0", "1")]
        said = [process.communicate(timeout=300)[0] for process in both]
        assert [each.split()[-1] for each in said] == ["3", "3"], said
        lonely = start("worker", *at, str(script), "0", "100000")
        assert lonely.stdout is not None
        assert "round 6\n" in iter(lonely.stdout.readline, "")
        until(lambda: torch.load(checkpoint, weights_only=True)["round"] >= 4)
        server.kill()
        begin, lost = time.monotonic(), "TransportError: the parameter server is lost: the connection broke"
        assert any(lost in line for line in lonely.stdout)
        assert time.monotonic() - begin < limit_s  # the connection says so, before the silence does
        assert lonely.wait(30) == 1
        assert len(re.findall(r"worker \d has joined", server.communicate()[0])) == 3

        saved = torch.load(checkpoint, weights_only=True)
        torch.nn.Linear(4, 4).load_state_dict(saved["parameters"])
        waiting = start("worker", *at, str(script), "0", "16")  # when the server comes
        again = start("server", *at, "--checkpoint", str(checkpoint))
        said_last = waiting.communicate(timeout=300)[0]
        assert said_last.split()[-1] == str(saved["round"] + 1), said_last
        again.terminate()
        assert again.wait(30) == 0, again.communicate()[0]
        assert torch.load(checkpoint, weights_only=True)["round"] == saved["round"] + 1
        scheduler.terminate()
        said_at_last = scheduler.communicate(timeout=20)[0]
        assert len(re.findall(r"worker \d+ is gone: has ended", said_at_last)) == 3
        assert len(re.findall(r"worker \d+ is gone: so is its server: the connection broke", said_at_last)) == 1
