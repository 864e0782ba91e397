# SPDX-License-Identifier: Apache-2.0
"""What the host does for a bucket on a GPU, by preset: no more kernels, torch operations and functions than here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from commopt.feedback import SAMPLE_EVERY_STEPS
from commopt.groups import Team
from tests.plain_way import Group, NcclTeam, count, device
from tests.test_cuda_streams import Echo

# Kernels of ours, operations of torch (NCCL's among them), calls of Python functions: upper bounds.
BOUNDS = {
    ("flat", 2): (0, 2, 55),
    ("hierarchical_bf16", 2): (0, 5, 130),
    ("hierarchical_quantized", 2): (3, 8, 185),
    ("hierarchical_quantized:bits=4", 2): (3, 8, 185),
    ("hierarchical_quantized:bits=2", 2): (3, 7, 185),
    ("hierarchical_onebit", 2): (3, 18, 255),
    ("hierarchical_dgc", 2): (11, 19, 280),
    ("hierarchical_powersgd", 2): (13, 27, 280),
    ("hierarchical_quantized", 4): (5, 8, 255),
    ("hierarchical_dgc", 4): (22, 35, 460),
    ("hierarchical_powersgd", 4): (13, 27, 310),
}
REPLAYED = 36  # functions


@pytest.mark.parametrize(("preset", "size"), BOUNDS, ids=str)
def test_a_bucket_costs_no_more_than_the_table_says(preset: str, size: int) -> None:
    """And nothing asks the driver for the number of devices, as torch.cuda.current_stream() does."""
    found, names = count(preset, size)
    kernels, operations, functions = BOUNDS[preset, size]
    assert found.asked == 0
    assert found.kernels <= kernels
    assert found.operations <= operations
    assert found.functions <= functions, names.most_common()


@pytest.mark.parametrize("preset", ["flat", "hierarchical_quantized", "hierarchical_onebit", "hierarchical_dgc"])
def test_a_replayed_bucket_launches_nothing_and_calls_little(preset: str) -> None:
    """Its functions are those of the hook, of the lane and of two collectives, whatever the preset."""
    found, names = count(preset, replays=True)
    assert found.kernels == found.asked == 0
    assert found.functions <= REPLAYED, names.most_common()


def test_a_sample_of_the_compression_error_is_seven_operations() -> None:
    usual, _ = count("hierarchical_quantized")
    sampled, _ = count("hierarchical_quantized", step=SAMPLE_EVERY_STEPS * 200)
    assert 0 < sampled.operations - usual.operations <= 7
    assert sampled.kernels == usual.kernels


@pytest.mark.parametrize("size", [2, 3])
def test_calls_of_nccl_do_what_those_of_torch_distributed_do(size: int) -> None:
    """On ranks that are all alike, a team above such calls and a team that stands for one leave the same."""

    def results(team: Team, used: Any) -> list[Tensor]:
        shared, block = used(12 * size), used(12)
        outputs = [used(12), used(12), used(12), used(12), used(12 * size), used(12 * size)]
        team.all_reduce(outputs[0], scale=0.5)
        team.reduce(outputs[1], 0)
        team.broadcast(outputs[2], 0)
        team.reduce_scatter(outputs[3], shared)
        team.all_gather(outputs[4], block)
        team.all_to_all(outputs[5], shared)
        return [each.cpu() for each in outputs]

    def used(numel: int) -> Tensor:
        return torch.arange(numel, dtype=torch.float32).to("cuda")

    with device() as (gpu, _):
        got, wanted = (results(team, used) for team in (NcclTeam(size), Echo(tuple(range(size)))))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))
        assert not gpu.faults


def test_options_of_nccl_make_the_current_stream_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that a group returns is waited for; a root goes with the call for which it is."""
    ended: list[str] = []
    seen: list[Any] = []

    class Work:
        def wait(self) -> None:
            ended.append("waited")

    def root(self: Group, tensors: list[Tensor], options: Any) -> Work:
        seen.append((options.rootRank, getattr(options, "asyncOp", False)))
        return Work()

    monkeypatch.setattr(Group, "reduce", root)
    monkeypatch.setattr(Group, "broadcast", root)
    with device():
        team, values = NcclTeam(4), torch.zeros(4).to("cuda")
        for rank in (3, 1):
            team.reduce(values, rank)
            team.broadcast(values, rank)
    assert seen == [(3, False), (3, False), (1, False), (1, False)]
    assert len(ended) == 4
