"""The benchmark of whole compressors: the same work for both sides, real averages, and what it writes and prints."""

from __future__ import annotations

import json
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
from bench.compressors.contender import Contender, Start
from bench.compressors.contenders import CONTENDERS, contender, in_rounds
from bench.compressors.gradients import Gradients, layouts_of
from bench.compressors.measure import Measurement, TooSlowError, measure
from bench.compressors.presets import RANKS_PER_NODE
from bench.compressors.report import Comparison, Failure, compare, print_table, write
from bench.compressors.torch_hooks import TORCH_HOOKS, Bucket, empty_all_reduce_us, world_of_one
from bench.mute import LoneRank, Mute
from commopt import ConfigurationError
from commopt.feedback import Layout

CPU = torch.device("cpu")
HOOKS = [name for name in CONTENDERS if name in TORCH_HOOKS]
PRESETS = [name for name in CONTENDERS if name not in TORCH_HOOKS]
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
    assert {beside.hook for beside in CONTENDERS.values() if beside is not None} < set(HOOKS)


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_runs(name: str, device: torch.device) -> None:
    found = measure(contender(name), gradients(device), steps=2, limit_s=inf)
    assert (found.model, found.contender, found.device, found.steps) == ("tiny", name, device.type, 2)
    assert 0 < found.best_ms <= found.median_ms
    assert found.host_ms > 0
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
        contender(name)


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


def test_a_bucket_shows_its_buffer_in_the_shapes_of_the_parameters() -> None:
    own = gradients()
    bucket = Bucket(own, 1)
    shapes = [tuple(gradient.shape) for gradient in bucket.gradients()]
    assert shapes == [(32, 16, 3, 3), (32,), (128, 128), (128, 128), (4, 6)]
    assert (bucket.index(), bucket.is_last(), Bucket(own, 0).is_last()) == (1, True, False)
    for number, gradient in enumerate(bucket.gradients()):
        gradient.fill_(number)
    assert torch.equal(own.buffers[1].unique(), torch.arange(5.0))
    assert bucket.buffer() is own.buffers[1]


def test_gradients_are_the_same_in_every_step() -> None:
    own = gradients()
    before = [buffer.clone() for buffer in own.buffers]
    for buffer in own.buffers:
        buffer.zero_()
    own.renew()
    assert all(map(torch.equal, own.buffers, before))
    assert torch.cat(before).std() == pytest.approx(1.0, abs=0.02)


# ----------------------------------------------------------------------------- both do the same work


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_hand_over_the_bytes_that_are_reported(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[int] = []

    def counting(collective: Callable[..., Any], place: int) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            handed.append(args[place].nbytes)
            return collective(*args, **options)

        return counted

    each, own = contender(name), gradients(device)
    start = each.enter(own)
    take_steps(start, own, each.lead_steps)
    monkeypatch.setattr(dist, "all_reduce", counting(dist.all_reduce, 0))
    monkeypatch.setattr(dist, "all_gather", counting(dist.all_gather, 1))
    take_steps(start, own, 2)
    assert sum(handed) == 2 * each.payload_nbytes(own)


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("hierarchical")])
def test_presets_hand_over_the_bytes_that_are_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[int] = []

    def counting(collective: Callable[..., None], place: int) -> Callable[..., None]:
        def counted(*args: Any, **options: Any) -> None:
            handed.append(args[place].nbytes)
            collective(*args, **options)

        return counted

    for primitive, place in (("all_reduce", 1), ("all_gather", 2), ("all_to_all", 2)):
        monkeypatch.setattr(Mute, primitive, counting(getattr(Mute, primitive), place))
    each, own = contender(name), gradients()
    take_steps(each.enter(own), own, 2)
    assert sum(handed) == 2 * each.payload_nbytes(own)


