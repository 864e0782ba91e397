# SPDX-License-Identifier: Apache-2.0
"""Does communication run beside backward on a GPU? `python -m bench.evidence.overlap --json FILE`.

torch's profiler looks at a few steps of a GPT under DDP. What runs on which stream, and which calls of the host wait
for the device, is read from its trace.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import commopt
from bench.environment import gather, run_of
from bench.output import print_rows, write_results
from commopt.command_line import CommandParser, output_file, whole
from examples.train_gpt import GPT, VOCABULARY, strategy_name

Event = Mapping[str, Any]
"""Of a Chrome trace: cat, name, ts and dur in microseconds, pid, tid, args."""

Span = tuple[float, float]

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cuda_runtime", "cuda_driver")
_COLLECTIVE = "nccl"  # in the names of NCCL's kernels
# These wait for all of the device without having it in their name.
_WAITING = {"cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost"}


@dataclass(frozen=True)
class Overlap:
    """Of one rank; times are sums over the steps.

    lane_streams: those with NCCL's kernels, as the profiler numbers them. backward_stream: the busiest other one, None
    when there is none. waits: calls inside the steps that wait for the device, by call and the operator that made it.
    """

    steps: int
    lane_streams: tuple[int, ...]
    backward_stream: int | None
    lane_kernels: int
    backward_kernels: int
    lane_ms: float
    backward_ms: float
    both_ms: float
    waits: dict[str, int]


def overlap_of(events: Iterable[Event], step_name: str) -> Overlap:
    """Find out what ran beside what in the steps, which are marked on the host by `record_function(step_name)`.

    Kernels count from the start of the first step on: the trace must end with the work of the last one.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    steps = [_span(event) for event in whole if event["name"] == step_name and event.get("cat") == "user_annotation"]
    begin_us = min((first for first, _ in steps), default=float("inf"))
    by_stream: dict[int, list[Event]] = {}
    for event in whole:
        if event.get("cat") in _ON_DEVICE and event["ts"] >= begin_us:
            by_stream.setdefault(int(event["args"]["stream"]), []).append(event)
    lane = sorted(stream for stream, found in by_stream.items() if any(_COLLECTIVE in each["name"] for each in found))
    busy = {stream: union(map(_span, found)) for stream, found in by_stream.items()}
    backward = max((stream for stream in by_stream if stream not in lane), key=lambda s: length(busy[s]), default=None)
    on_lane = union(span for stream in lane for span in busy[stream])
    on_backward = [] if backward is None else busy[backward]
    return Overlap(
        steps=len(steps),
        lane_streams=tuple(lane),
        backward_stream=backward,
        lane_kernels=sum(len(by_stream[stream]) for stream in lane),
        backward_kernels=0 if backward is None else len(by_stream[backward]),
        lane_ms=length(on_lane) / 1000,
        backward_ms=length(on_backward) / 1000,
        both_ms=both(on_lane, on_backward) / 1000,
        waits=dict(sorted(_waits(whole, steps).items())),
    )


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same times as spans that are in order and do not touch."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def length(spans: Iterable[Span]) -> float:
    """Return the sum of their lengths."""
    return sum(end - begin for begin, end in spans)


