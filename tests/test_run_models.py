# SPDX-License-Identifier: Apache-2.0
"""What `commopt run` does to the models of a script: the same, bit for bit, as attaching by hand."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt.display import significant
from commopt.run.cli import ScriptRun, Shown, _keep, show
from commopt.run.models import Models, Trained, watching
from commopt.run.script import Choice, Script
from commopt.schedule import Tuned
from commopt.schedule.decision import Outcome
from commopt.schedule.plan import digest_of_names
from tests.hook_training import SMALL_BUCKET, Tower, batch_of, digest_of, loss_of, seeded
from tests.plan_changes import heard
from tests.ranks import run

STRATEGY = "hierarchical_quantized:bits=4"  # every step depends on the ones before, and on who shares a block
STEPS = 4

Attach = Callable[[TorchDDP], None]


class Subclass(TorchDDP):
    """Wraps forward, as people do."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return super().forward(*inputs, **kwargs)


def train(ddp: Any, rank: int, scaler: Any = None) -> str:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(ddp, batch_of(rank, step))
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    module = ddp.module if isinstance(ddp, TorchDDP) else ddp._orig_mod.module
    return digest_of(module)


def plain(rank: int, attach: Attach) -> str:
    ddp = Subclass(seeded(Tower), **SMALL_BUCKET)
    attach(ddp)
    return train(ddp, rank)


def compiled(rank: int, attach: Attach) -> str:
    torch._dynamo.reset()
    ddp = TorchDDP(seeded(Tower))  # no cap: the compiler refuses those below 1 MiB
    attach(ddp)
    return train(torch.compile(ddp, backend="eager"), rank)


def compiled_step(rank: int, attach: Attach) -> str:
    """What is compiled is a function that calls the model."""
    torch._dynamo.reset()
    ddp = TorchDDP(seeded(Tower))  # no cap: the compiler refuses those below 1 MiB
    attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    loss: Any = torch.compile(loss_of, backend="eager")
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(ddp, batch_of(rank, step)).backward()
        optimizer.step()
    return digest_of(ddp.module)


def two_models(rank: int, attach: Attach) -> str:
    models = [TorchDDP(seeded(Tower), **SMALL_BUCKET) for _ in range(2)]
    for ddp in models:
        attach(ddp)
    return "".join(train(ddp, rank) for ddp in models)


def copied(rank: int, attach: Attach) -> str:
    """A copy of a model that has its hook is a model without."""
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    attach(ddp)
    train(ddp, rank)
    other = copy.deepcopy(ddp)
    attach(other)
    return train(other, rank) + digest_of(ddp.module)


def loss_scaling(rank: int, attach: Attach) -> str:
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    attach(ddp, scaler=scaler)  # type: ignore[call-arg]  # by_hand takes it
    return train(ddp, rank, scaler=scaler)


WAYS = (plain, compiled, compiled_step, two_models, copied, loss_scaling)


def both(rank: int, world_size: int, name: str) -> tuple[str, str, str, int]:
    way: Any = next(way for way in WAYS if way.__name__ == name)

    def by_hand(ddp: TorchDDP, **options: Any) -> None:
        commopt.attach(ddp, STRATEGY, **options)

    def not_at_all(ddp: TorchDDP, **options: Any) -> None:
        pass

    expected, stock = way(rank, by_hand), way(rank, not_at_all)
    models = Models(Choice(STRATEGY))
    with watching(models):
        found = way(rank, not_at_all)
    return expected, found, stock, len(models.trained)


@pytest.mark.parametrize("name", [way.__name__ for way in WAYS])
def test_it_trains_as_if_attached_by_hand(name: str) -> None:
    for expected, found, stock, attached in run(both, 2, name, nodes=(1, 1)):
        assert found == expected
        assert found != stock, "without a hook the parameters would be others"
        assert attached == (2 if name in ("two_models", "copied") else 1)


def evaluate_first(rank: int, world_size: int) -> tuple[int, int]:
    """Return how many models had a hook after an evaluation, and after a training."""
    models = Models(Choice("flat"))
    with watching(models):
        ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
        with torch.no_grad():
            ddp(*batch_of(rank, 0))
        before = len(models.trained)
        train(ddp, rank)
    return before, len(models.trained)


def test_a_model_that_is_evaluated_first_gets_its_hook_in_training() -> None:
    assert run(evaluate_first, 2) == [(0, 1)] * 2


# --------------------------------------------------------------------------------------- what is left alone


def leave_alone(rank: int, world_size: int) -> None:
    models = Models(Choice(STRATEGY))
    with watching(models), heard() as said:
        theirs = TorchDDP(seeded(Tower))
        theirs.register_comm_hook(None, default_hooks.fp16_compress_hook)
        train(theirs, rank)
        ours = TorchDDP(seeded(Tower))
        state = commopt.attach(ours, "flat")
        train(ours, rank)
    assert [line.rpartition("is left alone: ")[2] for _, line in said] == [
        "the script has registered the communication hook fp16_compress_hook itself",
        "the script has registered the communication hook hook itself",
    ]
    assert state.stats()["steps"] == STEPS
    assert models.seen
    assert not models.trained


