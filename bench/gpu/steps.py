# SPDX-License-Identifier: Apache-2.0
"""All steps, the most telling first."""

from __future__ import annotations

from collections.abc import Sequence

from bench.demo import local_ranks
from bench.gpu import exposed as exposed_times
from bench.gpu.parse_results import (
    Read,
    compressors,
    exposed,
    kernels,
    learned,
    machine,
    overlap,
    tests,
    to_loss_of,
)
from bench.gpu.runner import ROOT
from bench.gpu.session import Step

KERNEL_TESTS = tuple(f"tests/test_{name}.py" for name in ("kernels", "gpu_loaders"))
CONTRACT, CAPTURE, DDP, FAILURES, SOAK, REPLAY, SHARDED = RANKS_TESTS = tuple(
    f"tests/test_gpu_{name}.py" for name in ("contract", "capture", "ddp", "failures", "soak", "replay", "sharded")
)
_TWO = "[2] or [1+1]"  # names of worlds of two ranks
_FLAT_GRAPHS = "replays and flat"
_PRESETS_OF_TWO = "every_preset and not nodes"
KERNEL_NAMES = ("cast_", "encode_", "decode_", "recode_", "sparse_", "factor_", "lowrank_", "commit")  # how ours begin
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
    "initcheck": "no kernel reads memory that nobody has written",
    "synccheck": "no kernel waits at a barrier that others do not come to",
}
_ALL_KERNELS = ("initcheck",)  # who else has written memory counts too
TO_A_LOSS = ("torch_bf16", "torch_powersgd", *exposed_times.STRATEGIES[6:])
_METHODS = "torch.allreduce,flat,torch.bf16,hierarchical_bf16,quantized,quantized:bits=4,quantized:bits=2,onebit,dgc,"
_METHODS += "torch.powerSGD:r=4,powersgd,hierarchical_quantized:bits=4,hierarchical_powersgd"
_CHOSEN = ("--models", "gpt2-medium,resnet50", "--strategies", _METHODS)  # models of the most buckets, and the fewest
_REPLAYED_TOO = ("hierarchical_quantized:bits=4", "hierarchical_powersgd")
_TIMES = ("--seconds", "5", "--look-every", "2", "--noop-steps", "5")  # of a training: enough to see it learn
_TIMES_TO_A_LOSS = ("--seconds", "7", "--look-every", "1", "--noop-steps", "10", "--json", "{out}/to-a-loss.json")
_LAUNCHER, _TWO_NODES = local_ranks(2, 2)
_TEST_TIMEOUT_S = 170  # longer than any job of ranks, which then shows where each rank hangs
_TEST_PROCESSES = 6
_NEEDS_A_GPU = ("mark.gpu", "ON_GPU")
_SHARED = ("quick", "slow", "long")


def steps(build: bool) -> list[Step]:
    """Return all steps; `build`: commopt is compiled first, else the one that is installed is used.

    Limits are those of ranks that take turns on the GPU.
    """
    return [
        _build(build),
        Step(
            "machine",
            "what machine this is; how fast it copies and multiplies",
            _module("bench.gpu.machine", "--json", "{out}/machine.json"),
            60,
            machine,
        ),
        *_first_tests(),
        _benchmark("compressors", "what a step of each preset costs beside torch's hooks", 120, compressors, *_CHOSEN),
        _benchmark("kernels", "what part of the memory's speed each kernel reaches", 100, kernels),
        *_paced(),
        _benchmark(
            "overlap",
            "communication overlaps with backward; nothing waits for the device",
            60,
            overlap,
            "--trace",
            "{out}/overlap-trace.json.gz",
            module="bench.evidence.overlap",
        ),
        *_tests_in_groups(),
        _tests("soak", "500 steps: nothing grows", 100, SOAK, group="long"),
        _training("training", "a GPT learns by every preset on 2 x 2 ranks", PRESETS, 150, "long"),
        _tuner("tuning", "auto:allow=quantized+powersgd"),
    ]


def _first_tests() -> list[Step]:
    """Return the tests without which no time counts."""
    same = "both loaders compute what the reference does"
    return [
        _tests("kernel-tests", same, 150, *KERNEL_TESTS, at_once=True, group="first"),
        *(_sanitizer(tool, "first") for tool in SANITIZER_TOOLS),
    ]


def _paced() -> list[Step]:
    """Return the steps over links that the kernel paces, with ranks that share the GPU."""
    powersgd, two_bits = "hierarchical_powersgd", "hierarchical_quantized:bits=2"
    shares = ((powersgd, "torch_powersgd", 0.6), (two_bits, "ddp", 0.15))
    again = ("--without-replay", ",".join(_REPLAYED_TOO))
    what = "time of communication that backward does not hide"
    names, sharded = exposed_times.STRATEGIES, exposed_times.SHARDED
    return [
        _exposed("exposed-10gbit", f"{what}: GPT-2", "10gbit", 1, 120, names, shares, *again),
        _exposed("exposed-1gbit", f"{what}: a GPT of 28M", "1gbit", 1, 150, names, (), "--model", "gpt-28m", *again),
        _exposed("exposed-hsdp", f"{what}: HSDP", "10gbit", 2, 100, sharded, (), "--parallel", "hsdp"),
        Step(
            "to-a-loss",
            "seconds to the loss that torch's bfloat16 hook comes to, over 1 Gbit/s",
            _over_links("1gbit", 1, "bench.training", "--strategies", ",".join(TO_A_LOSS), *_TIMES_TO_A_LOSS),
            120,
            to_loss_of(TO_A_LOSS[0], "to-a-loss.json", TO_A_LOSS),
        ),
    ]


