# SPDX-License-Identifier: Apache-2.0
"""Buckets that change their strategy in mid-training lose nothing: what one has kept, the next one sends."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from commopt import DGC, Aggregator, Compressed, Flat, Hierarchical, Layout, PowerSGD
from commopt.aggregate import context_for
from commopt.errors import ConfigurationError
from commopt.feedback import BufferContext, Feedback, ResidualStore
from commopt.groups import Team, TeamShape
from commopt.lanes import Pending
from tests import test_feedback_conservation
from tests.catalogue import LAYOUTS, run_on
from tests.feedback_training import (
    STRATEGIES,
    Books,
    Training,
    Vectors,
    assert_conserved,
    drift,
    residual_of,
    total,
    zero_gradients,
)
from tests.hook_training import assert_identical
from tests.overheard import overheard
from tests.ranks import run

CPU = torch.device("cpu")
EXACT = ("exact", "inter exact")
KNOWN: dict[str, Aggregator] = {
    **STRATEGIES,
    "exact": Flat(),
    "inter exact": Hierarchical(),
    "leader top 25%": Hierarchical(Compressed(DGC(0.25)), form="leader"),
    "rank 1": PowerSGD(1, start_step=0),
}
ANYWHERE = ("4 bits", "onebit mean", "inter 4 bits", "inter onebit mean", "rank 2", "inter rank 2", "leader top 25%")
RANKS = ("rank 1", "inter rank 1", "rank 2", "inter rank 2")  # of factors in buffers that are otherwise the same
SPARSE = ("top 25%", "inter top 5%")
STEPS = 24

Choice = Callable[[int, str], str]  # of the step and the first parameter of the buffer


@dataclass(frozen=True)
class AtRandom:
    """Another strategy for every bucket of every second step, the same on every rank; exact from step `end` on."""

    names: tuple[str, ...]
    end: int = STEPS

    def __call__(self, step: int, name: str) -> str:
        return random.Random(f"{step // 2} {name}").choice(EXACT if step >= self.end else self.names)


@dataclass(frozen=True)
class InTurn:
    """The same for all buckets: one after the other, the last one for ever."""

    names: tuple[str, ...]

    def __call__(self, step: int, name: str) -> str:
        return self.names[min(step, len(self.names) - 1)]


class Switching(Training):
    """A training whose buckets are averaged by what `choice` says."""

    choice: Choice

    def switch(self, choice: Choice) -> None:
        self.choice = choice

        path, controller = self.comm._registration, self.comm._registration.controller
        send = path._send

        def switched(layout: Layout, buffer: Tensor, index: int, *, last: bool) -> Pending:
            controller.aggregator = KNOWN[choice(self.steps, layout.pieces[0].name)]
            return send(layout, buffer, index, last=last)

        patch.object(path, "_send", switched).start()


def make(rank: int, world_size: int, choice: Choice, dtype: str = "float32", **others: Any) -> Switching:
    training = Switching(rank, world_size, KNOWN["4 bits"], getattr(torch, dtype), **others)
    training.switch(choice)
    return training


def keep_books(
    rank: int,
    world_size: int,
    choice: Choice,
    dtype: str,
    snapshots: Sequence[int],
    poisoned: Sequence[int] = (),
    scaling: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> tuple[list[Books], str]:
    scaler = None if scaling is None else torch.amp.GradScaler("cpu", **scaling)
    others = {} if options is None else {"options": options}
    training = make(rank, world_size, choice, dtype, scaler=scaler, **others)
    books = []
    for step in range(snapshots[-1]):
        poison = (step % world_size, "second.weight", 2048, float("inf")) if step in poisoned else None
        assert training.step(poison) == (poison is None), f"step {step}"
        if training.steps in snapshots:
            books.append(training.books())
    return books, training.digest()


def check(results: Sequence[tuple[list[Books], str]]) -> None:
    """Nothing is lost at any time, something was kept before the end, and at the end nothing is."""
    test_feedback_conservation.check(results, kept_at=-2)
    assert not any(values.any() for books, _ in results for values in books[-1].residual.values())


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("2x2", (*EXACT, *ANYWHERE, *SPARSE)),
        ("2+1", (*EXACT, *ANYWHERE)),
        ("1+1", (*EXACT, *ANYWHERE, *SPARSE)),
        ("2x2 interleaved", RANKS),
    ],
)
def test_nothing_is_lost_whatever_comes_next(layout: str, names: tuple[str, ...]) -> None:
    check(run_on(layout, keep_books, AtRandom(names), "float32", (2, 5, 9, 15, STEPS, STEPS + 1)))


@pytest.mark.parametrize(
    "names",
    [
        ("4 bits", "inter 4 bits", "4 bits", "inter 4 bits", "exact"),
        ("inter onebit mean", "onebit mean", "inter onebit mean", "inter exact"),
        ("inter rank 2", "inter exact", "inter rank 2", "rank 2", "inter rank 2", "exact"),
    ],
    ids=" then ".join,
)
def test_back_to_a_strategy_that_was_there_before(names: tuple[str, ...]) -> None:
    twice = tuple(name for name in names[:-1] for _ in range(3)) + names[-1:]
    check(run(keep_books, 4, InTurn(twice), "float32", (*range(3, len(twice), 3), len(twice)), nodes=(2, 2)))


@pytest.mark.parametrize("layout", ["2x2", "2+1"])
def test_a_dropped_step_keeps_what_was_to_be_handed_over(layout: str) -> None:
    """Without a scaler, and with one bucket, whose residuals are those of the step."""
    before = ("onebit mean", "onebit mean", "exact", "inter 4 bits", "inter 4 bits", "exact", "exact", "rank 2")
    names = (*before, "inter onebit mean", "inter exact", "inter rank 2", "4 bits", "exact", "exact")
    snapshots, poisoned = (3, 4, 6, 8, 10, 12, 14), (2, 3, 5, 6, 9, 12)
    results = run_on(layout, keep_books, InTurn(names), "float32", snapshots, poisoned, None, {})
    check(results)


@pytest.mark.parametrize("layout", ["2x2"])
def test_with_a_scaler_that_drops_whole_steps(layout: str) -> None:
    """An exact bucket that is not finite drops what compressed buckets have staged before and after it."""
    scaling = {"init_scale": 1000.0, "growth_interval": 2, "growth_factor": 1.5, "backoff_factor": 0.5}
    snapshots, poisoned = (3, 8, 14, STEPS, STEPS + 2), (4, 5, 10, 13, 18, STEPS)
    choice = AtRandom((*EXACT, *ANYWHERE))
    check(run_on(layout, keep_books, choice, "float32", snapshots, poisoned, scaling))


@pytest.mark.parametrize(("layout", "dtype"), [("2x2", "float16"), ("2+1", "bfloat16")])
def test_16_bit_buffers(layout: str, dtype: str) -> None:
    """Exact between what keeps residuals; then one exact step, which rounds as such steps do, sends everything."""
    world_size, nodes = LAYOUTS[layout]
    results = run(keep_books, world_size, AtRandom(ANYWHERE, 10), dtype, (4, 10, 11), nodes=nodes)
    assert_identical([digest for _, digest in results])
    for number in range(2):
        assert_conserved([books[number] for books, _ in results], number)
    before, after = ([books[number] for books, _ in results] for number in (1, 2))
    lost, kept = drift(after), {name: sum(books.residual[name].abs() for books in before) for name in drift(before)}
    tolerance = (world_size + 2) * torch.finfo(getattr(torch, dtype)).eps / 2 * after[0].largest
    assert max(float(torch.as_tensor(values).max()) for values in kept.values()) > 4 * tolerance
    assert max(float(values.abs().max()) for values in lost.values()) <= tolerance
    assert all(not values.any() for books in after for values in books.residual.values())


def load(training: Switching, saved: dict[str, Any]) -> None:
    """Load residuals of levels that the aggregator asked for does not keep itself."""
    with patch("commopt.attached.checkpoint._require_same_levels"):
        training.comm.load_state_dict(saved)


def go_on(rank: int, world_size: int, choice: AtRandom, at: int) -> tuple[list[str], list[Books]]:
    """Return the digests of going on and of a run resumed after `at` steps, and the books of the latter."""
    training = make(rank, world_size, choice)
    for _ in range(at):
        training.step()
    saved, owed, told = training.comm.state_dict(), dict(training.owed), dict(training.told)
    owed, told = ({name: values.clone() for name, values in book.items()} for book in (owed, told))
    parameters = [parameter.detach().clone() for parameter in training.module.parameters()]
    digests = []
    for resumed in (False, True):
        if resumed:
            training = make(rank, world_size, choice)
            load(training, saved)
            training.steps, training.owed, training.told = at, owed, told
            with torch.no_grad():
                for parameter, values in zip(training.module.parameters(), parameters, strict=True):
                    parameter.copy_(values)
        training.forget()
        for _ in range(choice.end + 1 - at):
            training.step()
        digests.append(training.digest())
    return digests, [training.books()]


@pytest.mark.parametrize("at", [3, 4])
def test_a_checkpoint_in_the_middle(at: int) -> None:
    results = run(go_on, 4, AtRandom((*EXACT, *ANYWHERE, *SPARSE), 12), at, nodes=(2, 2))
    for digests, _ in results:
        assert digests[0] == digests[1]
    assert_conserved([books for _, (books,) in results])
    assert all(not values.any() for _, (books,) in results for values in books.residual.values())


def save(rank: int, world_size: int) -> dict[str, Any] | None:
    training = make(rank, world_size, AtRandom(ANYWHERE))
    for _ in range(5):
        training.step()
    return training.comm.gathered_state_dict()


def send_what_was_saved(rank: int, world_size: int, name: str, saved: dict[str, Any]) -> tuple[Vectors, float]:
    """Return what is sent without any gradient, in one step and an exact one, and the norm of what is left then."""
    training = make(rank, world_size, InTurn((name, "exact")), chosen=zero_gradients)
    load(training, saved)
    training.step()
    training.step()
    return training.told, training.comm.stats()["residual_norm"]


@pytest.mark.parametrize(("layout", "name"), [("3", "exact"), ("2+1", "inter 4 bits")])
def test_a_checkpoint_of_another_world(layout: str, name: str) -> None:
    saved = next(state for state in run(save, 4, nodes=(2, 2)) if state is not None)
    assert {"", "inter"} <= {role.partition("/")[0] for part in saved["ranks"] for role in part["residuals"]}
    owed = total([residual_of(part) for part in saved["ranks"]])
    world_size, nodes = LAYOUTS[layout]
    for told, left in run(send_what_was_saved, world_size, name, saved, nodes=nodes):
        assert left == 0
        for each, values in owed.items():
            torch.testing.assert_close(told[each], values, rtol=0, atol=1e-5)


def count_calls(rank: int, world_size: int, names: tuple[str, ...]) -> list[list[tuple[str, str, int]]]:
    """Return the collectives of each step."""
    steps: list[list[tuple[str, str, int]]] = []

    def listen(team: Team, primitive: str, nbytes: int, roots: list[int]) -> None:
        steps[-1].append((team.level, primitive, nbytes))

    training = make(rank, world_size, InTurn(names))
    with overheard(listen):
        for _ in names:
            steps.append([])
            training.step()
    return steps


def test_residuals_move_once() -> None:
    """One all_reduce inside the node for each bucket, in the first step between nodes; none in the second."""
    names = ("4 bits",) * 3 + ("inter 4 bits",) * 2 + ("exact",) * 2 + ("inter 4 bits",) * 2
    for steps in run(count_calls, 4, names, nodes=(2, 2)):
        moves = [sum(level == "intra" and what == "all_reduce" for level, what, _ in step) for step in steps]
        assert moves == [0, 0, 0, 3, 0, 0, 0, 3, 0]
        assert steps[5] == steps[6], "what is left over goes along with what is sent anyway"
        assert steps[4] == steps[8]


# ------------------------------------------------------------------------------------------- the store

AB = Layout.of_parameters([("a", 3), ("b", 2)])
A, B = Layout.of_parameters([("a", 3)]), Layout.of_parameters([("b", 2)])
VALUES = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
FOUR = KNOWN["4 bits"]


def kept(store: ResidualStore) -> dict[str, dict[str, list[float]]]:
    """Return what is kept by path and piece."""
    found: dict[str, dict[str, list[float]]] = {}
    for slot in store.residuals():
        for offset, piece in zip(slot.layout.offsets, slot.layout.pieces, strict=True):
            values = slot.values[offset : offset + piece.numel].tolist()
            if any(values):
                found.setdefault(slot.path, {})[str(piece)] = values
    return found


def migrate(store: ResidualStore, layout: Layout, *paths: str, by: object = None, search: bool = True) -> bool:
    """Return whether the buffer is settled."""
    return store.migrate(layout, by or paths, paths, search=search).complete


def test_a_rank_that_holds_nothing_places_anew_as_the_others_do() -> None:
    holding, empty = ResidualStore(warm=True), ResidualStore(warm=True)
    holding.add("inter", AB, VALUES)
    for store in (holding, empty):
        assert store.divides_anew("inter", AB, "shards")
        assert not store.divides_anew("inter", AB, "shards")
        migrate(store, AB, "inter")  # as after a checkpoint: it is not known who sent it
        assert not store.divides_anew("inter", AB, "shards")
        migrate(store, A)
        migrate(store, AB, "inter")
        assert store.divides_anew("inter", AB, "shards")
        migrate(store, AB, "inter", "inter.exp_avg")  # moments may have stayed elsewhere
        assert store.divides_anew("inter", AB, "shards")


def test_moments_go_to_moments_or_stay() -> None:
    store = ResidualStore()
    store.add("inter.exp_avg", AB, VALUES)
    store.add("inter", AB, 2 * VALUES)
    migrate(store, AB, "")
    assert {path: pieces["b[0:2]"] for path, pieces in kept(store).items()} == {
        "": [8.0, 10.0],
        "inter.exp_avg": [4.0, 5.0],
    }
    migrate(store, AB, "", "exp_avg")
    assert {path: pieces["b[0:2]"] for path, pieces in kept(store).items()} == {
        "": [8.0, 10.0],
        "exp_avg": [4.0, 5.0],
    }


def test_a_settled_buffer_is_looked_up_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody asks for any more joins what is asked for, then the buffer is settled until another one comes."""
    store = ResidualStore()
    team: Any = TeamShape.of([4], 0, {"cpu": "gloo"})
    store.residual("", "server", A, CPU, torch.float32, AB).values.copy_(VALUES[:3])

    def step() -> None:
        store.transaction.begin_step()
        context = context_for(FOUR, AB, team, store, step=1)
        feedback = context.error_feedback("worker", AB, Feedback(), CPU)
        assert feedback is not None
        feedback.new.copy_(feedback.old)
        store.transaction.end_bucket([torch.zeros(5)], last=True)

    step()
    while not store.buffers[AB].complete:
        step()
        assert store.transaction.steps < 5
    assert kept(store) == {"": {"a[0:3]": [1.0, 2.0, 3.0]}}
    with monkeypatch.context() as patched:
        patched.setattr(ResidualStore, "migrate", None)
        patched.setattr(ResidualStore, "residual", None)
        step()
    context_for(FOUR, B, team, store, step=1)
    assert AB not in store.buffers


