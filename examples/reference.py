"""An example of every public name, shown in the API reference; `python examples/reference.py` runs all of them.

They run in a process group of one rank. What an example takes for granted, it has as a parameter: `ddp`, a torch
DistributedDataParallel model; `comm`, what `attach` returned for one that has trained for a few steps.
"""

# No `from __future__ import annotations`: what you copy from here may be a hook, whose annotations DDP reads.

import inspect
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
from commopt.aggregate import Buffer, Step
from commopt.cost import Speeds, nominal_links
from commopt.groups import Team, TeamShape

# ------------------------------------------------------------------------------------------- attach


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


def merged_state(comm: commopt.HookState) -> None:
    torch.save(comm.state_dict(), "comm-0.pt")  # every rank its own
    parts = [torch.load("comm-0.pt")]  # the files that there are, the same on every rank
    comm.load_state_dict(commopt.merged_state(parts))


def Weights() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard(model, mesh=mesh)
    weights = commopt.Weights(commopt.Quantize(bits=4), difference=True)
    commopt.attach(model, "hierarchical_quantized", weights=weights)


def NcclOptions() -> None:
    limits = {"inter": commopt.NcclOptions(max_ctas=4)}  # commopt.attach(ddp, "hierarchical", nccl=limits)
    print(limits)


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


# ------------------------------------------------------------------------------------------- presets


def flat(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.flat)


def hierarchical(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.hierarchical)


def hierarchical_bf16(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.hierarchical_bf16)


def hierarchical_quantized(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.hierarchical_quantized, bits=4, dense=("*.bias",))


def hierarchical_onebit(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.hierarchical_onebit, start_step=1000)


def hierarchical_dgc(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.hierarchical_dgc, density=0.01, warmup=((100, 0.25), (100, 0.0625)))


def hierarchical_powersgd(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.hierarchical_powersgd, matrix_rank=8, start_step=1000)


def quantized(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.quantized, bits=8)


def onebit(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.onebit, scale="rms")


def dgc(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.dgc, momentum=0.9)  # and SGD(momentum=0)


def powersgd(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.powersgd, matrix_rank=4)


def auto(ddp: DDP) -> None:
    comm = commopt.attach(ddp, commopt.auto, allow="quantized+powersgd")
    print(comm.explain())


def PRESETS() -> None:
    print(", ".join(commopt.PRESETS))


def Preset(ddp: DDP) -> None:
    def bf16() -> commopt.Aggregator:
        """Bfloat16 between all ranks."""
        return commopt.Compressed(commopt.Cast(torch.bfloat16), feedback=None)

    commopt.attach(ddp, commopt.Preset(bf16))


def build_preset(ddp: DDP) -> None:
    aggregator = commopt.build_preset("hierarchical_quantized:bits=4")
    print(aggregator)


# ------------------------------------------------------------------------------------------- aggregators


def AGGREGATORS() -> None:
    print(commopt.AGGREGATORS["hierarchical"]())


def Aggregator(ddp: DDP) -> None:
    @dataclass(frozen=True, repr=False)
    class Doubled(commopt.Aggregator):
        """The average, times two. examples/new_aggregator.py has a useful one."""

        def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: commopt.BufferContext) -> None:
            team.all_reduce(buffer, scale=2 * scale)

        def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Step, ...]:
            return commopt.Flat().calls(buffer, team)

        @property
        def lossless(self) -> bool:
            return False

    commopt.attach(ddp, Doubled())


def Flat(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.Flat())


def Hierarchical(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.Hierarchical(inter=commopt.Compressed(commopt.Cast(torch.float16))))


def Compressed(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.Compressed(commopt.Quantize(bits=8), dense=("*.bias",)))


def PowerSGD(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.Hierarchical(inter=commopt.PowerSGD(matrix_rank=8, start_step=1000)))


def LocalSGD(ddp: DDP) -> None:
    comm = commopt.attach(ddp, commopt.LocalSGD(period=8, start_step=1000))
    comm.average_parameters()  # on every rank, before saving or evaluating


def Auto(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.Auto(allow=("quantized", "powersgd"), max_trials=4))


def Feedback(ddp: DDP) -> None:
    half = commopt.Feedback(dtype=torch.bfloat16)  # residuals of 2 bytes
    commopt.attach(ddp, commopt.Compressed(commopt.Quantize(bits=4), feedback=half))


def BufferContext() -> None:
    layout = commopt.Layout.of_parameters([("weight", (64, 64))])
    print(commopt.BufferContext(layout, step=3).layout.numel)  # 4096


def Layout() -> None:
    layout = commopt.Layout.of_parameters([("weight", (64, 64)), ("bias", (64,))])
    print(layout.numel, layout.cut(4000, 4160))  # elements 4000 to 4160 of the buffer


# ------------------------------------------------------------------------------------------- compressors


def Adam(ddp: DDP) -> None:
    comm = commopt.attach(ddp, "hierarchical_onebit", adam=commopt.Adam(betas=(0.9, 0.95)))
    optimizer = comm.optimizer(ddp.parameters(), lr=1e-3, weight_decay=0.1)  # in place of AdamW
    ddp(torch.ones(2, 64)).sum().backward()
    optimizer.step()


def COMPRESSORS() -> None:
    print(commopt.COMPRESSORS["quantize"]())


def Compressor() -> None:
    quantize: commopt.Compressor = commopt.Quantize(bits=4)  # examples/new_compressor.py writes one
    values, decoded = torch.randn(1024), torch.empty(1024)
    payload = torch.empty(1, quantize.payload_nbytes(1024), dtype=torch.uint8)
    quantize.compress(values, payload, chunk_numel=1024, scale=1.0)
    quantize.decompress(payload, decoded, chunk_numel=1024)
    print((decoded - values).norm() / values.norm())


def Cast(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.Compressed(commopt.Cast(torch.float16), feedback=None))


def Quantize(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.Compressed(commopt.Quantize(bits=8, rounding="stochastic")))


def OneBit(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.Compressed(commopt.OneBit(block=1024, start_step=1000)))


def DGC(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.Compressed(commopt.DGC(density=0.01, value_dtype=torch.float32)))


# ------------------------------------------------------------------------------------------- without DDP


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


def WireBytes() -> None:
    sent: commopt.WireBytes = commopt.Communicator().wire_bytes(1_000_000, torch.float32)
    print(sent.inter)  # bytes that this rank sends to other nodes in one all_reduce


# ------------------------------------------------------------------------------------------- errors


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


# ------------------------------------------------------------------------------------------- running them


def _ddp() -> DDP:
    return DDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))


def _comm() -> commopt.HookState:
    ddp = _ddp()
    comm = commopt.attach(ddp, "hierarchical_quantized", record=True)
    for _ in range(3):
        ddp(torch.ones(2, 64)).sum().backward()
    return comm


def examples() -> dict[str, Callable[..., None]]:
    """Return all examples of this file, by the public name."""
    return {name: found for name, found in globals().items() if inspect.isfunction(found) and hasattr(commopt, name)}


def run(example: Callable[..., None]) -> None:
    """Run one, with what its parameters ask for."""
    make = {"ddp": _ddp, "comm": _comm}
    example(**{name: make[name]() for name in inspect.signature(example).parameters})


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name, example in examples().items():
        print(f"--- {name}")
        run(example)
    dist.destroy_process_group()
