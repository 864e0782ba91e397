# SPDX-License-Identifier: Apache-2.0
"""All steps, the most telling first."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from shutil import which

from bench.demo import local_ranks
from bench.gpu.parse_results import Read, compressors, kernels, learned, machine, overlap, tests
from bench.gpu.runner import ROOT, environment
from bench.gpu.session import Step
from commopt.cluster import EmulatedCluster

KERNEL_TESTS = tuple(f"tests/test_{name}.py" for name in ("kernels", "gpu_loaders"))
CONTRACT, CAPTURE, DDP, FAILURES, SOAK = RANKS_TESTS = tuple(
    f"tests/test_gpu_{name}.py" for name in ("contract", "capture", "ddp", "failures", "soak")
)
_TWO = "[2] or [1+1]"  # names of worlds of two ranks
_FLAT_GRAPHS = "replays and flat"
_PRESETS_OF_TWO = "every_preset and not nodes"
KERNEL_NAMES = ("cast_", "encode_", "decode_", "recode_", "sparse_", "factor_", "lowrank_")  # how ours begin
PRESETS = (
    "ddp",
    "flat",
    "hierarchical",
    "hierarchical_bf16",
    "hierarchical_quantized",
    "hierarchical_quantized:bits=4",
    "hierarchical_onebit",
    "hierarchical_dgc:density=0.01",
    "hierarchical_powersgd",
)
SANITIZER_TOOLS = {
    "memcheck": "no kernel reads or writes out of bounds",
    "racecheck": "no kernel races on shared memory",
    "initcheck": "no kernel reads what nobody wrote",
    "synccheck": "no kernel waits for threads that never come",
}
_TIMES = ("--seconds", "5", "--look-every", "2", "--noop-steps", "5")  # of a training: enough to see it learn
_LINK_RATE = "1gbit"
_ACROSS = ("ddp", "hierarchical", "hierarchical_quantized", "hierarchical_powersgd")
_SANITIZER = "compute-sanitizer"
_LAUNCHER, _TWO_NODES = local_ranks(2, 2)
_TEST_TIMEOUT_S = 170  # longer than any job of ranks, which then shows where each rank hangs
_TEST_PROCESSES = 6


def steps(build: bool) -> list[Step]:
    """Return all steps; `build`: commopt is compiled first, else it is what this Python has.

    The first part proves most per minute and needs no more than two ranks at a time, but for a few failures. Limits
    are those of ranks that take turns: 2 to 6 ms for a small collective of two ranks, 25 to 50 of four, 100 of eight.
    """
    return [
        Step(
            "machine",
            "what machine this is; how fast it copies and multiplies",
            _module("bench.gpu.machine", "--json", "{out}/machine.json"),
            60,
            machine,
        ),
        _build(build),
        _tests("kernel-tests", "both loaders compute what the reference does", 150, *KERNEL_TESTS, at_once=True),
        _benchmark("kernels", "what part of the memory's speed each kernel reaches", 100, kernels),
        _tests("nccl-tests", "two ranks average over NCCL: right, and the same bits", 60, CONTRACT, k=_TWO),
        _tests("graph-tests", "a CUDA graph replays steps of flat presets", 60, CAPTURE, k=_FLAT_GRAPHS),
        _benchmark(
            "overlap",
            "communication overlaps with backward; nothing waits for the device",
            60,
            overlap,
            "--trace",
            "{out}/overlap-trace.json.gz",
            module="bench.evidence.overlap",
        ),
        _tests("ddp-tests", "every preset inside DDP, two ranks", 90, DDP, k=_PRESETS_OF_TWO),
        _tests("failures", "a failing or dying rank is known to all", 120, FAILURES),
        *(replace(step, part=2) for step in _second_part()),
    ]


def _second_part() -> list[Step]:
    return [
        _tests("contract-tests", "the contract of all aggregators over NCCL", 240, CONTRACT, k=f"not ({_TWO})"),
        _tests(
            "nodes-tests",
            "DDP's features, AMP and CUDA graphs on nodes",
            240,
            DDP,
            CAPTURE,
            k=f"not ({_PRESETS_OF_TWO}) and not ({_FLAT_GRAPHS})",
        ),
        _tests("option-tests", "options of communicators, recordings, ranks", 120, *_other_tests()),
        _benchmark("compressors", "what a step of each preset costs beside torch's hooks", 120, compressors),
        _tests("soak", "500 steps: nothing grows", 100, SOAK),
        _training("training", "a GPT learns by every preset on 2 x 2 ranks", PRESETS, 150),
        _tuner("exact-tuning", "auto"),
        _tuner("lossy-tuning", "auto:allow=quantized+powersgd"),
        *map(_sanitizer, SANITIZER_TOOLS),
        _emulated_network(),
    ]


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return "{python}", "-m", name, *arguments


def _ranks(*module: str) -> tuple[str, ...]:
    """Return what runs a module on four ranks that share the GPU and pass for two nodes."""
    return _module(*_LAUNCHER, "-m", "bench.gpu.rank", *module)


def _build(build: bool) -> Step:
    shows = "the kernels compile for this GPU, all of them"
    if not build:
        return Step("build", shows, _module("bench.gpu.build"), 60)
    return Step("build", shows, ("{first python}", "-m", "bench.gpu.build", "--into", "{build}"), 300)


def _tests(name: str, shows: str, limit_s: float, *files: str, at_once: bool = False, k: str = "") -> Step:
    file = f"{name}.xml"
    options = ["-v", "--tb=short", "-m", "gpu", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    options += ["--timeout", str(_TEST_TIMEOUT_S), "--junitxml", f"{{out}}/{file}"]
    options += ["-n", str(_TEST_PROCESSES), "--dist", "worksteal"] if at_once else []
    options += ["-k", k] if k else []
    return Step(name, shows, _module("pytest", *options, *files), limit_s, tests(file))


def _other_tests() -> list[str]:
    """Return every other file with tests that need a GPU, none forgotten."""
    files = sorted((ROOT / "tests").glob("test_*.py"))
    marked = [f"tests/{each.name}" for each in files if "test_gpu_" in each.name or "mark.gpu" in each.read_text()]
    return [name for name in marked if name not in (*KERNEL_TESTS, *RANKS_TESTS)]


def _benchmark(name: str, shows: str, limit_s: float, read: Read, *arguments: str, module: str = "") -> Step:
    command = _module(module or f"bench.{name}", "--json", f"{{out}}/{name}.json", *arguments)
    return Step(name, shows, command, limit_s, read)


def _sanitizer(tool: str) -> Step:
    sanitizer = (_SANITIZER, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20")
    return Step(
        tool,
        SANITIZER_TOOLS[tool],
        (*sanitizer, *_kernel_filters(), *_module("bench.gpu.every_kernel")),
        150,
        settings={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        missing=lambda: _not_on_path(_SANITIZER, "CUDA's toolkit"),
        refusal="Device not supported",
    )


@cache
def _kernel_filters() -> tuple[str, ...]:
    """Return what has the sanitizer look at our kernels alone, where it knows how: torch's are many and slow."""
    if _not_on_path(_SANITIZER, "CUDA's toolkit"):
        return ()
    program = which(_SANITIZER, path=environment()["PATH"]) or _SANITIZER
    said = subprocess.run([program, "--help"], capture_output=True, text=True, check=False).stdout
    names = KERNEL_NAMES if "--kernel-name" in said else ()
    return tuple(word for name in names for word in ("--kernel-name", f"kernel_substring={name}"))


