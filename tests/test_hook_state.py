# SPDX-License-Identifier: Apache-2.0
"""What a HookState keeps and counts: through pickles, checkpoints, and scalers that come late."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import Compressed, ConfigurationError, Flat, Hierarchical, HookState, Layout, Quantize
from commopt.attached.reduction import SentBytes
from commopt.groups import TeamShape
from commopt.schedule import Plan
from tests.feedback_training import STRATEGIES, Training, same_residuals
from tests.hook_training import SMALL_BUCKET, Tower, batch_of, loss_of, seeded, train
from tests.plan_changes import plan_of
from tests.ranks import run

# ------------------------------------------------------------------------------------------- pickles


def whole_plan() -> Plan:
    return plan_of([name for name, _ in reversed(list(Tower().named_parameters()))])


def keep(rank: int, world_size: int) -> tuple[dict[str, Any], Plan | None, int, int]:
    module = seeded(Tower)
    given = HookState(Flat(), ranks_per_node=1, module=module, timeout=40, plan=whole_plan(), record=True)
    kept = pickle.loads(pickle.dumps(given))
    before = kept.stats()
    ddp = TorchDDP(module, **SMALL_BUCKET)
    kept.set_module(module)
    ddp.register_comm_hook(kept, commopt.hook)
    train(ddp, rank, world_size, Flat(), steps=3)
    return before, kept.plan, len(kept.cluster.nodes), len(kept.timeline().steps)


def test_a_pickle_keeps_what_was_asked_for_and_joins_at_the_first_bucket() -> None:
    for before, plan, nodes, steps in run(keep, 2):
        assert before["cluster"] == "not joined yet"
        assert before["aggregator"] == "Flat()"
        assert before["steps"] == before["buckets"] == before["inter_bytes"] == 0
        assert plan == whole_plan()
        assert nodes == 2
        assert steps == 3


def disagree(rank: int, world_size: int) -> str:
    usual = pickle.dumps(HookState(Flat()))
    other = pickle.dumps(HookState(Hierarchical()))
    odd = pickle.loads(other if rank else usual)
    for _ in range(2):  # the second time must not take for granted what the first did not settle
        with pytest.raises(commopt.MismatchError, match="aggregator"):
            _ = odd.cluster
    cluster: str = odd.stats()["cluster"]
    return cluster


def test_unpickled_states_that_differ_never_get_to_work() -> None:
    assert run(disagree, 2) == ["not joined yet"] * 2


# ------------------------------------------------------------------------------------------- registration


def mistake_the_preset(rank: int, world_size: int) -> None:
    ddp = TorchDDP(Tower())
    ddp.register_comm_hook(HookState(Flat()), commopt.hierarchical)
    with pytest.raises(Exception, match=r"hook commopt\.hierarchical, which means Hierarchical"):
        loss_of(ddp, batch_of(rank, 0)).backward()


def test_a_state_of_another_aggregator_than_the_preset_is_refused() -> None:
    run(mistake_the_preset, 1, fresh=True)


# ------------------------------------------------------------------------------------------- scalers


def scale_late(rank: int, world_size: int, given: bool) -> list[bool]:
    """Return whether a step with a value that is not finite left residuals alone: all of them, and the rest's."""
    training = Training(rank, world_size, STRATEGIES["8 bits"])
    for _ in range(3):
        training.step()
    with pytest.raises(ConfigurationError, match="scaler is a float"):
        training.comm.scaler = 8.0
    if given:
        training.scaler = training.comm.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        training.step()
    before = training.comm.state_dict()
    finite = training.step(poison=(0, "gain", 0, float("nan")))
    return [finite, same_residuals(before, training.comm.state_dict())]


@pytest.mark.parametrize("given", [True, False])
def test_with_a_scaler_that_comes_late_whole_steps_are_dropped(given: bool) -> None:
    assert run(scale_late, 2, given) == [[False, given]] * 2


# ------------------------------------------------------------------------------------------- counts


def report_after_resuming(rank: int, world_size: int) -> list[commopt.WireBytes]:
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    state = commopt.attach(ddp, Hierarchical(), record=True)
    sent = []
    for _ in range(2):
        train(ddp, rank, world_size, Hierarchical(), steps=3)
        sent.append(state.report().sent_per_step)
        state.load_state_dict({**state.state_dict(), "steps": 1000})
    assert state.stats()["steps"] == 1000
    return sent


def test_a_resumed_run_reports_its_own_traffic() -> None:
    numel = sum(parameter.numel() for parameter in Tower().parameters())
    for sent in run(report_after_resuming, 2, nodes=(1, 1)):
        assert sent == [commopt.WireBytes(intra=0, inter=4 * numel)] * 2


def test_sent_bytes_are_counted_over_any_number_of_steps() -> None:
    aggregator, team, cpu = Compressed(Quantize(4, start_step=70)), TeamShape.of((1, 1)), torch.device("cpu")
    layout, sent = Layout.of_parameters([("weight", 4096)]), SentBytes()
    assert sent.wire_bytes() == commopt.WireBytes()
    expected = commopt.WireBytes()
    for step in range(150):
        sent.count(aggregator, layout, torch.float32, cpu, step, team)
        expected += aggregator.wire_bytes(layout, torch.float32, team, cpu, step)
    assert sent.wire_bytes() == sent.wire_bytes() == expected
    assert expected.inter < 150 * 4 * 4096


# ------------------------------------------------------------------------------------------- timelines


def try_files(rank: int, world_size: int, folder: str) -> str:
    """Ask for a file that cannot be, train on, and ask for one that can."""
    ddp = TorchDDP(torch.nn.Linear(4, 4))
    state = commopt.attach(ddp, "flat", plan="ddp", record=True)
    ddp(torch.ones(2, 4)).sum().backward()
    with pytest.raises(commopt.ConfigurationError) as caught:
        state.timeline(f"{folder}/none/trace.json")
    ddp(torch.ones(2, 4)).sum().backward()
    state.timeline(f"{folder}/trace.json" if rank == 0 else None)
    return str(caught.value)


def test_every_rank_hears_of_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    first, second = run(try_files, 2, str(tmp_path))
    assert first == second
    assert "none/trace.json cannot be written" in first
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
