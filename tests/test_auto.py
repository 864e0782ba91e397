# SPDX-License-Identifier: Apache-2.0
"""`auto` on real process groups: what the search does to a training, and what is saved of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import Auto, ConfigurationError
from commopt.schedule import Decision, Measurement, Outcome, Plan, Tuned, Window, controller, sync
from commopt.schedule.plan import digest_of_names
from tests.hook_training import (
    BUCKETS_CAN_BE_GIVEN,
    SMALL_BUCKET,
    Branches,
    Tower,
    batch_of,
    expected_gradients,
    loss_of,
    seeded,
)
from tests.plan_changes import heard, plan_of, tower_names
from tests.ranks import run

ALL = "bf16+quantized+onebit+dgc+powersgd"


class Cycling:
    """Follows every strategy there is for two steps each, and ends with an exact one."""

    first = Window(3, 4)

    def __init__(self, options: Sequence[Any], *_: object, **__: object) -> None:
        names = [option.strategy for option in options]
        self._waiting = [*names[2:], *names[:2], *reversed(names)]

    def decide(self, window: Measurement, step: int) -> Decision:
        later = Window(step + 1, step + 2)
        if not self._waiting:
            return Decision(None, later, "done")
        strategy = self._waiting.pop(0)
        cut = 1 + step % (len(window.units) - 1)
        units = [unit.names for unit in window.units]
        groups = (tuple(chain(*units[:cut])), tuple(chain(*units[cut:])))
        return Decision(Plan(groups, strategy), later, strategy)


@contextmanager
def cycling() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync, "Search", Cycling)
        patch.setattr(controller, "FIRST_LOOK", Cycling.first)
        patch.setattr(controller, "FIRST_WINDOW", Cycling.first)
        yield


def bits(module: torch.nn.Module) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())


def go_through_all(rank: int, world_size: int, steps: int) -> tuple[bytes, list[str], float, float]:
    with cycling():
        ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
        # Nothing may be left out for good.
        state = commopt.attach(ddp, "auto", allow=ALL, plan="adaptive")
        owed = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in ddp.module.named_parameters()}
        largest = 0.0
        for step in range(steps):
            batches = [[batch_of(other, step)] for other in range(world_size)]
            means = expected_gradients(ddp.module, batches)
            ddp.zero_grad(set_to_none=True)
            loss_of(ddp, batches[rank][0]).backward()
            for name, parameter in ddp.module.named_parameters():
                assert parameter.grad is not None
                owed[name] += means[name].value - parameter.grad.double()
                largest = max(largest, float(means[name].value.norm()))
            with torch.no_grad():
                for parameter in ddp.module.parameters():
                    parameter -= 1e-3 * parameter.grad
        left = max(float(each.norm()) for each in owed.values())
        return bits(ddp.module), [decision.reason for decision in state.decisions], left, largest


@pytest.mark.parametrize("nodes", [(2, 2), (2, 1), (1, 1)], ids=["2x2", "2+1", "1x2"])
def test_switching_between_all_ways_loses_nothing(nodes: Sequence[int]) -> None:
    results = run(go_through_all, sum(nodes), 60, nodes=nodes, timeout_s=300)
    replicas, reasons, owed, largest = zip(*results, strict=True)
    assert len(set(replicas)) == 1
    assert len({tuple(each) for each in reasons}) == 1
    assert reasons[0][-1] == "done", reasons[0]
    assert any("PowerSGD" in reason for reason in reasons[0])
    # The last plans average exactly and take along what was kept: only rounding is left (bf16 has no feedback).
    assert max(owed) <= 0.02 * max(largest)


def tune(rank: int, world_size: int, folder: Path, allow: str) -> tuple[bytes, str, str, int]:
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    state = commopt.attach(ddp, "auto", allow=allow, plan="adaptive", optimizer="adamw")
    assert state.tuned is None
    assert "nothing was decided yet" in state.explain()
    steps = 0
    while state.tuned is None and steps < 61:
        step(ddp, rank, steps)
        steps += 1
    assert state.tuned is not None
    state.tuned.save(folder / f"tuned-{rank}.json")
    return bits(ddp.module), state.explain(), state.tuned.to_json(), steps


def step(ddp: TorchDDP, rank: int, number: int) -> None:
    ddp.zero_grad(set_to_none=True)
    loss_of(ddp, batch_of(rank, number)).backward()
    with torch.no_grad():
        for parameter in ddp.module.parameters():
            parameter -= 1e-3 * parameter.grad


@pytest.mark.parametrize("allow", ["lossless", "quantized+powersgd", "local"])
def test_tunes_by_itself_within_sixty_steps(tmp_path: Path, allow: str) -> None:
    results = run(tune, 4, tmp_path, allow, nodes=(2, 2), timeout_s=300)
    replicas, texts, documents, steps = zip(*results, strict=True)
    assert len(set(replicas)) == len(set(texts)) == len(set(documents)) == 1
    assert max(steps) <= 61  # the decision is known one step after the last that was measured
    tuned = Tuned.from_json(documents[0])
    assert tuned.steps <= 60
    assert tuned.nodes == (2, 2)
    if allow != "quantized+powersgd":
        assert all(tried.error == 0 for tried in tuned.considered)
    local = {tried.name: tried for tried in tuned.considered if tried.strategy.startswith("LocalSGD(")}
    assert set(local) == ({"onebit_local", "onebit_local:delay=4:fragments=4"} if allow == "local" else set())
    assert all(tried.predicted_step_us > 0 and tried.step_us is None for tried in local.values())


def see_optimizers(rank: int, world_size: int) -> list[str]:
    found = []
    for asked, makers in (
        (None, (torch.optim.SGD, torch.optim.AdamW, torch.optim.SGD)),
        ("adamw", (torch.optim.SGD,)),
    ):
        ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
        state = commopt.attach(ddp, "auto", allow="quantized", optimizer=asked, plan="adaptive")
        others = torch.nn.Linear(2, 2)
        others(torch.ones(2)).sum().backward()
        torch.optim.Adam(others.parameters()).step()
        for make in makers:
            loss_of(ddp, batch_of(rank, 0)).backward()
            make(ddp.parameters(), lr=1e-3).step()
            found.append(state._registration.controller.optimizer)
    return found


def test_the_optimizer_is_seen_when_it_steps_unless_it_was_told() -> None:
    assert run(see_optimizers, 2) == [["sgd", "adamw", "adamw", "adamw"]] * 2


def tuned_by_hand(
    plan: commopt.Plan, nodes: tuple[int, ...] = (2, 2), allow: tuple[str, ...] = ("lossless", "quantized")
) -> Tuned:
    tried = Outcome("by hand", plan.strategy, 0.5, 1.0, 1.0)
    return Tuned("by hand", allow, nodes, 1, (tried,), plan, "for a test")


def strategy(bits_: Literal[8, 4, 2]) -> str:
    return repr(commopt.Hierarchical(commopt.Compressed(commopt.Quantize(bits_))))


def plan_by_hand(bits_: Literal[8, 4, 2] = 4) -> commopt.Plan:
    names = tower_names()
    return plan_of(names[:4], names[4:], strategy=strategy(bits_))


def load_tuned(rank: int, world_size: int, folder: Path) -> tuple[int, float, str, str, str]:
    path = folder / f"tuned-{rank}.json"
    tuned_by_hand(plan_by_hand()).save(path)
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    state = commopt.attach(ddp, "auto", allow="quantized", tuned=path, plan="adaptive")
    for number in range(5):
        step(ddp, rank, number)
    assert state.plan is not None
    assert state.tuned is not None
    error = state.stats()["residual_norm"]

    def refused(choice: str, tuned: Tuned, **options: Any) -> str:
        with pytest.raises(commopt.CommoptError) as info:
            commopt.attach(TorchDDP(seeded(Tower)), choice, tuned=tuned, plan="adaptive", **options)
        return str(info.value)

    not_allowed = refused("auto", tuned_by_hand(plan_by_hand(), allow=("lossless",)))
    elsewhere = refused("auto", tuned_by_hand(plan_by_hand(), (4, 4)), allow="quantized")
    not_auto = refused("hierarchical", tuned_by_hand(plan_by_hand()))
    with pytest.raises(ConfigurationError, match="both"):
        commopt.HookState(commopt.Auto("quantized"), plan=plan_by_hand(), tuned=tuned_by_hand(plan_by_hand()))
    return len(state.plan.groups), error, not_allowed, elsewhere, not_auto


def test_an_earlier_tuning_is_followed_from_the_first_step(tmp_path: Path) -> None:
    for buckets, residual_norm, not_allowed, elsewhere, not_auto in run(load_tuned, 4, tmp_path, nodes=(2, 2)):
        assert buckets == 2
        assert residual_norm > 0
        assert "Quantize" in not_allowed
        assert "allow" in not_allowed
        assert "4 + 4" in elsewhere
        assert "2 + 2" in elsewhere
        assert "'auto'" in not_auto


# An exact choice in DDP's own buckets: no plan says which strategies and parameters it was found for.
AS_FOUND = Tuned(
    *("by hand", ("lossless", "quantized"), (2,), 1, (Outcome("by hand", repr(commopt.Flat()), 0.0, 1.0, 1.0),)),
    *(None, "for a test", "sgd", digest_of_names(tower_names())),
)


def begin_with_a_choice_as_found(rank: int, world_size: int, folder: Path) -> list[str]:
    """Return the refusals of what does not fit."""
    path = folder / f"tuned-{rank}.json"
    AS_FOUND.save(path)
    fitting: list[Any] = ["quantized", "quantized+lossless", ("quantized",), ["lossless", "quantized"]]
    for allow in fitting:
        state = commopt.attach(TorchDDP(seeded(Tower)), "auto", allow=allow, tuned=path, plan="adaptive")
        assert state.tuned == AS_FOUND
        assert state.plan is None
    refusals = []
    others: list[tuple[torch.nn.Module, dict[str, Any]]] = [
        (seeded(Tower), {}),
        (seeded(Tower), {"allow": "quantized+powersgd"}),
        (seeded(Branches), {"allow": "quantized"}),
    ]
    for model, options in others:
        with pytest.raises(ConfigurationError) as info:
            commopt.attach(TorchDDP(model), "auto", tuned=path, plan="adaptive", **options)
        refusals.append(str(info.value))
    return refusals


def test_a_choice_of_ddps_own_buckets_fits_what_it_was_found_for(tmp_path: Path) -> None:
    for fewer, others, model in run(begin_with_a_choice_as_found, 2, tmp_path, nodes=(2,)):
        assert "found with allow='lossless+quantized', and here it is allow='lossless'; pass the same" in fewer
        assert "here it is allow='lossless+quantized+powersgd'; pass the same" in others
        assert "other parameters than this one's 9 ('branches.0.bias', " in model
        assert model.endswith("tune again without it")


def begin_with_an_old_file(rank: int, world_size: int) -> list[tuple[str, str]]:
    old = replace(AS_FOUND, parameters="")
    with heard() as warned:
        ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
        state = commopt.attach(ddp, "auto", allow="quantized", tuned=old, plan="adaptive")
        assert state.tuned is None
        for number in range(3):
            step(ddp, rank, number)
    assert len(state.decisions) == 1, "there was a first look"
    return warned


def test_an_old_file_that_does_not_tell_its_model_is_tuned_anew() -> None:
    for warned in run(begin_with_an_old_file, 2, nodes=(2,)):
        assert any("does not tell which model" in each for _, each in warned)


def begin_with_an_unknown_model(
    rank: int, world_size: int, tuned: Tuned, steps: int
) -> tuple[bool, list[tuple[str, str]], int]:
    """Without a module DDP's buckets show, in the first step, how many parameters there are."""
    with heard() as warned:
        ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
        state = commopt.HookState(Auto("quantized"), tuned=tuned)
        ddp.register_comm_hook(state, commopt.hook)
        assert state.tuned == tuned
        for number in range(steps):
            step(ddp, rank, number)
    return state.tuned == tuned, warned, len(state.decisions)


