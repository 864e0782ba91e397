# SPDX-License-Identifier: Apache-2.0
"""Read the files of a step: counts of tests, targets, whether a model has learned."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from bench.gpu import exposed as exposed_times
from bench.gpu.report import Counted, Table, Target
from bench.gpu.runner import Place
from bench.training import report as training

_WHOLE_DEVICE = "cudaDeviceSynchronize"
_NO_LOADER = ("native: ", "nvrtc: ", "there are not two loaders")  # why tests of kernels were skipped

Read = Callable[[Place], "Parsed"]


@dataclass(frozen=True)
class Parsed:
    """The results of a step; `why` when they show a failure, whatever the exit status was."""

    tests: Counted | None = None
    targets: list[Target] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    table: Table | None = None


def nothing(place: Place) -> Parsed:
    """Read a step whose exit status says it all."""
    return Parsed()


def tests(file: str) -> Read:
    """Return a reader of the file that pytest's --junitxml wrote."""

    def read(place: Place) -> Parsed:
        cases = list(ElementTree.parse(place.out / file).iter("testcase"))
        failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
        skipped = sum(case.find("skipped") is not None for case in cases)
        failures = [f"{case.get('classname', '')}::{case.get('name', '')}" for case in failed]
        counted = Counted(len(cases) - len(failures) - skipped, len(failures), skipped, failures)
        if failures:
            return Parsed(counted, why=f"{len(failures)} of {len(cases)} tests failed")
        for reason in (each.get("message", "") for case in cases for each in case.iter("skipped")):
            if any(absent in reason for absent in _NO_LOADER):
                return Parsed(counted, why=f"a loader was not there, and is not tested: {reason}")
        return Parsed(counted, why="" if counted.passed else f"no test ran, {skipped} were skipped")

    return read


def learned(file: str, strategies: Sequence[str]) -> Read:
    """Return a reader of a file of bench.training, which should have all of `strategies`.

    Losses alone, since ranks that share a GPU take turns.
    """

    def read(place: Place) -> Parsed:
        _, outcomes = training.read(place.out / file)
        losses = {each.strategy: [look.held_out_loss for look in each.curve] for each in outcomes}
        failures = [name for name, curve in losses.items() if not (isfinite(curve[-1]) and curve[-1] < curve[0])]
        missing = [name for name in strategies if name not in losses]
        wrong = [f"the loss did not fall with {', '.join(failures)}"] if failures else []
        wrong += [f"no loss is known of {', '.join(missing)}"] if missing else []
        facts = {"held_out_loss": {name: [curve[0], curve[-1]] for name, curve in losses.items()}}
        return Parsed(facts=facts, why="; ".join(wrong))

    return read


_RATE_TOLERANCE = 0.15  # of what the kernel's pacing lets through


def exposed(file: str, strategies: Sequence[str], *shares: tuple[str, str, float]) -> Read:
    """Return a reader of a file of bench.gpu.exposed, which should have all of `strategies`.

    shares: names of two strategies, and what part of the second one's step the first one's may take.
    """

    def read(place: Place) -> Parsed:
        header, rows = exposed_times.read(place.out / file)
        step_ms = {each.strategy: each.step_ms for each in rows if each.replay is not False}
        missing = [name for name in strategies if name not in step_ms]
        lost = [each.strategy for each in rows if not isfinite(each.loss)]
        wrong = [f"no steps are known of {', '.join(missing)}"] if missing else []
        wrong += [f"the loss is not finite with {', '.join(lost)}"] if lost else []
        paced, measured = header["paced_gbps"], header["measured_gbps"]
        if paced and abs(measured / paced - 1) > _RATE_TOLERANCE and header["ranks_per_node"] == 1:
            wrong.append(f"the links let through {measured:.2f} Gbit/s, not {paced:g}")
        targets = [
            Target(f"{ours}, a step", f"<= {share:g} of that of {theirs}", found, found <= share)
            for ours, theirs, share in shares
            if ours in step_ms and theirs in step_ms
            for found in [step_ms[ours] / step_ms[theirs]]
        ]
        shown = Table(exposed_times.title(header), exposed_times.HEADINGS, exposed_times.rows_of(rows))
        return Parsed(targets=targets, why="; ".join(wrong), table=shown)

    return read


