"""`python -m commopt doctor`: why is communication slow here?"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from commopt.command_line import BAD_INPUT, reader_has_gone, refuse
from commopt.doctor.checks.diagnosis import diagnose
from commopt.doctor.finding import Finding, exit_status, in_order
from commopt.doctor.log.findings import examine
from commopt.doctor.log.reader import HOW, read_logs
from commopt.doctor.nodes.compare import rank_facts
from commopt.doctor.nodes.gather import gather, launched
from commopt.doctor.observe import LIVE, observe
from commopt.doctor.report import as_json, show
from commopt.errors import ConfigurationError, MismatchError
from topology.cluster import read_host_identity

WATCH_S = 1.0
"""Between two readings of error counters."""

CLOSING = f"What NCCL really does: run the job with {HOW}, then: python -m commopt doctor --log nccl.*"
EPILOG = f"""exit status: 0 nothing wrong, 1 warnings, 3 errors, {BAD_INPUT} bad input (one line on stderr).
The environment is always this process's; NVML and versions are asked on the live machine only.
Under torchrun every rank examines its machine; rank 0 compares and prints, and it alone has a status other than 0."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the doctor."""
    parser.description = "Look for what makes NCCL and gloo slow on this machine, and say how to mend it."
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    parser.add_argument("--all", action="store_true", help="also print what is fine")
    parser.add_argument("--links", type=Path, metavar="FILE", help="compare what a probe measured with the line rate")
    parser.add_argument("--root", type=Path, default=LIVE, metavar="DIR", help="read /sys, /proc, /dev below DIR")
    parser.add_argument(
        "--log",
        type=Path,
        nargs="+",
        metavar="FILE|FOLDER",
        help="read logs of NCCL_DEBUG=INFO (all of one job) instead of the machine",
    )


def run(options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> int:
    """Examine, print, and return the exit status."""
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
            show(findings, options.all, None if options.log is not None else CLOSING)
        sys.stdout.flush()
    except BrokenPipeError:
        reader_has_gone()
    return exit_status(findings)


def _findings(options: argparse.Namespace, environ: Mapping[str, str]) -> Sequence[Finding] | None:
    """Return what was found; None on a rank that does not print."""
    if options.log is not None:
        return examine(read_logs(options.log))
    if not os.path.isdir(options.root):
        raise ConfigurationError(f"--root {options.root} is not a directory; pass one that holds sys/ and proc/")
    machine = observe(options.root, environ)
    if machine.counters and options.root == LIVE:
        time.sleep(WATCH_S)
    findings = diagnose(machine)
    if options.links is not None and environ.get("RANK", "0") == "0":
        from commopt.cost import Links  # here, so that a machine is examined without torch
        from commopt.doctor.checks.measured import measured

        findings = in_order([*findings, *measured(machine, Links.load(options.links), str(options.links))])
    if not launched(environ):
        return findings
    return gather(rank_facts(machine, read_host_identity(environ, options.root)), findings)