@pytest.mark.parametrize("count", [12, 11])
@pytest.mark.parametrize("has_plan", [False, True])
def test_the_parameters_of_an_unknown_model_are_compared_in_the_first_step(count: int, has_plan: bool) -> None:
    names = [f"parameter {number}" for number in range(count)]
    lossy = repr(commopt.Compressed(commopt.Quantize(4), commopt.Feedback()))
    plan = plan_of(names[:4], names[4:], strategy=lossy) if has_plan else None
    tuned = replace(AS_FOUND, plan=plan, parameters=digest_of_names(names))
    for kept, warned, decisions in run(begin_with_an_unknown_model, 2, tuned, 4, nodes=(2,)):
        assert kept == (count == 12)
        assert kept != any("HookState(..., module=model): tuning anew" in each for _, each in warned)
        assert decisions == (0 if kept else 1), "tuning anew begins with a first look"


def go_on_with_another_strength(rank: int, world_size: int) -> tuple[int, str]:
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    state = commopt.attach(ddp, "auto", allow="quantized", tuned=tuned_by_hand(plan_by_hand(8)), plan="adaptive")
    for number in range(14):
        step(ddp, rank, number)
    return len(state.decisions), state.decisions[-1].reason


def test_an_earlier_strength_that_would_not_be_chosen_now_is_watched() -> None:
    for decisions, reason in run(go_on_with_another_strength, 4, nodes=(2, 2)):
        assert decisions == 1
        assert reason.startswith(str(commopt.Hierarchical(commopt.Compressed(commopt.Quantize(8)))))


