# SPDX-License-Identifier: Apache-2.0
"""`commopt doctor --measure`: measures on every rank within bounds of time and memory; rank 0 prints the verdict."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import astuple
from datetime import datetime, timedelta, timezone
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from commopt.command_line import refuse, writing
from commopt.doctor import diagnose, observe
from commopt.doctor.compare import TIMEOUT_S, gather, rank_facts
from commopt.doctor.finding import FINE, Finding
from commopt.doctor.verdict import gain
from commopt.doctor.verdict.direct import own_facts, result_of, trials, try_both
from commopt.doctor.verdict.facts import Measurements, Problem
from commopt.doctor.verdict.judge import NOT_MEASURED, judge
from commopt.doctor.verdict.measure import CollectiveProber, Found, measure_paces, with_expected
from commopt.doctor.verdict.show import changes, lines_of
from commopt.doctor.verdict.wires import measure_wires, own_endpoints
from commopt.errors import CommoptError, ConfigurationError, MismatchError
from commopt.groups import Membership, join
from commopt.groups.agreement import exchange_facts
from commopt.groups.signed import own_secret
from commopt.groups.store import LimitedStore, limited
from commopt.probe.cli import require_usable, start
from commopt.probe.network import find_network, looks_for_sites, node_names
from commopt.simulate import Workload, model
from topology.cluster import read_host_identity

_MARGIN_S = 15.0
"""How long a measurement that hangs is waited for, beyond the time for all."""
_SITES_SHARE = 1 / 3  # of the time for all, at most
_GATHERED = "commopt/verdict"


def run(options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> int:
    """Measure, print on rank 0, and return the exit status."""
    try:
        _check(options)
        before = None if options.compare is None else Measurements.load(options.compare)
        examination = Examination(options, environ)
    except (ConfigurationError, MismatchError, OSError) as error:
        return refuse("commopt doctor", error)
    try:
        examination.run()
    except (ConfigurationError, MismatchError, OSError) as error:
        examination.close()
        return refuse("commopt doctor", error)
    except CommoptError as error:
        examination.found.add(unmeasured=" ".join(str(error).split())[:200])
    examination.close()
    if examination.rank != 0:
        return 0
    return conclude(examination.found.measurements, options, before)


def _check(options: argparse.Namespace) -> None:
    asked = [name for name in ("model", "params", "script") if getattr(options, name) is not None]
    if len(asked) > 1:
        raise ConfigurationError(f"--{asked[0]} and --{asked[1]} both name what is trained; pass one")
    if options.script is not None:
        from commopt.doctor.verdict.script import script_of

        script_of(options.script)
    if options.model is not None:
        model(options.model)
    for name in ("log", "flight"):
        if getattr(options, name) is not None:
            raise ConfigurationError(f"--measure examines this machine, and --{name} reads files; pass one")


def conclude(found: Measurements, options: argparse.Namespace, before: Measurements | None) -> int:
    """Print the verdict, write what was measured, and return the exit status."""
    verdict = judge(found)
    if options.json:
        changed = {} if before is None else {"changes": changes(found, before)}
        print(json.dumps({"verdict": verdict.as_document(), "measured": found.as_document(), **changed}, indent=2))
    else:
        print(*lines_of(verdict), *([] if before is None else ["", *changes(found, before)]), sep="\n")
    sys.stdout.flush()
    try:
        if options.html is not None:
            from commopt.doctor.verdict.page import write_verdict

            with writing(options.html):
                write_verdict(options.html, verdict, found, [] if before is None else changes(found, before))
        if options.save is not None:
            with writing(options.save):
                found.save(options.save)
    except ConfigurationError as error:
        return refuse("commopt doctor", error)
    return verdict.status


class Examination:
    """One measurement of everything; every rank makes the same calls."""

    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str]) -> None:
        self._options = options
        self._environ = environ
        self._machine = observe(options.root, environ)
        self._begun = time.monotonic()
        self._held: Any = None
        alone = "RANK" not in environ
        self.rank, self.world_size = (0, 1) if alone else self._meet()
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.found = Found(Measurements(("this machine",), (self.world_size,), date=now))
        self._watch = threading.Timer(options.budget_s + _MARGIN_S, self._leave, ("a measurement did not end",))
        self._watch.daemon = True

    def _meet(self) -> tuple[int, int]:
        try:
            self._held, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=TIMEOUT_S))))
        except (RuntimeError, ValueError) as error:
            raise MismatchError(f"the ranks did not meet: {str(error).splitlines()[0]}; use torchrun") from error
        return rank, world_size

    def close(self) -> None:
        """End the watch and leave the process group."""
        self._watch.cancel()
        if dist.is_initialized():
            dist.destroy_process_group()

    def run(self) -> None:
        """Measure; `found` holds what is known at any time."""
        self._watch.start()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda number, frame: self._leave("stopped by a signal"))
        self._say("checks of host and network")
        findings = diagnose(self._machine)
        if self.world_size < 2:
            self.found.add(problems=problems_of(findings))
            return
        everything = gather(rank_facts(self._machine, read_host_identity(self._environ)), findings)
        self._wires(everything)
        self._direct()
        if any(one.check == "nodes-reach" and one.severity == "error" for one in self.found.measurements.problems):
            return
        if self._options.script is not None:
            from commopt.doctor.verdict.script import record

            record(self._options.script, self.found, self._options.budget_s / 3, self._say)
        self._levels()

    @cached_property
    def _store(self) -> LimitedStore:
        return limited(self._held, _GATHERED, TIMEOUT_S, own_secret())

    def _exchange(self, purpose: str, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        return exchange_facts(self._store, range(self.world_size), self.rank, purpose, facts, TIMEOUT_S)

    def _own_node(self) -> tuple[str, str]:
        """Return what tells this node from others, and its name."""
        host = read_host_identity(self._environ)
        return "/".join(host.node_key), host.nccl_hostid or host.hostname

    def _direct(self) -> None:
        """Try direct access between devices with its switch on and off, in processes of their own."""
        key, name = self._own_node()
        answers = self._exchange("devices", {"key": key, "name": name, **own_facts(self._machine, self._environ)})
        asked = trials(answers)
        for access in dict.fromkeys(trial.access for trial in asked):
            alike = [trial for trial in asked if trial.access is access]
            self._say(f"{access.what} on and off")
            mine = next((trial for trial in alike if self.rank in trial.ranks), None)
            outcomes = [] if mine is None else try_both(mine, self.rank, self._environ)
            answers = self._exchange(access.what, {"outcomes": [astuple(each) for each in outcomes]})
            results = [result_of(trial, answers, self._environ) for trial in alike]
            self.found.add(direct=(*self.found.measurements.direct, *results))
            if any(one.used and one.with_it.fault and not one.without.fault for one in results):
                os.environ[access.variable] = access.off  # or the rest would end like that

    def _wires(self, findings: list[Finding] | None) -> None:
        key, name = self._own_node()
        problems = [] if findings is None else [vars(one) for one in problems_of(findings)]
        answers = self._exchange("findings", {"problems": problems, "key": key, "name": name})
        ranks: dict[str, int] = {}
        for answer in answers:
            ranks[answer["key"]] = ranks.get(answer["key"], 0) + 1
        names = {answer["key"]: answer["name"] for answer in answers}
        told = tuple(Problem(**one) for one in answers[0]["problems"])
        self.found.add(nodes=tuple(names[key] for key in ranks), ranks=tuple(ranks.values()), problems=told)
        if len(ranks) > 1:
            wires = measure_wires(own_endpoints(self._machine), name, key, self.rank, self._exchange, self._say)
            self.found.add(wires=wires)

    def _levels(self) -> None:
        device = torch.device("cpu")
        if not dist.is_initialized():
            device = start(self._environ)
        elif torch.cuda.is_available() and "nccl" in dist.get_backend():
            device = torch.device("cuda", torch.cuda.current_device())
        membership = join()
        require_usable(self._options.save)
        names = node_names(membership)
        gpus = device.type == "cuda"
        counts = tuple(len(node) for node in membership.cluster.nodes)
        self.found.add(nodes=names, ranks=counts, backend="nccl" if gpus else "gloo")
        self.found.add(connections=membership.connections.count, split=membership.connections.measured)
        self._say("the pace of every rank")
        self.found.add(paces=measure_paces(membership, device))
        if looks_for_sites(membership):
            budget_s = _SITES_SHARE * self._options.budget_s
            self.found.add(network=find_network(membership, budget_s, self._say))
        left_s = self._left_s(membership)
        prober = CollectiveProber(membership, left_s, self._say)
        prober.levels(self.found)
        measured = self.found.measurements
        self.found.add(levels=with_expected(measured.levels, measured.wires, self._machine, gpus))
        self._training(membership, prober, device)

    def _training(self, membership: Membership, prober: CollectiveProber, device: torch.device) -> None:
        options, recorded = self._options, self.found.workload
        if options.model is None and options.params is None and recorded is None:
            return
        team = membership.team
        prober.work(gain.needed_work(team), self.found)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        slowest = min(pace.tflops for pace in self.found.measurements.paces)
        workload: Workload = recorded or gain.workload_of(options.model, options.params, options.batch, name, slowest)
        before = self.found.measurements.training
        self.found.add(training=gain.predict(workload, team, self.found, name, before))

    def _left_s(self, membership: Membership) -> float:
        """Return the time left for collectives, the same on every rank."""
        mine = 0.75 * self._options.budget_s - (time.monotonic() - self._begun)
        answers = membership.exchange("the time left", left=mine)
        return max(min(float(answer["left"]) for answer in answers), 3.0)

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.monotonic() - self._begun:4.1f} s] measuring {text}", file=sys.stderr, flush=True)

    def _leave(self, why: str) -> None:
        """Print what is known and end this process: the main thread may be inside a call that never returns."""
        if self.rank != 0:
            os._exit(0)
        status = NOT_MEASURED
        try:
            self.found.add(unmeasured=why)
            status = conclude(self.found.measurements, self._options, None)
        finally:
            os._exit(status)


def problems_of(findings: list[Finding]) -> tuple[Problem, ...]:
    """Return the errors and warnings among findings."""
    return tuple(
        Problem(one.check, one.severity.value, one.value, one.remedy or "")
        for one in findings
        if one.value is not None and one.severity not in FINE and one.severity.value in ("error", "warning")
    )
