# SPDX-License-Identifier: Apache-2.0
"""`commopt chaos`: every fault with every strategy, a table of verdicts, and a picture of each run."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from types import FrameType
from typing import Any

from commopt.chaos.asynchronous import judge_workers
from commopt.chaos.faults import FAULTS, Fault, read_faults
from commopt.chaos.judge import Reference, RunRecord, RunVerdict, judge
from commopt.chaos.parameter_server import settings_of
from commopt.chaos.picture import draw
from commopt.chaos.rank import SERVER, RunOrder
from commopt.chaos.stage import Stage
from commopt.cluster import ClusterUnavailableError
from commopt.command_line import BAD_INPUT, number, refuse, whole
from commopt.display import show_table
from commopt.document import reason_of
from commopt.errors import ConfigurationError
from commopt.run.script import Choice
from commopt.server.secret import SECRET_VARIABLE

SCRIPT = Path(__file__).with_name("train.py")
STRATEGIES = ("hierarchical", "hierarchical_quantized:bits=4", "onebit_local:period=4")
WITH_SERVER = f"{SERVER}:period=4"
_SERVER = "server"
REFERENCES = 2  # to see whether the script does the same in every run
_EPILOG = f"""faults:
{"".join(f"  {fault.name:10} {fault.about}{chr(10)}" for fault in FAULTS.values())}
Each strategy is first trained {REFERENCES} times without a fault, which shows what is
right. A fault strikes in the middle of the backward of step --at. Then each rank
that is left must end with the right model, or with an error that names the fault.

