# SPDX-License-Identifier: Apache-2.0
"""All_reduces for the test that compares promised bytes with the network's counters; runs under torchrun."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

import commopt
from commopt.cluster import LinkTraffic, traffic

NUMEL = 1 << 20  # 4 MiB of float32
REPEATS = 4
COUNTS = 2


def count(comm: commopt.Communicator, x: torch.Tensor, aggregator: commopt.Aggregator) -> LinkTraffic:
    """Return what this rank's node sent for REPEATS all_reduces of `x`; collective."""
    dist.barrier()
    before = traffic()
    dist.barrier()
    for _ in range(REPEATS):
        comm.all_reduce(x, aggregator=aggregator)
    dist.barrier()
    return traffic() - before


def main() -> None:
    """Print, on rank 0, one JSON object: for each preset the promised and the counted payload bytes per node."""
    dist.init_process_group("gloo")
    comm = commopt.Communicator()
    x = torch.ones(NUMEL)
    report = {}
    for name, preset in commopt.PRESETS.items():
        aggregator = preset.build()
        comm.all_reduce(x, aggregator=aggregator)  # connections are made on first use
        counts = [count(comm, x, aggregator) for _ in range(COUNTS)]
        wire = comm.wire_bytes(NUMEL, torch.float32, aggregator)
        mine = {
            "rank": dist.get_rank(),
            "promised inter": wire.inter * REPEATS,
            "promised intra": wire.intra * REPEATS,
            # Probes and what TCP sends again on a busy machine only add: the least is nearest to what was meant.
            "counted inter": min(sent.link_payload_bytes for sent in counts),
            "counted intra": min(sent.loopback.tx_payload_bytes for sent in counts),
        }
        everyone: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        report[name] = {"nodes": [list(node) for node in comm.cluster.nodes], "ranks": everyone}
    if dist.get_rank() == 0:
        print(json.dumps(report), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