def test_what_nobody_can_use_does_not_hold_up_for_ever() -> None:
    store = ResidualStore()
    store.add("", AB, VALUES)
    settled = [migrate(store, AB, "", by="forgets") for _ in range(6)]
    assert settled == sorted(settled)
    assert settled[-1]
    assert kept(store)[""] == {"a[0:3]": [1.0, 2.0, 3.0], "b[0:2]": [4.0, 5.0]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_exact_averages_flush_the_residual(dtype: torch.dtype) -> None:
    store = ResidualStore()
    store.add("inter", AB, VALUES)
    team: Any = TeamShape.of([4], 0, {"cpu": "gloo"})
    buffer = torch.tensor([4.0, 8.0, 12.0, 16.0, 20.0], dtype=dtype)
    context = context_for(Flat(), AB, team, store, loss_scale=torch.tensor(8.0))
    assert context.flush_into(buffer, 0.25) == 1.0
    assert buffer.tolist() == [1.0 + 8, 2.0 + 16, 3.0 + 24, 4.0 + 32, 5.0 + 40]
    store.transaction.end_bucket([buffer], last=True)
    assert not kept(store)
    assert context_for(Flat(), AB, team, store).flush_into(buffer, 0.25) == 0.25
    assert buffer.tolist() == [9.0, 18.0, 27.0, 36.0, 45.0]


def test_a_residual_that_was_not_flushed_is_used_again() -> None:
    store = ResidualStore()
    store.add("", AB, VALUES)
    assert BufferContext(AB, store=store).flush(AB, CPU) is not None
    feedback = BufferContext(AB, store=store).error_feedback("worker", AB, Feedback(), CPU)
    assert feedback is not None
    feedback.new.copy_(2 * VALUES)
    store.transaction.end_bucket([torch.zeros(5)], last=True)
    assert kept(store)[""]["b[0:2]"] == [8.0, 10.0]


def save_beside_the_lane(rank: int, world_size: int) -> None:
    """Ask for the state again and again in another thread, while the lane takes residuals apart in every step."""
    training = Training(rank, world_size, STRATEGIES["inter 4 bits"])
    with ThreadPoolExecutor(1) as executor:
        for _ in range(20):
            asked = [executor.submit(ask) for ask in (training.comm.state_dict, training.comm.stats) * 3]
            store = training.comm._registration.store
            store.divisions, store.buffers = {}, {}  # so that all of it is placed anew
            training.step()
            for each in asked:
                each.result()


def test_a_state_may_be_asked_for_during_a_step() -> None:
    run(save_beside_the_lane, 4, nodes=(2, 2))


class Watched:
    """A lock of one thread that tells whether it is held."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


@pytest.mark.parametrize("per_step", [False, True])
def test_whoever_asks_for_the_state_sees_all_of_a_commit_or_nothing(per_step: bool) -> None:
    lock: Any = Watched()
    store, held = ResidualStore(per_step=per_step, lock=lock), list[bool]()
    feedback = BufferContext(AB, store=store).error_feedback("worker", AB, Feedback(), CPU)
    assert feedback is not None
    feedback.new.copy_(VALUES)
    check = store.transaction.check_results  # a commit begins with it

    def check_and_note() -> list[Tensor]:
        held.append(lock.depth > 0)
        return check()

    with patch.object(store.transaction, "check_results", check_and_note):
        store.transaction.end_bucket([torch.zeros(5)], last=True)
    assert held == [True]
    assert kept(store)[""]["b[0:2]"] == VALUES[-2:].tolist()


@pytest.mark.parametrize("exact_first", [False, True])
def test_a_bucket_nobody_reports_on_is_judged_with_the_step(exact_first: bool) -> None:
    store = ResidualStore(per_step=True)
    exact, compressed = [torch.full((2,), float("nan"))], [torch.zeros(3)]
    if exact_first:
        store.transaction.end_bucket(exact, last=False)
    store.transaction.stage(store.residual("", "worker", A, CPU, torch.float32, A))[1].fill_(1.0)
    store.transaction.flags.append(torch.tensor(True))
    store.transaction.end_bucket(compressed, last=exact_first)
    if not exact_first:
        store.transaction.end_bucket(exact, last=True)
    assert not kept(store)
    assert store.stats()["dropped_commits"] == 1


def test_what_a_step_sends_twice_continues_from_its_first_residual() -> None:
    store = ResidualStore(per_step=True)
    for step, verdict in enumerate((True, False)):  # committed, then dropped
        found = []
        for value in (1.0, 2.0):
            old, new = store.transaction.stage(store.residual("", "worker", A, CPU, torch.float32, A))
            found.append(old.tolist())
            new.fill_(value)
            store.transaction.flags.append(torch.tensor(verdict or value == 2.0))
            store.transaction.end_bucket((), last=False)
        assert found == [[2.0 * step] * 3, [1.0] * 3]
        store.transaction.end_bucket((), last=True)
        assert [slot.values.tolist() for slot in store.residuals()] == [[2.0] * 3]
    store.transaction.stage(store.residual("", "worker", A, CPU, torch.float32, A))
    both = Layout.of_parameters([("a", 3), ("b", 2)])
    with pytest.raises(ConfigurationError, match="two messages that are not of the same parameters"):
        store.residual("", "worker", both, CPU, torch.float32, both)


def test_what_concerns_no_residual_is_not_judged() -> None:
    store = ResidualStore()
    store.transaction.end_bucket([torch.full((2,), float("nan"))], last=True)
    assert store.stats()["dropped_commits"] == 0
