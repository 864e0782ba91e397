"""Steps that DDP averages by itself, without the hook: only the books can tell, and nothing is lost on the way."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import Compressed, ConfigurationError, Flat, HookState, MismatchError, Quantize
from commopt.bucketing import methods
from commopt.bucketing.absence import Absence
from commopt.cost import Speeds, nominal_links
from commopt.groups import TeamShape
from commopt.plan import Calendar, Decision, Plan, Tried, Tuned, Window
from tests.hook_training import (
    SMALL_BUCKET,
    WIDTH,
    Batch,
    Tower,
    assert_identical,
    batch_of,
    digest_of,
    expected_gradients,
    loss_of,
    seeded,
    train,
)
from tests.plan_changes import needs_caps, plan_of
from tests.ranks import run

pytestmark = needs_caps

NAMES = [name for name, _ in reversed(list(Tower().named_parameters()))]
NODES = (1, 1)
# Decided after steps 4 and 25, begun three steps later, and over three steps before the next window.
FIRST, SECOND = range(8, 21), range(29, 42)
BOTH = [*FIRST, *SECOND]
STEPS = SECOND.stop + 2
AWAY = 12  # a step in the middle of it


class Leaving:
    """Leaves the gradients to DDP between all windows, whatever these show."""

    first = Calendar(3, 4)
    plan: Plan | None = None

    def __init__(self, *_: object) -> None: ...

    def decide(self, window: Window, step: int) -> Decision:
        return Decision(self.plan, Calendar(step + 20, step + 21), "left to DDP", leave_to_ddp=True)


class Exact(Leaving):
    """Ends any compression before."""

    plan = plan_of(NAMES[:4], NAMES[4:])


@contextlib.contextmanager
def deciding(kind: type[Leaving] = Leaving) -> Iterator[None]:
    """Let `kind` decide on rank 0 about what `auto` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "Tuning", kind)
        patch.setattr(methods.Choosing, "first", kind.first)
        yield


def attached(
    nodes: Sequence[int] = NODES, options: Mapping[str, Any] = SMALL_BUCKET, **how: Any
) -> tuple[TorchDDP, HookState]:
    """Return a DDP model, made with `options`, and the state of its hook; nothing has to be tried out."""
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET | dict(options))
    links = nominal_links(TeamShape.of(nodes), Speeds(nic_gbps=25, intra_gb_per_s=20))
    return ddp, commopt.attach(ddp, "auto", plan="adaptive", links=links, **how)


class Booked(NamedTuple):
    """A hash of the replica; the steps in which the hook was not called; the bytes that each step sent."""

    digest: str
    without_hook: list[int]
    sent: list[int]


def book(
    ddp: TorchDDP,
    state: HookState,
    rank: int,
    world_size: int,
    steps: int = STEPS,
    before: Callable[[int], None] = lambda step: None,
    micros: int = 1,
) -> Booked:
    """Train as `train` does, which checks every gradient, and read the statistics after each step."""
    pages = []

    def turn(step: int) -> None:
        pages.append(state.stats())
        before(step)

    digest = train(ddp, rank, world_size, Flat(), steps=steps, micros=micros, before=turn)
    pages.append(state.stats())

    def per_step(*keys: str) -> list[int]:
        totals = [sum(page[key] for key in keys) for page in pages]
        return [after - before for before, after in pairwise(totals)]

    assert per_step("steps") == [1] * steps
    without_hook = [step for step, calls in enumerate(per_step("buckets")) if calls == 0]
    assert per_step("steps_by_ddp") == [int(step in without_hook) for step in range(steps)]
    return Booked(digest, without_hook, per_step("intra_bytes", "inter_bytes"))


def assert_alike(booked: Sequence[Booked], without_hook: Collection[int]) -> None:
    assert_identical([each.digest for each in booked])
    assert [each.without_hook for each in booked] == [list(without_hook)] * len(booked)


# ------------------------------------------------------------------------------------- away and back again


