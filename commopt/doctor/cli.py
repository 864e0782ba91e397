# SPDX-License-Identifier: Apache-2.0
"""`commopt doctor`: find the causes of slow communication."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from commopt.command_line import BAD_INPUT, reader_has_gone, refuse, rich_console
from commopt.doctor import LIVE, diagnose, observe
from commopt.doctor.compare import gather, rank_facts
from commopt.doctor.finding import FINE, Finding, Severity, exit_status
from commopt.doctor.log_findings import examine
from commopt.doctor.log_reader import LOG_VARIABLES, read_logs
from commopt.doctor.verdict import options as verdict_options
from commopt.errors import ConfigurationError, MismatchError
from topology.cluster import read_host_identity

WATCH_S = 1.0
"""Time between two readings of the error counters."""

CLOSING = f"To see what NCCL uses, run the job with\n{LOG_VARIABLES}\nthen: python -m commopt doctor --log nccl.*"
EPILOG = f"""exit status: 0 nothing wrong, 1 warnings, 3 errors, {BAD_INPUT} bad input (one line on stderr).
With --measure: 0 as it should be, 1 slower than it should be, {BAD_INPUT} could not measure, or bad input.
The environment is always that of this process. NVML and versions are read on the live machine only.
Under torchrun, srun or mpirun every rank examines its machine. Rank 0 compares and prints; only its status can
differ from 0. It alone reads what --log names."""

HANG = "log-hang"
"""The check whose findings are about ranks that hang."""
WIDTH = 80
_PARTS = re.compile(r"(?<=;) (?![^(]*\))")  # not inside brackets
_COMMAND = re.compile(
    r"(?:(?:sudo|docker run|for \w+ in|printf|pip|unset|nvidia-smi|ulimit|python|mpirun|torchrun) |export \w+=)\S"
)

MARKS = {
    Severity.ERROR: ("ERROR", "bold red"),
    Severity.WARNING: ("WARN", "yellow"),
    Severity.INFO: ("INFO", "cyan"),
    Severity.OK: ("OK", "green"),
    Severity.NOT_APPLICABLE: ("N/A", "dim"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the doctor."""
    parser.description = "Find the causes of slow NCCL and gloo communication on this machine, with remedies."
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    parser.add_argument("--all", action="store_true", help="also print checks that are fine or do not apply")
    parser.add_argument(
        "--root", type=Path, default=LIVE, metavar="DIR", help="read /sys, /proc, /etc and /dev below DIR"
    )
    logs = "examine logs of NCCL_DEBUG=INFO and dumps of torch's flight recorder, all of one job, not the machine"
    parser.add_argument("--log", type=Path, nargs="+", metavar="FILE|FOLDER", help=logs)
    flights = "who is missing in which operation: flight records of commopt, dumps of torch's flight recorder, logs"
    parser.add_argument("--flight", type=Path, nargs="+", metavar="FILE|FOLDER", help=flights)
    verdict_options.add_arguments(parser)