def _not_on_path(program: str, comes_with: str) -> str | None:
    return None if which(program, path=environment()["PATH"]) else f"no {program} on PATH; it comes with {comes_with}"


def _training(name: str, shows: str, strategies: Sequence[str], limit_s: float) -> Step:
    file = f"{name}.json"
    arguments = ("--strategies", ",".join(strategies), *_TIMES, "--json", f"{{out}}/{file}")
    command = _ranks("bench.training", *arguments)
    return Step(name, shows, command, limit_s, learned(file, strategies), settings=_TWO_NODES)


def _tuner(name: str, strategy: str) -> Step:
    script = ("examples/train_gpt.py", "--strategy", "ddp", "--steps", "80", "--look-every", "40")
    command = _ranks("commopt", "run", "--strategy", strategy, "--report", *script)
    return Step(name, f"{strategy} measures, tries and decides over NCCL", command, 90, settings=_TWO_NODES)


def _emulated_network() -> Step:
    """Return a training on two nodes whose link is slow, where namespaces can be had."""
    shape = ("--nodes", "2", "--ranks-per-node", "2", "--rate", _LINK_RATE)
    training = ("bench.training", "--strategies", ",".join(_ACROSS), *_TIMES, "--json", "{out}/network.json")
    return Step(
        "network",
        f"a GPT learns on two emulated nodes with a {_LINK_RATE} link between them",
        _module("commopt", "cluster", *shape, "-m", "bench.gpu.rank", *training),
        90,
        learned("network.json", _ACROSS),
        settings=_TWO_NODES,
        missing=lambda: EmulatedCluster.missing(_LINK_RATE),
    )
