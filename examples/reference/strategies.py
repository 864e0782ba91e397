# SPDX-License-Identifier: Apache-2.0
"""Examples of presets, aggregators and compressors."""

# No `from __future__ import annotations`: what you copy from here may be a hook, whose annotations DDP reads.

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
from commopt.aggregate import Action, Buffer
from commopt.groups import Team, TeamShape


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
    commopt.attach(ddp, commopt.onebit, scale="mean")


def dgc(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.dgc, density=0.02, min_elements=1)


def diloco(ddp: DDP) -> None:
    commopt.attach(ddp, commopt.diloco, period=100)


def onebit_local(ddp: DDP) -> None:
    comm = commopt.attach(ddp, commopt.onebit_local, start_step=1000)
    comm.average_parameters()  # on every rank, before saving or evaluating


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


def AGGREGATORS() -> None:
    print(commopt.AGGREGATORS["hierarchical"]())


def Aggregator(ddp: DDP) -> None:
    @dataclass(frozen=True, repr=False)
    class Doubled(commopt.Aggregator):
        """The average, times two. examples/new_aggregator.py has a useful one."""

        def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: commopt.BufferContext) -> None:
            team.all_reduce(buffer, scale=2 * scale)

        def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Action, ...]:
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


def Outer(ddp: DDP) -> None:
    outer = commopt.Outer(lr=0.7, momentum=0.9, nesterov=True)
    commopt.attach(ddp, commopt.LocalSGD(period=50, outer=outer, compressor=commopt.Quantize(bits=4)))


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
    quantize.compress(values, payload, commopt.compress.Encoding(chunk_numel=1024))
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
