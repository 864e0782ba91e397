"""Options of NCCL by level: what is refused, what reaches which process group, and that ranks agree."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
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
from commopt.groups.nccl import copied_options, missing_in_torch, require_nccl_options
from tests.ranks import run

UNSET = -(2**31)


class Torch:
    """Stands for torch's ProcessGroupNCCL, of which a torch for CPUs has none."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(min_ctas=UNSET, max_ctas=UNSET)


# ------------------------------------------------------------------------------ the options themselves


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_ctas": 0}, r"max_ctas=0\) must be a whole number, 1 or more"),
        ({"min_ctas": -4}, "min_ctas=-4"),
        ({"max_ctas": 2.0}, "max_ctas=2.0"),
        ({"max_ctas": True}, "max_ctas=True"),
        ({"cga_cluster_size": -1}, "0 or more"),
        ({"cga_cluster_size": 9}, "use 0 to 8"),
        ({"min_ctas": 8, "max_ctas": 4}, "min_ctas=8, max_ctas=4"),
    ],
)
def test_values_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        NcclOptions(**options)


def test_only_what_is_given_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", Torch, raising=False)
    options = NcclOptions(max_ctas=4)
    made = options.for_torch()
    assert (made.config.min_ctas, made.config.max_ctas) == (UNSET, 4)
    assert options.for_torch() is not made, "torch writes the ranks of a group into it"


def test_what_torch_lacks_is_found_before_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", Torch, raising=False)
    given = {"inter": NcclOptions(max_ctas=4), "intra": NcclOptions(max_ctas=2, cga_cluster_size=0)}
    assert missing_in_torch(given) == ["cga_cluster_size"]
    assert missing_in_torch({"inter": given["inter"]}) == missing_in_torch({}) == []


@pytest.mark.parametrize(
    ("nccl", "backends", "message"),
    [
        ({"internode": NcclOptions()}, {"cuda": "nccl"}, "'internode'; the levels are world, intra, inter"),
        ({"inter": NcclOptions(max_ctas=4)}, {"cpu": "gloo", "cuda": "gloo"}, "is for NCCL"),
    ],
)
def test_options_that_nobody_would_read(nccl: Any, backends: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        require_nccl_options(nccl, backends)


def test_options_without_a_level_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"nccl=NcclOptions\(.*max_ctas=4.* names no level"):
        copied_options(NcclOptions(max_ctas=4))  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ConfigurationError, match=r"'inter'\] is a dict; pass for example commopt.NcclOptions"):
        copied_options({"inter": {"max_ctas": 4}})  # type: ignore[dict-item]  # what is tested


def test_options_of_nccl_beside_gloo_are_fine() -> None:
    require_nccl_options({"inter": NcclOptions(max_ctas=4)}, {"cpu": "gloo", "cuda": "nccl"})
    require_nccl_options({}, {"cpu": "gloo"})


# ------------------------------------------------------------------------------ from the user to the groups


def be_refused(rank: int, world_size: int) -> None:
    nccl = {"inter": NcclOptions(max_ctas=4)}
    with pytest.raises(ConfigurationError, match="is for NCCL"):
        Communicator(nccl=nccl)
    with pytest.raises(ConfigurationError, match="is for NCCL"):
        HookState(nccl=nccl)
    with pytest.raises(ConfigurationError, match="is for NCCL"):
        commopt.attach(DistributedDataParallel(nn.Linear(2, 2)), "flat", nccl=nccl)


def test_gloo_takes_none() -> None:
    run(be_refused, 2)


@contextmanager
def as_with_nccl(torch_of: type = Torch) -> Iterator[dict[str, Any]]:
    """Let commopt take gloo's groups for NCCL's too; give the options of each that is made, by its name."""
    given: dict[str, Any] = {}
    create = c10d._new_process_group_helper

    def record(*arguments: Any, **options: Any) -> Any:
        *_, name, backend_options = arguments
        given[name.rsplit("/", 1)[1]] = backend_options
        return create(*arguments, **options)

    backends = patch.object(build, "_backends", lambda parent: {"cpu": "gloo", "cuda": "nccl"})
    options = patch.object(c10d, "ProcessGroupNCCL", torch_of, create=True)
    with backends, options, patch.object(c10d, "_new_process_group_helper", record):
        yield given