def test_powersgd_sends_the_same_values_as_torchs() -> None:
    factors = sum(4 * (rows + cols) for rows, cols in MATRICES)
    lefts = sum(4 * rows for rows, _ in MATRICES)
    own = gradients()
    sent = {name: contender(name).payload_nbytes(own) / 4 for name in CONTENDERS if "powersgd" in name.lower()}
    assert sent["torch.powerSGD:r=4"] == sent["torch.powerSGD:r=4:batched"] == factors + DENSE_NUMEL
    assert sent["powersgd"] == factors + DENSE_NUMEL
    # One side in even steps, the other in odd ones; the dense elements in both.
    assert sent["powersgd:alternating=True"] == (lefts + (factors - lefts)) / 2 + DENSE_NUMEL


@pytest.mark.parametrize(
    ("name", "bytes_per_element"), [("torch.allreduce", 4), ("flat", 4), ("torch.fp16", 2), ("torch.bf16", 2)]
)
def test_bytes_of_plain_values(name: str, bytes_per_element: int) -> None:
    assert contender(name).payload_nbytes(gradients()) == bytes_per_element * NUMEL


POWERSGD = ("torch.powerSGD:r=4", "torch.powerSGD:r=4:batched", "powersgd", "powersgd:alternating=True")


def share_of(name: str) -> int:
    """Return what a result is to be multiplied by: commopt's is of one rank among several that send nothing."""
    return 1 if name in TORCH_HOOKS else sum(RANKS_PER_NODE)


@pytest.mark.parametrize("name", POWERSGD)
def test_powersgd_finds_a_gradient_of_low_rank(name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    own = gradients(device)
    for buffer, layout in zip(own.values, LAYOUTS, strict=True):
        for part, piece in zip(buffer.split([piece.numel for piece in layout.pieces]), layout.pieces, strict=True):
            matrix = part.view(piece.shape[0], -1)
            rank = min(4, *matrix.shape)
            left, right = (torch.randn(extent, rank, device=device) for extent in matrix.shape)
            matrix.copy_(left @ right.T)
    each = contender(name)
    *_, before, last = take_steps(each.enter(own), own, each.lead_steps + 10)
    expected = torch.cat(own.values)
    # What an alternating step leaves out, the next one brings.
    found = share_of(name) * (before + last) / 2
    assert (found - expected).norm() < 1e-3 * expected.norm()


def missing(name: str, device: torch.device, steps: tuple[int, ...]) -> list[float]:
    """Return how far the mean of the first results is from the gradient, relative to it, after so many steps each."""
    own, each = gradients(device), contender(name)
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
    alternating = missing("powersgd:alternating=True", device, (1, 32, 64))  # half the values, twice the steps
    assert torchs[2] < alternating[1] < 0.7
    assert alternating[2] == pytest.approx(torchs[2], abs=0.05)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("torch.allreduce", 0.0, 1e-7),
        ("torch.fp16", 1e-5, 5e-4),
        ("torch.bf16", 1e-4, 4e-3),
        ("torch.pertensor", 1e-3, 2e-2),
        ("torch.perchannel", 1e-3, 2e-2),
    ],
)
def test_what_torchs_hooks_leave_out_of_one_step(name: str, least: float, most: float, device: torch.device) -> None:
    """A rounding is at most 2^-11 of a value in float16, 2^-9 in bfloat16, 1/510 of the range in 8 bits."""
    own = gradients(device)
    start = contender(name).enter(own)
    found = torch.cat([_result(start(number)) for number in range(len(own.buffers))])
    expected = torch.cat(own.values)
    assert least <= (found - expected).norm() / expected.norm() <= most


def _result(wait: Callable[[], object]) -> Tensor:
    found = wait()
    assert isinstance(found, Tensor)
    return found


# -------------------------------------------------------------------------------- a rank by itself


@pytest.mark.parametrize("preset", ["quantized", "quantized:bits=4", "onebit", "dgc:density=0.1"])
def test_of_two_ranks_the_other_sends_the_same(preset: str) -> None:
    """Two ranks with equal gradients: their average is what one has, as far as the encoding goes."""
    aggregator = commopt.build_preset(preset)
    layouts = [Layout.of_parameters([("a", (50, 400))]), Layout.of_parameters([("b", (7_000,)), ("c", (3,))])]
    alone = LoneRank(aggregator, layouts, ranks_per_node=(1, 1))
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(layout.numel, generator=generator) for layout in layouts]
    sums = [torch.zeros(layout.numel) for layout in layouts]
    steps = 60
    for _ in range(steps):
        for number, gradient in enumerate(values):
            buffer = gradient.clone()
            alone.reduce(number, buffer)
            sums[number] += buffer
    for total, gradient in zip(sums, values, strict=True):
        assert (total / steps - gradient).norm() < 0.2 * gradient.norm()


