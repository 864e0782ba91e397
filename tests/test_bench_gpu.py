# SPDX-License-Identifier: Apache-2.0
"""`make gpu` where there is no GPU: its steps are run by the same code, all but what only a GPU can do."""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import asdict, replace
from importlib.util import find_spec
from math import nan
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from _pytest.mark.expression import Expression

from bench.compressors.baselines import METHODS
from bench.compressors.measure import Failure
from bench.compressors.measure import Measurement as Measured
from bench.compressors.measure import write as write_compressors
from bench.demo import local_ranks
from bench.evidence.overlap import Overlap
from bench.evidence.overlap import write as write_overlap
from bench.gpu import __main__ as command_line
from bench.gpu import build, every_kernel, machine, mps, report, runner
from bench.gpu import parse_results as readers
from bench.gpu import report as record
from bench.gpu import steps as step_choices
from bench.gpu.exposed import Exposed
from bench.gpu.parse_results import Parsed
from bench.gpu.report import FILE, Counted, Outcome, Table, Target
from bench.gpu.runner import Place
from bench.gpu.session import ARCHIVE, Step, groups, session, take
from bench.gpu.steps import KERNEL_NAMES, PRESETS, steps
from bench.kernels.case import Verdict
from bench.kernels.measure import Measurement as Timed
from bench.kernels.measure import Missing, ResultFile
from bench.output import write_results
from bench.training.report import Environment, Look, write
from bench.training.report import Outcome as Trained
from commopt.kernels import sources
from commopt.kernels.loader import Arguments, Loader
from tests import ranks
from tests.emulator import on_the_cpu

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
CLONE_NEWUTS = 0x04000000
FOREVER = "import time; time.sleep(600)"
QUICK = (sys.executable, "-I", "-S", "-c")  # without packages: it has begun before its time is over


def python(code: str) -> tuple[str, ...]:
    return "{python}", "-c", code


def step(name: str, code: str, limit_s: float = 60, **rest: Any) -> Step:
    return Step(name, f"that {name} works", python(code), limit_s, **rest)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# ------------------------------------------------------------------------------------- the runner


@pytest.mark.parametrize("parent", ["waits", "ends"])
def test_nothing_outlives_a_step_in_whatever_session_it_is(tmp_path: Path, parent: str) -> None:
    """As torchrun's ranks: children in sessions of their own, of a parent that hangs, or is gone before them."""
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time, pathlib\n"
        f"child = subprocess.Popen([sys.executable, '-c', {FOREVER!r}], start_new_session=True)\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        f"{'time.sleep(600)' if parent == 'waits' else ''}"
    )
    ended = runner.run([*QUICK, code], os.environ, tmp_path / "log", 3.0)
    assert ended.status == (None if parent == "waits" else 0)
    assert not alive(int(pid.read_text()))


def test_at_the_limit_a_program_may_still_write_what_it_knows(tmp_path: Path) -> None:
    code = (
        "import pathlib, time\n"
        "try:\n    time.sleep(600)\n"
        f"except KeyboardInterrupt:\n    pathlib.Path({str(tmp_path / 'known')!r}).write_text('half')"
    )
    ended = runner.run([*QUICK, code], os.environ, tmp_path / "log", 2.0)
    assert ended.status is None
    assert ended.seconds < 2.0 + runner.GRACE_S
    assert (tmp_path / "known").read_text() == "half"


# --------------------------------------------------------------------------------------- one step


def unreadable(place: Place) -> Parsed:
    raise KeyError("targets")


BUSY = "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"
TAKEN = f"the device was busy with other processes' work, so take this step again: {BUSY}"
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB "
    "of which 1.00 GiB is free. Process 17 has 77.10 GiB memory in use. Of the allocated memory 1.00 GiB is allocated"
)
HELD = "the device's memory ran out while other processes held some of it: Process 17 has 77.10 GiB memory in use"