def run(options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> int:
    """Examine, print, and return the exit status."""
    if not os.path.isdir(options.root):
        return refuse("commopt doctor", f"--root {options.root} is not a directory; pass one that holds sys/ and proc/")
    if verdict_options.asked(options):
        from commopt.doctor.verdict.command import run as measure  # measuring needs torch, the checks do not

        return measure(options, environ)
    try:
        findings = _findings(options, environ)
    except (ConfigurationError, MismatchError, OSError) as error:
        return refuse("commopt doctor", error)
    if findings is None:
        return 0
    try:
        if options.json:
            print(as_json(findings))
        else:
            examined = options.log is None and options.flight is None
            show(findings, options.all, CLOSING if examined else None)
        sys.stdout.flush()
    except BrokenPipeError:
        reader_has_gone()
    return exit_status(findings)


def _findings(options: argparse.Namespace, environ: Mapping[str, str]) -> Sequence[Finding] | None:
    """Return the findings; None on a rank that does not print."""
    unused = [name for name in ("html", "save", "compare", "batch") if getattr(options, name) is not None]
    unused += ["budget"] if options.budget_s != verdict_options.BUDGET_S else []
    if unused:
        raise ConfigurationError(
            f"--{unused[0]} is for what is measured, and nothing is; add --measure, or --model NAME"
        )
    if options.flight is not None:
        found = examine(read_logs([*options.flight, *(options.log or ())]))
        return found if options.log is not None else [each for each in found if each.check == HANG]
    if options.log is not None:
        return examine(read_logs(options.log)) if environ.get("RANK", "0") == "0" else None
    machine = observe(options.root, environ)
    if machine.counters and options.root == LIVE:
        time.sleep(WATCH_S)
    findings = diagnose(machine)
    if machine.ranks < 2:
        return findings
    return gather(rank_facts(machine, read_host_identity(environ, options.root)), findings)


def as_json(findings: Sequence[Finding]) -> str:
    """Return {"status": exit status, "counts": {severity: n}, "findings": [...]} with findings in order of repair."""
    counts = {severity.value: sum(finding.severity is severity for finding in findings) for severity in Severity}
    shown = [finding.as_dict() for finding in findings]
    return json.dumps({"status": exit_status(findings), "counts": counts, "findings": shown}, indent=2)


def show(
    findings: Sequence[Finding], everything: bool, closing: str | None = None, stream: TextIO | None = None
) -> None:
    """Print problems, unread files and a summary, in lines of up to 80 characters.

    In colour if rich is installed and the output is a terminal.

    everything: also print checks that are fine or do not apply.
    """
    stream = sys.stdout if stream is None else stream
    wanted = [one for one in findings if one.value is not None and (everything or one.severity not in FINE)]
    unread_ones = [one for one in findings if one.value is None]
    lines = [line for number, finding in enumerate(wanted, 1) for line in _block(number, finding)]
    if unread_ones:
        lines.append(("", "Not checked, because they could not be read:"))
        for one in unread_ones:
            hint = f" (try: {one.remedy})" if one.remedy else ""
            text = f"{one.title} [{one.check}]{_on(one)}: {one.read}: {one.expected}{hint}"
            lines += [("dim", line) for line in _wrapped(text, "  ", "    ")]
        lines.append(("", ""))
    endings = [_summary(findings), *(closing or "").splitlines()]
    lines += [("", line) for text in endings for line in _wrapped(text)]
    console = rich_console(stream)
    if console is None:
        stream.write("".join(f"{text}\n" for _, text in lines))
        return
    from rich.text import Text

    for style, text in lines:
        console.print(Text(text, style=style))


def _on(finding: Finding) -> str:
    more = " ..." if len(finding.nodes) > 4 else ""
    return f" on {', '.join(finding.nodes[:4])}{more}" if finding.nodes else ""


def _wrapped(text: str, first: str = "", rest: str = "", width: int = WIDTH) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _block(number: int, finding: Finding) -> Iterator[tuple[str, str]]:
    mark, style = MARKS[finding.severity]
    title = f"{finding.title} [{finding.check}]{_on(finding)}"
    yield from ((style, line) for line in _wrapped(title, f"{number:2}. {mark:5} ", " " * 10))
    for name, text in (("read", finding.read), ("value", finding.value or ""), ("expected", finding.expected)):
        yield from (("", line) for line in _wrapped(text, f"      {name:9}", " " * 15))
    yield from (("", line) for line in _remedy(finding.remedy or ""))
    if finding.confidence != "high":
        yield "", f"      sure     {finding.confidence}"
    yield "", ""


def _remedy(text: str) -> Iterator[str]:
    """Yield lines with one command or sentence each. A command that continues ends its line with a backslash."""
    margin = "      remedy   "
    for part in filter(None, _PARTS.split(text)):
        ending = " \\" if _COMMAND.match(part) else ""
        lines = _wrapped(part, margin, " " * 17, WIDTH - len(ending))
        yield from (line + ending for line in lines[:-1])
        yield from lines[-1:]
        margin = " " * 15


def _summary(findings: Sequence[Finding]) -> str:
    count = Counter(finding.severity for finding in findings if finding.value is not None)
    words = {Severity.ERROR: "error(s)", Severity.WARNING: "warning(s)", Severity.INFO: "note(s)", Severity.OK: "fine"}
    words |= {Severity.NOT_APPLICABLE: "not applicable"} if count[Severity.NOT_APPLICABLE] else {}
    parts = [f"{count[severity]} {word}" for severity, word in words.items()]
    parts.append(f"{sum(finding.value is None for finding in findings)} not read")
    return ", ".join(parts) + ("" if exit_status(findings) else ": no cause of slow communication found")
