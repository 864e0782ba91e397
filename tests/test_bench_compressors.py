# SPDX-License-Identifier: Apache-2.0
"""The benchmark of whole compressors: the same work for both sides, real averages, and what it writes and prints."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import commopt
from bench.compressors import __main__ as compressors
from bench.compressors.baselines import (
    METHODS,
    TORCH_HOOKS,
    method_of,
    world_of_one,
)
from bench.compressors.lone_hook import AbsentRanks, LoneHook, in_backward
from bench.compressors.measure import (
    Failure,
    Measurement,
    markdown,
    measure,
    write,
)
from bench.compressors.methods import RANKS_PER_NODE, Bucket, Gradients, Method, Start, layouts_of
from bench.compressors.profiled import Profile, counted
from bench.compute_only import LoneRank
from bench.replay import VARIABLE
from commopt import ConfigurationError
from commopt.feedback import Layout

CPU = torch.device("cpu")
HOOKS = [name for name in METHODS if name in TORCH_HOOKS]
PRESETS = [name for name in METHODS if name not in TORCH_HOOKS]
# Matrices of several shapes, some of which are too small to be worth it, and vectors; more than one block of channels.
LAYOUTS = (
    Layout.of_parameters([("head.weight", (64, 96)), ("head.bias", (64,))]),
    Layout.of_parameters(
        [("conv", (32, 16, 3, 3)), ("scale", (32,)), ("query", (128, 128)), ("key", (128, 128)), ("tiny", (4, 6))]
    ),
)
MATRICES = ((64, 96), (32, 144), (128, 128), (128, 128))  # those of at least twice their factors' elements, at r = 4
DENSE_NUMEL = 64 + 32 + 4 * 6
NUMEL = sum(layout.numel for layout in LAYOUTS)

DEVICES = [
    pytest.param("cpu"),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Return a device, in a world of one rank that can reduce there."""
    found = torch.device(request.param, 0) if request.param == "cuda" else CPU
    with world_of_one(found), pytest.MonkeyPatch.context() as patch:
        if found == CPU:
            patch.setattr(dist, "all_gather", all_gather_as_of_nccl)
        yield found


def all_gather_as_of_nccl(outputs: list[Tensor], own: Tensor, **_: object) -> SimpleNamespace:
    """Resolve to one tensor of all ranks, which torch's quantization hooks rely on; gloo resolves to a list."""
    outputs[0].copy_(own)
    future = torch.futures.Future[list[Tensor]]()
    future.set_result([torch.stack(outputs)])
    return SimpleNamespace(get_future=lambda: future)


def gradients(device: torch.device = CPU) -> Gradients:
    return Gradients("tiny", LAYOUTS, device)


def take_steps(start: Start, own: Gradients, steps: int) -> list[Tensor]:
    """Return the gradients of each step as they come out, all buckets joined."""
    results = []
    for _ in range(steps):
        own.renew()
        for number in range(len(own.buffers)):
            start(number)()
        results.append(torch.cat(own.buffers))
    return results


# ------------------------------------------------------------------------------------- who is measured


def test_every_preset_and_every_hook_is_measured() -> None:
    assert {name.partition(":")[0] for name in PRESETS} == set(commopt.PRESETS) - {"auto"}  # which chooses of them
    assert set(HOOKS) == set(TORCH_HOOKS)
    assert {beside.hook for beside in METHODS.values() if beside is not None} < set(HOOKS)


@pytest.mark.parametrize("name", METHODS)
def test_every_contender_runs(name: str, device: torch.device) -> None:
    found = measure(method_of(name), gradients(device), steps=2, limit_s=inf)
    assert (found.model, found.method, found.device, found.steps) == ("tiny", name, device.type, 2)
    assert 0 < found.best_ms <= found.median_ms
    assert found.host_ms > 0
    assert found.copy_ms > 0
    assert 0 < found.payload_bytes <= 8 * NUMEL
    if device.type == "cuda":
        assert found.peak_bytes is not None
        assert found.peak_bytes > 0 or name in ("torch.allreduce", "flat")  # which work in place
    else:
        assert found.peak_bytes is None
        assert found.host_ms == found.median_ms


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch.noloco", "'torch.noloco' is unknown; of torch's hooks there are torch.allreduce, torch.fp16"),
        ("lossy", "preset 'lossy' is unknown"),
        ("powersgd:bits=4", "preset powersgd has no option bits=4"),
    ],
)
def test_what_is_unknown_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        method_of(name)


