# SPDX-License-Identifier: Apache-2.0
"""Options of NCCL by level: what is refused, what reaches which process group, and that ranks agree."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

import commopt
from commopt import Communicator, ConfigurationError, HookState, MismatchError
from commopt.groups import NcclOptions, build, join
from commopt.groups.nccl import copied_options, require_nccl_options
from tests.ranks import run

UNSET = -(2**31)


class Torch:
    """Stands for torch's ProcessGroupNCCL, of which a torch for CPUs has none."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(max_ctas=UNSET)


# ------------------------------------------------------------------------------ the options themselves


@pytest.mark.parametrize("value", [0, -4, 2.0, True])
def test_values_that_cannot_be(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"max_ctas={value}\) must be a whole number, 1 or more"):
        NcclOptions(max_ctas=value)


@pytest.mark.parametrize(
    ("nccl", "backends", "message"),
    [
        ({"internode": NcclOptions()}, {"cuda": "nccl"}, "'internode'; the levels are world, intra, inter"),
        ({"inter": NcclOptions(max_ctas=4)}, {"cpu": "gloo", "cuda": "gloo"}, "is for NCCL"),
        ({"inter": NcclOptions(max_ctas=4)}, {"cpu": "gloo", "cuda": "nccl"}, None),
        ({}, {"cpu": "gloo"}, None),
    ],
)
def test_options_that_nobody_would_read(nccl: Any, backends: dict[str, str], message: str | None) -> None:
    with nullcontext() if message is None else pytest.raises(ConfigurationError, match=message):
        require_nccl_options(nccl, backends)


@pytest.mark.parametrize(
    ("nccl", "message"),
    [
        (NcclOptions(max_ctas=4), r"nccl=NcclOptions\(.*max_ctas=4.* names no level"),
        ({"inter": {"max_ctas": 4}}, r"'inter'\] is a dict; pass for example commopt.NcclOptions"),
    ],
)
def test_options_without_a_level_are_refused(nccl: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        copied_options(nccl)


# ------------------------------------------------------------------------------ from the user to the groups


def be_refused(rank: int, world_size: int) -> None:
    nccl = {"inter": NcclOptions(max_ctas=4)}
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    calls: list[Callable[..., object]] = [Communicator, HookState, partial(commopt.attach, ddp, "flat")]
    for call in calls:
        with pytest.raises(ConfigurationError, match="is for NCCL"):
            call(nccl=nccl)


def test_gloo_takes_none() -> None:
    run(be_refused, 2)


@contextmanager
def as_with_nccl() -> Iterator[dict[str, Any]]:
    """Let commopt take gloo's groups for NCCL's too; give the options of each that is made, by its name."""
    given: dict[str, Any] = {}
    create = c10d._new_process_group_helper

    def record(*arguments: Any, **options: Any) -> Any:
        *_, name, backend_options = arguments
        given[name.rsplit("/", 1)[1]] = backend_options
        return create(*arguments, **options)

    backends = patch.object(build, "_backends", lambda parent: {"cpu": "gloo", "cuda": "nccl"})
    options = patch.object(c10d, "ProcessGroupNCCL", Torch, create=True)
    with backends, options, patch.object(c10d, "_new_process_group_helper", record):
        yield given


def give_options_to_levels(rank: int, world_size: int) -> None:
    nccl = {"inter": NcclOptions(max_ctas=4), "world": NcclOptions(max_ctas=2)}
    with as_with_nccl() as given:
        comm = Communicator(nccl=nccl)
        team = comm._membership.team
        assert team.intra is not None
        assert team.inter is not None
        names = ("world", f"intra{rank // 2}", f"inter{rank % 2}")
        assert given.keys() == set(names)
        assert given[f"intra{rank // 2}"] is None, "torch's default"
        assert given[f"inter{rank % 2}"].config.max_ctas == 4
        assert given["world"].config.max_ctas == 2
        assert given["world"]._timeout.total_seconds() == 60, "the world's"
        for level, name in zip((team, team.intra, team.inter), names, strict=True):
            group = level._live_group()
            assert group is not None
            assert group.group_desc.startswith("commopt/")
            assert group.group_desc.endswith(f"/{name}")
        assert comm.all_reduce(torch.ones(3), op="sum").tolist() == [4] * 3


def test_each_level_gets_its_own_options_and_a_telling_name() -> None:
    run(give_options_to_levels, 4, nodes=(2, 2), timeout_s=60)


def share_memberships(rank: int, world_size: int) -> None:
    with as_with_nccl():
        given = {"world": NcclOptions(max_ctas=4)}
        plain, four = join(), join(nccl=given)
        assert join(nccl={}) is plain
        assert four is not plain
        state = HookState(commopt.Flat(), nccl=given)
        assert state.membership is four
        given["world"], given["inter"] = NcclOptions(max_ctas=5), NcclOptions()  # the caller's, which was copied
        assert pickle.loads(pickle.dumps(state)).membership is four
        assert join(nccl=given) is not four
        with pytest.raises(MismatchError, match=r"NCCL options: rank 1 .*max_ctas=5.*rank 0 .*max_ctas=4"):
            Communicator(nccl={"inter": NcclOptions(max_ctas=4 + rank)})


def test_equal_options_share_their_groups_and_ranks_must_agree() -> None:
    run(share_memberships, 2)


# ------------------------------------------------------------------------------ on a GPU


def read_options(rank: int, world_size: int) -> tuple[str, str, int, int]:
    comm = Communicator(nccl={"inter": NcclOptions(max_ctas=4)})
    values = torch.ones(100_000, device="cuda")
    assert (comm.all_reduce(values, op="sum") == world_size).all()
    team = comm._membership.team
    assert team.intra is not None
    assert team.inter is not None
    intra, inter = team.intra._live_group(), team.inter._live_group()
    assert intra is not None
    assert inter is not None
    options: list[Any] = [group._get_backend(values.device).options for group in (intra, inter)]
    return intra.group_desc, inter.group_desc, options[0].config.max_ctas, options[1].config.max_ctas


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_is_told() -> None:
    for rank, (intra, inter, of_intra, of_inter) in enumerate(run(read_options, 4, nodes=(2, 2), device="cuda")):
        assert intra.endswith(f"/intra{rank // 2}")
        assert inter.endswith(f"/inter{rank % 2}")
        assert (of_intra == 4, of_inter) == (False, 4)
