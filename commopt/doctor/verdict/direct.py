# SPDX-License-Identifier: Apache-2.0
"""All_reduce with direct access between devices and without, in processes of their own.

NCCL reads its settings once in a process. Where an IOMMU or a driver breaks direct access it hangs, or adds up wrong
numbers. So every trial is a process on each rank, which is ended when its time is over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from time import perf_counter
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from commopt.cost.links import ring
from commopt.doctor.machine import Machine
from commopt.doctor.settings import needs_gpudirect
from commopt.doctor.verdict.facts import FAILS, HANGS, WRONG, Direct, TrialOutcome

BACKEND = "nccl"
TRIAL_S = 12.0
"""For one all_reduce to begin and be timed; NCCL needs a few seconds on eight GPUs."""
_START_S = 30.0  # until a process has loaded torch, on a machine that starts several at once
_NBYTES = 2**25
_ITERATIONS = 5
_DIFFERENT = 1024  # values beside each other; their sums are exact
_LONGEST_FAULT = 120


@dataclass(frozen=True)
class Access:
    """A kind of direct access: what reaches what, and the variable that switches it off."""

    what: str
    variable: str
    off: str

    def is_used(self, environ: Mapping[str, str]) -> bool:
        """Return whether NCCL may use it."""
        return environ.get(self.variable) != self.off

    def environ(self, environ: Mapping[str, str], *, used: bool) -> dict[str, str]:
        """Return the environment in which it is used, or is not."""
        others = {name: value for name, value in environ.items() if name != self.variable}
        return others if used else {**others, self.variable: self.off}


PEERS = Access("peer access", "NCCL_P2P_DISABLE", "1")
RDMA = Access("GPUDirect RDMA", "NCCL_NET_GDR_LEVEL", "LOC")


@dataclass(frozen=True)
class Trial:
    """Ranks that try one kind of access together. name: their node, or "all nodes"."""

    access: Access
    name: str
    ranks: tuple[int, ...]


def own_facts(machine: Machine, environ: Mapping[str, str]) -> dict[str, bool]:
    """Return what `trials` must know of this rank: whether it has a GPU, and an adapter that may reach into it."""
    count = devices_here()
    local_rank = environ.get("LOCAL_RANK", "")
    gpu = local_rank.isdecimal() and int(local_rank) < count
    return {"gpu": gpu, "rdma": gpu and needs_gpudirect(machine)}


def devices_here() -> int:
    """Return the number of GPUs that NCCL can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0


def trials(answers: Sequence[Mapping[str, Any]]) -> list[Trial]:
    """Return what to try, the same on every rank: GPUs of each node, then one of each node.

    answers: of all ranks: `own_facts` with the "key" and "name" of the node.
    """
    nodes: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        nodes.setdefault(str(answer["key"]), []).append(rank)
    if not all(answer["gpu"] is True for answer in answers):  # gloo measures, then
        return []
    found = [Trial(PEERS, str(answers[ranks[0]]["name"]), tuple(ranks)) for ranks in nodes.values() if len(ranks) > 1]
    if len(nodes) > 1 and all(answer["rdma"] is True for answer in answers):
        found.append(Trial(RDMA, "all nodes", tuple(ranks[0] for ranks in nodes.values())))
    return found


def try_both(trial: Trial, rank: int, environ: Mapping[str, str]) -> tuple[TrialOutcome, TrialOutcome]:
    """Return what happens with direct access, and without; all ranks of the trial call it."""
    meeting = f"commopt/direct/{trial.access.variable}/{trial.ranks[0]}"
    asked = {
        "place": trial.ranks.index(rank),
        "size": len(trial.ranks),
        "device": int(environ.get("LOCAL_RANK", 0)),
        "address": (environ["MASTER_ADDR"], int(environ["MASTER_PORT"])),
        "backend": BACKEND,
        "trial_s": TRIAL_S,
    }
    # Both load torch at the same time, and the second one waits for its input.
    started = [(used, _start(trial.access.environ(environ, used=used))) for used in (True, False)]
    with_it, without = (_ended(each, {**asked, "meeting": f"{meeting}/{used}"}) for used, each in started)
    return with_it, without