@pytest.mark.parametrize(
    ("chosen", "verdict", "why"),
    [
        (step("a", "raise SystemExit('the reason\\n')"), "failed", "exit status 1; the reason"),
        (
            step("a", "import os, bench.gpu; assert os.environ['COLOUR'] == 'red'", variables={"COLOUR": "red"}),
            "passed",
            "",
        ),
        (step("a", "", read=lambda place: Parsed(why="the loss did not fall")), "failed", "the loss did not fall"),
        (
            step("a", "exit(2)", read=lambda place: Parsed(why="1 of 2 failed")),
            "failed",
            "exit status 2; 1 of 2 failed",
        ),
        (step("a", "", read=unreadable), "failed", "its results cannot be read: KeyError: 'targets'"),
        (
            step("a", f"print({BUSY!r})\nprint('1 failed')\nexit(1)"),
            "failed",
            f"exit status 1; 1 failed; {TAKEN}",
        ),
        (step("a", f"print({FULL!r})\nprint('1 failed')\nexit(1)"), "failed", f"exit status 1; 1 failed; {HELD}"),
        (step("a", "print('out of memory'); exit(1)"), "failed", "exit status 1; out of memory"),
        (step("a", f"print({BUSY!r})"), "passed", ""),
        (Step("a", "", ("no-such-program",), 60), "failed", "[Errno 2] No such file or directory: 'no-such-program'"),
    ],
)
def test_what_a_step_comes_to_and_why(place: Place, chosen: Step, verdict: str, why: str) -> None:
    outcome = take(chosen, place, 100)
    assert (outcome.verdict, outcome.why) == (verdict, why)
    assert outcome.fell_through == (verdict == "failed")
    if chosen.variables:
        assert outcome.command.startswith("COLOUR=red python -c ")


def test_a_step_gets_what_is_left_of_the_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    late = take(step("a", ""), place, 4.0)
    assert (late.verdict, late.why) == ("skipped", "4 s were left")
    assert take(step("b", "", limit_s=5), place, 6.0).verdict == "passed"  # it needs no more than that
    monkeypatch.setattr("bench.gpu.session.LEAST_S", 0.5)
    outcome = take(step("c", FOREVER), place, 1.0)
    assert outcome.verdict == "timed out"
    assert outcome.why.startswith("stopped after 1 s; ")
    assert outcome.seconds < 1.0 + runner.GRACE_S


def test_results_of_an_earlier_session_do_not_count(place: Place) -> None:
    (place.out / "a.json").write_text("old")

    def read(place: Place) -> Parsed:
        return Parsed(facts={"text": (place.out / "a.json").read_text()})

    lazy = Step("a", "", (*python(""), "--json", "{out}/a.json"), 60, read)
    assert "FileNotFoundError" in take(lazy, place, 100).why
    busy = Step("a", "", (*python("import sys; open(sys.argv[1], 'w').write('new')"), "{out}/a.json"), 60, read)
    assert take(busy, place, 100).facts == {"text": "new"}


# ------------------------------------------------------------------------------------ the session