@deciding()
def follow(
    rank: int,
    world_size: int,
    nodes: Sequence[int],
    options: dict[str, Any],
    *,
    micros: int = 1,
    looks: bool = False,
    **how: Any,
) -> Booked:
    """looks: whether one rank, not always the same, evaluates with gradients before every step."""
    ddp, state = attached(nodes, options, **how)

    def before(step: int) -> None:
        # Not before the second step, in which DDP compares its own buckets.
        if looks and step > 1 and rank == step // 2 % world_size:
            ddp(*batch_of(rank, step))

    return book(ddp, state, rank, world_size, before=before, micros=micros)


VIEWS = {"gradient_as_bucket_view": True}  # `train` has zero_grad in either form


@pytest.mark.parametrize(
    ("nodes", "options", "how", "without_hook"),
    [
        pytest.param((2, 2), {}, {}, BOTH, id="2x2"),
        pytest.param((1, 1, 1), {}, {}, BOTH, id="3x1"),
        pytest.param(NODES, {}, {"micros": 3}, BOTH, id="accumulation"),
        pytest.param(NODES, {}, {"looks": True}, BOTH, id="a look on one rank"),
        pytest.param(NODES, VIEWS, {"micros": 2}, BOTH, id="views and accumulation"),
        pytest.param(NODES, VIEWS, {"looks": True}, BOTH, id="views and a look on one rank"),
        pytest.param(NODES, {}, {"record": True}, [], id="recorded"),
        pytest.param(NODES, {"find_unused_parameters": True}, {}, [], id="unused parameters"),
        pytest.param(NODES, {"static_graph": True}, {}, [], id="static graph"),
    ],
)
def test_gradients_are_the_mean_with_and_without_the_hook(
    nodes: Sequence[int], options: dict[str, Any], how: dict[str, Any], without_hook: list[int]
) -> None:
    booked = run(follow, sum(nodes), nodes, options, nodes=nodes, **how)
    assert_alike(booked, without_hook)
    # N ranks send 2 (N - 1) times the gradients, in every step.
    nbytes = sum(parameter.nbytes for parameter in Tower().parameters())
    in_all = [sum(sent) for sent in zip(*(each.sent for each in booked), strict=True)]
    assert in_all == [2 * (sum(nodes) - 1) * nbytes] * STEPS


# ------------------------------------------------------------------------------------- as torch's own DDP


def forward_unsynced(ddp: TorchDDP, first: Batch, second: Batch) -> None:
    with ddp.no_sync():
        loss = loss_of(ddp, first)
    loss.backward()


def backward_unsynced(ddp: TorchDDP, first: Batch, second: Batch) -> None:
    loss = loss_of(ddp, first)
    with ddp.no_sync():
        loss.backward()


def two_forwards(ddp: TorchDDP, first: Batch, second: Batch) -> None:
    (loss_of(ddp, first) + loss_of(ddp, second)).backward()


def two_backwards(ddp: TorchDDP, first: Batch, second: Batch) -> None:
    loss = loss_of(ddp, first)
    loss.backward(retain_graph=True)
    loss.backward()


def look(ddp: TorchDDP, first: Batch, second: Batch) -> None:
    with torch.no_grad():
        ddp(*first)
    ddp(*second)


def forward_raises(ddp: TorchDDP, first: Batch, second: Batch) -> None:
    def out_of_memory(*_: Any) -> None:
        raise MemoryError

    with pytest.raises(MemoryError), ddp.module.register_forward_pre_hook(out_of_memory):
        ddp(*first)
    with ddp.no_sync():
        loss_of(ddp, second).backward()


# A forward that DDP is to average after prepares its reducer: the next backward averages, whatever its own forward was.
UNUSUAL = [
    (forward_unsynced, 0),
    (backward_unsynced, 1),
    (two_forwards, 1),
    (two_backwards, 1),
    (forward_unsynced, 0),
    (look, 0),
    (forward_unsynced, 1),
    (forward_raises, 0),
]


def gradients(ddp: TorchDDP) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in ddp.module.parameters() if parameter.grad is not None]