def _over_links(rate: str, ranks_per_node: int, *module: str) -> tuple[str, ...]:
    links = ("--rate", rate, "--nodes", "2", "--ranks-per-node", str(ranks_per_node))
    return _module("bench.gpu.paced", *links, "-m", *module)


def _exposed(
    name: str,
    shows: str,
    rate: str,
    ranks_per_node: int,
    limit_s: float,
    strategies: Sequence[str],
    shares: Sequence[tuple[str, str, float]],
    *arguments: str,
) -> Step:
    file = f"{name}.json"
    command = _over_links(rate, ranks_per_node, "bench.gpu.exposed", *arguments, "--json", f"{{out}}/{file}")
    return Step(name, shows, command, limit_s, exposed(file, strategies, *shares))


def _tests_in_groups() -> list[Step]:
    """Return the tests of ranks: what is quick first, those of one group at the same time."""
    rest = f"not ({_PRESETS_OF_TWO}) and not ({_FLAT_GRAPHS})"
    return [
        _tests("replay-tests", "steps of replayed kernels have the bits of others", 150, REPLAY, group="quick"),
        _tests("ddp-tests", "every preset inside DDP, two ranks", 120, DDP, k=_PRESETS_OF_TWO, group="quick"),
        _tests("sharded-tests", "FSDP2, AdamW before averages, LocalSGD", 240, SHARDED, group="quick"),
        _tests("graph-tests", "a CUDA graph replays steps of flat presets", 90, CAPTURE, k=_FLAT_GRAPHS, group="quick"),
        _tests(
            "nccl-tests", "two ranks average over NCCL: right, and the same bits", 90, CONTRACT, k=_TWO, group="quick"
        ),
        _tests("failures", "a failing or dying rank is known to all", 120, FAILURES),
        _tests(
            "contract-tests", "all aggregators over NCCL, more ranks", 240, CONTRACT, k=f"not ({_TWO})", group="slow"
        ),
        _tests("nodes-tests", "DDP's features, AMP and CUDA graphs on nodes", 240, DDP, CAPTURE, k=rest, group="slow"),
        _tests("other-tests", "recordings, damaged checkpoints, ranks, clocks", 240, *_other_tests(), group="slow"),
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


def _tests(
    name: str, shows: str, limit_s: float, *files: str, at_once: bool = False, k: str = "", group: str = ""
) -> Step:
    file = f"{name}.xml"
    options = ["-v", "--tb=short", "-m", "gpu", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    options += ["--timeout", str(_TEST_TIMEOUT_S), "--junitxml", f"{{out}}/{file}"]
    options += ["-n", str(_TEST_PROCESSES), "--dist", "worksteal"] if at_once else []
    options += ["-k", k] if k else []
    shared = group in _SHARED  # not failures: one client of MPS that is killed can take others with it
    return Step(name, shows, _module("pytest", *options, *files), limit_s, tests(file), group=group, shares_gpu=shared)


def _other_tests() -> list[str]:
    """Return every other file with tests that need a GPU, none forgotten."""
    files = sorted((ROOT / "tests").glob("test_*.py"))
    texts = {f"tests/{each.name}": each.read_text() for each in files}
    marked = [name for name, text in texts.items() if any(word in text for word in _NEEDS_A_GPU)]
    return [name for name in marked if name not in (*KERNEL_TESTS, *RANKS_TESTS)]


def _benchmark(name: str, shows: str, limit_s: float, read: Read, *arguments: str, module: str = "") -> Step:
    command = _module(module or f"bench.{name}", "--json", f"{{out}}/{name}.json", *arguments)
    return Step(name, shows, command, limit_s, read)


def _sanitizer(tool: str, group: str) -> Step:
    sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    for name in () if tool in _ALL_KERNELS else KERNEL_NAMES:  # ours alone: torch's are many and slow
        sanitizer += ["--kernel-name", f"kernel_substring={name}"]
    command = (*sanitizer, *_module("bench.gpu.every_kernel"))
    variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Step(tool, SANITIZER_TOOLS[tool], command, 150, variables=variables, group=group)


def _training(name: str, shows: str, strategies: Sequence[str], limit_s: float, group: str) -> Step:
    file = f"{name}.json"
    arguments = ("--strategies", ",".join(strategies), *_TIMES, "--json", f"{{out}}/{file}")
    command = _ranks("bench.training", *arguments)
    return Step(name, shows, command, limit_s, learned(file, strategies), _TWO_NODES, group, shares_gpu=True)


def _tuner(name: str, strategy: str) -> Step:
    script = ("examples/train_gpt.py", "--strategy", "ddp", "--steps", "80", "--look-every", "40")
    command = _ranks("commopt", "run", "--strategy", strategy, "--report", *script)
    shows = f"{strategy} measures, tries and decides over NCCL"
    return Step(name, shows, command, 90, variables=_TWO_NODES, shares_gpu=True)
