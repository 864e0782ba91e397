"""Findings for people and for programs."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

from commopt.doctor.finding import Finding, Severity, exit_status

MARKS = {Severity.ERROR: "ERROR", Severity.WARNING: "WARN", Severity.INFO: "INFO", Severity.OK: "OK"}
COLOURS = {"ERROR": "bold red", "WARN": "yellow", "INFO": "cyan", "OK": "green", "?": "dim"}


def as_json(findings: Sequence[Finding]) -> str:
    """Return {"status": exit status, "counts": {severity: n}, "findings": [...]} with findings in order of repair."""
    counts = {severity.value: sum(finding.severity is severity for finding in findings) for severity in Severity}
    shown = [finding.as_dict() for finding in findings]
    return json.dumps({"status": exit_status(findings), "counts": counts, "findings": shown}, indent=2)


def show(
    findings: Sequence[Finding], everything: bool, closing: str | None = None, stream: TextIO | None = None
) -> None:
    """Print what needs attention, then what could not be read, then a summary; `everything` adds what is fine,
    `closing` a last line.

    In colour when rich is installed and the output is a terminal, otherwise plain.
    """
    stream = sys.stdout if stream is None else stream
    attention = [finding for finding in findings if finding.value is not None]
    wanted = [finding for finding in attention if everything or finding.severity is not Severity.OK]
    unread = [finding for finding in findings if finding.value is None]
    blocks = [_block(number, finding) for number, finding in enumerate(wanted, 1)]
    lines = [line for block in blocks for line in [*block, ("", "")]]
    if unread:
        lines.append(("", "Not checked, because it could not be read:"))
        lines += [("?", f"  {_where(finding)}: {finding.expected}{_try(finding)}") for finding in unread]
        lines.append(("", ""))
    lines.append(("", _summary(findings)))
    if closing is not None:
        lines.append(("", closing))
    _print(lines, stream)


def _block(number: int, finding: Finding) -> list[tuple[str, str]]:
    mark = MARKS[finding.severity]
    head = f"{number:2}. {mark:5} {finding.title} [{finding.check}]"
    if finding.nodes:
        head += f" on {', '.join(finding.nodes[:4])}" + (" ..." if len(finding.nodes) > 4 else "")
    rows = [("read", finding.read), ("value", finding.value or ""), ("expected", finding.expected)]
    if finding.remedy is not None:
        rows.append(("remedy", finding.remedy))
    if finding.confidence != "high":
        rows.append(("sure", finding.confidence))
    # Commands stay on one line: people copy them.
    body = [
        line
        for name, text in rows
        for line in ([f"      {name:9}{text}"] if name == "remedy" else _wrapped(f"{name:9}", text))
    ]
    return [(mark, head), *(("", line) for line in body)]


def _wrapped(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, 112, initial_indent=f"      {name}", subsequent_indent=" " * 15, break_long_words=False
    ) or [f"      {name}"]


def _where(finding: Finding) -> str:
    nodes = f" on {', '.join(finding.nodes[:4])}" if finding.nodes else ""
    return f"{finding.title} [{finding.check}]{nodes}: {finding.read}"


def _try(finding: Finding) -> str:
    return f" (try: {finding.remedy})" if finding.remedy else ""


def _summary(findings: Sequence[Finding]) -> str:
    def count(severity: Severity) -> int:
        return sum(finding.severity is severity and finding.value is not None for finding in findings)

    unread = sum(finding.value is None for finding in findings)
    parts = [
        f"{count(Severity.ERROR)} error(s)",
        f"{count(Severity.WARNING)} warning(s)",
        f"{count(Severity.INFO)} note(s)",
        f"{count(Severity.OK)} fine",
        f"{unread} not read",
    ]
    return ", ".join(parts) + ("" if exit_status(findings) else ": nothing that was read makes communication slow")


def _print(lines: Sequence[tuple[str, str]], stream: TextIO) -> None:
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        stream.write("".join(f"{text}\n" for _, text in lines))
        return
    console = Console(file=stream, soft_wrap=True, highlight=False)
    for mark, text in lines:
        console.print(Text(text, style=COLOURS.get(mark, "")))