# ---------------------------------------------------------------------------------------- the buckets


@pytest.mark.parametrize(
    ("name", "numel"), [("resnet50", 25_557_032), ("bert-large", 336_226_108), ("gpt2-medium", 354_823_168)]
)
def test_buckets_hold_every_gradient_and_close_at_25_mib(name: str, numel: int) -> None:
    layouts = layouts_of(name)
    first, *others, last = [4 * layout.numel for layout in layouts]
    assert first >= 2**20
    assert all(nbytes >= 25 * 2**20 for nbytes in others)
    assert last > 0
    assert sum(layout.numel for layout in layouts) == numel
    assert all(piece.shape for layout in layouts for piece in layout.pieces)


# ----------------------------------------------------------------------------- both do the same work


def counting(collective: Callable[..., Any], place: int, handed: list[int]) -> Callable[..., Any]:
    def counted(*args: Any, **options: Any) -> Any:
        handed.append(args[place].nbytes)
        return collective(*args, **options)

    return counted


COLLECTIVES: dict[Any, dict[str, int]] = {
    dist: {"all_reduce": 0, "all_gather": 1},  # what torch's hooks call
    AbsentRanks: {"all_reduce": 1, "all_gather": 2, "all_to_all": 2},
}


@pytest.mark.parametrize("name", [name for name in METHODS if not name.startswith("hierarchical")])
def test_methods_hand_over_the_bytes_that_are_reported(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[int] = []
    monkeypatch.setenv(VARIABLE, "0")  # a replay calls what was there when it was captured
    each, own = method_of(name), gradients(device)
    start = each.enter(own)
    take_steps(start, own, max(each.lead_steps, 4))  # what rests is told once, in the first compressed steps
    of = dist if name in TORCH_HOOKS else AbsentRanks
    for primitive, place in COLLECTIVES[of].items():
        monkeypatch.setattr(of, primitive, counting(getattr(of, primitive), place, handed))
    take_steps(start, own, 2)
    assert sum(handed) == 2 * each.payload_nbytes(own)


def test_powersgd_sends_the_same_values_as_torchs() -> None:
    factors = sum(4 * (rows + cols) for rows, cols in MATRICES)
    own = gradients()
    sent = {name: method_of(name).payload_nbytes(own) / 4 for name in METHODS if "powersgd" in name.lower()}
    assert sent["torch.powerSGD:r=4"] == sent["torch.powerSGD:r=4:batched"] == factors + DENSE_NUMEL
    assert sent["powersgd"] == factors + DENSE_NUMEL


def share_of(name: str) -> int:
    """Return what a result is to be multiplied by: commopt's is of one rank among several that send nothing."""
    return 1 if name in TORCH_HOOKS else sum(RANKS_PER_NODE)


def missing(name: str, device: torch.device, steps: tuple[int, ...]) -> list[float]:
    """Return how far the mean of the first results is from the gradient, relative to it, after so many steps each."""
    own, each = gradients(device), method_of(name)
    results = torch.stack(take_steps(each.enter(own), own, each.lead_steps + max(steps))[each.lead_steps :])
    expected = torch.cat(own.values)
    means = [share_of(name) * results[:count].mean(0) for count in steps]
    return [float((mean - expected).norm() / expected.norm()) for mean in means]


def test_powersgd_leaves_out_as_much_as_torchs(device: torch.device) -> None:
    """With error feedback the mean goes to the gradient even where that has full rank: in both at the same pace."""
    steps = (1, 8, 32)
    torchs = missing("torch.powerSGD:r=4", device, steps)
    assert 0.9 < torchs[0] < 1.0
    assert torchs[2] < 0.5 * torchs[0]
    for other in ("torch.powerSGD:r=4:batched", "powersgd"):
        assert missing(other, device, steps) == pytest.approx(torchs, abs=0.02)


# -------------------------------------------------------------------------------- a rank by itself


PAIR = [Layout.of_parameters([("a", (50, 400))]), Layout.of_parameters([("b", (7_000,)), ("c", (3,))])]


def by_lone_rank(aggregator: commopt.Aggregator, own: Gradients) -> Callable[[int], object]:
    alone = LoneRank(aggregator, own.layouts, ranks_per_node=(1, 1))
    return lambda number: alone.reduce(number, own.buffers[number])


def by_lone_hook(aggregator: commopt.Aggregator, own: Gradients) -> Callable[[int], object]:
    hook, buckets = LoneHook(aggregator, (1, 1), own.device), [Bucket(own, number) for number in range(len(PAIR))]
    return lambda number: hook(buckets[number]).wait()


@pytest.mark.parametrize("way", [by_lone_rank, by_lone_hook])
@pytest.mark.parametrize("preset", ["quantized", "quantized:bits=4", "onebit", "dgc:density=0.1"])
def test_of_two_ranks_the_other_sends_the_same(preset: str, way: Any) -> None:
    """Two ranks with equal gradients: their average is what one has, as far as the encoding goes."""
    own, steps = Gradients("pair", PAIR, CPU), 60
    with nullcontext() if dist.is_initialized() else world_of_one(CPU):  # the fixture's may be there
        reduce = way(commopt.build_preset(preset), own)
        sums = [torch.zeros(layout.numel) for layout in PAIR]
        for _ in range(steps):
            own.renew()
            for number, buffer in enumerate(own.buffers):
                reduce(number)
                sums[number] += buffer
    for total, gradient in zip(sums, own.values, strict=True):
        assert (total / steps - gradient).norm() < 0.2 * gradient.norm()


def test_hooks_are_called_inside_a_backward() -> None:
    tasks: list[int] = []
    in_backward(lambda: tasks.append(torch._C._current_graph_task_id()))
    assert tasks[0] != -1 == torch._C._current_graph_task_id()


def test_a_preset_is_measured_with_replay_and_without() -> None:
    seen: list[str | None] = []

    def enter(own: Gradients) -> Start:
        seen.append(os.environ.get(VARIABLE))
        return lambda number: lambda: None

    method = Method("flat", enter, lambda own: 8, replay=True, replayed=lambda: 7)
    variants = compressors.variants(method, "both")
    assert [each.label for each in variants] == ["flat", "flat, no replay"]
    assert [measure(each, gradients(), 1, inf).replay for each in variants] == [True, False]
    assert seen == [None, None, "0", "0"]
    assert VARIABLE not in os.environ
    assert [each.label for each in compressors.variants(method, "off")] == ["flat, no replay"]
    assert len(compressors.variants(method_of("torch.bf16"), "both")) == 1


def test_a_step_is_made_of_launches_and_kernels() -> None:
    names = {"cuda_runtime": ["cudaLaunchKernel", "cudaEventRecord", "cudaGraphLaunch", "cudaMemcpyAsync"]}
    names |= {"cuda_driver": ["cuLaunchKernelEx", "cuStreamWaitEvent"], "cpu_op": ["aten::LaunchKernel"]}
    names |= {"kernel": ["a", "b"], "gpu_memset": ["c"]}
    events = [{"ph": "X", "cat": kind, "name": name, "dur": 500.0} for kind, of in names.items() for name in of]
    longest = [(name, 1, 0.5) for name in "abc"]
    assert counted([*events, {"ph": "i", "cat": "kernel", "name": "mark"}]) == Profile(4, 1, 3, 1.5, longest)


# ----------------------------------------------------------------------------------------- measuring


def test_a_step_counts_only_after_those_that_do_not() -> None:
    taken: list[int] = []

    def enter(own: Gradients) -> Callable[[int], Callable[[], object]]:
        def start(number: int) -> Callable[[], object]:
            if own.model == "tiny":
                taken.append(number)
            return lambda: None

        return start

    found = measure(Method("idle", enter, lambda own: 8, lead_steps=3), gradients(), steps=4, limit_s=inf)
    assert taken == [0, 1] * (3 + 6 + 4)
    assert (found.steps, found.payload_bytes) == (4, 8)


def test_one_that_fails_does_not_take_the_others_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    def enter(own: Gradients) -> Callable[[int], Callable[[], object]]:
        raise ValueError("Got the following error when running the callback: KeyError: 7\n\nAt:\n  hooks.py(9)")

    broken = Method("broken", enter, lambda own: 0)
    failed, found = compressors.measure_model(gradients(), [broken, method_of("flat")], steps=1, limit_s=inf)
    assert failed == Failure("tiny", "broken", "ValueError: KeyError: 7")
    assert found.method == "flat"
    assert capsys.readouterr().err == "tiny: broken\ntiny: flat\n"


# ------------------------------------------------------------------------------------------- reporting

THEIRS = Measurement("m", "torch.powerSGD:r=4", "cuda", 10, 8.0, 7.5, 7.0, 2.0, 2**21, 2**20)
OURS = replace(THEIRS, method="powersgd", median_ms=2.0, best_ms=1.75, host_ms=1.5)


def test_the_file(tmp_path: Path) -> None:
    file = tmp_path / "compressors.json"
    write(file, {"device": "x"}, [THEIRS, OURS], [Failure("m", "dgc", "bad")])
    header, theirs, ours, failure = map(json.loads, file.read_text().splitlines())
    assert header == {"record": "environment", "kind": "compressors", "device": "x"}
    assert (theirs["record"], theirs["median_ms"], "beside" in theirs) == ("step", 8.0, False)
    assert (ours["beside"], ours["times_as_fast"], ours["target"], ours["met"]) == (
        "torch.powerSGD:r=4",
        4.0,
        4.0,
        True,
    )
    assert failure == {"record": "failure", "model": "m", "method": "dgc", "reason": "bad"}
    assert markdown(file).splitlines()[2:] == [
        "| m | `torch.powerSGD:r=4` | 8.0 | 7.0 | 2 | 4.0 | - |",
        "| m | `powersgd` | 2.0 | 1.5 | 2 | 1.0 | 4.0 |",
    ]
    split = replace(OURS, buckets=3, device_ms=0.5, profile=Profile(40, 9, 50, 0.4), replay=True, replayed=30)
    write(
        file, {"device": "x"}, [replace(THEIRS, profile=Profile(7, 0, 7, 1.0)), split, replace(split, replay=False)], []
    )
    assert markdown(file).splitlines()[2:] == [
        "| m | `torch.powerSGD:r=4` | 8.0 | 7.0 | 7000 | - | 7 |  | 2 | 4.0 | - |",
        "| m | `powersgd` | 2.0 | 1.5 | 500 | 0.50 | 40 | 30 | 2 | 1.0 | 4.0 |",
        "| m | `powersgd`, no replay | 2.0 | 1.5 | 500 | 0.50 | 40 |  | 2 | 1.0 | 4.0 |",
    ]
    assert [json.loads(line).get("target") for line in file.read_text().splitlines()[1:]] == [None, 4.0, None]
    write(file, {"device": "x"}, [replace(THEIRS, device="cpu", peak_bytes=None)], [])
    assert markdown(file).splitlines()[2:] == ["| m | `torch.powerSGD:r=4` | 8.0 | 4.0 | - |"]


def test_from_the_command_line(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compressors.json"
    arguments = ["--models", "a,b", "--strategies", "torch.fp16,flat,powersgd", "--steps", "2", "--device", device.type]
    monkeypatch.setattr(sys, "argv", ["bench.compressors", *arguments, "--json", str(file)])
    monkeypatch.setattr(compressors, "layouts_of", lambda name: LAYOUTS)
    monkeypatch.setattr(compressors, "world_of_one", lambda device: nullcontext())  # it is there
    compressors.main()
    header, *steps = map(json.loads, file.read_text().splitlines())
    assert header["kind"] == "compressors"
    assert header["command"] == f"python -m bench.compressors {' '.join(arguments)} --json {file}"
    assert header["ranks_per_node"] == [2, 2]
    assert header["kernels"] in (["torch"] if device.type == "cpu" else ["native", "nvrtc"])
    assert header["empty_all_reduce_us"] > 0
    times = 1 if device.type == "cpu" else 2  # with replay and without
    assert [(step["model"], step["method"]) for step in steps] == [
        *((model, "powersgd") for model in "ab" for _ in range(times)),
        *((model, name) for model in "ab" for name in ("torch.fp16", *times * ["flat"])),
    ]
    assert f"b on {header['device']}, a step without the network" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "alexnet"], "model 'alexnet' is unknown; did you mean resnet50? there are resnet50"),
        (["--strategies", "flat,nothing"], "preset 'nothing' is unknown"),
        (["--steps", "0"], "argument --steps: '0' is not a whole number from 1"),
    ],
)
def test_bad_options(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.compressors", *arguments])
    with pytest.raises(SystemExit):
        compressors.parse_options()
    assert message in capsys.readouterr().err