def test_steps_go_on_after_one_that_failed_and_the_file_has_all(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [step("a", "print('last words'); exit(7)"), step("b", ""), Step("c", "", ("no-such-program",), 60)]
    outcomes = session(chosen, place, None, {"date": "2030-01-01"}, ["a", "b", "c"])
    assert [outcome.verdict for outcome in outcomes] == ["failed", "passed", "failed"]
    environment, again = record.read(place.out / FILE)
    assert environment == {"date": "2030-01-01"}
    assert again == outcomes
    said = capsys.readouterr().err
    assert "[1/3] a: that a works" in said
    assert "      last words" in said
    assert (place.out / "a.log").read_text() == "last words\n"


def test_what_other_steps_came_to_stays_in_the_file(place: Place) -> None:
    facts = {"gpu": "H0", "nccl": "2.0"}
    known = step("machine", "", read=lambda place: Parsed(facts=facts))
    session([known, step("a", "exit(1)"), step("b", "")], place, None, {"date": "1"}, ["machine", "a", "b"])
    session([step("a", "")], place, None, {"date": "2"}, ["machine", "a", "b"])
    environment, outcomes = record.read(place.out / FILE)
    assert environment == {"date": "2", **facts}
    assert [(outcome.name, outcome.verdict) for outcome in outcomes] == [
        ("machine", "passed"),
        ("a", "passed"),
        ("b", "passed"),
    ]


def test_steps_of_a_group_are_taken_at_the_same_time(place: Place) -> None:
    wait = (
        "import pathlib, time\npathlib.Path({mine!r}).touch()\n"
        "while not pathlib.Path({other!r}).exists(): time.sleep(0.01)"
    )
    a, b = (str(place.out / f"{name}-is-there") for name in "ab")
    chosen = [
        step("a", wait.format(mine=a, other=b), group="one"),
        step("b", wait.format(mine=b, other=a), group="one"),
        step("c", "", group="another"),
        step("d", ""),
        step("e", ""),
    ]
    assert [[each.name for each in group] for group in groups(chosen)] == [["a", "b"], ["c"], ["d"], ["e"]]
    outcomes = session(chosen[:3], place, None, {}, ["b", "c", "a"])
    assert [(each.name, each.verdict) for each in outcomes] == [(name, "passed") for name in "abc"]
    assert [each.name for each in record.read(place.out / FILE)[1]] == ["b", "c", "a"]


def test_ranks_of_a_group_share_the_gpu(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the daemon's program notes when it is started and ended, and steps which one they would find."""
    program, calls = tmp_path / mps.CONTROL, tmp_path / "calls"
    program.write_text(f'#!/bin/sh\n(echo "$CUDA_MPS_PIPE_DIRECTORY"; [ $# -gt 0 ] || cat) >> {calls}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    says = "import os; print(os.environ.get('CUDA_MPS_PIPE_DIRECTORY'))"
    chosen = [replace(step(name, says, group="one"), shares_gpu=True) for name in "ab"]
    session([*chosen, step("c", says)], place, None, {}, ["a", "b", "c"])
    said = [(place.out / f"{name}.log").read_text().strip() for name in "abc"]
    assert said[0] == said[1] != said[2] == "None"
    assert calls.read_text().split() == [said[0], said[0], "quit"]


def test_ranks_take_turns_where_they_cannot_share(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(place.out))
    (outcome,) = session([replace(step("a", ""), shares_gpu=True)], place, None, {}, ["a"])
    assert outcome.verdict == "passed"
    assert "take turns on the GPU: nvidia-cuda-mps-control is not on PATH" in capsys.readouterr().err


def test_one_archive_has_all_results(place: Place) -> None:
    chosen = [Step("a", "", (*python("import sys; open(sys.argv[1], 'w').write('new')"), "{out}/a.json"), 60)]
    session([*chosen, step("b", "print('words')")], place, None, {}, ["a", "b"])
    with tarfile.open(place.out / ARCHIVE) as archive:
        assert sorted(archive.getnames()) == ["a.json", "a.log", "b.log", FILE]
        words = archive.extractfile("b.log")
        assert words is not None
        assert words.read() == b"words\n"


def test_the_archive_may_be_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command_line, "steps", lambda build: [step("a", "")])
    arguments = ["--out", str(tmp_path / "out"), "--archive", str(tmp_path / "all.tar.gz")]
    assert run_main(monkeypatch, *arguments) == 0
    with tarfile.open(tmp_path / "all.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["a.log", FILE]
    assert not (tmp_path / "out" / ARCHIVE).exists()
    assert "a" in capsys.readouterr().out.split()


@pytest.mark.parametrize("text", ["", "{}\n", '{"record": "environment", "kind": "kernels"}\n', "no JSON\n"])
def test_a_file_of_another_program_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=r"gpu\.json is not a file that bench\.gpu wrote"):
        record.read(tmp_path / FILE)


def test_what_is_known_stays_when_it_is_told_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        f"import os, pathlib, signal; pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
        f"print('begun', flush=True); os.kill(os.getppid(), signal.SIGTERM)\n{FOREVER}"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command_line, "steps", lambda build: [step("a", "print('whole')"), step("b", code)])
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "--out", str(tmp_path))
    assert [outcome.name for outcome in record.read(tmp_path / FILE)[1]] == ["a"]
    with tarfile.open(tmp_path / ARCHIVE) as archive:
        assert "b.log" in archive.getnames()
    assert [(tmp_path / f"{name}.log").read_text().splitlines()[0] for name in "ab"] == ["whole", "begun"]
    assert not alive(int(pid.read_text()))