def test_all_that_is_received_is_written() -> None:
    team = LoneRank(commopt.Flat(), LAYOUTS, (2, 2), rank=1).team
    assert isinstance(team, Mute)
    gathered = torch.zeros(8)
    own = gathered[2:4]
    own.copy_(torch.tensor([1.0, 2.0]))
    team.all_gather(gathered, own)  # in place, as a collective would allow
    assert gathered.tolist() == [1.0, 2.0] * 4
    part = torch.zeros(2)
    team.reduce_scatter(part, torch.arange(8.0))
    assert part.tolist() == [2.0, 3.0]
    received = torch.zeros(8)
    team.all_to_all(received, torch.arange(8.0))
    assert received.tolist() == list(range(8))
    scaled = torch.ones(3)
    team.all_reduce(scaled, scale=0.25)
    assert scaled.tolist() == [0.25] * 3


# ----------------------------------------------------------------------------------------- measuring


def test_a_step_counts_only_after_those_that_do_not() -> None:
    taken: list[int] = []

    def enter(own: Gradients) -> Callable[[int], Callable[[], object]]:
        def start(number: int) -> Callable[[], object]:
            if own.model == "tiny":
                taken.append(number)
            return lambda: None

        return start

    found = measure(Contender("idle", enter, lambda own: 8, lead_steps=3), gradients(), steps=4, limit_s=inf)
    assert taken == [0, 1] * (3 + 2 + 4)
    assert (found.steps, found.payload_bytes) == (4, 8)


def test_what_takes_too_long_says_how_far_it_came() -> None:
    with pytest.raises(TooSlowError, match="no time left after bucket 1 of 2 of step 1"):
        measure(contender("flat"), gradients(), steps=4, limit_s=0.0)


def test_one_that_fails_does_not_take_the_others_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    def enter(own: Gradients) -> Callable[[int], Callable[[], object]]:
        raise ValueError("Got the following error when running the callback: KeyError: 7\n\nAt:\n  hooks.py(9)")

    broken = Contender("broken", enter, lambda own: 0)
    failed, found = compressors.measure_model(gradients(), [broken, contender("flat")], steps=1, limit_s=inf)
    assert failed == Failure("tiny", "broken", "ValueError: KeyError: 7")
    assert found.contender == "flat"
    assert capsys.readouterr().err == "tiny: broken\ntiny: flat\n"


def test_an_empty_all_reduce_takes_time(device: torch.device) -> None:
    assert 0 < empty_all_reduce_us(device) < 1e5


# ------------------------------------------------------------------------------------------- reporting

THEIRS = Measurement("m", "torch.powerSGD:r=4", "cuda", 10, 8.0, 7.5, 7.0, 2**21, 2**20)
OURS = replace(THEIRS, contender="powersgd", median_ms=2.0, best_ms=1.75, host_ms=1.5)


@pytest.mark.parametrize(("ours_ms", "times", "met"), [(2.0, 4.0, True), (1.0, 8.0, True), (2.5, 3.2, False)])
def test_what_is_asked_of_powersgd(ours_ms: float, times: float, met: bool) -> None:
    found = compare(replace(OURS, median_ms=ours_ms), [THEIRS])
    assert found == Comparison("torch.powerSGD:r=4", times, 4.0, met)
    assert str(found) == f"{times:.2f} x powerSGD:r=4 (asked 4: {'met' if met else 'missed'})"


def test_nothing_is_asked_on_a_cpu() -> None:
    found = compare(replace(OURS, device="cpu"), [THEIRS])
    assert found == Comparison("torch.powerSGD:r=4", 4.0, None, None)
    assert str(found) == "4.00 x powerSGD:r=4"


