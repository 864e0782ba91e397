# SPDX-License-Identifier: Apache-2.0
"""What a bucket costs on the host: `python -m bench.evidence.hook_overhead --json bench/results/hook_overhead.json`.

One process, a model of many small buckets, no peers: a backward with commopt's hook less a backward with a hook that
returns the bucket at once, divided by the buckets, is what the lane, the operation and the future cost. The two
alternate, and the figure is the median over pairs.
"""

from __future__ import annotations

import json
import tempfile
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

import commopt
from bench.environment import machine
from bench.output import print_rows
from commopt.command_line import CommandParser, output_file, whole

_LAYERS = 64
_WIDTH = 64


def build() -> commopt.DistributedDataParallel:
    """Return a model with a bucket per layer."""
    layers = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)]
    layer_mib = _WIDTH * _WIDTH * 4 / 2**20
    return commopt.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=layer_mib)


def step_us(ddp: nn.Module, steps: int) -> float:
    """Return the mean time of a backward in microseconds."""
    x, total = torch.ones(1, _WIDTH), 0.0
    for _ in range(steps):
        loss = ddp(x).sum()
        started = perf_counter()
        loss.backward()
        total += perf_counter() - started
    return total / steps * 1e6


def measure(preset: commopt.Preset, pairs: int, steps: int) -> dict[str, Any]:
    """Return the host cost per bucket of one preset in microseconds."""
    plain, hooked = build(), build()
    plain.register_comm_hook(None, noop_hook)
    state = commopt.attach(hooked, preset, plan="ddp")
    for ddp in (plain, hooked):
        step_us(ddp, 5)  # DDP rebuilds its buckets
    before = state.stats()
    differences_us = [step_us(hooked, steps) - step_us(plain, steps) for _ in range(pairs)]
    after = state.stats()
    buckets = (after["buckets"] - before["buckets"]) // (pairs * steps)
    return {
        "preset": preset.name,
        "buckets": buckets,
        "step_us_per_bucket": median(differences_us) / buckets,
        "hook_us_per_bucket": after["hook_us_per_bucket"],
    }


def main() -> None:
    """Measure every preset, print and write the figures."""
    parser = CommandParser(prog="python -m bench.evidence.hook_overhead", description=__doc__)
    parser.add_argument("--pairs", type=whole(1), default=15)
    parser.add_argument("--steps", type=whole(1), default=20, help="steps on each side of a pair")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        rows = [measure(preset, options.pairs, options.steps) for preset in commopt.PRESETS.values()]
        dist.destroy_process_group()
    figures = ("step_us_per_bucket", "hook_us_per_bucket")
    shown = [[row["preset"], str(row["buckets"]), *(f"{row[name]:.1f}" for name in figures)] for row in rows]
    print_rows("On the host", ["preset", "buckets", "step us/bucket", "hook us/bucket"], shown)
    if options.json is not None:
        environment = {**machine(), "command": "python -m bench.evidence.hook_overhead"}
        options.json.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