def test_ranks_start_where_the_host_name_does_not_resolve() -> None:
    launcher, variables = local_ranks(1, 1)
    libc = ctypes.CDLL(None, use_errno=True)

    def rename() -> None:
        if libc.unshare(CLONE_NEWUTS) == 0:
            socket.sethostname("no-such-host")

    targets = subprocess.run(["cat", "/proc/sys/kernel/hostname"], preexec_fn=rename, capture_output=True, text=True)
    if targets.stdout.strip() != "no-such-host":
        pytest.skip("needs root: a host name of its own")
    command = [sys.executable, "-m", *launcher, "--no-python", "echo", "started"]
    done = subprocess.run(
        command, env={**os.environ, **variables}, preexec_fn=rename, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "started\n"


# ------------------------------------------------------------------------------ what files say


def test_tests_are_counted_from_what_pytest_writes(place: Place, tmp_path: Path) -> None:
    source = tmp_path / "test_some.py"
    source.write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.fixture\ndef broken(): raise OSError\n"
        "def test_error(broken): pass\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
        "def test_loader(): pytest.skip('native: no module')\n"
    )

    def counted(*selection: str) -> Parsed:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(source)]
        xml = place.out / "some.xml"
        subprocess.run([*command, "--junitxml", str(xml), *selection], cwd=tmp_path, capture_output=True, check=False)
        return readers.tests("some.xml")(place)

    everything = counted()
    assert everything.tests == Counted(1, 2, 2, ["test_some::test_bad", "test_some::test_error"])
    assert everything.why == "2 of 5 tests failed"
    assert counted("-k", "good") == Parsed(Counted(1, 0, 0))
    assert counted("-k", "skipped").why == "no test ran, 1 were skipped"
    assert counted("-k", "good or loader").why == "a loader was not there, and is not tested: native: no module"


TRAINED_ON = Environment("2030", "c", "2", "3", 2, "cuda", "nccl", 2, [2, 2], None, 10, 5.0, 0, 1.0, "e")


def trained(strategy: str, *losses: float) -> Trained:
    curve = [Look(3 * index, float(index), loss) for index, loss in enumerate(losses, 1)]
    return Trained(strategy, 9, 5.0, 1.0, 1.0, 0.5, None, None, None, curve)


def test_a_training_that_did_not_come_to_all_strategies_says_which(place: Place) -> None:
    write(place.out / "t.json", TRAINED_ON, [trained("flat", 5.0, 4.0)])
    found = readers.learned("t.json", ["ddp", "flat", "onebit"])(place)
    assert found.facts == {"held_out_loss": {"flat": [5.0, 4.0]}}
    assert found.why == "no loss is known of ddp, onebit"
    by_name = {each.name: each for each in steps(build=False)}
    write(place.out / "training.json", TRAINED_ON, [trained("flat", 5.0, 4.0)])
    assert PRESETS[0] in by_name["training"].read(place).why.split(" of ")[1].split(", ")