def differ(rank: int, world_size: int) -> str:
    tuned = tuned_by_hand(plan_by_hand(4 if rank else 2))
    with pytest.raises(commopt.MismatchError) as info:
        commopt.attach(TorchDDP(seeded(Tower)), "auto", allow="quantized", tuned=tuned, plan="adaptive")
    return str(info.value)


def test_ranks_with_different_tunings_are_told() -> None:
    for text in run(differ, 2):
        assert "tuned" in text


def resume(rank: int, world_size: int) -> tuple[bool, bool]:
    tuned = tuned_by_hand(plan_by_hand())
    first = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    state = commopt.attach(first, "auto", allow="quantized", tuned=tuned, plan="adaptive")
    for number in range(4):
        step(first, rank, number)
    saved, weights = state.state_dict(), {name: each.clone() for name, each in first.module.state_dict().items()}
    second = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    second.module.load_state_dict(weights)
    again = commopt.attach(second, "auto", allow="quantized", plan="adaptive")
    again.load_state_dict(saved)
    for number in range(4, 8):
        step(first, rank, number)
        step(second, rank, number)
    return bits(first.module) == bits(second.module), again.tuned == state.tuned


def test_a_checkpoint_knows_the_tuning() -> None:
    for same_bits, same_tuning in run(resume, 4, nodes=(2, 2)):
        assert same_bits or not BUCKETS_CAN_BE_GIVEN
        assert same_tuning