def test_a_model_with_a_hook_is_left_alone() -> None:
    run(leave_alone, 2)


def leave_the_unhookable_alone(rank: int, world_size: int) -> list[str]:
    models = Models(Choice(STRATEGY))
    module = seeded(Tower)
    frozen, *delayed = list(module.named_parameters())
    frozen[1].requires_grad_(False)  # DDP wants one that is not delayed
    with heard() as said:
        models.before_forward(
            TorchDDP(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=delayed[-1][1])
        )
        with watching(models), torch._dynamo.config.patch(optimize_ddp="python_reducer"):
            loss_of(TorchDDP(seeded(Tower)), batch_of(rank, 0)).backward()
    assert not models.trained
    return [line for _, line in said]


def test_models_without_buckets_are_left_alone() -> None:
    for delayed, python_reducer in run(leave_the_unhookable_alone, 2):
        assert "delay_all_reduce_named_params" in delayed
        assert "python reducer" in python_reducer


def leave_no_trace(rank: int, world_size: int) -> None:
    call, scale = TorchDDP.__call__, torch.amp.GradScaler.scale
    models = Models(Choice("flat"))
    with watching(models):
        assert TorchDDP.__call__ is not call
        assert nn.Module.__call__ is call, "other modules are none of our business"
        ddp = TorchDDP(seeded(Tower))
        saved = pickle.dumps(ddp)
        assert b"commopt" not in saved
        train(ddp, rank)
        restored = pickle.loads(saved)
        assert train(restored, rank) == digest_of(ddp.module)
        assert len(models.trained) == 2
    assert "__call__" not in vars(TorchDDP)
    assert (TorchDDP.__call__, torch.amp.GradScaler.scale) == (call, scale)
    with pytest.raises(KeyError), watching(models):
        raise KeyError
    assert (TorchDDP.__call__, torch.amp.GradScaler.scale) == (call, scale)


def test_nothing_stays_behind() -> None:
    run(leave_no_trace, 2)


# ----------------------------------------------------------------------------------------------- scalers


def share_scalers(rank: int, world_size: int) -> dict[str, list[str]]:
    found = {}

    def scalers(count: int, enabled: int) -> list[torch.amp.GradScaler]:
        return [torch.amp.GradScaler("cpu", enabled=number < enabled) for number in range(count)]

    for name, count, enabled in (("several", 2, 2), ("one enabled", 2, 1), ("one", 1, 1)):
        made = scalers(count, enabled)
        models = Models(Choice(STRATEGY))
        with watching(models), heard() as said:
            ddp = TorchDDP(seeded(Tower))
            train(ddp, rank, scaler=made[0])
        found[name] = [line for _, line in said]
        del ddp, made
    return found


def test_of_several_scalers_none_is_taken() -> None:
    for found in run(share_scalers, 2, nodes=(1, 1)):
        ours = [line for line in found["several"] if line.startswith("commopt run")]
        assert len(ours) == 1
        assert "2 enabled GradScalers" in ours[0]
        assert f"commopt.attach(ddp, '{STRATEGY}', scaler=scaler)" in ours[0]
        assert found["one enabled"] == found["one"] == []


def follow_a_scaler(rank: int, world_size: int) -> None:
    models = Models(Choice(STRATEGY))
    states: list[commopt.HookState] = []
    with watching(models), pytest.MonkeyPatch.context() as patch:
        expect = models.scalers.expect

        def overheard(state: commopt.HookState) -> None:
            states.append(state)
            expect(state)

        patch.setattr(models.scalers, "expect", overheard)
        ddp = TorchDDP(seeded(Tower))
        loss = loss_of(ddp, batch_of(rank, 0))
        scaler = torch.amp.GradScaler("cpu")  # made as late as can be
        assert states[0].scaler is None
        scaled = scaler.scale(loss)
        assert states[0].scaler is scaler
        scaled.backward()
        other = TorchDDP(seeded(Tower))
        scaler.scale(loss_of(other, batch_of(rank, 0))).backward()
        assert states[1].scaler is scaler
        assert float(scaler.scale(torch.ones(()))) == scaler.get_scale()


def test_the_scaler_is_known_before_the_first_bucket() -> None:
    run(follow_a_scaler, 2, nodes=(1, 1))


# ------------------------------------------------------------------------------------------------ the end


TRIED = (Outcome("flat", "Flat()", 0.0, 1.0, 1.0),)
NAMES = digest_of_names(name for name, _ in Tower().named_parameters())
CHOSEN = Tuned("flat", ("lossless",), (1, 1), 10, TRIED, None, "for a test", parameters=NAMES)