def give_options_to_levels(rank: int, world_size: int) -> None:
    nccl = {"inter": NcclOptions(max_ctas=4), "world": NcclOptions(min_ctas=2)}
    with as_with_nccl() as given:
        comm = Communicator(nccl=nccl)
        team = comm._membership.team
        assert team.intra is not None
        assert team.inter is not None
        names = ("world", f"intra{rank // 2}", f"inter{rank % 2}")
        assert given.keys() == set(names)
        assert given[f"intra{rank // 2}"] is None, "torch's default"
        assert given[f"inter{rank % 2}"].config.max_ctas == 4
        assert given["world"].config.min_ctas == 2
        assert given["world"]._timeout.total_seconds() == 60, "the world's"
        for level, name in zip((team, team.intra, team.inter), names, strict=True):
            group = level._live_group()
            assert group is not None
            assert group.group_desc.startswith("commopt/")
            assert group.group_desc.endswith(f"/{name}")
        assert comm.all_reduce(torch.ones(3), op="sum").tolist() == [4] * 3


def test_each_level_gets_its_own_options_and_a_telling_name() -> None:
    run(give_options_to_levels, 4, nodes=(2, 2))


def share_memberships(rank: int, world_size: int) -> None:
    with as_with_nccl():
        plain, four = join(), join(nccl={"world": NcclOptions(max_ctas=4)})
        assert join(nccl={}) is plain
        assert four is not plain
        assert join(nccl={"world": NcclOptions(max_ctas=4)}) is four
        assert HookState(nccl={"world": NcclOptions(max_ctas=4)}).membership is four
        assert join(nccl={"world": NcclOptions(max_ctas=5)}) is not four


def test_equal_options_share_their_groups() -> None:
    run(share_memberships, 2)


def change_afterwards(rank: int, world_size: int) -> None:
    """A mapping of the caller's, which may hold other options by the time a saved state finds its groups again."""
    given = {"world": NcclOptions(max_ctas=4)}
    with as_with_nccl():
        state = HookState(commopt.Flat(), nccl=given)
        given["world"], given["inter"] = NcclOptions(max_ctas=5), NcclOptions()
        assert pickle.loads(pickle.dumps(state)).membership is state.membership


def test_the_callers_mapping_is_copied() -> None:
    run(change_afterwards, 2)


def disagree(rank: int, world_size: int) -> None:
    with as_with_nccl(), pytest.raises(MismatchError, match=r"NCCL options: rank 1 .*max_ctas=5.*rank 0 .*max_ctas=4"):
        Communicator(nccl={"inter": NcclOptions(max_ctas=4 + rank)})


def test_ranks_must_agree() -> None:
    run(disagree, 2)


class NewerTorch:
    """Knows of clusters of thread blocks."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(min_ctas=UNSET, max_ctas=UNSET, cga_cluster_size=UNSET)


def ask_for_clusters(rank: int, world_size: int, newer: int) -> tuple[str, list[str]]:
    """Ask for what only the torch of the last `newer` ranks has; return what was said, and which groups were made."""
    with as_with_nccl(NewerTorch if rank >= world_size - newer else Torch) as given:
        try:
            comm = Communicator(timeout=10, nccl={"world": NcclOptions(cga_cluster_size=2)})
        except (ConfigurationError, MismatchError) as error:
            return f"{type(error).__name__}: {error}", list(given)
        return str(comm.all_reduce(torch.ones(1), op="sum").item()), list(given)


@pytest.mark.parametrize(
    ("newer", "message", "made"),
    [
        (0, r"ConfigurationError: .* have no cga_cluster_size; leave it out", []),
        (1, r"MismatchError: .*torch lacks: rank 1 has \[\], rank 0 has \['cga_cluster_size'\]", []),
        (2, r"2\.0", ["world"]),
    ],
)
def test_what_some_torch_lacks_is_refused_on_every_rank(newer: int, message: str, made: list[str]) -> None:
    for said, groups in run(ask_for_clusters, 2, newer):
        assert re.match(message, said)
        assert groups == made


# ------------------------------------------------------------------------------ on a GPU


def read_options(rank: int, world_size: int) -> tuple[str, str, int, int]:
    comm = Communicator(nccl={"inter": NcclOptions(max_ctas=4, cga_cluster_size=0)})
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
