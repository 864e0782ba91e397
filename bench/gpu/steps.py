# SPDX-License-Identifier: Apache-2.0
"""All steps, the most telling first."""

from __future__ import annotations

from collections.abc import Sequence

from bench.demo import local_ranks
from bench.gpu.parse_results import Read, compressors, kernels, learned, machine, overlap, tests
from bench.gpu.runner import ROOT
from bench.gpu.session import Step

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
}
_TIMES = ("--seconds", "5", "--look-every", "2", "--noop-steps", "5")  # of a training: enough to see it learn
_LAUNCHER, _TWO_NODES = local_ranks(2, 2)
_TEST_TIMEOUT_S = 170  # longer than any job of ranks, which then shows where each rank hangs
_TEST_PROCESSES = 6


def steps(build: bool) -> list[Step]:
    """Return all steps; `build`: commopt is compiled first, else the one that is installed is used.

    Limits are those of ranks that take turns on the GPU.
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
        _tests("contract-tests", "the contract of all aggregators over NCCL", 240, CONTRACT, k=f"not ({_TWO})"),
        _tests(
            "nodes-tests",
            "DDP's features, AMP and CUDA graphs on nodes",
            240,
            DDP,
            CAPTURE,
            k=f"not ({_PRESETS_OF_TWO}) and not ({_FLAT_GRAPHS})",
        ),
        _tests("other-tests", "recordings, damaged checkpoints, ranks, clocks", 120, *_other_tests()),
        _benchmark("compressors", "what a step of each preset costs beside torch's hooks", 120, compressors),
        _tests("soak", "500 steps: nothing grows", 100, SOAK),
        _training("training", "a GPT learns by every preset on 2 x 2 ranks", PRESETS, 150),
        _tuner("tuning", "auto:allow=quantized+powersgd"),
        *map(_sanitizer, SANITIZER_TOOLS),
    ]


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return "{python}", "-m", name, *arguments


def _ranks(*module: str) -> tuple[str, ...]:
    """Return the command that runs a module on four ranks that share the GPU and pass for two nodes."""
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
    sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    for name in KERNEL_NAMES:  # ours alone: torch's are many and slow
        sanitizer += ["--kernel-name", f"kernel_substring={name}"]
    command = (*sanitizer, *_module("bench.gpu.every_kernel"))
    return Step(tool, SANITIZER_TOOLS[tool], command, 150, variables={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def _training(name: str, shows: str, strategies: Sequence[str], limit_s: float) -> Step:
    file = f"{name}.json"
    arguments = ("--strategies", ",".join(strategies), *_TIMES, "--json", f"{{out}}/{file}")
    command = _ranks("bench.training", *arguments)
    return Step(name, shows, command, limit_s, learned(file, strategies), variables=_TWO_NODES)


def _tuner(name: str, strategy: str) -> Step:
    script = ("examples/train_gpt.py", "--strategy", "ddp", "--steps", "80", "--look-every", "40")
    command = _ranks("commopt", "run", "--strategy", strategy, "--report", *script)
    return Step(name, f"{strategy} measures, tries and decides over NCCL", command, 90, variables=_TWO_NODES)
