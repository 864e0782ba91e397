# SPDX-License-Identifier: Apache-2.0
"""Record the machine, and whether its GPU is in good health: `python -m bench.gpu.machine --json FILE`.

Versions, the GPU, its rates of copies and products, and the answers of topology, doctor and nvidia-smi.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from shutil import which
from statistics import median
from typing import Any

import torch

from bench.environment import machine
from commopt.command_line import CommandParser, output_file, whole

_PACKAGES = ("triton", "cupy-cuda12x", "cupy-cuda13x", "nvidia-ml-py", "pybind11", "scikit-build-core", "transformers")
_PROGRAMS = ("compute-sanitizer",)
_QUERY = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,clocks.max.memory,power.limit"
_TOPOLOGY = ("nvidia-smi", "topo", "-m")
_DOCTOR_STATUSES = (0, 1, 3)  # nothing wrong, warnings, errors: an answer each
_TIMEOUT_S = 60
_ROWS, _CALLS = 5, 10


def versions() -> dict[str, str | None]:
    """Return the versions of all software that takes part; None for a package that is absent."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    release = re.search(r"release ([\d.]+)", _output(["nvcc", "--version"])) if which("nvcc") else None
    found = {**{name: _installed(name) for name in _PACKAGES}, **{name: which(name) for name in _PROGRAMS}}
    return {"cuda": torch.version.cuda, "nccl": nccl, "nvcc": release[1] if release else None, **found}


def device_facts(device: torch.device) -> dict[str, Any]:
    """Return the properties of the device."""
    if device.type != "cuda":
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "gpus": torch.cuda.device_count(),
    }


def rates(device: torch.device, copy_bytes: int, side: int) -> dict[str, float]:
    """Return the rate of a device copy, bytes read and written, and of a product of bfloat16 matrices."""
    source = torch.randint(256, (copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    copy_s, product_s = (_seconds_of(call, device) for call in (lambda: target.copy_(source), lambda: left @ right))
    return {"copy_gbps": 2 * copy_bytes / copy_s / 1e9, "bf16_matmul_tflops": 2 * side**3 / product_s / 1e12}


def _seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call: the median over some rows of calls, after one row of warm-up."""
    rows_s = []
    for _ in range(_ROWS + 1):
        started = time.perf_counter()
        for _ in range(_CALLS):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rows_s.append((time.perf_counter() - started) / _CALLS)
    return median(rows_s[1:])


def nvidia_smi() -> dict[str, str]:
    """Return the answers of the driver's tool; empty where there is none."""
    if not which("nvidia-smi"):
        return {}
    return {"query": _said("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv"), "topology": _said(*_TOPOLOGY)}


def _said(*command: str) -> str:
    """Return the output of a tool, errors too: in containers it cannot answer everything."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    return done.stdout + done.stderr


def _output(command: Sequence[str], statuses: Sequence[int] = (0,)) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode not in statuses:
        raise RuntimeError(f"{' '.join(command[:4])} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _of_module(*arguments: str, statuses: Sequence[int] = (0,)) -> Any:
    return json.loads(_output([sys.executable, "-m", *arguments], statuses))


def main() -> int:
    """Ask all questions, write the answers, and fail when one is missing."""
    parser = CommandParser(prog="python -m bench.gpu.machine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=output_file, metavar="FILE", required=True)
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default cuda)")
    parser.add_argument("--copy-bytes", type=whole(1), default=2**31, help="of the copy that is timed (default 2 GiB)")
    parser.add_argument("--side", type=whole(1), default=8192, help="of the matrices (default 8192)")
    options = parser.parse_args()
    device = torch.device(options.device)
    questions: dict[str, Callable[[], Any]] = {
        "versions": versions,
        "device": lambda: device_facts(device),
        "rates": lambda: rates(device, options.copy_bytes, options.side),
        "nvidia_smi": nvidia_smi,
        "topology": lambda: _of_module("topology", "--json"),
        "doctor": lambda: _of_module("commopt", "doctor", "--json", statuses=_DOCTOR_STATUSES),
    }
    record: dict[str, Any] = {**machine()}
    failures = []
    for name, ask in questions.items():
        try:
            record[name] = ask()
        except Exception as error:  # each is worth having without the others
            record[name] = {}
            failures.append(f"{name}: {error}")
    options.json.write_text(json.dumps({**record, "failures": failures}, indent=1) + "\n")
    print(json.dumps({name: record[name] for name in ("versions", "device", "rates")}, indent=1))
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