def _start(environ: Mapping[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environ
    )


def _ended(process: subprocess.Popen[str], asked: Mapping[str, Any]) -> TrialOutcome:
    """Let a process do its trial, and return what came of it."""
    try:
        told, errors = process.communicate(json.dumps(asked) + "\n", timeout=_START_S + asked["trial_s"])
    except subprocess.TimeoutExpired:
        return TrialOutcome(fault=HANGS)
    finally:
        process.kill()  # it may be inside the driver, and end later
    try:
        answer = json.loads(told.splitlines()[-1])
        return TrialOutcome(answer["gbps"], str(answer["fault"])[:_LONGEST_FAULT])
    except (IndexError, ValueError, TypeError, KeyError):  # it died
        last = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        return TrialOutcome(fault=f"{FAILS}: {last}"[:_LONGEST_FAULT])


def worst(outcomes: Sequence[TrialOutcome]) -> TrialOutcome:
    """Return what all ranks of a trial together came to: a hang or wrong numbers on any of them, or the slowest."""
    for fault in (WRONG, FAILS, HANGS):  # where one rank fails the others wait for it
        found = next((each for each in outcomes if each.fault.startswith(fault)), None)
        if found is not None:
            return found
    return min(outcomes, key=lambda each: each.gbps or 0.0)


def result_of(trial: Trial, answers: Sequence[Mapping[str, Any]], environ: Mapping[str, str]) -> Direct:
    """Return the result of a trial from the answers of all ranks."""
    outcomes = [[TrialOutcome(*each) for each in answers[rank]["outcomes"]] for rank in trial.ranks]
    with_it, without = (worst(each) for each in zip(*outcomes, strict=True))
    access = trial.access
    return Direct(trial.name, access.what, access.variable, access.off, with_it, without, access.is_used(environ))


# ------------------------------------------------------------------------------------------ in a process of its own


def all_reduce_rate(asked: Mapping[str, Any]) -> tuple[float, bool]:
    """Return the Gb/s of each rank in an all_reduce, and whether its sums are right."""
    size, limit = asked["size"], timedelta(seconds=asked["trial_s"])
    device = torch.device("cpu")
    if asked["backend"] == "nccl":
        device = torch.device("cuda", asked["device"])
        torch.cuda.set_device(device)
    host, port = asked["address"]
    store = dist.PrefixStore(asked["meeting"], dist.TCPStore(host, port, is_master=False, timeout=limit))
    dist.init_process_group(asked["backend"], store=store, rank=asked["place"], world_size=size, timeout=limit)
    values = torch.arange(_NBYTES // 4, device=device).remainder_(_DIFFERENT).float()
    expected, sums, times_s = size * values + size * (size - 1) / 2, torch.empty_like(values), []
    right = True
    for _ in range(1 + _ITERATIONS):  # the first one connects
        sums.copy_(values).add_(asked["place"])
        _finish(device)
        begun = perf_counter()
        dist.all_reduce(sums)
        _finish(device)
        times_s.append(perf_counter() - begun)
        right = right and torch.equal(sums, expected)
    return ring("all_reduce", size).volume * _NBYTES * 8e-9 / median(times_s[1:]), right


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Do what one line of standard input says, and print the outcome as JSON."""
    line = sys.stdin.readline()
    if not line:  # whoever asked is gone
        return
    asked = json.loads(line)
    watch = threading.Timer(asked["trial_s"], _answer, (None, HANGS))
    watch.daemon = True
    watch.start()
    try:
        gbps, right = all_reduce_rate(asked)
    except Exception as error:  # which is the answer
        _answer(None, f"{FAILS}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    _answer(gbps, "" if right else WRONG)


def _answer(gbps: float | None, fault: str) -> NoReturn:
    print(json.dumps({"gbps": gbps, "fault": fault}), flush=True)
    os._exit(0)  # a communicator that hangs does so in its destructor, too


if __name__ == "__main__":
    main()