exit status: 0 all runs end so; 1 some do not; {BAD_INPUT} bad input."""


@dataclass(frozen=True)
class Campaign:
    """What is to be run.

    settings: "option=value" of attach.
    victim: None for the last rank; the number after it is the parameter server's.
    """

    script: Path
    arguments: tuple[str, ...]
    strategies: tuple[str, ...]
    faults: tuple[Fault, ...]
    settings: tuple[str, ...] = ()
    nodes: int = 2
    ranks_per_node: int = 2
    rate: str = "200mbit"
    victim: int | None = None
    at: int = 10
    timeout_s: float = 15.0
    limit_s: float = 20.0
    jobs: int = 2

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    def orders(self, folder: Path) -> list[RunOrder]:
        """Return the runs: of each strategy those without a fault, then those with one."""
        victim = self.world_size - 1 if self.victim is None else self.victim
        settings = (*self.settings, f"timeout={self.timeout_s:g}")
        runs = [""] * REFERENCES + [fault.name for fault in self.faults]
        environment = {SECRET_VARIABLE: secrets.token_hex()}
        return [
            RunOrder(
                str(folder / folder_name(strategy) / (fault or f"reference{turn}")),
                *(str(self.script), self.arguments, strategy, settings, fault, victim, self.at),
                *(environment, self.timeout_s),
            )
            for strategy in self.strategies
            for turn, fault in enumerate(runs)
        ]


@dataclass(frozen=True)
class Judged:
    """A run with a fault, and its verdict."""

    order: RunOrder
    run: RunRecord
    verdict: RunVerdict

    def line(self) -> str:
        """Return it in a few words."""
        mark = "" if self.verdict.ok else "FAILED: "
        how = f"{mark}{self.verdict.outcome} after {self.verdict.seconds:.1f} s"
        return f"{self.order.strategy}, {self.order.fault}: {how}"

    def row(self) -> dict[str, Any]:
        """Return it as results have it."""
        seconds = {**asdict(self.verdict), "seconds": round(self.verdict.seconds, 1)}
        return {"strategy": self.order.strategy, "fault": self.order.fault, **seconds}


def folder_name(strategy: str) -> str:
    """Return a strategy as the name of a folder."""
    return re.sub(r"[^\w=.-]+", "_", strategy)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "Let faults strike a training run on emulated nodes, and judge how each run ends (needs root)."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--script", type=Path, default=SCRIPT, metavar="FILE", help="what is trained (default: a small network)")
    add("--faults", metavar="NAME[,NAME...]", help="default: all of them")
    presets = f"presets with options, or {WITH_SERVER}, each after --strategy or several (default: one of each kind)"
    add("--strategy", dest="strategies", action="extend", nargs="+", default=[], metavar="NAME", help=presets)
    option = "another option of commopt.attach, as for commopt run; may be repeated"
    add("--option", dest="settings", action="append", default=[], metavar="OPTION=VALUE", help=option)
    add("--nodes", type=whole(2, 16), default=2, help="number of nodes (default 2)")
    add("--ranks-per-node", type=whole(1, 16), default=2, help="ranks on every node (default 2)")
    add("--rate", default="200mbit", help="rate of every node's link (default 200mbit)")
    victim = f"the rank that a fault strikes (default: the last), or {_SERVER}: that of {SERVER}"
    add("--victim", type=_victim, metavar="RANK", help=victim)
    add("--at", type=whole(2), default=10, metavar="STEP", help="when it strikes (default 10)")
    add("--timeout", type=number(0, 3600), default=15, help="of the strategy's collectives, in seconds (default 15)")
    limit = "seconds in which every rank has to notice a fault (default: 5 more than --timeout)"
    add("--limit", type=number(0, 7200), help=limit)
    add("--jobs", type=whole(1, 16), default=2, help="runs at the same time, each on nodes of its own (default 2)")
    out = "keep journals, logs and pictures of all runs there (default: of failures only, among temporary files)"
    add("--out", type=Path, metavar="FOLDER", help=out)
    add("--json", action="store_true", help="print the table as JSON")
    add("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script, after --")


def _victim(text: str) -> int | str:
    return text if text == _SERVER else whole(0)(text)


def campaign_of(options: argparse.Namespace) -> Campaign:
    """Return the campaign of a command line. Raises ConfigurationError for what cannot be run."""
    world_size = options.nodes * options.ranks_per_node
    is_server = options.victim == _SERVER
    strikes = [fault.name for fault in FAULTS.values() if fault.of_server or not is_server]
    campaign = Campaign(
        options.script.absolute(),
        tuple(options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments),
        tuple(dict.fromkeys(options.strategies or ([WITH_SERVER] if is_server else STRATEGIES))),
        read_faults(options.faults or ",".join(strikes)),
        tuple(options.settings),
        options.nodes,
        options.ranks_per_node,
        options.rate,
        world_size if is_server else options.victim,
        options.at,
        options.timeout,
        options.timeout + 5 if options.limit is None else options.limit,
        options.jobs,
    )
    if not is_server and campaign.victim is not None and campaign.victim >= campaign.world_size:
        raise ConfigurationError(
            f"--victim {campaign.victim} is none of {campaign.world_size} ranks; pass 0 to the last of them"
        )
    if campaign.limit_s <= campaign.timeout_s:
        raise ConfigurationError(
            f"--limit {campaign.limit_s:g} is not more than --timeout {campaign.timeout_s:g}, after which ranks notice "
            "at the latest; pass a longer one"
        )
    if options.script is SCRIPT and campaign.arguments and not campaign.arguments[0].startswith("-"):
        word = campaign.arguments[0]
        raise ConfigurationError(f"{word!r} is an argument for the script, and none is named; pass --script {word}")
    if not os.path.isfile(campaign.script):
        raise ConfigurationError(f"--script {options.script}: there is no such file; pass the path of a script")
    for setting in campaign.settings:
        if setting.startswith("timeout="):
            raise ConfigurationError(f"--option {setting} is what --timeout says; pass that")
    for strategy in campaign.strategies:
        _require_sound(strategy, campaign)
    return campaign


def _require_sound(strategy: str, campaign: Campaign) -> None:
    """Raise ConfigurationError for a strategy that does not exist, or does not go with the rest."""
    if strategy.partition(":")[0] == SERVER:
        settings_of(strategy)
        if campaign.settings:
            raise ConfigurationError(
                f"--option {campaign.settings[0]} is of attach, and {strategy} takes none; leave it out"
            )
        if campaign.victim == campaign.world_size:
            odd = [fault.name for fault in campaign.faults if not fault.of_server]
            if odd:
                raise ConfigurationError(f"--faults {odd[0]} does not strike a server; leave it out")
        return
    if campaign.victim == campaign.world_size:
        raise ConfigurationError(f"--victim {_SERVER} is of {SERVER}, and {strategy} has none; pass a rank")
    Choice.read(strategy, campaign.settings)


def perform(campaign: Campaign, folder: Path, heard: Callable[[Judged], object] = lambda judged: None) -> list[Judged]:
    """Run a campaign, several runs at a time, and return the verdicts in its order.

    heard: is told each verdict as soon as it is known. Raises ClusterUnavailableError, and ValueError for a bad rate.
    """
    orders = campaign.orders(folder)
    stages: Queue[Stage] = Queue()
    with ExitStack() as opened, ThreadPoolExecutor(campaign.jobs) as pool:
        make = partial(Stage, campaign.nodes, campaign.ranks_per_node, campaign.rate, campaign.limit_s)
        opened_stages = [opened.enter_context(make()) for _ in range(min(campaign.jobs, len(orders)))]
        for stage in opened_stages:
            stages.put(stage)

        def run(order: RunOrder) -> RunRecord:
            stage = stages.get()
            try:
                return stage.run(order)
            finally:
                stages.put(stage)

        waiting = [(order, pool.submit(run, order)) for order in orders]
        try:
            return list(_judged(campaign, [(order, future.result) for order, future in waiting], heard))
        except BaseException:
            for _, future in waiting:
                future.cancel()
            for stage in opened_stages:
                stage.stop()
            raise


def _judged(
    campaign: Campaign, runs: Sequence[tuple[RunOrder, Callable[[], RunRecord]]], heard: Callable[[Judged], object]
) -> Iterator[Judged]:
    references: list[RunRecord] = []
    for order, wait in runs:
        run = wait()
        if not order.fault:
            references = [*(each for each in references if each.strategy == order.strategy), run]
            continue
        tuned = not order.has_server and bool(Choice.read(order.strategy, campaign.settings).aggregator.tunes)
        verdict = (judge_workers if order.has_server else judge)(
            run, Reference(references, tuned), campaign.limit_s, campaign.timeout_s
        )
        judged = Judged(order, run, verdict)
        title = f"{order.fault}, {order.strategy}: {judged.verdict.outcome}"
        draw(Path(order.folder), len(run.ranks), title, Path(order.folder, "picture.svg"))
        heard(judged)
        yield judged


def run(options: argparse.Namespace) -> int:
    """Run all, print the table; return the exit status."""
    for signal_number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, _stop)
    try:
        campaign = campaign_of(options)
        if options.out is not None:
            _make(options.out)
    except ConfigurationError as error:
        return refuse("commopt chaos", error)
    folder = Path(tempfile.mkdtemp(prefix="commopt-chaos-")) if options.out is None else options.out.absolute()
    failed: list[Judged] = []
    try:
        found = perform(campaign, folder, _say)
        failed = [judged for judged in found if not judged.verdict.ok]
    except (ClusterUnavailableError, ValueError) as error:
        return refuse("commopt chaos", error)
    finally:
        if options.out is None and not failed:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps([judged.row() for judged in found], indent=1))
    else:
        show(found)
    if folder.exists():
        print(f"journals, logs and pictures: {folder}", file=sys.stderr)
    return 1 if failed else 0


def _make(folder: Path) -> None:
    """Make a folder. Raises ConfigurationError where that cannot be, or where something is in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        empty = not any(folder.iterdir())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--out {folder} cannot be made: {reason_of(error)}; pass another folder") from None
    if not empty:
        raise ConfigurationError(f"--out {folder} is not empty; pass a new folder")


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _say(judged: Judged) -> None:
    print(judged.line(), file=sys.stderr, flush=True)


def show(found: Sequence[Judged]) -> None:
    """Print the table."""
    rows = [["strategy", "fault", "verdict", "because", "seconds"]]
    for judged in found:
        verdict = judged.verdict
        outcome = verdict.outcome if verdict.ok else f"FAILED: {verdict.outcome}"
        rows.append([judged.order.strategy, judged.order.fault, outcome, verdict.said, f"{verdict.seconds:.1f}"])
    good = sum(judged.verdict.ok for judged in found)
    title = f"{good} of {len(found)} runs end right, or with an error that names the fault on every rank"
    show_table(title, rows, 4, "seconds: from the fault until the last rank has ended, or has raised", sys.stdout)
