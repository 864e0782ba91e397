# SPDX-License-Identifier: Apache-2.0
"""The overlap benchmark: what it reads from a trace, checked by hand, and that it runs where there is no GPU."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.evidence.overlap import (
    STEP,
    Overlap,
    both,
    length,
    main,
    measure,
    overlap_of,
    parse_options,
    union,
    waits,
)
from tests.ranks import run

LANE, BACKWARD, COPIES = 20, 7, 24
AUTOGRAD, MAIN = 2, 1


def on_device(name: str, stream: int, begin: float, end: float, cat: str = "kernel") -> dict[str, Any]:
    args = {"stream": stream}
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "pid": 0, "tid": stream, "args": args}


def on_host(cat: str, name: str, begin: float, end: float, tid: int = MAIN) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "pid": 900, "tid": tid, "args": {}}


TRACE = [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    on_host("user_annotation", "training step", 1000, 2000),
    on_host("user_annotation", "training step", 3000, 4000),
    on_device("training step", BACKWARD, 1000, 4000, "gpu_user_annotation"),
    # Before the first step: of no step.
    on_device("ncclDevKernel_AllReduce_Sum_f32_RING_LL", LANE, 100, 900),
    on_device("gemm", BACKWARD, 100, 900),
    # Backward works from 1100 to 1600, the lane from 1300 to 1700 with a hole: 0.2 ms together, and 0.05 more.
    on_device("gemm", BACKWARD, 1100, 1400),
    on_device("gemm", BACKWARD, 1390, 1600),
    on_device("encode_uniform8", LANE, 1300, 1500),
    on_device("ncclDevKernel_AllGather", LANE, 1550, 1700),
    # The second step: one after the other.
    on_device("gemm", BACKWARD, 3100, 3200),
    on_device("Memset (Device)", LANE, 3200, 3300, "gpu_memset"),
    on_device("Memcpy HtoD", COPIES, 3100, 3150, "gpu_memcpy"),
    # Calls of the host: three wait inside the steps.
    on_host("cpu_op", "aten::to", 1000, 1100),
    on_host("cpu_op", "aten::copy_", 1010, 1090),
    on_host("cpu_op", "aten::mm", 1000, 1990, AUTOGRAD),
    on_host("cuda_runtime", "cudaMemcpyAsync", 1020, 1030),
    on_host("cuda_runtime", "cudaStreamSynchronize", 1040, 1080),
    on_host("cuda_runtime", "cudaStreamSynchronize", 3040, 3080),
    on_host("cuda_runtime", "cudaMalloc", 1500, 1510, AUTOGRAD),
    on_host("cuda_runtime", "cudaDeviceSynchronize", 4100, 4200),
    on_host("cuda_runtime", "cudaLaunchKernel", 1500, 1510),
]


def test_what_a_trace_says() -> None:
    assert overlap_of(TRACE, "training step") == Overlap(
        steps=2,
        lane_streams=(LANE,),
        backward_stream=BACKWARD,
        lane_kernels=3,
        backward_kernels=3,
        lane_ms=0.45,
        backward_ms=0.6,
        both_ms=0.25,
        waits={
            "cudaMalloc in aten::mm": 1,
            "cudaStreamSynchronize in aten::copy_": 1,
            "cudaStreamSynchronize in no operator": 1,
        },
    )


def test_times_in_common_are_those_of_a_count() -> None:
    draws = random.Random(0)
    for _ in range(200):
        sets = [[(begin, begin + draws.randint(0, 9)) for begin in draws.sample(range(60), 5)] for _ in range(2)]
        seconds = [{at for begin, end in spans for at in range(begin, end)} for spans in sets]
        first, second = map(union, sets)
        assert length(first) == len(seconds[0])
        assert both(first, second) == len(seconds[0] & seconds[1])


def test_calls_that_wait() -> None:
    waiting = "cudaDeviceSynchronize cudaStreamSynchronize cudaEventSynchronize cuCtxSynchronize cudaMemcpy cudaFree"
    others = "cudaMemcpyAsync cuMemcpyHtoDAsync_v2 cudaStreamWaitEvent cudaEventQuery cudaLaunchKernel"
    assert all(map(waits, [*waiting.split(), "cuMemcpyDtoH_v2"]))
    assert not any(map(waits, others.split()))


def measured(rank: int, world_size: int, folder: str) -> list[Overlap]:
    small = ["--layers", "1", "--width", "32", "--context", "16", "--batch", "2", "--steps", "2"]
    files = ["--json", f"{folder}/overlap.json", "--trace", f"{folder}/trace.json.gz"]
    return measure(parse_options([*small, *files]), torch.device("cpu"))


def test_it_runs_without_a_gpu(tmp_path: Path) -> None:
    """Where there are no streams, steps are marked and everything is written all the same."""
    nothing = Overlap(2, (), None, 0, 0, 0.0, 0.0, 0.0, {})
    assert run(measured, 2, str(tmp_path), nodes=(1, 1)) == [[nothing, nothing]] * 2
    environment, *ranks = map(json.loads, (tmp_path / "overlap.json").read_text().splitlines())
    assert environment["kind"] == "overlap"
    assert environment["strategy"].startswith("Hierarchical(inter=Compressed(Quantize(bits=4")
    assert [(record["rank"], record["steps"], record["both_ms"]) for record in ranks] == [(0, 2, 0.0), (1, 2, 0.0)]
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert sum(event["name"] == STEP for event in trace["traceEvents"]) == 2


def test_ranks_are_started_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def note(command: list[str]) -> subprocess.CompletedProcess[bytes]:
        started.append(command)
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(sys, "argv", ["bench.evidence.overlap", "--ranks", "4"])
    monkeypatch.setattr(subprocess, "run", note)
    monkeypatch.delenv("RANK", raising=False)
    assert main() == 7
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    launcher.append("--nproc-per-node=4")
    assert started == [[*launcher, "-m", "bench.evidence.overlap", "--ranks", "4"]]
