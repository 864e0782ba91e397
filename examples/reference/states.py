# SPDX-License-Identifier: Apache-2.0
"""Examples of attach and states, collectives without DDP, errors."""

# No `from __future__ import annotations`: what you copy from here may be a hook, whose annotations DDP reads.

from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
from commopt.cost import Speeds, nominal_links
from commopt.groups import TeamShape
from commopt.server import Scheduler, Server


def attach(ddp: DDP) -> None:
    comm = commopt.attach(ddp, "hierarchical_quantized", bits=4, dense=("*.bias",), timeout=60)
    ddp(torch.ones(2, 64)).sum().backward()
    print(comm.stats()["steps"])  # 1


def DistributedDataParallel() -> None:
    ddp = commopt.DistributedDataParallel(nn.Linear(64, 64))
    ddp.register_comm_hook(commopt.hierarchical_bf16)


def HookState(ddp: DDP) -> None:
    state = commopt.HookState(commopt.Hierarchical(), module=ddp.module, timeout=timedelta(minutes=5))
    ddp.register_comm_hook(state, commopt.hook)


def hook(ddp: DDP) -> None:
    ddp.register_comm_hook(commopt.HookState(commopt.Flat()), commopt.hook)


def CommState(comm: commopt.HookState) -> None:
    print(comm.stats()["inter_bytes"])  # payload that this rank has sent to other nodes, in bytes
    print(comm.report())  # with record=True; every rank must call it
    comm.timeline(trace="trace.json")  # for ui.perfetto.dev
    comm.log_to("communication.csv", every=50)  # or a writer of TensorBoard, a logger, a function


def Checkpointed(comm: commopt.HookState) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"comm": commopt.Checkpointed(comm)}, checkpoint_id="checkpoint")
    dcp.load({"comm": commopt.Checkpointed(comm)}, checkpoint_id="checkpoint")


def save_checkpoint(comm: commopt.HookState, ddp: DDP) -> None:
    moment = comm.async_state_dict()  # copied beside training
    content = {"model": ddp.module.state_dict(), "comm": moment.result()}
    commopt.save_checkpoint(content, f"checkpoint-{dist.get_rank()}.pt")  # complete or absent


def load_checkpoint(comm: commopt.HookState, ddp: DDP) -> None:
    saved = commopt.load_checkpoint(f"checkpoint-{dist.get_rank()}.pt")
    if saved is not None:  # else training begins
        ddp.module.load_state_dict(saved["model"])
        comm.load_state_dict(saved["comm"])


def Gathered(comm: commopt.HookState) -> None:
    gathered = commopt.Gathered(comm)  # accelerator.register_for_checkpointing(gathered)
    saved = gathered.state_dict()  # every rank must call it; None on all but the first
    if saved is not None:
        torch.save(saved, "comm.pt")
    gathered.load_state_dict(torch.load("comm.pt"))  # every rank


def merged_state(comm: commopt.HookState) -> None:
    torch.save(comm.state_dict(), "comm-0.pt")  # every rank its own
    parts = [torch.load("comm-0.pt")]  # the files that there are, the same on every rank
    comm.load_state_dict(commopt.merged_state(parts))


def rebuild(comm: commopt.HookState, ddp: DDP) -> None:
    survivors = dist.new_group([0])  # or, where the world has died, init_process_group() anew
    again = DDP(ddp.module, process_group=survivors)
    comm = commopt.rebuild(comm, again)


def Weights() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard(model, mesh=mesh)
    weights = commopt.Weights(commopt.Quantize(bits=4), difference=True)
    commopt.attach(model, "hierarchical_quantized", weights=weights)


def Plan(ddp: DDP) -> None:
    names = tuple(name for name, _ in ddp.module.named_parameters())
    plan = commopt.Plan(groups=(names[::-1],), strategy=repr(commopt.Hierarchical()))  # one bucket for everything
    commopt.attach(ddp, "hierarchical", plan=plan)


def Report(comm: commopt.HookState) -> None:
    report: commopt.Report = comm.report()
    print(report)


def Timeline(comm: commopt.HookState) -> None:
    timeline: commopt.Timeline = comm.timeline()
    print(len(timeline.steps), "steps were recorded")


def Links(ddp: DDP) -> None:
    nominal_links(TeamShape.of((8, 8)), Speeds(nic_gbps=25, intra_gb_per_s=200)).save("links.json")  # or commopt probe
    print(commopt.Links.load("links.json").curve("inter", "all_reduce", ranks=2))


def all_reduce() -> None:
    x = np.full(4, dist.get_rank(), dtype=np.float32)
    commopt.all_reduce(x)  # the average over all ranks, in place
    commopt.all_reduce(torch.ones(4), op="sum")


def Communicator() -> None:
    communicator = commopt.Communicator(timeout=60)
    x, everyone = torch.ones(4), torch.empty(4 * communicator.world_size)
    communicator.all_gather(everyone, x)
    communicator.broadcast(x, src=0)
    communicator.close()


def Work() -> None:
    work: commopt.Work = commopt.all_reduce(torch.ones(4), async_op=True)
    print(work.wait())


def ParameterServer() -> None:
    scheduler = Scheduler()  # `commopt scheduler` and `commopt server` start them on machines of their own
    server = Server(scheduler.address)
    model = torch.nn.Linear(4, 4)
    comm = commopt.attach(model, commopt.ParameterServer(scheduler.address, period=2, compressor=commopt.OneBit()))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
        comm.weight(2)  # samples, which deltas weigh by
        optimizer.step()  # every second one ends with a push and a pull
    comm.close()
    torch.save(server.state_dict(), "model.pt")
    server.close()
    scheduler.close()


def WireBytes() -> None:
    sent: commopt.WireBytes = commopt.Communicator().wire_bytes(1_000_000, torch.float32)
    print(sent.inter)  # bytes that this rank sends to other nodes in one all_reduce


def CommoptError() -> None:
    try:
        commopt.build_preset("hierarchical_quantised")
    except commopt.CommoptError as error:  # any of those below
        print(error)


def ConfigurationError() -> None:
    try:
        commopt.Quantize(bits=3)  # type: ignore[arg-type]
    except commopt.ConfigurationError as error:
        print(error)


def UnsupportedTensorError() -> None:
    try:
        commopt.all_reduce(torch.ones(4, dtype=torch.complex64))
    except commopt.UnsupportedTensorError as error:
        print(error)


def MismatchError() -> None:
    try:
        commopt.all_reduce(torch.ones(4))
    except commopt.MismatchError as error:  # another rank passed another length: nothing was sent
        print(error)


def LaneError(ddp: DDP) -> None:
    commopt.attach(ddp, "hierarchical")
    try:
        ddp(torch.ones(2, 64)).sum().backward()
    except commopt.LaneError as error:  # names the rank that failed, with its traceback
        raise SystemExit(1) from error


def take_ranks() -> None:
    ranks = commopt.take_ranks()  # before init_process_group
    print(ranks)  # "ranks from Slurm: 8, 4 on this node, meeting at n0 port 27629"; None alone


def TransportError(comm: commopt.HookState) -> None:
    try:
        comm.report()
    except commopt.TransportError as error:  # a store or a connection does not answer
        raise SystemExit(1) from error


def failure_of(ddp: DDP) -> None:
    commopt.attach(ddp, "hierarchical")
    try:
        ddp(torch.ones(2, 64)).sum().backward()
        dist.barrier()
    except RuntimeError as error:  # torch's own, when a peer has died
        raise commopt.failure_of(error) or error from None


def __version__() -> None:
    print(commopt.__version__)