def twin_of(ddp: TorchDDP) -> TorchDDP:
    """Return torch's own DDP, without any hook, of an equal model."""
    return TorchDDP(copy.deepcopy(ddp.module), **SMALL_BUCKET)


@deciding()
def go_unusual_ways(rank: int, world_size: int) -> tuple[list[int], Booked]:
    """Return how many steps each was counted as, and how training went on."""
    ddp, state = attached()
    train(ddp, rank, world_size, Flat(), steps=AWAY)
    assert not state._registration.assembly.gradients  # whose memory would be held for all the time
    twin, counts = twin_of(ddp), []
    for number, (way, _) in enumerate(UNUSUAL):
        before, results = state.stats()["steps"], []
        for model in (ddp, twin):
            model.zero_grad()
            way(model, batch_of(rank, number), batch_of(rank, number, 1))
            results.append(gradients(model))
        assert all(map(torch.equal, *results)), f"{number}: {way.__name__}"
        counts.append(state.stats()["steps"] - before)
    return counts, book(ddp, state, rank, world_size, steps=FIRST.stop - AWAY)


def test_a_step_is_what_ddp_averages() -> None:
    counts, booked = zip(*run(go_unusual_ways, 2, nodes=NODES), strict=True)
    assert list(counts) == [[count for _, count in UNUSUAL]] * 2
    assert_alike(booked, range(FIRST.stop - AWAY - sum(counts[0])))