def keep_what_was_tuned(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    """Train with `auto` and a file, twice: what is in it at the end is what the state had."""
    file = Path(folder, "tuned.json")
    job = ScriptRun(
        Choice.read("auto", ["timeout=60"], file), Script("none.py"), Shown(False, False, None, 50), (), folder, file
    )

    def script() -> TorchDDP:
        ddp = TorchDDP(seeded(Tower))
        train(ddp, rank)
        return ddp

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commopt.HookState, "tuned", property(lambda state: CHOSEN))
        job.run(script)
    torch.distributed.barrier()
    written = file.read_text()
    again = Choice.read("auto", ["timeout=60"], file)
    torch.distributed.barrier()
    replace(job, choice=again).run(script)
    torch.distributed.barrier()
    return written, file.read_text()


def test_what_auto_chose_is_kept_and_begun_with(tmp_path: Path) -> None:
    for first, second in run(keep_what_was_tuned, 2, str(tmp_path), nodes=(1, 1)):
        assert Tuned.from_json(first).reason == "for a test"
        assert second == first


def test_what_cannot_be_kept_is_one_line_and_ends_no_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, why in (("/dev/full", "No space left on device"), (tmp_path / "gone" / "tuned.json", "No such file")):
        _keep([Trained("GPT", 0, tuned=CHOSEN)], Path(file))
        told = capsys.readouterr().err
        assert told.startswith(f"commopt run: what auto chose is lost: {file} cannot be written: {why}")
        assert told.count("\n") == 1


ENDINGS = [
    (SystemExit(0), "destroys", "one model"),
    (SystemExit(0), "leaves", "one model"),
    (SystemExit(3), "destroys", "no average is taken after a SystemExit"),
    (SystemExit(3), "leaves", "no average is taken after a SystemExit"),
    (ValueError("broken"), "destroys", "no average is taken after a ValueError"),
]


def learn_apart(rank: int, world_size: int, ending: BaseException, way: str, folder: str) -> tuple[str, list[str]]:
    """Return what this rank's node ends with, and what was said of it."""
    job = ScriptRun(Choice("onebit_local"), Script("none.py"), Shown(False, False, None, 50), (), folder)
    kept: list[TorchDDP] = []

    def script() -> None:
        kept.append(TorchDDP(seeded(Tower), **SMALL_BUCKET))
        try:
            train(kept[0], rank)
            raise ending
        finally:
            if way == "destroys":
                torch.distributed.destroy_process_group()

    with heard() as said, pytest.raises(type(ending)):
        job.run(script)
    return digest_of(kept[0].module), [line for _, line in said if "end with different parameters" in line]


@pytest.mark.parametrize(("ending", "way", "then"), ENDINGS)
def test_only_ranks_without_an_error_average_at_the_end(
    ending: BaseException, way: str, then: str, tmp_path: Path
) -> None:
    """One that an error passes through would wait for others, which may not come."""
    (first, said), (second, said_too) = run(learn_apart, 2, ending, way, str(tmp_path), nodes=(1, 1))
    if then == "one model":
        assert first == second
        assert said == said_too == []
    else:
        assert first != second
        assert said == said_too == [f"commopt run: nodes end with different parameters: {then}"]


def let_go(rank: int, world_size: int) -> list[str]:
    models = Models(Choice(STRATEGY))
    with watching(models):
        ddp = TorchDDP(seeded(Tower))
        train(ddp, rank)
        model = ref(ddp)
        del ddp
        gc.collect()
        assert model() is None, "a model must not be kept alive for a report"
        assert models.trained[0].stats["steps"] == STEPS
        kept = TorchDDP(seeded(Tower))
        train(kept, rank)
        assert not models.trained[1].stats
    torch.distributed.destroy_process_group()  # as scripts do: the end must do without
    models.close()
    stream = io.StringIO()
    show(models.trained, stream)
    return stream.getvalue().splitlines()


def test_the_report_has_a_line_for_each_model() -> None:
    lines, silent = run(let_go, 2, nodes=(1, 1))
    assert silent == []
    rows = lines[3:]  # after a blank line and two of headings; long names go on in further lines
    height = len(rows) // 2
    name, *hook, steps, intra, inter = rows[height].split()
    shown = "".join("".join(part.split()) for part in (*hook, *rows[height + 1 :]))
    assert (name, shown, steps, intra) == ("Tower", "Hierarchical(inter=Compressed(Quantize(bits=4)))", str(STEPS), "0")
    # to one other rank: matrices at 4 bits, a scale of 4 bytes for each 512 elements, and the biases as they are; and a
    # bit for each element, in each of three steps in which something is new: the buffer, DDP's buckets, the strategy
    sent = 6 * 64 * 64 / 2 + 6 * 64 * 64 / 512 * 4 + 6 * 64 * 4
    assert inter == significant((sent + 3 * 64 * 64 / 8) / 1e6, 4)
    assert rows[0].split()[-3] == steps
    assert rows[0].startswith(name)
    assert max(map(len, lines)) <= 80
