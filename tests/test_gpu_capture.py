# SPDX-License-Identifier: Apache-2.0
"""Steps in a CUDA graph: what can be repeated trains as without one, what cannot is refused while it is captured."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import (
    DGC,
    Aggregator,
    Compressed,
    ConfigurationError,
    Feedback,
    Flat,
    Hierarchical,
    LocalSGD,
    OneBit,
    PowerSGD,
    Quantize,
)
from commopt.feedback import ResidualStore
from commopt.feedback.quality import SampledError
from commopt.groups import TeamShape
from commopt.schedule import reducer
from tests.gpu_training import ON_GPU, every_device, kept, on_ranks
from tests.hook_training import (
    SMALL_BUCKET,
    Tower,
    assert_identical,
    batch_of,
    digest_of,
    loss_of,
    seeded,
)
from tests.ranks import Nodes, run

WARM_UP = {"cpu": 4, "cuda": 11}  # steps that torch's notes on CUDA graphs ask for
REPLAYS = 4

# ------------------------------------------------------------------------------------- which steps differ

BFLOAT16 = Feedback(dtype=torch.bfloat16)
ONE_NODE, LONE_RANKS, BOTH_LEVELS = TeamShape.of((4,)), TeamShape.of((1, 1)), TeamShape.of((2, 2))
REPEATABLE: list[tuple[Aggregator, int]] = [
    (Flat(), 0),
    (Hierarchical(Compressed(Quantize(4))), 0),
    (Compressed(Quantize(8), feedback=None), 0),
    (Compressed(OneBit(start_step=5)), 6),
    (Compressed(DGC(warmup=((3, 0.25), (2, 0.1)))), 6),
    (PowerSGD(), 3),
    (Hierarchical(PowerSGD(feedback=None)), 3),
]
UNREPEATABLE: list[tuple[Aggregator, int, str]] = [
    (Compressed(OneBit(start_step=5)), 4, r"until step 5 .* repeat step 4 for ever; capture a step from 6 on"),
    (Compressed(OneBit(start_step=5)), 5, "until step 5"),
    (Compressed(DGC(warmup=((3, 0.25), (2, 0.1)))), 4, "until step 5"),
    (Hierarchical(Compressed(Quantize(8, start_step=9))), 8, "until step 9"),
    (Compressed(Quantize(8, rounding="stochastic")), 0, "use rounding='nearest'"),
    (Hierarchical(Compressed(Quantize(4, rounding="stochastic"))), 0, "use rounding='nearest'"),
    (Compressed(OneBit(), feedback=BFLOAT16), 0, r"use feedback=Feedback\(dtype=torch.float32\)"),
    (PowerSGD(feedback=BFLOAT16), 3, r"use feedback=Feedback\(dtype=torch.float32\)"),
    (PowerSGD(), 1, "until step 2"),
    (LocalSGD(), 0, "averages parameters every 8 steps"),
]


@pytest.mark.parametrize(("aggregator", "step"), REPEATABLE, ids=str)
def test_steps_that_a_graph_may_repeat(aggregator: Aggregator, step: int) -> None:
    aggregator.check_capture(step, BOTH_LEVELS)


@pytest.mark.parametrize(("aggregator", "step", "message"), UNREPEATABLE, ids=str)
def test_steps_that_no_graph_may_repeat(aggregator: Aggregator, step: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        aggregator.check_capture(step, BOTH_LEVELS)


CLUSTERS = {
    "one node": ONE_NODE,
    "lone ranks": LONE_RANKS,
    "both levels": BOTH_LEVELS,
    "not a leader": TeamShape.of((2, 1), rank=1),
}


@pytest.mark.parametrize(
    ("aggregator", "repeatable"),
    [
        (Hierarchical(inter=PowerSGD(feedback=BFLOAT16)), "one node"),
        (Hierarchical(inter=Compressed(OneBit(start_step=9))), "one node"),
        (Hierarchical(Compressed(Quantize(8, rounding="stochastic"))), "one node"),
        (Compressed(DGC(warmup=((9, 0.1),))), "nowhere"),
        (LocalSGD(), "one node"),
        (LocalSGD(gradients=Compressed(Quantize(8, rounding="stochastic"), feedback=None)), "nowhere"),
    ],
    ids=str,
)
def test_only_what_this_cluster_runs_is_judged(aggregator: Aggregator, repeatable: str) -> None:
    for name, team in CLUSTERS.items():
        if name == repeatable:
            aggregator.check_capture(6, team)
        else:
            with pytest.raises(ConfigurationError, match="CUDA graph"):
                aggregator.check_capture(6, team)


@pytest.mark.parametrize("preset", commopt.PRESETS)
def test_a_preset_sends_the_same_in_every_step(preset: str) -> None:
    """What `phase` knows of later steps must not have been forgotten."""
    aggregator = commopt.build_preset(preset)
    aggregator.check_capture(3, BOTH_LEVELS)
    assert len({aggregator.phase(step) for step in range(3, 2000)}) == 1


# ------------------------------------------------------------------------------------- what is refused in a hook


def capturing(rank: int, world_size: int, strategy: str, plan: str, steps: int, freeze: bool) -> tuple[str, str]:
    """Let a step, made after `steps` others, seem to be captured; return what it was told, and a hash in the end."""
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    state = commopt.attach(ddp, strategy, plan=plan)
    said = ""
    for step in range(steps):
        ddp.zero_grad()
        loss_of(ddp, batch_of(rank, step)).backward()
    if freeze:
        state.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer, "is_capturing", lambda: True)
        try:
            loss_of(ddp, batch_of(rank, steps)).backward()
        except ConfigurationError as error:
            said = str(error)
    ddp.zero_grad()
    loss_of(ddp, batch_of(rank, steps)).backward()  # nothing is left behind
    return said, gradients_of(ddp)


def gradients_of(ddp: TorchDDP) -> str:
    parts = [parameter.grad.cpu().flatten() for parameter in ddp.parameters() if parameter.grad is not None]
    return hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("strategy", "plan", "steps", "freeze", "message"),
    [
        ("flat", "ddp", 3, False, ""),
        ("flat", "adaptive", 3, True, ""),
        ("quantized", "adaptive", 3, True, ""),
        ("flat", "adaptive", 3, False, "while other buckets may yet be planned; call state.freeze() on every rank"),
        ("flat", "ddp", 0, False, "step 0 is captured in a CUDA graph before DDP has shown the same buckets twice"),
        ("flat", "ddp", 2, False, "step 2 is captured in a CUDA graph before DDP has shown the same buckets twice"),
        ("quantized:rounding=stochastic", "ddp", 3, False, "use rounding='nearest'"),
        ("powersgd:start_step=9", "adaptive", 4, True, "capture a step from 10 on"),
    ],
)
def test_a_captured_step_is_looked_at(strategy: str, plan: str, steps: int, freeze: bool, message: str) -> None:
    results = run(capturing, 2, strategy, plan, steps, freeze)
    assert_identical([digest for _, digest in results])
    for said, _ in results:
        assert message in said
        assert bool(said) == bool(message)


def without_forwards(rank: int, world_size: int) -> str:
    """Torch's own DDP, in its two-argument form, shows no forwards: then backward is refused."""
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    ddp.register_comm_hook(commopt.HookState(), commopt.PRESETS["flat"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer, "is_capturing", lambda: True)
        loss = loss_of(ddp, batch_of(rank, 0))
        with pytest.raises((ConfigurationError, RuntimeError)) as refused:
            loss.backward()
    return str(refused.value)


def test_without_forwards_the_backward_is_refused() -> None:
    for said in run(without_forwards, 2):
        assert "step 0 is captured in a CUDA graph before DDP has shown the same buckets twice" in said


def average_in_a_capture(rank: int, world_size: int, unseen: str) -> tuple[list[int], str]:
    """Capture a step that has to begin with an average of the parameters, and that no forward of DDP's announces."""
    module = seeded(Tower)
    ddp = TorchDDP(module, **SMALL_BUCKET)
    state = commopt.HookState(LocalSGD(period=3), module=module)
    ddp.register_comm_hook(state, commopt.hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(ddp, batch_of(rank, step)).backward()
        optimizer.step()
    begin = ddp if unseen == "by DDP" else lambda inputs: state._registration._begin_step(inputs.device)
    averages = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer, "is_capturing", lambda: True)
        with pytest.raises(ConfigurationError, match=r"averages parameters every 3 steps"):
            begin(*batch_of(rank, 3))
    averages.append(state.stats()["parameter_averages"])
    ddp(*batch_of(rank, 3))
    averages.append(state.stats()["parameter_averages"])
    return averages, digest_of(module)


@pytest.mark.parametrize("unseen", ["by DDP", "by the module"])
def test_no_average_is_begun_in_a_step_that_is_refused(unseen: str) -> None:
    results = run(average_in_a_capture, 2, unseen, nodes=(1, 1))
    assert [averages for averages, _ in results] == [[0, 1]] * 2
    assert_identical([digest for _, digest in results])


# ------------------------------------------------------------------------------------- what stays at its address


def test_what_a_graph_goes_on_writing_stays_where_it_is() -> None:
    """Freed memory that a graph still reads would be another's, or nobody's."""
    store, error = ResidualStore(), SampledError()
    addresses = set()
    for dropped in (False, True, True, False):
        store.transaction.stage_factors(torch.ones(1))
        store.transaction.flags.append(torch.tensor(not dropped))
        store.transaction.end_bucket(last=True)
        error.add(torch.full((4,), 3.0), torch.full((4,), 4.0))
        assert isinstance(store.transaction.dropped, Tensor)
        assert error.squares is not None
        addresses.add((store.transaction.dropped.data_ptr(), error.squares.data_ptr()))
    assert len(addresses) == 1
    assert store.stats()["dropped_commits"] == 2
    assert error.value() == pytest.approx(0.75)


# ------------------------------------------------------------------------------------- whole steps


class Trained(NamedTuple):
    """What training came to on one rank."""

    losses: list[float]
    parameters: Tensor
    kept: dict[str, Tensor]


class Loop:
    """A training whose every step reads the same memory: made, warmed up and captured on the current stream."""

    def __init__(self, rank: int, device: str, strategy: str) -> None:
        self.rank, self.device = rank, device
        self.module = seeded(Tower).to(device)
        self.ddp = TorchDDP(self.module, **SMALL_BUCKET)
        self.state = commopt.attach(self.ddp, strategy, plan="adaptive")
        self.state.freeze()
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01, momentum=0.9)
        self.inputs = torch.empty_like(batch_of(rank, 0)[0], device=device)
        self.loss = torch.empty((), device=device)

    def body(self) -> None:
        """Take a step on what lies in `inputs`, and leave its loss."""
        loss = self.ddp(self.inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def step(self, number: int, graph: torch.cuda.CUDAGraph | None = None) -> float:
        """Take step `number`, replayed if there is a graph; return its loss."""
        self.inputs.copy_(batch_of(self.rank, number)[0])
        if graph is None:
            self.optimizer.zero_grad(set_to_none=True)
            self.body()
        else:
            graph.replay()
        return float(self.loss)

    def capture(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        """Return a graph of a step; nothing of it is done yet."""
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph, stream=stream):
            self.body()
        return graph

    def result(self, losses: list[float]) -> Trained:
        parameters = torch.cat([parameter.detach().cpu().flatten() for parameter in self.module.parameters()])
        return Trained(losses, parameters, kept(self.state))


def loop(rank: int, world_size: int, device: str, strategy: str, captures: bool) -> Trained:
    """Train on; with `captures` all steps after the first 11 are replays of one."""
    if not captures:
        training = Loop(rank, device, strategy)
        return training.result([training.step(number) for number in range(WARM_UP[device] + REPLAYS)])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        training = Loop(rank, device, strategy)
        losses = [training.step(number) for number in range(WARM_UP[device])]
        graph = training.capture(stream)
        losses += [training.step(WARM_UP[device] + number, graph) for number in range(REPLAYS)]
        result = training.result(losses)
        torch.cuda.synchronize()
        graph.reset()  # NCCL's communicators end after the graphs that use them
    return result


def replay_as_eagerly(rank: int, world_size: int, device: str, strategies: list[str]) -> dict[str, list[Trained]]:
    """Return, for each strategy, what a graph's replays and what steps without a graph came to."""
    ways = (False, True) if device == "cuda" else (False, False)
    return {
        strategy: [loop(rank, world_size, device, strategy, captures) for captures in ways] for strategy in strategies
    }


POWERSGD = "powersgd"
REPLAYED: dict[str, tuple[list[str], int, Nodes | None]] = {
    "flat": (["flat", "quantized:bits=4", "onebit", "dgc:density=0.05", POWERSGD], 2, None),
    "on nodes": (
        ["hierarchical", "hierarchical_quantized", f"hierarchical_{POWERSGD}"],
        4,
        (2, 2),
    ),
}


@every_device
@pytest.mark.parametrize("world", REPLAYED)
def test_replays_train_as_steps_without_a_graph(device: str, world: str) -> None:
    """On the CPU, where there are no graphs, this shows that two trainings come to the same bits."""
    strategies, world_size, nodes = REPLAYED[world]
    env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    options: dict[str, Any] = {"fresh": True} if device == "cuda" else {}  # what reads these reads them once
    results = on_ranks(
        device, replay_as_eagerly, world_size, strategies, nodes=nodes, env=env, timeout_s=150, **options
    )
    for strategy in strategies:
        for eager, replayed in (found[strategy] for found in results):
            assert eager.losses[-1] != eager.losses[WARM_UP[device]]
            assert eager.kept.keys() == replayed.kept.keys()
            kept_pairs = ((eager.kept[key], replayed.kept[key]) for key in eager.kept)
            pairs = [(eager.parameters, replayed.parameters), *kept_pairs]
            if POWERSGD in strategy:  # cuBLAS may add in another order under a graph
                assert replayed.losses == pytest.approx(eager.losses, rel=1e-4)
                assert all((a - b).norm() <= 1e-3 * a.norm() for a, b in pairs), strategy
            else:
                assert replayed.losses == eager.losses, strategy
                assert all(torch.equal(a, b) for a, b in pairs), strategy
        assert_identical([found[strategy][1].parameters.numpy().tobytes().hex() for found in results])


def refuse_and_go_on(rank: int, world_size: int, device: str, strategies: list[str]) -> dict[str, tuple[str, str]]:
    """Try to capture what cannot be repeated, then train on; return what was said, and a hash of the parameters."""
    found = {}
    for strategy in strategies:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            training = Loop(rank, device, strategy)
            for number in range(WARM_UP[device]):
                training.step(number)
            with pytest.raises(ConfigurationError) as refused:
                training.capture(stream)
            training.step(WARM_UP[device])
            torch.cuda.synchronize()
        found[strategy] = str(refused.value), digest_of(training.module)
    return found


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_a_refused_capture_ends_well(device: str) -> None:
    strategies = {
        "quantized:rounding=stochastic": "rounding='nearest'",
        "onebit:start_step=99": "capture a step from 100 on",
    }
    env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    results = on_ranks(device, refuse_and_go_on, 2, list(strategies), env=env, fresh=True)
    for strategy, fix in strategies.items():
        assert_identical([found[strategy][1] for found in results])
        assert all(fix in found[strategy][0] for found in results)