LINKS = {
    "kind": "exposed",
    "model": "gpt2",
    "parallel": "ddp",
    "nodes": 2,
    "ranks_per_node": 1,
    "device": "H0",
    "paced_gbps": 10.0,
    "measured_gbps": 9.7,
    "compute_ms": 20.0,
}


def exposed_steps(strategy: str, step_ms: float, loss: float = 4.0, replay: bool | None = None) -> dict[str, Any]:
    return asdict(Exposed(strategy, replay, 8, step_ms, step_ms - 20, 2**30, 3 if replay else 0, loss))


def test_exposed_time_becomes_a_table_and_targets(place: Place) -> None:
    rows = [
        exposed_steps("ddp", 128.0),
        exposed_steps("flat", 80.0, replay=True),
        exposed_steps("flat", 92.0, replay=False),
    ]
    write_results(place.out / "e.json", LINKS, "strategy", rows)
    found = readers.exposed("e.json", ["ddp", "flat"], ("flat", "ddp", 0.5))(place)
    assert found.why == ""
    assert found.targets == [Target("flat, a step", "<= 0.5 of that of ddp", 0.625, False)]
    assert found.table is not None
    assert "links of 10 Gbit/s (9.70 measured)" in found.table.title
    assert [row[:5] for row in found.table.rows] == [
        ["ddp", "", "128.0", "108.0", "1.000"],
        ["flat", "3 buckets", "80.0", "60.0", "0.556"],
        ["flat", "off", "92.0", "72.0", "0.667"],
    ]
    write_results(place.out / "e.json", {**LINKS, "measured_gbps": 40.0}, "strategy", [exposed_steps("ddp", 1, nan)])
    assert readers.exposed("e.json", ["ddp", "flat"])(place).why == (
        "no steps are known of flat; the loss is not finite with ddp; the links let through 40.00 Gbit/s, not 10"
    )


def test_seconds_to_the_loss_of_another(place: Place) -> None:
    write(place.out / "t.json", TRAINED_ON, [trained("torch_bf16", 5.0, 4.0), trained("onebit", 4.5, 3.5)])
    found = readers.to_loss_of("torch_bf16", "t.json", ["torch_bf16", "onebit"])(place)
    assert found.facts["seconds_to_loss"] == {"torch_bf16": 2.0, "onebit": 1.5}
    assert found.table is not None
    assert [row[2] for row in found.table.rows] == ["2.00", "1.50"]
    assert readers.to_loss_of("torch_fp16", "t.json", ["onebit"])(place).why == "no loss is known of torch_fp16"


def test_what_is_asked_of_kernels(place: Place) -> None:
    file = ResultFile(place.out / "kernels.json", {})
    verdict = Verdict("of copy", ">=", 0.85, 0.9, True)
    for implementation, targets in (("kernel", (verdict,)), ("reference", ())):
        times = dict.fromkeys(("best_us", "median_us", "host_us", "gbps", "copy_gbps"), 1.0)
        file.add(Timed("encode", "8 bits", implementation, nbytes=13, calls=1, targets=targets, **times))
    file.add(Missing("encode", "8 bits", "bitsandbytes", False, "not installed"))
    assert readers.kernels(place) == Parsed(targets=[Target("encode, 8 bits", ">= 0.85 of copy", 0.9, True)])
    file.add(Missing("select", "1 %", "kernel", True, "out of memory"))
    assert readers.kernels(place).why == "select 1 %: out of memory"