def resume_a_choice_as_found(rank: int, world_size: int) -> list[tuple[str, str]]:
    """A checkpoint knows its parameters: what is allowed counts, and no more is asked of an old one."""
    old = replace(AS_FOUND, parameters="").to_json()
    with heard() as warned:
        for allow in ("quantized+lossless", "quantized+powersgd"):
            state = commopt.attach(TorchDDP(seeded(Tower), **SMALL_BUCKET), "auto", allow=allow, plan="adaptive")
            state.load_state_dict(state.state_dict() | {"tuned": old})
            assert (state.tuned is None) == (allow == "quantized+powersgd")
    return warned


def test_the_choice_of_a_checkpoint_counts_for_what_is_allowed() -> None:
    for warned in run(resume_a_choice_as_found, 2, nodes=(2,)):
        (told,) = (each for _, each in warned if "checkpoint" in each)
        assert "found with allow='lossless+quantized', and here it is allow='lossless+quantized+powersgd'" in told


def resume_from_a_trial(rank: int, world_size: int) -> tuple[bool, bool]:
    def attached() -> commopt.HookState:
        return commopt.attach(TorchDDP(seeded(Tower), **SMALL_BUCKET), "auto", allow="quantized", plan="adaptive")

    on_trial = attached().state_dict() | {"plan": plan_by_hand().to_json()}
    later = on_trial | {"tuned": tuned_by_hand(plan_by_hand(8)).to_json()}
    first, second = attached(), attached()
    first.load_state_dict(on_trial)
    second.load_state_dict(later)
    has_tuned = second.plan == plan_by_hand(8)
    second.load_state_dict(on_trial)
    return first.plan is None is second.plan, has_tuned


def test_a_checkpoint_from_the_middle_of_a_search_goes_on_with_what_was_before() -> None:
    assert run(resume_from_a_trial, 4, nodes=(2, 2)) == [(True, True)] * 4


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"allow": ("quantised",)}, "quantised"),
        ({"allow": 3}, "allow=3"),
        ({"max_trials": 0}, "max_trials=0"),
        ({"max_trials": True}, "max_trials=True"),
        ({"optimizer": "adam"}, "optimizer='adam'"),
        ({"dense": "*.bias"}, "dense"),
    ],
)
def test_bad_wishes_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Auto(**options)


def test_exact_averages_are_always_allowed() -> None:
    assert Auto(allow=("quantized",)) == Auto("quantized") == Auto(("lossless", "quantized"))
    assert Auto().lossless
    assert Auto().residual_paths == Auto("local").residual_paths == ()
    assert Auto("local").lossless
    assert not Auto("powersgd").lossless
    assert commopt.build_preset("auto:allow=quantized+dgc:max_trials=2") == Auto("quantized+dgc", 2)
    assert commopt.build_preset("auto:optimizer=adamw") == Auto(optimizer="adamw")