def test_there_is_no_comparison_with_what_was_not_measured() -> None:
    assert compare(OURS, [replace(THEIRS, model="another")]) is None
    assert compare(THEIRS, [THEIRS]) is None
    assert compare(replace(OURS, contender="powersgd:matrix_rank=2"), [THEIRS]) is None


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    print_table("title", [THEIRS, replace(OURS, peak_bytes=None)], [Failure("m", "dgc", "ValueError: bad")])
    title, headings, theirs, ours, failure = capsys.readouterr().out.splitlines()
    assert title == "title"
    assert len(headings.split("\t")) == 7
    assert theirs == "torch.powerSGD:r=4\t8.00\t7.50\t7.00\t2\t1.00\t"
    assert ours == "powersgd\t2.00\t1.75\t1.50\t-\t1.00\t4.00 x powerSGD:r=4 (asked 4: met)"
    assert failure == "dgc: ValueError: bad"


def test_the_file(tmp_path: Path) -> None:
    file = tmp_path / "compressors.json"
    write(file, {"device": "x"}, [THEIRS, OURS], [Failure("m", "dgc", "bad")])
    header, theirs, ours, failure = map(json.loads, file.read_text().splitlines())
    assert header == {"record": "environment", "kind": "compressors", "device": "x"}
    assert (theirs["record"], theirs["median_ms"], "beside" in theirs) == ("step", 8.0, False)
    assert (ours["beside"], ours["times_as_fast"], ours["asked"], ours["met"]) == ("torch.powerSGD:r=4", 4.0, 4.0, True)
    assert failure == {"record": "failure", "model": "m", "contender": "dgc", "reason": "bad"}


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
    assert [(step["model"], step["contender"]) for step in steps] == [
        *((model, "powersgd") for model in "ab"),
        *((model, name) for model in "ab" for name in ("torch.fp16", "flat")),
    ]
    assert f"b on {header['device']}, a step without the network" in capsys.readouterr().out


def test_what_is_asked_for_is_measured_first_and_the_rest_follows() -> None:
    first, others = in_rounds([contender(name) for name in CONTENDERS])
    assert {each.name for each in first} == {"powersgd", "torch.powerSGD:r=4"}
    assert [each.name for each in others] == [name for name in CONTENDERS if name not in {each.name for each in first}]
    (alone,) = in_rounds([contender("flat"), contender("onebit")])
    assert [each.name for each in alone] == ["flat", "onebit"]


def test_a_run_that_is_killed_leaves_what_is_asked_for_and_all_it_has(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, begun = tmp_path / "compressors.json", list[str]()

    def measure_some(each: Contender, own: Gradients, steps: int, limit_s: float) -> Measurement:
        recorded = [json.loads(line) for line in file.read_text().splitlines()[1:]] if begun else []
        assert [f"{step['model']} {step['contender']}" for step in recorded] == begun
        begun.append(f"{own.model} {each.name}")
        if len(begun) == 6:
            raise KeyboardInterrupt
        return replace(THEIRS, model=own.model, contender=each.name)

    arguments = ["--models", "a,b", "--strategies", "flat,powersgd,onebit,torch.powerSGD:r=4", "--device", device.type]
    monkeypatch.setattr(sys, "argv", ["bench.compressors", *arguments, "--json", str(file)])
    monkeypatch.setattr(compressors, "layouts_of", lambda name: LAYOUTS)
    monkeypatch.setattr(compressors, "world_of_one", lambda device: nullcontext())  # it is there
    monkeypatch.setattr(compressors, "measure", measure_some)
    with pytest.raises(KeyboardInterrupt):
        compressors.main()
    asked = ["powersgd", "torch.powerSGD:r=4"]
    assert begun == [*(f"{model} {name}" for model in "ab" for name in asked), "a flat", "a onebit"]
    assert [path.name for path in tmp_path.iterdir()] == ["compressors.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "alexnet"], "model 'alexnet' is unknown; there are resnet50"),
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