def test_what_is_asked_of_presets(place: Place) -> None:
    (preset, beside), *_ = [(name, each) for name, each in METHODS.items() if each and each.target]
    times = {
        "device": "cuda",
        "steps": 3,
        "best_ms": 1.0,
        "host_ms": 1.0,
        "copy_ms": 1.0,
        "peak_bytes": None,
        "payload_bytes": 8.0,
    }
    steps_taken = [
        Measured("gpt2-medium", preset, median_ms=2.0, **times),  # type: ignore[arg-type]  # of several types
        Measured("gpt2-medium", beside.hook, median_ms=6.0, **times),  # type: ignore[arg-type]
    ]
    failed = [Failure("gpt2-medium", "torch.fp16", "no")]
    write_compressors(place.out / "compressors.json", {}, steps_taken, failed)
    wanted = Target(f"{preset} on gpt2-medium", f">= 4 times as fast as {beside.hook}", 3.0, False)
    assert readers.compressors(place) == Parsed(targets=[wanted])
    replayed = Measured("gpt2-medium", "flat", median_ms=2.0, buckets=8, replay=True, **times)  # type: ignore[arg-type]
    write_compressors(place.out / "compressors.json", {}, [replayed, replace(replayed, replay=False)], failed)
    wanted = Target("flat on gpt2-medium", "<= 60 us of the host a bucket", 125.0, False)
    assert readers.compressors(place) == Parsed(targets=[wanted])
    failed += [Failure("gpt2-medium", "onebit", "too slow")]
    write_compressors(place.out / "compressors.json", {}, steps_taken, failed)
    assert readers.compressors(place).why == "onebit: too slow"


def test_overlap_and_waits(place: Place) -> None:
    overlaps = [Overlap(3, (20,), 7, 9, 90, 4.0, 8.0, 3.0, {"cudaStreamSynchronize in aten::item": 3})]
    write_overlap(place.out / "overlap.json", {}, overlaps)
    facts = {"beside_backward": [0.75], "waits": [overlaps[0].waits]}
    assert readers.overlap(place) == Parsed(facts=facts)
    overlaps += [Overlap(3, (), 7, 0, 90, 0.0, 8.0, 0.0, {"cudaDeviceSynchronize in no operator": 2})]
    write_overlap(place.out / "overlap.json", {}, overlaps)
    assert readers.overlap(place).why == (
        "rank 1: nothing ran beside backward; rank 1: 2 x cudaDeviceSynchronize in no operator"
    )


# --------------------------------------------------------------------------------------- the steps


def options_known_to(module: str) -> str:
    """All that the modules of a program are written in."""
    spec = find_spec(module)
    assert spec is not None, f"{module} is not there"
    assert spec.origin is not None
    origin = Path(spec.origin)
    files = origin.parent.rglob("*.py") if spec.submodule_search_locations else [origin]
    return "".join(file.read_text() for file in files)


OWN = ("bench.", "commopt", "topology")


@pytest.mark.parametrize("chosen", steps(build=True), ids=lambda each: each.name)
def test_programs_and_their_options_exist(chosen: Step) -> None:
    words = list(chosen.command)
    modules = [words[index + 1] for index, word in enumerate(words[:-1]) if word == "-m" and words[index + 1] != "gpu"]
    modules += [words[words.index("bench.gpu.rank") + 1]] if "bench.gpu.rank" in words else []
    assert modules
    text = "".join(options_known_to(module) for module in modules if module.startswith(OWN))
    text += "".join((ROOT / word).read_text() for word in words if word.startswith("examples/"))
    outside = {"-m", "--standalone", "--local-addr", "--nproc-per-node"}
    outside |= {"--tool", "--error-exitcode", "--print-limit", "--kernel-name"}
    if any(module.startswith(OWN) for module in modules) and "pytest" not in modules:
        wanted = [word.split("=")[0] for word in words if word.startswith("--")]
        assert [word for word in wanted if word not in outside and f'"{word}"' not in text] == []


def test_a_job_that_hangs_ends_before_its_test_and_shows_where() -> None:
    limits = [ranks.JOB_LIMIT_S]
    for file in (ROOT / "tests").glob("test_gpu_*.py"):
        limits += map(float, re.findall(r"(?:timeout_s=|TIMEOUT_S = )([0-9.]+)", file.read_text()))
    assert len(limits) > 1 and max(limits) < step_choices._TEST_TIMEOUT_S  # noqa: PT018


