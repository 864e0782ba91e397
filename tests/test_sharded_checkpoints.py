# SPDX-License-Identifier: Apache-2.0
"""What a run of FSDP2 leaves unsent goes on in the next: in the same world to the bit, in another one as a sum."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import commopt
from commopt import Compressed, ConfigurationError, Quantize
from tests.ranks import run
from tests.sharded_training import NODES, Made, Net, attached, batch, hsdp_mesh, local, same

STEPS = 4
COMPRESSED = Compressed(Quantize(2, 64))


def train(net: Net, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        net(batch(step, width=net.width), side=True).square().mean().backward()
        optimizer.step()


def adamw(net: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), 1e-2)


def resume_with_dcp(rank: int, world_size: int, folder: str) -> dict[str, bool]:
    """Train 2 x STEPS steps, and again from the middle."""
    first = Made()()
    optimizer = adamw(first)
    with attached(first, COMPRESSED) as comm:
        train(first, optimizer, 0, STEPS)
        model_state, optimizer_state = get_state_dict(first, optimizer)
        checkpoint = {"model": model_state, "optimizer": optimizer_state, "comm": commopt.Checkpointed(comm)}
        dcp.save(checkpoint, checkpoint_id=folder)
        train(first, optimizer, STEPS, 2 * STEPS)
    equal = {}
    for what in ("with residuals", "without"):
        second = Made()()
        optimizer = adamw(second)
        with attached(second, COMPRESSED) as comm:
            model_state, optimizer_state = get_state_dict(second, optimizer)
            found: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
            if what == "with residuals":
                found["comm"] = commopt.Checkpointed(comm)
            dcp.load(found, checkpoint_id=folder)
            set_state_dict(second, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
            train(second, optimizer, STEPS, 2 * STEPS)
        equal[what] = same(local(first), local(second))
    return equal


def test_dcp_resumes_to_the_bit(tmp_path: Path) -> None:
    for equal in run(resume_with_dcp, 4, str(tmp_path), nodes=NODES):
        assert equal == {"with residuals": True, "without": False}
    state, steps = run(load_with_dcp, 2, str(tmp_path), nodes=(1, 1))[0]
    assert steps == STEPS
    assert max(float(values.abs().max()) for values in total(state).values()) > 1e-3


def load_with_dcp(rank: int, world_size: int, folder: str) -> Any:
    net = Made(mesh=hsdp_mesh(2, 1))()
    with attached(net, COMPRESSED) as comm:
        dcp.load({"comm": commopt.Checkpointed(comm, saved_world_size=4)}, checkpoint_id=folder)
        return comm.gathered_state_dict(), comm.stats()["steps"]


def rows(parameter: nn.Parameter) -> Shard:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else Shard(0)


SIZES = (32, 16, 28, 6)


def made(replicas: int, shards: int, second_dimension: bool) -> Net:
    options = {"shard_placement_fn": rows} if second_dimension else {}
    return Made(SIZES, options, mesh=hsdp_mesh(replicas, shards))()


def total(state: Any) -> dict[str, Tensor]:
    """Return the sum over all ranks of what is kept, by parameter."""
    sums: dict[str, Tensor] = {}
    for part in state["ranks"]:
        for pieces in part["residuals"].values():
            for key, values in pieces.items():
                name, _, span = key.rpartition("[")
                begin, end = map(int, span[:-1].split(":"))
                sums.setdefault(name, torch.zeros(part["parameters"][name], dtype=torch.float64))
                sums[name][begin:end] += values.double()
    return sums


def save(rank: int, world_size: int, second_dimension: bool) -> Any:
    net = made(2, 2, second_dimension)
    with attached(net, COMPRESSED) as comm:
        train(net, adamw(net), 0, STEPS)
        with pytest.raises(ConfigurationError, match="cannot be pickled"):
            pickle.dumps(comm)
        return comm.gathered_state_dict()


def load(rank: int, world_size: int, saved: Any, replicas: int, shards: int, second_dimension: bool) -> Any:
    net = made(replicas, shards, second_dimension)
    with attached(net, COMPRESSED) as comm:
        try:
            comm.load_state_dict(saved)
        except ConfigurationError as error:
            return str(error)
        kept = comm.gathered_state_dict()
        mine = comm.stats()["residual_bytes"]
        train(net, adamw(net), STEPS, 2 * STEPS)
        return {"kept": kept, "bytes": mine, "steps": comm.stats()["steps"], "finite": finite(net)}


def finite(net: Net) -> bool:
    return all(bool(values.isfinite().all()) for values in local(net))


@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (1, 2), (2, 1), (4, 1)])
def test_in_another_world_the_sum_stays(saved: Any, replicas: int, shards: int) -> None:
    results = run(
        load,
        replicas * shards,
        saved,
        replicas,
        shards,
        False,
        nodes=(1,) * replicas if shards == 1 else (2,) * replicas,
    )
    before, after = total(saved), total(results[0]["kept"])
    assert before.keys() == after.keys()
    for name, values in before.items():
        torch.testing.assert_close(after[name], values, rtol=1e-6, atol=1e-9)
    assert max(float(values.abs().max()) for values in before.values()) > 1e-3
    numel = sum(saved["ranks"][0]["parameters"].values())
    for each in results:
        assert each["bytes"] <= 4 * numel * (1.1 / shards)  # of what is its own
        assert each["steps"] == 2 * STEPS
        assert each["finite"]


def save_replicated(rank: int, world_size: int) -> Any:
    torch.manual_seed(7)
    net = Net(SIZES)
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    comm = commopt.attach(ddp, COMPRESSED)
    ddp(batch(0, width=net.width), side=True).square().mean().backward()
    return comm.gathered_state_dict()


def test_residuals_of_ddp_are_shared_out_by_the_shards_though_the_ranks_are_the_same() -> None:
    parts = run(save_replicated, 4, nodes=NODES)[0]
    results = run(load, 4, parts, 2, 2, False, nodes=NODES)
    before, after = total(parts), total(results[0]["kept"])
    for name, values in before.items():
        torch.testing.assert_close(after[name], values, rtol=1e-6, atol=1e-9)
    numel = sum(parts["ranks"][0]["parameters"].values())
    assert all(each["bytes"] <= 4 * numel * (1.1 / 2) for each in results)


@pytest.fixture(scope="module")
def saved() -> Any:
    return run(save, 4, False, nodes=NODES)[0]


def test_parts_along_another_dimension_need_as_many_shards() -> None:
    parts = run(save, 4, True, nodes=NODES)[0]
    assert isinstance(run(load, 4, parts, 2, 2, True, nodes=NODES)[0], dict)
    for refused in run(load, 4, parts, 4, 1, True, nodes=NODES):
        assert "layers.0.0.weight [part 0/2 of dim 1]" in refused