def to_loss_of(reference: str, file: str, strategies: Sequence[str]) -> Read:
    """Return a reader of a file of bench.training: how soon all have come to the loss that `reference` ends with."""

    def read(place: Place) -> Parsed:
        parsed = learned(file, strategies)(place)
        _, outcomes = training.read(place.out / file)
        loss = next((each.held_out_loss for each in outcomes if each.strategy == reference), None)
        if loss is None:
            return Parsed(facts=parsed.facts, why=parsed.why or f"no loss is known of {reference}")
        taken = {each.strategy: each.seconds_to(loss) for each in outcomes}
        rows = [
            [each.strategy, f"{each.step_ms:.1f}", _seconds(taken[each.strategy]), f"{each.held_out_loss:.3f}"]
            for each in outcomes
        ]
        headings = ["strategy", "step ms", "s to that loss", "loss in the end"]
        shown = Table(f"Held-out loss of {loss:.3f}, that of {reference} after all its seconds", headings, rows)
        return Parsed(facts={**parsed.facts, "seconds_to_loss": taken}, why=parsed.why, table=shown)

    return read


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def kernels(place: Place) -> Parsed:
    """Read the targets of kernels, and whether they were met; a kernel that cannot run is a failure."""
    file = place.out / "kernels.json"
    targets = [
        Target(
            f"{record['name']}, {record['variant']}",
            f"{verdict['relation']} {verdict['limit']:g} {verdict['what']}",
            verdict["found"],
            verdict["met"],
        )
        for record in _records(file, "kernel")
        for verdict in record["targets"]
    ]
    failed = [each for each in _records(file, "missing") if each["failed"]]
    return Parsed(targets=targets, why="; ".join(f"{each['name']} {each['variant']}: {each['why']}" for each in failed))


# Microseconds of the host that a bucket may take where its kernels are replayed.
_HOST_US = {"flat": 60, "powersgd": 200, **dict.fromkeys(("quantized", "quantized:bits=4", "onebit", "dgc"), 130)}
_STEP_MS = {("gpt2-medium", "quantized"): 6, ("gpt2-medium", "onebit"): 6}
_STEP_MS |= {("gpt2-medium", "powersgd"): 12, ("resnet50", "powersgd"): 4}


def _limits(record: dict[str, Any]) -> list[Target]:
    """Return what is asked of a preset's step by itself."""
    if not record.get("replay"):
        return []
    model, method = record["model"], record["method"]
    found = []
    if method in _HOST_US:
        taken, limit = 1000 * record["host_ms"] / record["buckets"], _HOST_US[method]
        found.append(Target(f"{method} on {model}", f"<= {limit} us of the host a bucket", taken, taken <= limit))
    if (model, method) in _STEP_MS:
        taken, limit = record["median_ms"], _STEP_MS[model, method]
        found.append(Target(f"{method} on {model}", f"<= {limit} ms a step", taken, taken <= limit))
    return found


def compressors(place: Place) -> Parsed:
    """Read the targets of presets; one that could not be measured is a failure, but not one of torch's."""
    file = place.out / "compressors.json"
    targets = [target for record in _records(file, "step") for target in _limits(record)]
    targets += [
        Target(
            f"{record['method']} on {record['model']}",
            f">= {record['target']:g} times as fast as {record['beside']}",
            record["times_as_fast"],
            record["met"],
        )
        for record in _records(file, "step")
        if record.get("target") is not None
    ]
    failed = [each for each in _records(file, "failure") if not each["method"].startswith("torch.")]
    return Parsed(targets=targets, why="; ".join(f"{each['method']}: {each['reason']}" for each in failed))


def overlap(place: Place) -> Parsed:
    """Read how much of the lane's work ran beside backward on each rank, and whether a step waited for the device."""
    ranks = _records(place.out / "overlap.json", "rank")
    parts = [each["both_ms"] / each["lane_ms"] if each["lane_ms"] else 0.0 for each in ranks]
    waits = [each["waits"] for each in ranks]
    wrong = [f"rank {rank}: nothing ran beside backward" for rank, part in enumerate(parts) if part == 0]
    for rank, calls in enumerate(waits):
        wrong += [f"rank {rank}: {count} x {call}" for call, count in calls.items() if call.startswith(_WHOLE_DEVICE)]
    return Parsed(facts={"beside_backward": [round(part, 3) for part in parts], "waits": waits}, why="; ".join(wrong))


def _records(file: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return [record for record in records if record["record"] == kind]


def machine(place: Place) -> Parsed:
    """Read the record of the machine."""
    record = json.loads((place.out / "machine.json").read_text())
    facts = {**record["versions"], **record["device"], **record["rates"]}
    return Parsed(facts=facts, why="; ".join(record["failures"]))