def test_every_test_that_needs_a_gpu_is_in_one_step() -> None:
    run = Counter(file for each in steps(build=False) if "pytest" in each.command for file in files_of(each))
    marked = [
        file for file in (ROOT / "tests").glob("test_*.py") if re.search(r"mark[.]gpu|ON_GP[U]", file.read_text())
    ]
    assert sorted(run) == sorted(f"tests/{file.name}" for file in marked)
    shared = [file for file, times in run.items() if times > 1]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", *shared]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tests = [line for line in said.splitlines() if "::" in line]
    assert {test.partition("::")[0] for test in tests} == set(shared)
    for test in tests:
        taken = [each.name for each in steps(build=False) if "pytest" in each.command and takes(each, test)]
        assert len(taken) == 1, f"{test} is in {taken}"


def files_of(chosen: Step) -> list[str]:
    return [word for word in chosen.command if word.startswith("tests/")]


def takes(chosen: Step, test: str) -> bool:
    words = list(chosen.command)
    wanted = words[words.index("-k") + 1] if "-k" in words else ""
    matches = not wanted or Expression.compile(wanted).evaluate(lambda name, /, **_: name.lower() in test.lower())
    return bool(matches) and test.partition("::")[0] in words


def test_the_sanitizers_look_at_every_kernel_and_no_other() -> None:
    assert all(kernel.startswith(KERNEL_NAMES) for kernel in sources.file_of_kernel())


def test_commands_can_be_repeated_by_whoever_reads_them() -> None:
    place = Place(Path("build/gpu"), Path("build/gpu-environment"))
    for each in steps(build=True):
        shown = place.shown(each.command)
        assert not any(word in shown for word in ("{", sys.prefix, str(ROOT)))
        assert not any("{" in word for word in place.filled(each.command))


# ----------------------------------------------------------------------------------- the programs


