"""All steps, the most telling first."""

from __future__ import annotations

from collections.abc import Sequence
from shutil import which

from bench.cluster import Cluster
from bench.demo import local_ranks
from bench.gpu.found import Read, compressors, kernels, launches, learned, machine, overlap, tests
from bench.gpu.place import environment
from bench.gpu.runner import ROOT
from bench.gpu.step import Step

KERNEL_TESTS = tuple(
    f"tests/test_{name}.py" for name in ("kernels", "gpu_quantize", "gpu_sparse_lowrank", "gpu_loaders")
)
DDP_TESTS = tuple(f"tests/test_gpu_{name}.py" for name in ("ddp", "capture", "soak"))
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
_LAUNCHER, _TWO_NODES = local_ranks(2, 2)
_TEST_TIMEOUT_S = 170  # longer than any job of ranks, which then shows where each rank hangs
_TEST_PROCESSES = 6


def steps(build: bool) -> list[Step]:
    """Return all steps; `build`: commopt is compiled first, else it is what this Python has."""
    return [
        _build(build),
        Step(
            "machine",
            "what machine this is; how fast it copies and multiplies",
            _module("bench.gpu.machine", "--json", "{out}/machine.json"),
            60,
            machine,
        ),
        _tests("kernel-tests", "both loaders compute what the reference does", 150, *KERNEL_TESTS, at_once=True),
        _benchmark("kernels", "what part of the memory's speed each kernel reaches", 120, kernels),
        _tests("collective-tests", "failures, options and the contract over NCCL", 240, *_other_tests()),
        _benchmark("compressors", "what a step of each preset costs beside torch's hooks", 120, compressors),
        _benchmark(
            "launches",
            "what a launch costs with each loader and Triton",
            40,
            launches,
            module="bench.kernels.launches",
        ),
        _tests("ddp-tests", "DDP's features, AMP, long runs and CUDA graphs", 200, *DDP_TESTS),
        _sanitizer("memcheck"),
        _sanitizer("racecheck"),
        _benchmark(
            "overlap",
            "communication overlaps with backward; nothing waits for the device",
            60,
            overlap,
            "--trace",
            "{out}/overlap-trace.json.gz",
        ),
        _training("training", "a GPT learns by every preset on 2 x 2 ranks", PRESETS, 110),
        _tuner("exact-tuning", "auto"),
        _tuner("lossy-tuning", "auto:allow=quantized+powersgd"),
        _sanitizer("initcheck"),
        _sanitizer("synccheck"),
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


def _tests(name: str, shows: str, limit_s: float, *files: str, at_once: bool = False) -> Step:
    file = f"{name}.xml"
    options = ["-v", "--tb=short", "-m", "gpu", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    options += ["--timeout", str(_TEST_TIMEOUT_S), "--junitxml", f"{{scratch}}/{file}"]
    options += ["-n", str(_TEST_PROCESSES), "--dist", "worksteal"] if at_once else []
    return Step(name, shows, _module("pytest", *options, *files), limit_s, tests(file))


def _other_tests() -> list[str]:
    """Return every other file with tests that need a GPU, none forgotten; the contract takes long and comes last."""
    files = sorted((ROOT / "tests").glob("test_*.py"))
    marked = [f"tests/{each.name}" for each in files if "test_gpu_" in each.name or "mark.gpu" in each.read_text()]
    others = [name for name in marked if name not in (*KERNEL_TESTS, *DDP_TESTS)]
    return sorted(others, key=lambda name: "contract" in name)


def _benchmark(name: str, shows: str, limit_s: float, read: Read, *arguments: str, module: str = "") -> Step:
    command = _module(module or f"bench.{name}", "--json", f"{{out}}/{name}.json", *arguments)
    return Step(name, shows, command, limit_s, read)


def _sanitizer(tool: str) -> Step:
    sanitizer = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20")
    return Step(
        tool,
        SANITIZER_TOOLS[tool],
        (*sanitizer, *_module("bench.gpu.every_kernel")),
        90,
        settings={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        missing=lambda: _not_on_path("compute-sanitizer"),
        refusal="Device not supported",
    )


def _not_on_path(program: str) -> str | None:
    return None if which(program, path=environment()["PATH"]) else f"no {program} on PATH; it comes with CUDA's toolkit"


def _training(name: str, shows: str, strategies: Sequence[str], limit_s: float) -> Step:
    file = f"{name}.json"
    arguments = ("--strategies", ",".join(strategies), *_TIMES, "--json", f"{{scratch}}/{file}")
    command = _ranks("bench.training", *arguments)
    return Step(name, shows, command, limit_s, learned(file, strategies), settings=_TWO_NODES)


def _tuner(name: str, strategy: str) -> Step:
    script = ("examples/train_gpt.py", "--strategy", "ddp", "--steps", "80", "--look-every", "40")
    command = _ranks("commopt", "run", "--strategy", strategy, "--report", *script)
    return Step(name, f"{strategy} measures, tries and decides over NCCL", command, 60, settings=_TWO_NODES)


def _emulated_network() -> Step:
    """Return a training on two nodes whose link is slow, where namespaces can be had."""
    shape = ("--nodes", "2", "--ranks-per-node", "2", "--rate", _LINK_RATE)
    training = ("bench.training", "--strategies", ",".join(_ACROSS), *_TIMES, "--json", "{scratch}/network.json")
    return Step(
        "network",
        f"a GPT learns on two emulated nodes with a {_LINK_RATE} link between them",
        _module("bench.cluster", *shape, "-m", "bench.gpu.rank", *training),
        90,
        learned("network.json", _ACROSS),
        settings=_TWO_NODES,
        missing=lambda: Cluster.missing(_LINK_RATE),
    )
