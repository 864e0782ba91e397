# SPDX-License-Identifier: Apache-2.0
"""The forms of Adam before the wire: with an oracle's v and no compression it is torch.optim.AdamW; the rest runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.evidence.adam_forms import __main__ as command
from bench.evidence.adam_forms.averaging import Averaging, schedule_of, train
from bench.evidence.adam_forms.forms import DENSE, FORMS, TODAY, Differences, Form
from bench.evidence.adam_forms.replica import NODES, Replica
from bench.evidence.adam_forms.report import Run, markdown
from bench.evidence.adam_forms.second_moments import Blocks, Own, Shared
from bench.evidence.convergence import plan
from bench.output import write_results
from examples.train_gpt import GPT, WEIGHT_DECAY, load_corpus, windows_at
from tests.chosen import threads

STEPS, CONTEXT, BATCH = 12, 32, 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


def by_adamw(rate: float, seed: int) -> GPT:
    """Train as stock DDP does: the mean gradient of all ranks' batches, and torch's AdamW on every parameter."""
    torch.manual_seed(seed)
    model, text = GPT(2, 64, CONTEXT), load_corpus()[0]
    optimizer = torch.optim.AdamW(model.parameters(), 0.003 * rate, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    schedule = schedule_of(optimizer, STEPS)
    world = sum(plan.RANKS_PER_NODE)
    draws = [torch.Generator().manual_seed(seed * world + rank) for rank in range(world)]
    for _ in range(STEPS):
        starts = torch.cat([torch.randint(len(text) - CONTEXT, (BATCH,), generator=draw) for draw in draws])
        tokens, targets = windows_at(text, starts, CONTEXT, torch.device("cpu"))
        optimizer.zero_grad()
        cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        schedule.step()
    return model


@pytest.mark.parametrize("seed", [0, 3])
def test_with_the_oracle_and_no_compression_it_is_adamw(seed: int) -> None:
    replica, _ = train(FORMS[DENSE], 4.0, seed, STEPS)
    expected = by_adamw(4.0, seed)
    torch.manual_seed(seed)
    started = GPT(2, 64, CONTEXT).state_dict()
    found = replica.model.state_dict()
    for name, values in expected.state_dict().items():
        assert float((found[name] - values).norm()) < 1e-3 * float((values - started[name]).norm()), name


@pytest.fixture(scope="module")
def replica() -> Replica:
    return Replica(0)


def noise(replica: Replica, steps: int, equal: bool = False) -> list[Tensor]:
    """Return gradients of every node, of a size that each tensor has by itself."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.cat([torch.full((length,), 0.1 ** (i % 4)) for i, length in enumerate(replica.lengths)])
    drawn = torch.randn(steps, NODES, len(sizes), generator=generator) * sizes
    return list(drawn[:, :1].expand_as(drawn) if equal else drawn)


def directions(form: Form, replica: Replica, gradients: list[Tensor]) -> list[Tensor]:
    averaging = Averaging(form, replica)
    return [averaging.direction(each, step) for step, each in enumerate(gradients)]


def test_nodes_with_one_gradient_take_adams_direction(replica: Replica) -> None:
    gradients = noise(replica, 10, equal=True)
    expected = directions(FORMS[DENSE], replica, gradients)
    for name in ("own v, length 1", "own v, length exact", "own v, length sketched", "own v", "v shared every 8"):
        for found, wanted in zip(directions(FORMS[name], replica, gradients), expected, strict=True):
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5), name


def test_lengths_make_up_for_the_noise_of_one_node(replica: Replica) -> None:
    gradients = noise(replica, 25)
    for name in ("own v, length exact", "own v, length sketched", "own v"):
        short, long = (directions(FORMS[each], replica, gradients)[-1] for each in ("own v, length 1", name))
        assert float(long.norm() / short.norm()) == pytest.approx(NODES**0.5, rel=0.05), name


def test_blocks_of_one_element_are_v_shared(replica: Replica) -> None:
    gradients = noise(replica, 5)
    shared, blocks = (Form(partial(kind, 1), length="1") for kind in (Shared, partial(Blocks, 1)))
    for found, wanted in zip(*(directions(each, replica, gradients) for each in (blocks, shared)), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_nothing_is_lost_by_feedback(replica: Replica) -> None:
    gradients = noise(replica, 5)
    for name, form in FORMS.items():
        if form.second is not Own or form.momentum != "node" or form.channel is Differences:
            continue
        if form.length == "measured":  # it hears what was sent
            form = replace(form, length="sqrt(K)")
        averaging = Averaging(form, replica)
        sent = torch.stack([averaging.direction(each, step) for step, each in enumerate(gradients)]).sum(0)
        owed = torch.stack(directions(replace(form, compressor=None), replica, gradients)).sum(0)
        left = torch.zeros_like(gradients[0])
        for row, channel in zip(left, averaging._channels, strict=False):
            row[: replica.matrix_numel] = channel.residual
        assert torch.allclose(sent + left.mean(0), owed, atol=1e-4), name


@pytest.mark.parametrize("name", FORMS)
def test_every_form_takes_steps(name: str, replica: Replica) -> None:
    form = FORMS[name]
    steps = 2 + (0 if form.compressor is None else form.compressor.start_step)
    assert all(each.isfinite().all() and each.any() for each in directions(form, replica, noise(replica, steps)))


def test_the_command_goes_on_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "forms.json"

    def call(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["adam_forms", *words])
        command.main()
        return capsys.readouterr().out

    first = call("--quick", "--only", DENSE, "--json", str(file))
    again = call("--quick", "--only", DENSE, "--only", TODAY, "--json", str(file))
    assert f"{DENSE}, rate x 2, seed 0: 3." in first
    assert f"{DENSE}, rate" not in again
    assert f"{TODAY}, rate x 2, seed 0: 3." in again
    assert call("--report", str(file)).strip() == again[again.index("| form") :].strip()
    assert f"| {TODAY} | 3." in again
    assert "| 0.044 |" in again
    with pytest.raises(SystemExit):  # a file of other steps
        call("--only", DENSE, "--json", str(file))
    assert "20" in capsys.readouterr().err


def test_what_a_part_costs_is_told_seed_by_seed(tmp_path: Path) -> None:
    losses = {(DENSE, 3.0): (2.0, 4.0, 3.0), (DENSE, 4.0): (2.0, 5.0, 3.0), ("own v", 3.0): (2.02, 4.12, 3.03)}
    runs = [Run(form, rate, seed, loss, 1.0) for (form, rate), each in losses.items() for seed, loss in enumerate(each)]
    runs.append(Run("own v", 4.0, 0, None, 1.0))  # diverged: of one seed, which is no rate to compare
    file = tmp_path / "forms.json"
    write_results(file, {"steps": 400}, "run", map(asdict, runs))
    (price,) = (line for line in markdown(file).splitlines() if line.startswith("| the mean of directions"))
    assert price.split("|")[2].strip() == "+1.7 ± 0.7 % (3)"  # 1, 3 and 1 per cent
    (row,) = (line for line in markdown(file).splitlines() if line.startswith("| own v |"))
    assert row.split("|")[2:6] == [" 3.057 ", " inf (1) ", " +1.7 ± 0.7 % (3) ", " diverged "]