class Noting(Loader):
    """Launches nothing and remembers the names."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def launch(self, kernel: str, grid: int, block: int, stream: int, arguments: Arguments) -> None:
        assert grid > 0
        self.names.add(kernel)


def test_every_kernel_is_launched() -> None:
    loader = Noting()
    with on_the_cpu(loader):
        for call in every_kernel.calls(CPU):
            call()
    assert loader.names == set(sources.file_of_kernel())


def test_the_machine_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--device", "cpu", "--copy-bytes", "1000000", "--side", "64", "--json", str(tmp_path / "machine.json")]
    monkeypatch.setattr(sys, "argv", ["machine", *arguments])
    assert machine.main() == 0
    found = json.loads((tmp_path / "machine.json").read_text())
    assert found["failures"] == []
    assert found["versions"].keys() >= {"cuda", "nccl", "nvcc", "triton"}
    assert found["rates"]["copy_gbps"] > 0
    assert found["rates"]["bf16_matmul_tflops"] > 0
    assert found["doctor"]["findings"]
    assert found["topology"]
    facts = readers.machine(Place(tmp_path)).facts
    assert facts.keys() >= {"gpu", "nccl", "copy_gbps"}


def test_a_rank_becomes_the_module(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("import os, sys; print(__name__, os.environ['NCCL_HOSTID'], *sys.argv[1:])")
    environ = {**os.environ, "RANK": "5", "LOCAL_RANK": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-m", "bench.gpu.rank", "shown", "--seconds", "5"]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "__main__ rank-5 --seconds 5\n"


def test_kernels_that_are_not_compiled_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = ModuleType("commopt._C")
    known = sorted(sources.file_of_kernel())
    monkeypatch.setitem(sys.modules, "commopt._C", compiled)
    monkeypatch.setattr(compiled, "names", lambda: known, raising=False)
    assert build.problem() is None
    monkeypatch.setattr(compiled, "names", lambda: [*known[1:], "zzz"])
    assert build.problem() == f"compiled, or in csrc, but not both: {known[0]}, zzz; compile again"
    monkeypatch.setitem(sys.modules, "commopt._C", None)
    assert "COMMOPT_REQUIRE_CUDA=ON" in str(build.problem())


def test_the_environment_of_a_build_sees_all_packages_and_changes_none(tmp_path: Path) -> None:
    made = build.make_environment(tmp_path / "made")
    code = "import sys, torch, pip; print(sys.prefix, torch.__file__)"
    done = subprocess.run([made, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / "made"), torch.__file__]


# --------------------------------------------------------------------------------- the command line


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench.gpu", *arguments])
    return command_line.main()


def test_without_a_gpu_it_ends_at_once_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_main(monkeypatch, "--out", str(tmp_path / "out")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bench.gpu: torch {torch.__version__} of {sys.executable} is built ")
    assert "sees no GPU" in line
    assert not (tmp_path / "out").exists()


def test_steps_are_listed_and_chosen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, "--list") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [each.name for each in steps(False)]
    assert run_main(monkeypatch, "--list", "--only", "overlap,kernels") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["overlap", "kernels"]
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "--only", "kernels,speed")
    assert "there is no step 'speed'; known: build, machine, " in capsys.readouterr().err


@pytest.mark.parametrize(("code", "status"), [("", 0), ("exit(1)", 1)])
def test_the_status_says_whether_a_step_fell_through(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, code: str, status: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command_line, "steps", lambda build: [step("a", code)])
    assert run_main(monkeypatch, "--out", str(tmp_path)) == status
    assert record.read(tmp_path / FILE)[1][0].verdict == ("failed" if status else "passed")
    assert "a" in capsys.readouterr().out.split()


# ------------------------------------------------------------------------------------- the report

ENVIRONMENT = {"gpu": "H0", "torch": "2.0", "cuda": "13", "nccl": "2.1", "date": "2030-01-02T03:04"}
ENVIRONMENT |= {"command": "c", "revision": "0123abc"}
OUTCOMES = [
    Outcome("kernel-tests", "c", "2030", 12.3, "failed", "1 of 4 tests failed", Counted(2, 1, 1, ["a::b"])),
    Outcome(
        "kernels",
        "c",
        "2030",
        80.0,
        "passed",
        targets=[
            Target("encode, 8 bits", ">= 0.85 of copy", 0.8765, True),
            Target("select | 1 %", "<= 1.4 times a copy", 1.512, False),
            Target("encode, 4 bits", ">= 2 times faster than other", None, None),
        ],
    ),
    Outcome("network", "c", "2030", 0.0, "skipped", "no ip and no tc\non PATH"),
    Outcome("exposed", "c", "2030", 9.0, "passed", table=Table("Of links", ["strategy", "ms"], [["flat", "7"]])),
]


def test_the_document_gets_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record.write(tmp_path / FILE, ENVIRONMENT, OUTCOMES)
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / FILE), "--markdown"])
    assert report.main() == 0
    text = capsys.readouterr().out
    assert text.startswith("H0, torch 2.0, CUDA 13, NCCL 2.1, commopt at 0123abc, 2030-01-02.\n")
    assert text.count("| kernels: select \\| 1 % | <= 1.4 times a copy | 1.51 | missed |") == 1
    assert text.count("| network | skipped | 0 |  |  |  |  |  | no ip and no tc on PATH |") == 1
    assert text.count("- `a::b`") == 1
    assert text.endswith("Of links:\n\n| strategy | ms |\n| --- | --- |\n| `flat` | 7 |\n")
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / FILE)])
    assert report.main() == 0
    assert "missed" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / "nowhere")])
    assert report.main() == 2


def test_the_document_has_the_steps_in_their_order() -> None:
    text, _, _ = (ROOT / "docs" / "evidence" / "gpu.md").read_text().partition("## What came out")
    cells = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    assert re.findall("`([^`]*)`", " ".join(cells)) == [each.name for each in steps(build=True)]
