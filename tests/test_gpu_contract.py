# SPDX-License-Identifier: Apache-2.0
"""The contract of tests/test_contract_aggregators.py over NCCL, with 2, 4 and 8 ranks that may share one GPU.

Equal bits on all ranks are promised here too. The bits of gloo are promised only where commopt itself adds, in rank
order, or where two values are added: NCCL adds more of them in an order of its own.
"""

from __future__ import annotations

import pytest
import torch

from commopt import DGC, Aggregator, Cast, Compressed, Flat, Hierarchical, Quantize
from tests import test_collectives as collectives
from tests import test_contract_aggregators as contract
from tests.catalogue import LAYOUTS, aggregators, representatives
from tests.ranks import Nodes, run

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
over_nccl = pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])

WORLDS: dict[str, tuple[int, Nodes | None]] = {
    **{layout: LAYOUTS[layout] for layout in ("2", "4", "1+1", "2x2")},
    "4x2": (8, (2, 2, 2, 2)),
}
SIZES: contract.Sizes = {
    torch.float32: (0, 1, 1023, 40_000),
    torch.float16: (1023,),
    torch.bfloat16: (1023,),
    torch.float64: (7,),
}
TIMEOUT_S = 90.0

every_world = pytest.mark.parametrize("layout", WORLDS)


@pytest.mark.gpu
@needs_gpu
class TestOverNccl:
    @every_world
    def test_mean_is_right_and_bit_identical(self, layout: str) -> None:
        world_size, nodes = WORLDS[layout]
        tried = aggregators() if layout == "2x2" else representatives()
        arguments = (contract.average_everything, world_size, tried, "cuda", SIZES)
        digests = run(*arguments, nodes=nodes, device="cuda", timeout_s=TIMEOUT_S)
        contract.assert_equal_bits(digests)
        assert digests[0].keys() == {repr(aggregator) for aggregator in tried}, "some were refused"

    @every_world
    def test_awkward_values(self, layout: str) -> None:
        world_size, nodes = WORLDS[layout]
        run(average_awkward_values, world_size, "cuda", nodes=nodes, device="cuda", timeout_s=TIMEOUT_S)

    def test_error_of_compression_does_not_grow_with_the_world(self) -> None:
        errors = {ranks: run(contract.compression_errors, ranks, "cuda", device="cuda") for ranks in (2, 4, 8)}
        contract.assert_errors_do_not_grow({ranks: everyones[0] for ranks, everyones in errors.items()})

    @pytest.mark.parametrize("layout", ["4", "2x2"])
    def test_wire_bytes_follow_the_formulas(self, layout: str) -> None:
        contract.assert_wire_bytes(layout, torch.float32, "cuda")

    def test_hooks_return_the_bucket_itself(self) -> None:
        tried = [Flat(), Hierarchical(inter=Compressed(Quantize(8)))]
        run(contract.return_legal_tensors, 4, tried, "cuda", nodes=(2, 2), device="cuda")

    def test_five_collectives(self) -> None:
        run(move_everything, 4, "cuda", nodes=(2, 2), device="cuda", timeout_s=TIMEOUT_S)


def average_awkward_values(rank: int, world_size: int, device: str) -> None:
    """Large, whole and not finite ones."""
    contract.sum_integers(rank, world_size, aggregators(), device)
    contract.average_large_values(rank, world_size, representatives(), device)
    contract.spread_non_finite(rank, world_size, representatives(), device, every=6)


def move_everything(rank: int, world_size: int, device: str) -> None:
    """Run the standalone collectives on few shapes."""
    shapes: list[collectives.Shape] = [(), (2, 0, 3), (3, 5), (30_001,)]
    collectives.all_reduce(rank, world_size, device, shapes)
    collectives.reduce_scatter(rank, world_size, device, shapes)
    collectives.all_gather(rank, world_size, device, shapes)
    collectives.broadcast(rank, world_size, device, shapes[1:3])
    collectives.all_to_all(rank, world_size, device, shapes)


# ------------------------------------------------------------------------------ the bits of gloo

# A code of 1 or 2 bits stands for a mean, whose last bits depend on the order of a sum over its block.
EXACT = (
    Cast(torch.bfloat16),
    Cast(torch.float16),
    Cast(rounding="stochastic"),
    Quantize(8),
    Quantize(4),
    Quantize(8, rounding="stochastic"),
    DGC(0.05, value_dtype=torch.float32),
)
SAME_BITS: dict[str, list[Aggregator]] = {
    "2": [Flat()],
    "4": [Compressed(compressor) for compressor in EXACT],
    "2x2": [Hierarchical(inter=inter) for inter in (Flat(), Compressed(Quantize(8)), Compressed(DGC(0.05)))],
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("layout", SAME_BITS)
def test_sums_of_a_fixed_order_have_the_bits_of_the_cpu(layout: str) -> None:
    world_size, nodes = WORLDS[layout]
    sizes = {torch.float32: (1, 1023, 150_001)}
    arguments = (contract.average_everything, world_size, SAME_BITS[layout])
    on_cpu = run(*arguments, "cpu", sizes, nodes=nodes)[0]
    assert run(*arguments, "cuda", sizes, nodes=nodes, device="cuda")[0] == on_cpu