def scaled_step(scaler: torch.amp.GradScaler, ddp: TorchDDP, batch: Batch) -> tuple[str, float]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    optimizer.zero_grad()
    scaler.scale(loss_of(ddp, batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    return digest_of(ddp.module), scaler.get_scale()


@deciding()
def scale(rank: int, world_size: int) -> tuple[list[str], int]:
    """Return what the model was after each step, and how many were made without the hook."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4) for _ in range(2)]
    ddp, state = attached(scaler=scalers[0])
    twin, digests = twin_of(ddp), []
    for step in range(FIRST.stop + 2):
        batch = (torch.full((4, WIDTH), float("inf")),) if step == AWAY and rank == 1 else batch_of(rank, step)
        mine, its = (scaled_step(*pair, batch) for pair in zip(scalers, (ddp, twin), strict=True))
        assert mine == its, f"step {step}"
        assert state.stats()["steps"] == step + 1
        digests.append(mine[0])
    return digests, state.stats()["steps_by_ddp"]


def test_a_scaler_skips_the_step_that_it_would_skip() -> None:
    results = run(scale, 2, nodes=NODES)
    assert results[0] == results[1]
    digests, by_ddp = results[0]
    assert by_ddp == len(FIRST)
    assert [step for step in range(1, len(digests)) if digests[step] == digests[step - 1]] == [AWAY]


def train_uneven(ddp: TorchDDP, rank: int, steps: int, options: dict[str, Any]) -> list[Tensor]:
    """Return the gradients of so many steps of this rank."""
    seen: list[Tensor] = []
    with ddp.join(**options):
        for step in range(steps):
            ddp.zero_grad()
            loss_of(ddp, batch_of(rank, step)).backward()
            seen += gradients(ddp)
    return seen


@deciding()
def join(rank: int, world_size: int, entered: int, lasting: int, options: dict[str, Any]) -> tuple[Booked, int]:
    """Return how training went on after a join, and how many steps DDP had made before."""
    ddp, state = attached()
    train(ddp, rank, world_size, Flat(), steps=entered)
    twin = twin_of(ddp)
    mine, its = (train_uneven(model, rank, 5 if rank == lasting else 2, options) for model in (ddp, twin))
    assert all(map(torch.equal, mine, its))
    by_ddp = state.stats()["steps_by_ddp"]
    # Until then DDP takes inputs to be uneven, also behind a join, and goes on with the weights of that one.
    with ddp.join(**(options or {"enable": False})):
        return book(ddp, state, rank, world_size, steps=20), by_ddp


@pytest.mark.parametrize(
    ("entered", "lasting", "options", "by_ddp", "without_hook"),
    [
        # Of the steps from 11 and 13 on: those of the next date.
        pytest.param(6, 0, {}, [0, 0], range(18, 20), id="decided"),
        pytest.param(FIRST.start, 1, {}, [0, 0], range(16, 20), id="about to leave"),
        pytest.param(AWAY, 0, {}, [9, 6], range(20), id="away"),
        pytest.param(AWAY, 1, {"divide_by_initial_world_size": False}, [6, 9], range(20), id="away, unequal weights"),
        pytest.param(FIRST.stop - 1, 0, {}, [17, 14], range(20), id="about to return"),
        pytest.param(FIRST.stop, 1, {}, [15, 18], range(20), id="returning"),
    ],
)
def test_all_ranks_leave_alike_or_not_and_none_returns_after_a_join(
    entered: int, lasting: int, options: dict[str, Any], by_ddp: list[int], without_hook: Collection[int]
) -> None:
    booked, counts = zip(*run(join, 2, entered, lasting, options, nodes=NODES, timeout_s=30.0), strict=True)
    assert list(counts) == by_ddp
    assert_alike(booked, without_hook)


# ------------------------------------------------------------------------------------- frozen


@deciding()
def freeze(rank: int, world_size: int, date: int) -> Booked:
    """Freeze when one rank has made a forward since the last step, and the other has not."""
    ddp, state = attached()

    def before(step: int) -> None:
        if step == date:
            if rank == 0:
                ddp(*batch_of(rank, step))
            state.freeze()

    return book(ddp, state, rank, world_size, before=before)


@pytest.mark.parametrize(
    ("date", "without_hook"),
    [
        pytest.param(FIRST.start, [], id="about to leave"),
        pytest.param(AWAY, range(FIRST.start, STEPS), id="away"),
        pytest.param(FIRST.stop, FIRST, id="about to return"),
    ],
)
def test_once_frozen_the_hook_neither_returns_nor_leaves(date: int, without_hook: Collection[int]) -> None:
    assert_alike(run(freeze, 2, date, nodes=NODES), without_hook)


@deciding()
def load_and_freeze(rank: int, world_size: int) -> Booked:
    ddp, state = attached()
    train(ddp, rank, world_size, Flat(), steps=AWAY)
    state.load_state_dict(state.state_dict())
    state.freeze()
    return book(ddp, state, rank, world_size, steps=3)


def test_what_is_loaded_is_used_whatever_comes_next() -> None:
    assert_alike(run(load_and_freeze, 2, nodes=NODES), [])


@deciding()
def pass_through_frozen(rank: int, world_size: int, name: str, dates: Collection[int]) -> Booked:
    """Make forwards through frozen parameters before steps, as through a discriminator while its generator learns."""
    ddp, state = attached()
    frozen = [parameter for each, parameter in ddp.module.named_parameters() if each.startswith(name)]

    def before(step: int) -> None:
        if step in dates:
            for parameter in frozen:
                parameter.requires_grad_(False)
            (x,) = batch_of(rank, step)
            loss = loss_of(ddp, (x.requires_grad_(),))
            if len(frozen) == len(NAMES):
                loss.backward()
            ddp.module.requires_grad_(True)

    return book(ddp, state, rank, world_size, before=before)


@pytest.mark.parametrize("name", ["layers.0.weight", "layers."], ids=["one", "all"])
@pytest.mark.parametrize(
    "dates",
    [range(FIRST.stop - 1, FIRST.stop + 2), [FIRST.start]],
    ids=["when to return", "when to leave"],
)
def test_a_look_through_frozen_parameters_changes_no_date(name: str, dates: Collection[int]) -> None:
    assert_alike(run(pass_through_frozen, 2, name, dates, nodes=NODES), BOTH)


# ------------------------------------------------------------------------------------- kept back, and saved

TRIED = Tried("by hand", ((repr(Compressed(Quantize(4))), 1),), 0.5, 1.0, 1.0)
COMPRESSING = Tuned(
    "by hand",
    ("lossless", "quantized"),
    NODES,
    1,
    (TRIED,),
    plan_of(NAMES[:4], NAMES[4:], strategy=TRIED.strategies[0][0]),
    "for a test",
)


class Owed:
    """What the true means up to now have more than the averages."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._peers, self._step = rank, range(world_size), 0
        self._sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in Tower().named_parameters()}

    def train(self, ddp: TorchDDP, steps: int) -> float:
        """Return what is owed then, as a share of the last gradient."""
        for _ in range(steps):
            batches = [[batch_of(peer, self._step)] for peer in self._peers]
            means = expected_gradients(ddp.module, batches)
            ddp.zero_grad()
            loss_of(ddp, batches[self._rank][0]).backward()
            for (name, mean), gradient in zip(means.items(), gradients(ddp), strict=True):
                self._sums[name] += mean.value - gradient.double()
            self._step += 1
        return max(float(owed.norm() / means[name].value.norm()) for name, owed in self._sums.items())


@deciding(Exact)
def compress_first(rank: int, world_size: int) -> tuple[float, float, float, int]:
    ddp, state = attached(allow="quantized", tuned=COMPRESSING)
    owed = Owed(rank, world_size)
    before, after = owed.train(ddp, 5), owed.train(ddp, AWAY - 5)
    return before, after, state.stats()["residual_norm"], state.stats()["steps_by_ddp"]


def test_what_compression_kept_back_is_delivered_before_the_hook_leaves() -> None:
    for before, after, residual_norm, by_ddp in run(compress_first, 2, nodes=NODES):
        assert by_ddp == AWAY - FIRST.start
        assert before > 0.01
        assert after < 1e-5
        assert residual_norm == 0


@deciding(Exact)
def load_residuals(rank: int, world_size: int) -> tuple[float, float]:
    owed = Owed(rank, world_size)
    first, state = attached(allow="quantized", tuned=COMPRESSING)
    before = owed.train(first, 4)
    second, again = attached(allow="quantized")
    train(second, rank, world_size, Flat(), steps=AWAY)
    assert again.stats()["steps_by_ddp"] == AWAY - FIRST.start
    again.load_state_dict(state.state_dict())
    return before, owed.train(second, FIRST.start + 1)


def test_residuals_of_a_checkpoint_call_the_hook_back() -> None:
    for before, after in run(load_residuals, 2, nodes=NODES):
        assert before > 0.01
        assert after < 1e-5


@deciding()
def load(rank: int, world_size: int, saved_at: int, date: int) -> tuple[list[Booked], list[int], bool]:
    """Go on from what was saved at one date at another one, and in a new model.

    Returns also the steps that each then counts, and whether the traffic up to then still does.
    """
    ddp, state = attached()
    train(ddp, rank, world_size, Flat(), steps=saved_at)
    saved = state.state_dict()
    train(ddp, rank, world_size, Flat(), steps=date - saved_at)
    new, its = attached()
    new.module.load_state_dict(ddp.module.state_dict())
    before = state.stats()
    state.load_state_dict(saved)
    its.load_state_dict(saved)
    steps = [state.stats()["steps"], its.stats()["steps"]]
    kept = {**before, "steps": 0} == {**state.stats(), "steps": 0}
    return [book(*pair, rank, world_size, steps=FIRST.stop + 1) for pair in ((ddp, state), (new, its))], steps, kept


@pytest.mark.parametrize("saved_at", [5, AWAY])
@pytest.mark.parametrize("date", [FIRST.start, AWAY, FIRST.stop], ids=["about to leave", "away", "about to return"])
def test_a_checkpoint_calls_the_hook_back_at_once(saved_at: int, date: int) -> None:
    for booked, steps, kept in run(load, 2, min(saved_at, date), date, nodes=NODES):
        assert_alike(booked, FIRST)
        assert steps == [min(saved_at, date)] * 2
        assert kept


@deciding()
def copied(rank: int, world_size: int) -> Booked:
    """Save a model while its hook is away, and train what was loaded before the model itself goes on."""
    stock, _ = attached()
    train(stock, rank, world_size, Flat(), steps=AWAY)
    with pytest.raises(ConfigurationError, match="has a communication hook already"):
        commopt.attach(stock, "flat")
    ddp = commopt.DistributedDataParallel(seeded(Tower), **SMALL_BUCKET)
    state = commopt.attach(ddp, "auto", plan="adaptive")

    def before(step: int) -> None:
        if step != AWAY:
            return
        assert "without the hook" in state.explain()
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        for other in (torch.load(file, weights_only=False), copy.deepcopy(ddp)):
            _, comm = other._comm_hooks[0]
            assert isinstance(comm, HookState)
            if rank == 0:
                other(*batch_of(rank, step))
            assert comm._registration.joined is None  # whatever one rank does alone, until all average
            assert book(other, comm, rank, world_size, steps=2).without_hook == []

    return book(ddp, state, rank, world_size, steps=FIRST.stop + 1, before=before)


def test_a_model_can_be_copied_but_not_attached_to_while_its_hook_is_away() -> None:
    assert_alike(run(copied, 2, nodes=NODES), FIRST)


# ------------------------------------------------------------------------------------- counting


class Counted:
    """A parameter whose steps are counted, and what stands for its DDP model."""

    def __init__(self, length: int) -> None:
        self.module = nn.Linear(2, 1, bias=False)
        self.ddp: Any = SimpleNamespace(_join_config=object())
        self.absence = Absence(cast(TorchDDP, self.ddp), self.module.weight, length)

    def step(self, *forwards: bool) -> tuple[int, bool]:
        """Make a backward after forwards that DDP is, or is not, to average after; return what there is then."""
        for self.ddp.require_backward_grad_sync in forwards:
            self.absence.after_forward(self.ddp)
        self.module(torch.ones(2)).backward()
        return self.absence.steps, self.absence.is_over(self.ddp)


def test_absence_counts_backwards_for_which_ddp_was_prepared() -> None:
    counted = Counted(2)
    seen = [counted.step(*forwards) for forwards in ([], [True], [], [False], [True, True], [True, False])]
    assert seen == [(0, False), (1, False), (1, False), (1, False), (2, True), (3, True)]


def test_absence_counts_no_more_when_it_ends() -> None:
    counted = Counted(5)
    assert counted.step(True) == (1, False)
    counted.absence.end()
    assert counted.step(True) == (1, False)


def test_absence_is_not_over_after_a_join() -> None:
    counted = Counted(1)
    counted.ddp._join_config = object()
    assert counted.step(True) == (1, False)
    assert not counted.absence.is_alike(counted.ddp)


def test_the_last_absence_is_not_over_by_itself() -> None:
    counted = Counted(1)
    counted.absence.last()
    assert counted.step(True) == (1, False)


@deciding()
def record_on_one(rank: int, world_size: int) -> None:
    with pytest.raises(MismatchError, match="record"):
        attached(record=rank == 0)


def test_what_is_recorded_on_one_rank_only_is_refused() -> None:
    run(record_on_one, 2, nodes=NODES)


# ------------------------------------------------------------------------------------- failures meanwhile


@deciding()
def lose_a_rank(rank: int, world_size: int) -> tuple[str, str]:
    """Return what commopt knows of the error, and what is printed when nobody catches it."""
    ddp, state = attached((1,) * world_size, timeout=40)
    train(ddp, rank, world_size, Flat(), steps=AWAY)
    assert state.stats()["steps_by_ddp"] > 0
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as info:
        train(ddp, rank, world_size, Flat(), steps=1)
    failure = commopt.failure_of(info.value)
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        sys.excepthook(info.type, info.value, None)
    assert isinstance(failure, commopt.LaneError)
    return str(failure), printed.getvalue()


def test_a_killed_rank_has_a_name_while_ddp_averages() -> None:
    results = run(lose_a_rank, 3, nodes=(1, 1, 1), dies=(2,), fresh=True)
    for rank in (0, 1):
        failure, printed = results[rank]
        assert "lost rank 2 outside" in failure, failure
        assert "lost rank 2 outside" in printed, printed