def both(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Return how long the times are that are in both unions."""
    return length(first) + length(second) - length(union([*first, *second]))


def _covers(spans: Sequence[Span], time: float) -> bool:
    return any(begin <= time < end for begin, end in spans)


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _waits(events: Sequence[Event], steps: Sequence[Span]) -> Counter[str]:
    found: Counter[str] = Counter()
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    for event in events:
        if event.get("cat") in _ON_HOST and waits(event["name"]) and _covers(steps, event["ts"]):
            found[f"{event['name']} in {_innermost(operators, event)}"] += 1
    return found


def waits(call: str) -> bool:
    """Return whether a call of the CUDA runtime or driver keeps the host, or the device, waiting."""
    copies = "memcpy" in call.lower() and "async" not in call.lower()
    return copies or "Synchronize" in call or call in _WAITING


def _innermost(operators: Sequence[Event], call: Event) -> str:
    """Return the name of the last operator that had begun, and not ended, in the thread of `call`."""
    around = [
        each
        for each in operators
        if (each["pid"], each["tid"]) == (call["pid"], call["tid"])
        and each["ts"] <= call["ts"] <= each["ts"] + each["dur"]
    ]
    return str(max(around, key=lambda each: each["ts"])["name"]) if around else "no operator"


STEP = "training step"

# Until DDP has its buckets, NCCL its connections, and the allocators all they need.
_FIRST_STEPS = 12
# What ranks that share a GPU can use: NCCL refuses two of them on one host, so each claims a host of its own.
_ALL_BY_SOCKETS = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}


def start_process_group() -> torch.device:
    """Join the other ranks that torchrun started on this machine; return this rank's device, maybe shared."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if int(os.environ["LOCAL_WORLD_SIZE"]) > gpus:
        settings = {"NCCL_HOSTID": f"{socket.gethostname()}-{local}", **_ALL_BY_SOCKETS}
        os.environ.update({name: os.environ.get(name, value) for name, value in settings.items()})
    device = torch.device("cuda", local % gpus)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    return device


class Steps:
    """Steps that read nothing but the device's memory, so that all that waits in them is the training itself."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        self._device = device
        model = GPT(options.layers, options.width, options.context).to(device)
        self.ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
        self.state = commopt.attach(self.ddp, options.strategy, plan="ddp")
        self._optimizer = torch.optim.AdamW(self.ddp.parameters(), fused=True)
        window = torch.randint(VOCABULARY, (options.batch, options.context + 1), device=device)
        self._tokens = window[:, :-1].contiguous()
        self._targets = window[:, 1:].flatten()

    def run(self, count: int) -> None:
        """Take steps, each marked for the profiler; return when the device has done them."""
        for _ in range(count):
            with record_function(STEP):
                self._optimizer.zero_grad(set_to_none=True)
                cross_entropy(self.ddp(self._tokens).flatten(0, 1), self._targets).backward()
                self._optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def profiled(self, count: int) -> profile:
        """Take steps under the profiler, after those that every training begins with."""
        self.run(_FIRST_STEPS)
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities)
        with profiler:
            self.run(count)
        return profiler


KIND = "overlap"


def trace_of(profiler: profile) -> dict[str, Any]:
    """Return what a profiler has recorded, as a Chrome trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
    return trace


def write(path: Path, environment: dict[str, Any], overlaps: Sequence[Overlap]) -> None:
    """Write JSON lines: the environment, then every rank."""
    ranks = ({"rank": rank, **asdict(overlap)} for rank, overlap in enumerate(overlaps))
    write_results(path, {"kind": KIND, **environment}, "rank", ranks)


def print_table(title: str, overlaps: Sequence[Overlap]) -> None:
    """Print a row for each rank, and below it the calls that waited."""
    headings = ["rank", "steps", "lane ms", "backward ms", "both ms", "lane kernels", "backward kernels", "waits"]
    rows = [
        [
            str(rank),
            str(overlap.steps),
            f"{overlap.lane_ms:.2f}",
            f"{overlap.backward_ms:.2f}",
            f"{overlap.both_ms:.2f}",
            str(overlap.lane_kernels),
            str(overlap.backward_kernels),
            str(sum(overlap.waits.values())),
        ]
        for rank, overlap in enumerate(overlaps)
    ]
    waits = [
        f"rank {rank}: {count} x {call}"
        for rank, overlap in enumerate(overlaps)
        for call, count in overlap.waits.items()
    ]
    print_rows(title, headings, rows, "\n".join(waits))


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, or of `arguments`."""
    parser = CommandParser(prog="python -m bench.evidence.overlap", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=whole(1), default=2, help="to start, unless torchrun has (default 2)")
    parser.add_argument("--strategy", type=strategy_name, default="hierarchical_quantized:bits=4")
    parser.add_argument("--steps", type=whole(1), default=3, help="to look at (default 3)")
    parser.add_argument("--layers", type=whole(1), default=6)
    parser.add_argument("--width", type=whole(1), default=768)
    parser.add_argument("--context", type=whole(1), default=128)
    parser.add_argument("--batch", type=whole(1), default=16)
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write JSON lines: the environment, then every rank"
    )
    parser.add_argument("--trace", type=output_file, metavar="FILE", help="write rank 0's trace, compressed (.json.gz)")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, device: torch.device) -> list[Overlap]:
    """Profile a few steps on every rank, write and print what was found; collective."""
    steps = Steps(options, device)
    trace = trace_of(steps.profiled(options.steps))
    overlaps = gather(overlap_of(trace["traceEvents"], STEP))
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        model = {key: getattr(options, key) for key in ("layers", "width", "context", "batch")}
        environment = {
            **run_of("bench.evidence.overlap"),
            "device": name,
            "strategy": str(steps.state.aggregator),
            **model,
        }
        if options.json:
            write(options.json, environment, overlaps)
        if options.trace:
            with gzip.open(options.trace, "wt") as file:  # ui.perfetto.dev reads it as it is
                json.dump(trace, file)
        print_table(f"{options.strategy} on {name}, sums over the steps", overlaps)
    return overlaps


def main() -> int:
    """Start the ranks unless torchrun has; in each, measure. Return 1 where no communication was seen on a stream."""
    options = parse_options()
    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        launcher.append(f"--nproc-per-node={options.ranks}")
        return subprocess.run([*launcher, "-m", "bench.evidence.overlap", *sys.argv[1:]]).returncode
    device = start_process_group()
    overlaps = measure(options, device)
    seen = all(overlap.lane_kernels for overlap in overlaps)
    if not seen and dist.get_rank() == 0:
        why = "there is no GPU here" if device.type == "cpu" else "the profiler has recorded none"
        print(f"no kernel of NCCL was seen: {why}", file=sys.stderr)
    dist.destroy_process_group()
    return 0 if seen else 1


if __name__ == "__main__":
    sys.exit(main())
