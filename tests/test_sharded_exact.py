# SPDX-License-Identifier: Apache-2.0
"""Weights(exact=True): FSDP2 over all ranks computes with its own bits, which cross as packed differences."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import commopt
from commopt import Communicator, Flat, Quantize
from commopt.errors import ConfigurationError
from commopt.feedback import Scratch
from commopt.groups import Team
from commopt.kernels.differences import HEAD_NBYTES
from commopt.sharded import Weights
from commopt.sharded.exact import Differences
from tests import test_sharded_modes as modes
from tests.overheard import overheard
from tests.ranks import run
from tests.sharded_training import NODES, batch, differences, local, policy
from tests.test_sharded_1d import Seen, by_columns, everywhere_equal, made, train

pytestmark = pytest.mark.skipif(torch.__version__ < "2.9", reason="FSDP2 lets its collectives be replaced since 2.9")

EXACT, BF16, FP16 = Weights(exact=True), policy(torch.bfloat16, torch.float32), policy(torch.float16, None)

MODES: dict[str, dict[str, Any]] = {
    "bf16": {"options": BF16},
    "fp16": {"options": FP16},
    "bf16 parameters": {"dtype": torch.bfloat16, "options": policy(torch.bfloat16, None)},
    "recomputed": {"options": BF16, "adjust": modes.checkpointed},
    "together": {"options": BF16, "shard": modes.two_layers_together},
    "kept after forward": {"options": {**BF16, "reshard_after_forward": False}},
    "fewer ranks": {"options": {**BF16, "reshard_after_forward": 2}},
    "by columns": {"options": {**BF16, "shard_placement_fn": by_columns}},
}


def bits_of(model: Any) -> list[Tensor]:
    return [each.contiguous().view(torch.uint8) for each in local(model)]


def trained(rank: int, world: int, mode: str, stock: bool) -> tuple[bool, bool, bool, int]:
    """Return whether losses, weights and what a layer computed with are those of a model without `weights`."""
    ends: list[Any] = []
    for weights in (None, EXACT):
        model = made(**MODES[mode])
        state = None
        if weights is not None or not stock:
            state = commopt.attach(model, Flat(), weights=weights)
        seen = Seen(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        losses = train(model, optimizer, range(5), side=lambda step: step == 2)
        ends.append((losses, bits_of(model), seen.forward + seen.backward))
        if state is not None:
            crossings = state.stats().get("weight_crossings", 0)
            state.close()
    same = [all(torch.equal(*pair) for pair in zip(ends[0][part], ends[1][part], strict=True)) for part in (1, 2)]
    return ends[0][0] == ends[1][0], same[0], same[1], crossings


@pytest.mark.parametrize("mode", MODES)
def test_every_bit_is_as_without(mode: str) -> None:
    for *same, crossings in run(trained, 4, mode, False, nodes=NODES):
        assert all(same)
        assert crossings == 5 * (3 if mode == "together" else 4)


def test_every_bit_is_stock_fsdp_s() -> None:
    """Between two ranks, where gradients are added up as in torch."""
    assert all(all(same) for *same, _ in run(trained, 2, "bf16", True, nodes=(1, 1)))


CHANGES: dict[str, Callable[[Any, Any, Any], object]] = {
    "a step": lambda model, state, other: None,
    "load_state_dict": lambda model, state, other: model.load_state_dict(other.state_dict()),
    "invalidate": lambda model, state, other: state.invalidate(),
    "a jump nobody told": lambda model, state, other: [
        each.to_local().detach().copy_(torch.randn_like(each.to_local()) * torch.randn(1).exp())
        for each in model.parameters()
    ],
    "not a number": lambda model, state, other: [
        each.to_local().detach().fill_(torch.nan) for each in model.parameters()
    ],
    "back from that": lambda model, state, other: model.load_state_dict(other.state_dict()),
    "zeros of either sign": lambda model, state, other: [
        each.to_local().detach().fill_(-0.0) for each in model.parameters()
    ],
    "still zeros": lambda model, state, other: None,
    "and again": lambda model, state, other: None,
}


def changed(rank: int, world: int) -> dict[str, tuple[bool, bool, int]]:
    """Return, after every change, whether a forward computes with those bits, and what crossed the network for it."""
    model, other = made(options=BF16), made(seed=1)
    state = commopt.attach(model, Flat(), weights=EXACT)
    train(model, torch.optim.AdamW(model.parameters(), 1e-3), range(3))
    seen, found = Seen(model), {}
    for name, change in CHANGES.items():
        change(model, state, other)
        before = state.stats()["inter_bytes"]
        with torch.no_grad():
            model(batch(99, width=model.width))
        model.reshard()
        used, exact = seen.forward[-1], seen.exact().bfloat16()
        right = torch.equal(used.view(torch.int16), exact.view(torch.int16))
        found[name] = right, everywhere_equal(used.view(torch.uint8)), state.stats()["inter_bytes"] - before
    return found


def test_no_forward_computes_with_other_bits_and_no_jump_costs_more_than_raw() -> None:
    raw = 2 * sum(a * b for a, b in ((96, 193), (193, 96), (96, 5))) / 4  # of a shard, to one other rank
    for found in run(changed, 4, nodes=NODES):
        for name, (right, alike, nbytes) in found.items():
            assert right, name
            assert alike, name
            assert nbytes < raw * 1.1 + 4 * 600, (name, nbytes, raw)  # biases, padding, heads
        assert 4 * found["and again"][2] < found["a step"][2] < 0.5 * found["invalidate"][2]
        assert found["load_state_dict"][2] > raw


def crossing(rank: int, world: int) -> list[tuple[bool, int, list[int], tuple[int, ...]]]:
    """Exchange rows that change by more and less; return whether they came, and what was sent."""
    team, scratch, exchange, found = Communicator()._membership.team, Scratch(), Differences(), []
    everyone = torch.randn(world, 100_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    mine = everyone.clone()
    for step, rate in enumerate((1e-4, 1e-4, 1e-4, 1e-1, 1e-4, 1e-4, 0.0, 30.0, 1e-4)):
        draws = torch.Generator().manual_seed(step + 1)
        everyone = (everyone.float() + rate * torch.randn(world, 100_000, generator=draws)).bfloat16()
        sent: list[int] = []

        def listen(team: Team, primitive: str, nbytes: int, roots: Sequence[int], sent: list[int] = sent) -> None:
            sent.append(nbytes)

        with overheard(listen):
            exchange.exchange(everyone[rank], mine, team, scratch)
        found.append((torch.equal(mine.view(torch.int16), everyone.view(torch.int16)), step, sent, exchange.lengths))
    return found


def test_rows_that_grow_are_followed_by_their_rest_and_the_next_ones_are_as_long() -> None:
    for found in run(crossing, 3, nodes=(1, 1, 1)):
        assert all(right for right, *_ in found)
        assert all(tuple(sent) == lengths for _, _, sent, lengths in found)
        assert [len(sent) for _, _, sent, _ in found] == [1, 1, 1, 2, 1, 1, 1, 2, 2]
        assert all(sum(sent) <= HEAD_NBYTES + 2 * 100_000 for _, _, sent, _ in found)
        assert all(sum(sent) < 0.05 * 2 * 100_000 for _, step, sent, _ in found if step not in (0, 3, 7))
        assert sum(found[7][2]) == HEAD_NBYTES + 2 * 100_000


def resumed(rank: int, world: int) -> tuple[float, int, int]:
    model = made(options=BF16)
    state = commopt.attach(model, commopt.hierarchical_quantized(bits=4), weights=EXACT)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    train(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), state.state_dict()))
    train(model, optimizer, range(3, 6))
    again = made(seed=1, options=BF16)
    other = commopt.attach(again, commopt.hierarchical_quantized(bits=4), weights=EXACT)
    anew = torch.optim.AdamW(again.parameters(), 1e-3)
    other.load_state_dict(saved[2])
    again.load_state_dict(saved[0])
    anew.load_state_dict(saved[1])
    train(again, anew, range(3, 6))
    numel = sum(each.numel() for each in model.parameters())
    return differences(model, again), state.stats()["second_copy_bytes"], numel


def test_a_resumed_training_goes_on_with_the_same_bits() -> None:
    for difference, nbytes, numel in run(resumed, 4, nodes=NODES):
        assert difference == 0
        assert nbytes <= 2 * numel / 2 * 1.03


def refused(rank: int, world: int) -> list[str]:
    said = []
    cases: list[tuple[dict[str, Any], Weights]] = [({}, EXACT), ({"options": BF16}, EXACT if rank else Weights())]
    for how, weights in cases:
        with pytest.raises(commopt.errors.CommoptError) as caught:
            commopt.attach(made(**how), Flat(), weights=weights)
        said.append(str(caught.value))
    return said


def test_what_cannot_be_packed_is_named_on_every_rank() -> None:
    for said in run(refused, 2, nodes=(1, 1)):
        assert "computes in torch.float32; pass MixedPrecisionPolicy(param_dtype=torch.bfloat16)" in said[0]
        assert "disagree about weights" in said[1]


@pytest.mark.parametrize(
    "options", [{"difference": True}, {"second_copy": False}, {"dense": ("*",)}, {"compressor": Quantize(bits=4)}]
)
def test_exact_takes_no_other_argument(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"pass Weights\(exact=True\) alone"):
        Weights(exact=True, **options)
    assert repr(EXACT) == "Weights(exact=True)"
